"""The experiment on protected attributes: its figures are computed on held-out people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import Linear, ReLU, Sequential
from torch.nn.functional import linear

import dfl
from dfl.simulation import distribute_data
from dfl.simulation.components import sources_of
from dfl.simulation.defaults import settle
from dfl.training.objectives import ADVERSARIES
from experiments import common
from experiments.personal_layers import lg_fair as experiment
from experiments.personal_layers.new_device import Models
from experiments.personal_layers.probe import probe_auc
from tests.support.adult_files import ORDER, people, text, write_adult
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow

EPOCHS = 11
"""Local epochs of the small experiment; the last tenth of as many rounds is 10 and 11."""
SHARED = {"lg": ("10.", "13.", "16."), "lg_adv": ("10.", "13.", "16."), "lg_adv_narrow": ("7.",)}
"""Method -> the beginnings of the names of its shared parameters."""


class Watcher(dfl.Callback):
    """Keeps copies of the models of every evaluation, and the rows."""

    needs_models = True

    def __init__(self, run: dfl.Run) -> None:
        self.run = run
        self.rows: list[dfl.Row] = []
        self.states: dict[int, dict[str, NDArray[Any]]] = {}

    def row(self, row: dfl.Row) -> None:
        self.rows.append(row)

    def evaluated_models(self, t: int, state: Mapping[str, NDArray[Any]]) -> None:
        self.states[t] = {name: rows.copy() for name, rows in state.items()}


@dataclass
class Small:
    """A small experiment with two devices that has run.

    Attributes:
        options: its options.
        trained: what its cells were computed from, by partition and method.
        watched: the runs of each of these, in order.
    """

    options: experiment.Options
    trained: dict[tuple[str, str], experiment.Trained] = field(default_factory=dict)
    watched: dict[tuple[str, str], list[Watcher]] = field(default_factory=dict)

    @property
    def rows(self) -> dict[tuple[str, str], dict[str, Any]]:
        """The row of every run, by partition and method."""
        return common.by_label(pd.read_csv(self.options.out / "seeds.csv"), ["partition", "method"])


def watched(run: dfl.Run, callbacks: Sequence[dfl.Callback] = ()) -> Watcher:
    """Run, and return what was watched."""
    seen = Watcher(run)
    for _ in dfl.simulate(run, callbacks=[*callbacks, seen]):
        pass
    return seen


def easy(n: int) -> list[list[str]]:
    """People whose income depends on their sex and on what they do, so that decisions differ."""
    rows = people(n)
    for row in rows:
        likely = {"Male", "Bachelors"} & {row[ORDER.index("sex")], row[ORDER.index("education")]}
        rich = likely and row[ORDER.index("occupation")] != "Sales"
        row[ORDER.index("income")] = ">50K" if rich else "<=50K"
    return rows


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> experiment.Options:
    folder = write_adult(tmp_path_factory.mktemp("data"), text(easy(400)))
    out = tmp_path_factory.mktemp("experiment")
    return experiment.Options(
        dataset="adult", data_dir=folder, devices=2, rounds=1, epochs=EPOCHS, seeds=1, probes=1,
        out=out,
    )  # fmt: skip


@pytest.fixture(scope="module")
def small(options: experiment.Options) -> Small:
    """The experiment, which has run."""
    known = experiment.trained
    made = Small(options)
    runs: list[Watcher] = []

    def simulate(run: dfl.Run, callbacks: Sequence[dfl.Callback] = ()) -> list[dfl.Row]:
        runs.append(watched(run, callbacks))
        return runs[-1].rows

    def trained(
        options: experiment.Options, partition: str, method: str, seed: int
    ) -> experiment.Trained:
        runs.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(experiment, "dfl", Recorded(simulate))
            made.trained[partition, method] = known(options, partition, method, seed)
        made.watched[partition, method] = [*runs]
        return made.trained[partition, method]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "trained", trained)
        patch.setattr("dfl.reporting.plots.figures", lambda *given: {})
        experiment.experiment(options)
    return made


class Recorded:
    """The package with another `simulate`."""

    def __init__(self, simulate: Any) -> None:
        self.simulate = simulate

    def __getattr__(self, name: str) -> Any:
        return getattr(dfl, name)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run is computed."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a run is computed")

    monkeypatch.setattr(experiment, "trained", refuse)


def test_a_row_for_every_method_beside_what_was_published(small: Small) -> None:
    published = pd.read_csv(small.options.out / "table.csv")
    assert list(zip(published["partition"], published["method"], strict=True)) == [
        (p, m) for p in experiment.PARTITIONS for m in experiment.METHODS
    ]
    assert list(small.trained) == list(small.rows)
    row = common.by_label(published, ["partition", "method"])["non_iid", "lg_adv"]
    figures = [row[f"{name}_published"] for name in ("accuracy", "auc", "adversary")]
    assert figures == [80.1, 84.1, 49.8]
    assert published[published["method"] == "lg_adv_narrow"]["auc_published"].isna().all()
    shares = published[list(experiment.FIGURES)].to_numpy()
    assert ((shares >= 0) & (shares <= 100)).all()
    assert (small.options.out / "figure.png").read_bytes().startswith(b"\x89PNG")


def representation(method: str, rows: Mapping[str, Tensor], inputs: NDArray[Any]) -> Tensor:
    """The representations of inputs, by the numbers of one device alone."""
    narrow = method == "lg_adv_narrow"
    h = torch.from_numpy(inputs)
    for k in ("1", "3", "5") if narrow else ("1", "4", "7"):
        h = linear(h, rows[f"{k}.weight"], rows[f"{k}.bias"])
        h = h if narrow and k == "5" else h.relu()
    if narrow:
        h = (h - h.mean(1, keepdim=True)) / (h.var(1, correction=0, keepdim=True) + 1e-5).sqrt()
    return h


def stack(h: Tensor, rows: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """The outputs of layers with ReLU between them."""
    for name in names:
        h = linear(
            h if name == names[0] else h.relu(), rows[f"{name}.weight"], rows[f"{name}.bias"]
        )
    return h


def by_hand(
    this: experiment.Trained, method: str, state: Models, i: int, *, probe: bool
) -> dict[str, float]:
    """Figures of one device on the test half, from the numbers of its models alone."""
    rows = {name: value[i if len(value) > 1 else 0] for name, value in state.items()}
    data = this.data
    h = representation(method, rows, data.test_inputs)
    behind = {"fedavg": ["10"], "lg_adv_narrow": ["7"]}.get(method, ["10", "13", "16"])
    layers = ["1", "3"] if method == "lg_adv_narrow" else ["1", "3", "5", "7"]
    y, z = stack(h, rows, behind), stack(h, rows, [f"adversary.{k}" for k in layers])
    truth, wanted = data.test_labels, data.test_protected
    assert wanted is not None
    assert data.train_protected is not None
    chosen = (y[:, 1] > y[:, 0]).numpy()
    rates = [[chosen[wanted[:, k] == group].mean() for group in (0, 1)] for k in (0, 1)]
    odds = [
        [
            [chosen[(wanted[:, k] == group) & (truth == y)].mean() for group in (0, 1)]
            for y in (0, 1)
        ]
        for k in (0, 1)
    ]
    figures = {
        "accuracy": float((chosen == truth).mean()),
        "auc": float(roc_auc_score(truth, (y[:, 1] - y[:, 0]).numpy())),
        "adversary": float(np.mean([roc_auc_score(wanted[:, k], z[:, k].numpy()) for k in (0, 1)])),
        "parity_gap": float(np.mean([abs(a - b) for a, b in rates])),
        "odds_gap": float(np.mean([max(abs(a - b) for a, b in pairs) for pairs in odds])),
    }
    if probe:
        part = this.split.train[i]
        own = representation(method, rows, data.train_inputs[part])
        found = probe_auc(own.numpy(), data.train_protected[part], h.numpy(), wanted, 0)
        figures["probe"] = float(found.mean())
    return figures


@pytest.mark.parametrize("method", experiment.METHODS)
def test_figures_are_means_over_devices_and_the_last_tenth_on_the_test_half(
    small: Small, method: str
) -> None:
    this = small.trained["iid", method]
    assert len(this.states) == (1 if method == "fedavg" else 2)
    each = [
        [by_hand(this, method, state, i, probe=i == 0) for i in (0, 1)] for state in this.states
    ]
    row = small.rows["iid", method]
    for name in experiment.FIGURES:
        own = [one[name] for devices in each for one in devices if name in one]
        assert row[name] == pytest.approx(100 * np.mean(own), abs=0.01), name  # ties by rounding
        assert len(own) == len(this.states) * (1 if name == "probe" else 2)
    alike = np.isclose(each[0][0]["adversary"], each[0][1]["adversary"])
    assert alike == (method == "fedavg")  # where all share the adversary
    assert method != "fedavg" or row["parity_gap"] > 1  # a constant answer has no gaps


@pytest.mark.parametrize("method", experiment.METHODS)
def test_the_models_of_the_last_tenth_are_kept(small: Small, method: str) -> None:
    this, end = small.trained["iid", method], small.watched["iid", method][-1]
    rounds = [1] if method == "fedavg" else [10, 11]
    assert list(end.states) == [0, *rounds]
    for state, t in zip(this.states, rounds, strict=True):
        assert set(state) == set(end.states[t])
        assert all(np.array_equal(rows, end.states[t][name]) for name, rows in state.items())
    moved = [not torch.equal(this.states[0][name], rows) for name, rows in this.states[-1].items()]
    assert all(moved) == (method != "fedavg")


def test_a_shorter_run_is_the_beginning_of_a_longer_one(small: Small) -> None:
    few = replace(small.options, epochs=EPOCHS - 1)
    (short,) = experiment.trained(few, "iid", "lg_adv_narrow", 0).states
    long = small.trained["iid", "lg_adv_narrow"].states[0]
    assert all(torch.equal(short[name], rows) for name, rows in long.items())


def held(options: experiment.Options) -> tuple[dfl.Data, Any]:
    """The data and their split."""
    run = experiment.run_of(options, "iid", "lg", 0)
    return distribute_data.read(run, sources_of(settle(run, 1)), None)


def test_choices_never_use_the_test_half(options: experiment.Options) -> None:
    data, split = held(replace(options, validate=True))
    train, test = experiment.groups(data, split, 1, validate=False)
    assert test[0] is data.test_inputs
    _, validation = experiment.groups(data, split, 1, validate=True)
    places = np.concatenate(split.validation)
    assert np.array_equal(validation[0], data.train_inputs[places])
    assert np.array_equal(validation[1], data.train_labels[places])
    assert len(places) == 16  # a tenth of 160, at both
    assert not set(places) & {k for part in split.train for k in part}
    assert np.array_equal(train[0], data.train_inputs[split.train[1]])


def test_figures_of_choices_are_of_validation_examples(options: experiment.Options) -> None:
    few = replace(options, validate=True, epochs=1)
    data, split = held(few)
    this = experiment.trained(few, "iid", "fedavg", 0)
    places = np.concatenate(split.validation)
    rows = {name: value[0] for name, value in this.states[-1].items()}
    y = stack(representation("fedavg", rows, data.train_inputs[places]), rows, ["10"])
    right = (y.argmax(1).numpy() == data.train_labels[places]).mean()
    for i in (0, 1):
        assert experiment.device(this, this.states[-1], i, few)["accuracy"] == pytest.approx(right)


def test_without_choices_devices_train_on_all_their_examples(small: Small) -> None:
    for this in small.trained.values():
        places = np.concatenate(this.split.train)
        assert sorted(places) == [*range(len(this.data.train_labels))]
        assert sum(map(len, this.split.validation)) == 0


@pytest.mark.parametrize("method", ["lg", "lg_adv"])
@pytest.mark.parametrize("partition", experiment.PARTITIONS)
def test_local_parts_and_adversaries_train_alone_first(
    small: Small, partition: str, method: str
) -> None:
    """The shared parameters of all peers stay as they were, and all others are trained."""
    before, after = small.watched[partition, method]
    assert max(before.states) == EPOCHS
    start, end = before.states[0], before.states[EPOCHS]
    beginnings = {name.partition(".")[0] for name in start}
    assert {"adversary", "auxiliary", "1", "4", "7", "10", "13", "16"} == beginnings
    for name, rows in end.items():
        assert rows.shape == start[name].shape
        assert len(rows) == 2
        still = [bool((mine == first).all()) for mine, first in zip(rows, start[name], strict=True)]
        assert still == [name.startswith(SHARED[method])] * 2, name
        if not all(still):
            assert (rows[0] != rows[1]).any(), name
    assert before.rows[-1]["payload_bytes"] == 0
    assert list(after.states[0]) == list(end)
    assert all(np.array_equal(rows, end[name]) for name, rows in after.states[0].items())
    assert all((rows != end[name]).any() for name, rows in after.states[EPOCHS].items())
    assert after.rows[-1]["payload_bytes"] > 0


def test_the_other_methods_begin_with_their_rounds(small: Small) -> None:
    for partition in experiment.PARTITIONS:
        for method in ("fedavg", "lg_adv_narrow"):
            (watcher,) = small.watched[partition, method]
            assert watcher.run.init_from is None


def test_without_its_updates_a_round_is_one_of_fedavg(options: experiment.Options) -> None:
    """After one round, personal parameters are those of FedAvg, and only these have moved."""
    run = replace(experiment.run_of(options, "iid", "lg_adv", 0), rounds=1, eval_every=1)
    own, fedavg = watched(replace(run, algorithm=experiment.KeepShared())), watched(run)
    for name, rows in own.states[1].items():
        shared = name.startswith(SHARED["lg_adv"])
        wanted = fedavg.states[0 if shared else 1][name]
        assert np.array_equal(rows, wanted), name
        assert not shared or (fedavg.states[1][name] != wanted).any()


def test_training_alone_is_not_against_an_adversary(small: Small) -> None:
    lg, adversarial = (small.watched["iid", method][0] for method in ("lg", "lg_adv"))
    for watcher in (lg, adversarial):
        name, _, values = str(watcher.run.fairness_adversary).partition(":")
        given = dict(value.split("=") for value in values.split(","))
        assert given == {"hidden": "32+32+32", "head_layers": "3"}
        assert ADVERSARIES[name]().lambda_global == ADVERSARIES[name]().lambda_local == 0  # type: ignore[union-attr]
    assert lg.run.auxiliary == adversarial.run.auxiliary == "supervised:head_layers=3"
    for name, rows in lg.states[EPOCHS].items():
        assert np.array_equal(rows, adversarial.states[EPOCHS][name])
    ends = [
        small.watched["iid", method][1].states[EPOCHS]["1.weight"] for method in ("lg", "lg_adv")
    ]
    assert (ends[0] != ends[1]).any()  # the rounds of training together are


def test_the_runs_are_those_of_the_paper() -> None:
    options = experiment.Options()
    fedavg, lg, adv, _ = runs = [
        experiment.run_of(options, "non_iid", method, 3) for method in experiment.METHODS
    ]
    assert {(run.peers, run.batch_size, run.lr, run.partition, run.seed) for run in runs} == {
        (10, 32, 0.1, "shards:per_peer=10", 3)
    }
    assert [run.share for run in runs] == ["all", "head:3", "head:3", "head:1"]
    assert [run.rounds for run in runs] == [50, 10, 10, 10]
    assert [run.local_epochs or 1 for run in runs] == [10, 1, 1, 1]
    assert [run.momentum for run in runs] == [0.5, 0.5, 0.5, 0.0]
    weights = [float(str(run.fairness_adversary).partition("lambda_global=")[2]) for run in runs]
    assert weights == [0, 0, experiment.LAMBDA["lg_adv"], experiment.LAMBDA["lg_adv_narrow"]]
    assert {run.validation for run in runs} == {0.0}
    assert fedavg.model == "mlp:hidden=32+32+32,dropout=0.2"
    assert lg.model == adv.model == "mlp:hidden=32+32+32+32+32,dropout=0.2"
    assert [run.auxiliary for run in runs] == [
        "none", "supervised:head_layers=3", "supervised:head_layers=3", "none"
    ]  # fmt: skip
    for run in (lg, adv):
        alone = experiment.alone_first(run)
        assert (alone.rounds, alone.local_epochs or 1, alone.share) == (10, 1, "head:3")
    assert options.seeds == 10
    choice = experiment.run_of(replace(options, validate=True), "iid", "lg", 0)
    assert choice == replace(experiment.run_of(options, "iid", "lg", 0), validation=0.1)


def test_the_last_tenth_of_the_rounds_is_evaluated() -> None:
    for method, last in zip(experiment.METHODS, (5, 1, 1, 1), strict=True):
        run = experiment.run_of(experiment.Options(), "iid", method, 0)
        assert (run.eval_every, run.eval_last) == (run.rounds, last)


def test_networks_have_the_published_widths(small: Small) -> None:
    """Of FedAvg 93-32-32-32-2, and five hidden layers where parts are personal."""
    wide = small.trained["iid", "lg"].data.train_inputs.shape[1]
    for method, sizes in {
        "fedavg": [wide, 32, 32, 32, 2],
        "lg": [wide, 32, 32, 32, 32, 32, 2],
        "lg_adv": [wide, 32, 32, 32, 32, 32, 2],
        "lg_adv_narrow": [wide, 32, 32, 3, 2],
    }.items():
        (state, *_), hidden = small.trained["iid", method].states, [32, 32, 32]
        hidden = [256] if method == "lg_adv_narrow" else hidden
        own = [
            rows.shape[1:] for name, rows in state.items() if name[0].isdigit() and rows.ndim == 3
        ]
        against = [
            rows.shape[1:]
            for name, rows in state.items()
            if name.startswith("adversary.") and rows.ndim == 3
        ]
        assert sorted(own) == sorted(zip(sizes[1:], sizes, strict=False))
        ends = [sizes[len(sizes) - 1 - experiment.BEHIND.get(method, 3)], *hidden, 2]
        assert sorted(against) == sorted(zip(ends[1:], ends, strict=False))


def test_a_stack_is_split_before_its_last_layers() -> None:
    model = Sequential(Linear(3, 4), ReLU(), Linear(4, 5), ReLU(), Linear(5, 2))
    f, g = experiment.split_model(model, 2)
    assert [type(layer) for layer in f] == [Linear, ReLU]
    x = torch.linspace(-1, 1, 6).view(2, 3)
    assert torch.equal(g(f(x)), model(x))


def test_the_narrow_model_starts_by_its_seed() -> None:
    first, again, other = (experiment.narrow(9, seed) for seed in (0, 0, 1))
    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True)
    )
    assert not torch.equal(next(first.parameters()), next(other.parameters()))
    h = experiment.split_model(first, 1)[0](torch.linspace(-1, 1, 45).view(5, 9))
    assert h.shape == (5, experiment.WIDTH)
    assert torch.allclose(h.mean(1), torch.zeros(5), atol=1e-5)


def test_the_table_has_means_and_deviations_over_the_seeds() -> None:
    rows = pd.DataFrame(
        [
            {"partition": "iid", "method": "lg", "seed": s}
            | {name: 60.0 + 10 * s + k for k, name in enumerate(experiment.FIGURES)}
            for s in (0, 1)
        ]
    )
    (row,) = experiment.tabulate(rows).to_dict("records")
    assert (row["accuracy"], row["accuracy_published"], row["adversary"]) == (65.0, 84.3, 67.0)
    assert row["probe_std"] == pytest.approx(np.sqrt(50))
    assert "accuracy 65.0 %, adversary 67.0, probe 68.0" in experiment.finding(
        experiment.tabulate(rows)
    )


@pytest.mark.usefixtures("nothing_runs")
def test_kept_rows_are_not_computed_again(small: Small) -> None:
    tables = [small.options.out / f"{name}.csv" for name in ("table", "seeds")]
    before = [path.read_bytes() for path in tables]
    experiment.experiment(small.options)
    assert [path.read_bytes() for path in tables] == before


@pytest.mark.usefixtures("nothing_runs")
def test_one_cell_alone_has_its_row(small: Small, capsys: pytest.CaptureFixture[str]) -> None:
    name = "partition=non_iid,method=lg_adv,seed=0"
    # The number of seeds changes no row.
    experiment.experiment(replace(small.options, seeds=4, only=name))
    head, line, *rest = capsys.readouterr().out.splitlines()
    assert rest == []
    lines = (small.options.out / "seeds.csv").read_text().splitlines()
    assert head == lines[0]
    assert line in lines[1:]
    assert line.startswith("non_iid,lg_adv,0,")


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    "other",
    [{"epochs": 12}, {"rounds": 2}, {"devices": 3}, {"probes": 2}, {"validate": True},
     {"dataset": "adult:size=100"}],
    ids=str,
)  # fmt: skip
def test_rows_of_other_settings_are_refused(small: Small, other: dict[str, Any]) -> None:
    with pytest.raises(dfl.InputError, match=r"seed=0 holds rows of other settings.*--out$"):
        experiment.experiment(replace(small.options, **other))


def test_the_figures_of_a_diverged_run_are_nan(
    options: experiment.Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise dfl.DivergedError("gone")

    with monkeypatch.context() as patched:
        patched.setattr(experiment, "trained", broken)
        figures = experiment.measured(options, "iid", "lg", 0)
    rows = [{"partition": "iid", "method": "lg", "seed": 0, **figures}]
    rows += [
        {"partition": "iid", "method": "lg", "seed": 1} | dict.fromkeys(experiment.FIGURES, 70.0)
    ]
    (row,) = experiment.tabulate(pd.DataFrame(rows)).to_dict("records")
    assert (row["seeds"], row["accuracy"]) == (1, 70.0)


def test_bad_input_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run_experiment("personal_layers.lg_fair", tmp_path, "--dataset", "nonsense")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "nonsense" in done.stderr
