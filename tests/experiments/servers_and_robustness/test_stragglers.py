"""The experiment on stragglers: its grid, the choice of rate and mu, its tables and its figure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import dfl
from dfl.sweep import Cell
from experiments import common
from experiments.servers_and_robustness import stragglers as experiment
from experiments.servers_and_robustness.stragglers import METHODS, MUS, RATES, SHARES, Options
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow

NAME = "servers_and_robustness.stragglers"
COMMITTED = Path(__file__).parents[3] / "experiments/results/stragglers"
FEW = ("--dataset", "digits", "--seeds", "1", "--rounds", "11", "--examples", "14")
SMALL = Options(dataset="digits", seeds=1, rounds=2, examples=14)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The experiment on digits for eleven rounds: its folder and its output."""
    out = tmp_path_factory.mktemp("stragglers")
    done = run_experiment(NAME, out, *FEW)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_the_experiment_ends_in_tables_a_figure_and_a_finding(ran: tuple[Path, str]) -> None:
    out, printed = ran
    table = pd.read_csv(out / "table.csv")
    assert [tuple(row) for row in table[["stragglers", "method"]].to_numpy()] == [
        (share, method) for share in SHARES for method in METHODS if share or method != "partial"
    ]
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert printed.strip() == (out / "table.md").read_text().strip()
    assert "\nFinding: with mu = " in printed
    tried = pd.read_csv(out / "tuning.csv")
    for parameter, values in (("lr", RATES), ("mu", MUS)):
        own = tried[tried["parameter"] == parameter]
        assert own["value"].tolist() == list(values)
        seeds = pd.read_csv(out / "seeds.csv")
        used = seeds.loc[seeds["method"] == "fedprox", parameter].unique().tolist()
        assert used == own.loc[own["validation"] == own["validation"].max(), "value"].tolist()[:1]


def test_the_numbers_are_those_of_the_last_rounds(ran: tuple[Path, str]) -> None:
    """Of eleven rounds the last two are the tail."""
    out, _ = ran
    for row in pd.read_csv(out / "seeds.csv").to_dict("records"):
        mu = f"{row['mu']:g}"
        values = {"stragglers": f"{row['stragglers']:g}", "method": row["method"]}
        folder = common.cell_folder(out, **values, lr=f"{row['lr']:g}", mu=mu, seed=row["seed"])
        tail = dfl.load(folder).rows.set_index("round").loc[[10, 11]]
        for column, spread in (
            ("accuracy_mean", "accuracy_spread"),
            ("train_loss", "loss_spread"),
        ):
            first, second = tail[column]
            assert row[column] == pytest.approx((first + second) / 2, rel=1e-4)
            assert row[spread] == pytest.approx(abs(first - second) / 2**0.5, rel=1e-3, abs=1e-7)


def test_one_cell_alone_has_its_row(ran: tuple[Path, str], tmp_path: Path) -> None:
    cell = sorted(path.parent.name for path in ran[0].glob("cells/*/run.json"))[-1]
    assert "method=partial" in cell
    done = run_experiment(NAME, tmp_path, *FEW, "--only", cell)
    assert done.returncode == 0, done.stderr
    head, row = (line.split(",") for line in done.stdout.splitlines())
    seeds = pd.read_csv(ran[0] / "seeds.csv", dtype=str).set_index(["stragglers", "method"])
    assert row[head.index("accuracy_mean")] == seeds.loc[("0.9", "partial"), "accuracy_mean"]


def test_cells_are_named_once_and_those_that_count_are_among_them() -> None:
    cells = experiment.every(Options(seeds=2))
    names = [cell.name for cell in cells]
    assert len({*names}) == len(names) == 2 * len(RATES) * (5 + 3 * len(MUS))
    assert {cell.name for cell in experiment.grid(Options(seeds=2), 0.1, 1.0)} <= {*names}


def test_runs_of_a_seed_differ_by_method_and_stragglers_only() -> None:
    cells = experiment.grid(Options(seeds=1), 0.1, 0.01)
    assert len(cells) == 8
    assert {cell.run.algorithm for cell in cells} == {
        *(f"fedavg:straggler_policy=drop,fraction=0.1,stragglers={s}" for s in ("0", "0.5", "0.9")),
        *(f"fedavg:straggler_policy=fewer,fraction=0.1,stragglers={s}" for s in ("0.5", "0.9")),
        *(
            f"fedprox:mu=0.01,straggler_policy=fewer,fraction=0.1,stragglers={s}"
            for s in ("0", "0.5", "0.9")
        ),
    }
    settings = [{**cell.run.to_dict(), "algorithm": ""} for cell in cells]
    assert all(each == settings[0] for each in settings)
    assert settings[0]["local_epochs"] == 5
    assert settings[0]["lr"] == 0.1


def end(share: float, method: str) -> tuple[float, float]:
    """Return accuracy and training loss at the end of a small run."""
    *_, row = dfl.simulate(experiment.run_of(SMALL, share, method, lr=0.1, seed=0))
    return float(row["accuracy_mean"]), float(row["train_loss"])


def test_methods_differ_where_they_should() -> None:
    """Without stragglers to drop or to take partial work is the same, and FedProx with mu = 0 is
    the latter.
    """
    drop, partial, prox = METHODS.values()
    assert end(0.0, drop) == end(0.0, partial)
    assert end(0.9, drop) != end(0.9, partial)
    assert end(0.9, prox.format(mu="0")) == end(0.9, partial) != end(0.9, prox.format(mu="1"))


def test_no_run_that_counts_has_the_seed_or_the_examples_of_the_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[Cell] = []

    def measured(options: Options, out: Path, cells: list[Cell]) -> pd.DataFrame:
        tried.extend(cells)
        rows = [
            {
                **cell.values, "round": 1,
                "validation_accuracy_mean": -abs(cell.run.lr - 0.0464) + float(
                    cell.values.get("mu") == "0.1"
                ),
            }
            for cell in cells
        ]  # fmt: skip
        return pd.DataFrame(rows)

    monkeypatch.setattr(experiment, "measure", measured)
    _, lr, mu = experiment.tune(Options())
    assert (lr, mu) == (0.0464, 0.1)
    assert len(tried) == len(RATES) + len(MUS) * len(SHARES)
    assert {cell.run.lr for cell in tried[len(RATES) :]} == {0.0464}
    for cell in tried:
        assert cell.run.seed == experiment.TUNING_SEED
        assert cell.run.validation == 0.2
    for cell in experiment.grid(Options(), lr, mu):
        assert cell.run.seed < Options().seeds < experiment.TUNING_SEED
        assert cell.run.validation == 0


def test_the_best_value_is_the_first_of_equals_and_never_one_that_diverged() -> None:
    tried = pd.DataFrame({"value": [1.0, 2.0, 3.0], "validation": [np.nan, 0.5, 0.5]})
    assert experiment.best(tried) == 2


def runs() -> pd.DataFrame:
    """Runs of three seeds: seeds differ by 0.1, partial work gains 0.2 and 0.01 more by seed, and
    FedProx loses 0.04 of it.
    """
    gain = {"drop": 0.0, "partial": 0.2, "fedprox": 0.16}
    return pd.DataFrame(
        [
            {
                "stragglers": share, "method": method, "lr": 0.1,
                "mu": 0.01 * (method == "fedprox"), "seed": seed,
                "accuracy_mean": 0.3 + 0.1 * seed + gain[method] * (1 + 0.05 * seed),
                "train_loss": 1 - gain[method], "accuracy_spread": 0.1, "loss_spread": 0.2,
            }
            for seed in range(3)
            for share in SHARES
            for method in METHODS
            if share or method != "partial"
        ]
    )  # fmt: skip


def test_differences_are_paired_by_seed() -> None:
    rows = runs().sample(frac=1, random_state=0)
    found = common.by_label(
        experiment.differences(rows), ["stragglers", "method", "minus", "figure"]
    )
    row = found[0.9, "partial", "drop", "accuracy_mean"]
    assert row["difference"] == pytest.approx(0.21)
    assert row["difference_std"] == pytest.approx(0.01)
    assert row["difference_ci95"] == pytest.approx(4.302653 * 0.01 / 3**0.5, rel=1e-5)
    assert found[0.5, "fedprox", "partial", "train_loss"]["difference"] == pytest.approx(0.04)
    assert found[0.0, "fedprox", "drop", "accuracy_mean"]["difference"] == pytest.approx(0.168)
    assert (0.0, "fedprox", "partial", "accuracy_mean") not in found
    assert (0.5, "drop", "drop", "accuracy_mean") not in found


def test_the_finding_is_read_off_the_differences() -> None:
    rows = runs()
    text = experiment.finding(experiment.tabulate(rows), experiment.differences(rows))
    assert text.startswith(
        "with mu = 0.01, over 3 seeds: that the proximal term helps at 50% stragglers FAILS: "
    )
    assert "that partial work helps at 90% stragglers holds: accuracy +0.210 ± 0.025" in text
    assert "that the proximal term helps at 90% stragglers FAILS: accuracy -0.042 ±" in text
    assert "that the proximal term helps at 0% stragglers holds" in text
    rows.loc[(rows["method"] == "partial") & (rows["seed"] == 0), "accuracy_mean"] = 0.1
    text = experiment.finding(experiment.tabulate(rows), experiment.differences(rows))
    assert "that partial work helps at 90% stragglers is NOT shown" in text


def test_the_figure_has_a_line_per_method() -> None:
    rows = runs()
    accuracy, loss, spread = experiment.draw(experiment.tabulate(rows), Options(seeds=3)).axes
    for axes, heights in ((accuracy, [0.4, 0.61, 0.568]), (loss, [1, 0.8, 0.84])):
        lines = [line for line in axes.lines if line.get_marker() in ("o", "s", "D")]
        assert [float(np.asarray(line.get_ydata())[-1]) for line in lines] == pytest.approx(heights)
    assert len(spread.lines) == len(METHODS)


def test_the_committed_differences_are_those_of_its_seeds() -> None:
    given, seeds = (pd.read_csv(COMMITTED / f"{name}.csv") for name in ("differences", "seeds"))
    pd.testing.assert_frame_equal(given, experiment.differences(seeds), rtol=5e-4, atol=2e-6)
