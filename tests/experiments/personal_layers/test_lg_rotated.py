"""The experiment on rotated digits: the parts of models that are combined, and their scores."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.patches import Rectangle
from torch.nn import Flatten, Linear, Module, Sequential

import dfl
from dfl.algorithms import ALGORITHMS
from dfl.config import Run
from dfl.datasets import DATASETS, Data
from dfl.simulation.evaluator import is_evaluated
from experiments import common
from experiments.personal_layers import lg_rotated as experiment
from experiments.personal_layers import new_device
from tests.support.launched import here

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "dataset": "digits", "devices": 6, "examples": 120, "model": "mlp:hidden=16+8",
    "goal": 0.8, "most": 20, "rounds": 4, "seeds": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """The folder of the experiment, the runs that it launched, and what it printed."""
    out, printed = tmp_path_factory.mktemp("published"), StringIO()
    with here() as launched, redirect_stdout(printed):
        experiment.experiment(experiment.Options(**SMALL, out=out))
    return out, launched, printed.getvalue()


@pytest.fixture(scope="module")
def this(tmp_path_factory: pytest.TempPathFactory) -> Iterator[experiment.Scene]:
    with here():
        yield experiment.scene(
            experiment.Options(**SMALL, out=tmp_path_factory.mktemp("experiment")), "non-iid", 0
        )


def rows_of(module: Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def same(one: Module, other: Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_the_experiment_ends_in_a_table_a_figure_and_a_finding(
    published: tuple[Path, list[str], str],
) -> None:
    out, launched, printed = published
    table, seeds = (pd.read_csv(out / f"{name}.csv") for name in ("table", "seeds"))
    assert launched == ["data=iid,seed=0", "data=non-iid,seed=0"]
    assert len(table) == len(seeds) == 2 * 8
    figures = ["normal", "normal_alone", "local", "rotated"]
    assert ((seeds[figures] >= 0) & (seeds[figures] <= 100)).all(axis=None)
    assert (seeds["seed"] == 0).all()
    np.testing.assert_allclose(table[figures], seeds[figures], rtol=1e-5)
    before = table[table["method"] == experiment.BEFORE].set_index("data")["normal"]
    for data, cell in zip(("iid", "non-iid"), launched, strict=True):
        end = dfl.load(out / "cells" / cell).rows.iloc[-1]
        assert before[data] == pytest.approx(100 * end["accuracy_mean"], rel=1e-5)
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert printed.strip() == (out / "table.md").read_text().strip()
    assert not set(new_device.NEWEST) & set(ALGORITHMS)


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is computed."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a row is computed")

    for name in ("scene", "learn", "scores"):
        monkeypatch.setattr(experiment, name, refuse)


@pytest.mark.usefixtures("nothing_runs")
def test_kept_rows_are_not_computed_again(
    published: tuple[Path, list[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    out, _, printed = published
    tables = [out / f"{name}.csv" for name in ("table", "seeds")]
    before = [path.read_bytes() for path in tables]
    experiment.experiment(experiment.Options(**SMALL, out=out))
    assert [path.read_bytes() for path in tables] == before
    assert capsys.readouterr().out == printed


@pytest.mark.usefixtures("nothing_runs")
def test_one_cell_alone_has_its_rows(
    published: tuple[Path, list[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    out, _, _ = published
    # The number of seeds changes no row.
    changed = {**SMALL, "seeds": 3}
    experiment.experiment(experiment.Options(**changed, out=out, only="data=non-iid,seed=0"))
    head, *lines = capsys.readouterr().out.splitlines()
    written = (out / "seeds.csv").read_text().splitlines()
    assert head == written[0]
    assert lines == [line for line in written if line.startswith("non-iid,0,")]
    assert len(lines) == 8


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize(
    "other",
    [{"rounds": 5}, {"goal": 0.7}, {"most": 21}, {"devices": 7}, {"model": "mlp:hidden=8+8"},
     {"examples": 60}],
    ids=str,
)  # fmt: skip
def test_rows_of_other_settings_are_refused(
    published: tuple[Path, list[str], str], other: dict[str, Any]
) -> None:
    with pytest.raises(dfl.InputError, match=r"data=iid,seed=0 holds rows of other settings.*"):
        experiment.experiment(experiment.Options(**{**SMALL, **other}, out=published[0]))


@pytest.mark.usefixtures("nothing_runs")
def test_a_single_round_is_refused(tmp_path: Path) -> None:
    """The local part learns first in half of the rounds."""
    with pytest.raises(dfl.InputError, match="--rounds must be at least 2, not 1"):
        experiment.experiment(experiment.Options(**{**SMALL, "rounds": 1}, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_images_are_turned_by_a_quarter() -> None:
    image = np.array([[[[1, 2], [3, 4]]]], np.uint8)
    assert new_device.rotated(image).tolist() == [[[[2, 4], [1, 3]]]]
    assert new_device.rotated(image).dtype == np.uint8


def test_the_new_device_has_turned_digits_of_its_own(this: experiment.Scene) -> None:
    newest, data = this.newest, this.data
    sizes = (len(newest.train_labels), len(newest.test_labels), len(this.rotated[1]))
    assert sizes == (120, 20, 20)
    assert len(np.unique(newest.train_inputs.reshape(120, -1), axis=0)) > 115
    found = np.concatenate([newest.train_inputs, newest.test_inputs])
    inputs = new_device.as_inputs(data, newest.test_inputs)
    assert torch.equal(this.rotated[0], inputs)
    assert this.rotated[1].tolist() == newest.test_labels.tolist()
    back = np.rot90(found, k=3, axes=(2, 3))
    for part, places in (("train", slice(0, 120)), ("test", slice(120, 140))):
        images, labels = (getattr(data, f"{part}_{name}") for name in ("inputs", "labels"))
        known = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
        own = [known[np.ascontiguousarray(image).tobytes()] for image in back[places]]
        assert own == getattr(newest, f"{part}_labels").tolist()


def test_the_first_devices_keep_their_examples(this: experiment.Scene) -> None:
    run = dfl.load(this.options.out / "cells" / "data=non-iid,seed=0")
    counts = [np.bincount(this.data.train_labels[part], minlength=10) for part in this.split.train]
    labels = [" ".join(f"{label}:{n}" for label, n in enumerate(each) if n) for each in counts]
    assert labels == run.peers["labels"].tolist()
    assert experiment.scores(this, [this.start], this.start)["local"] == pytest.approx(
        100 * run.rows["local_accuracy_mean"].iloc[-1], rel=1e-6
    )


@pytest.mark.parametrize("seed", [0, 1])
def test_the_newest_device_learns_in_every_round(this: experiment.Scene, seed: int) -> None:
    run = Run(algorithm="newest_fedavg:fraction=0.4", peers=6, share="head:1", rounds=1, seed=seed)
    models = new_device.learn(run, this.start, this.data)
    moved = (
        models["1.weight"]
        .ne(rows_of(this.start)["1.weight"])
        .flatten(1)
        .any(1)
        .nonzero()
        .flatten()
        .tolist()
    )
    assert len(moved) == 3  # 0.4 of five, and the newest
    assert moved[-1] == 5
    shared = sum(
        value.numel() for name, value in rows_of(this.start).items() if name.startswith("5.")
    )
    with ALGORITHMS.replaced(**new_device.NEWEST):
        *_, end = dfl.simulate(replace(run, model=this.start, dataset=this.data))
    assert end["upload_bytes"] == end["download_bytes"] == 3 * 4 * shared


def test_who_is_drawn_changes_from_round_to_round() -> None:
    class Many:
        peers = 101
        group = staticmethod(lambda ids: tuple(sorted(ids.tolist())))

        def __init__(self, t: int) -> None:
            self.t = t

    class Seed:
        seed = 3

    method: Any = new_device.WithNewest(fraction=0.1)
    drawn = [method._draw(Seed, Many(t))[0] for t in range(20)]
    assert all(len(set(each)) == 11 and each[-1] == 100 for each in drawn)
    assert len(set(drawn)) == 20
    assert new_device.WithNewest(fraction=0.0)._client_counts(101) == (1, 0)


def test_prox_pulls_back(this: experiment.Scene) -> None:
    run: dict[str, Any] = {"peers": 4, "rounds": 1, "dataset": "digits"}
    plain = new_device.learn(Run(**run, algorithm="newest_fedavg"), this.start, this.data)
    free = new_device.learn(Run(**run, algorithm="newest_fedprox:mu=0"), this.start, this.data)
    held = new_device.learn(Run(**run, algorithm="newest_fedprox:mu=5"), this.start, this.data)
    weight = rows_of(this.start)["1.weight"]
    assert torch.equal(plain["1.weight"], free["1.weight"])
    assert (held["1.weight"] - weight).norm() < 0.7 * (plain["1.weight"] - weight).norm()


def test_methods_are_known_for_a_while_only(this: experiment.Scene) -> None:
    with pytest.raises(dfl.InputError, match="lr"):
        new_device.learn(
            Run(algorithm="newest_fedavg", peers=2, lr_schedule="step:every=0"),
            this.start,
            this.data,
        )
    assert not set(new_device.NEWEST) & set(ALGORITHMS)


def test_a_fixed_part_stays_as_it_is(this: experiment.Scene) -> None:
    before = rows_of(this.start)
    module = new_device.OnFixed(this.start[:3], this.start[3:])
    assert list(rows_of(module)) == ["f.1.weight", "f.1.bias"]
    inputs, _ = this.normal
    assert torch.equal(module(inputs), this.start(inputs))
    models = new_device.learn(Run(algorithm="fedavg", peers=1, rounds=2), module, this.newest)
    trained = new_device.filled(module, models)
    assert not torch.equal(trained.f[1].weight, before["1.weight"])
    assert same(trained.fixed[0], this.start[3:])
    assert all(torch.equal(before[name], value) for name, value in rows_of(this.start).items())


Seen = list[tuple[int, list[Any], Any]]
"""The models that are scored, old and new, with the number of runs before."""


def copy_of(model: Module) -> Module:
    return copy.deepcopy(model)


def recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[Run, Module, Data]], Seen]:
    """Replace `scores`, which are then 1, 2, 3, ...; return the runs, and what is scored."""
    runs: list[tuple[Run, Module, Data]] = []
    seen: Seen = []
    known = new_device.learn

    def learn(run: Run, module: Module, data: Data, kept: Any) -> Any:
        runs.append((run, copy_of(module), data))
        return known(run, module, data, kept)

    def scores(scene: experiment.Scene, old: Any, new: Any) -> dict[str, float]:
        seen.append((len(runs), [copy_of(each) for each in old], copy_of(new)))
        return {"normal": float(len(seen)), "rotated": 10.0 * len(seen)}

    monkeypatch.setattr(experiment, "learn", learn)
    monkeypatch.setattr(experiment, "scores", scores)
    return runs, seen


def after(this: experiment.Scene, run: Run, module: Module, data: Data, t: int) -> Any:
    """The model of device 0 after t rounds of a run."""
    short = replace(run, rounds=t, eval_every=t, eval_last=1)
    return new_device.filled(module, new_device.learn(short, module, data))


def test_alone_whose_parts_meet(this: experiment.Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """4 rounds at once, and 2 of the local part before 2 of both."""
    runs, seen = recorded(monkeypatch)
    rows = experiment.alone(this)
    assert [(row["method"], row.get("C"), row.get("rounds")) for row in rows] == [
        (experiment.BEFORE, None, None),
        (experiment.FEDAVG, 0.0, 4),
        (experiment.LG, 0.0, 4),
        (experiment.BOTH, 0.0, 4),
        (experiment.FIRST, 0.0, 2),
    ]
    # A score is the number of its call: FedAvg, LG-FedAvg, the local part, both, and before.
    assert [k for k, _, _ in seen] == [1, 1, 2, 3, 3]
    assert [row["normal"] for row in rows] == [5, 1, 2, 4, 3]
    *joint, local, both, before = [(old, new) for _, old, new in seen]
    start = this.start
    ((fedavg,), fedavg_new), ((lg,), lg_new) = joint
    assert same(fedavg, fedavg_new)
    assert same(fedavg_new, lg_new)
    assert same(fedavg_new, after(this, *runs[0], 4))
    assert same(runs[0][1], start)
    ((both_old,), both_new), ((first,), first_new), ((known,), known_new) = both, local, before
    assert same(known, start)
    assert same(known_new, start)
    for old, new in ((lg, lg_new), (both_old, both_new)):
        assert same(old[:3], start[:3])
        assert same(old[3:], new[3:])
        assert not same(old[3:], start[3:])
    assert same(first, start)
    assert same(first_new[3:], start[3:])
    assert not same(first_new[:3], start[:3])


@pytest.mark.parametrize(("rounds", "half"), [(4, 2), (5, 2), (7, 3)])
def test_the_local_part_learns_first_for_half_of_the_rounds_under_the_unchanged_head(
    this: experiment.Scene, monkeypatch: pytest.MonkeyPatch, rounds: int, half: int
) -> None:
    runs, seen = recorded(monkeypatch)
    experiment.alone(replace(this, options=replace(this.options, rounds=rounds)))
    (joint, *_), (local, module, data), (both, begun, again) = runs
    assert [run.rounds for run in (joint, local, both)] == [rounds, half, rounds - half]
    assert {run.peers for run, _, _ in runs} == {1}
    assert {run.algorithm for run, _, _ in runs} == {"fedavg"}
    assert all(owned is this.newest for _, _, owned in runs)
    assert isinstance(module, new_device.OnFixed)
    assert same(module.f, this.start[:3])
    assert same(module.fixed[0], this.start[3:])
    frozen = copy.deepcopy(this.start)  # the same steps, of a whole model with a frozen part
    frozen[3:].requires_grad_(False)
    expected = after(this, local, frozen, data, half)
    assert isinstance(begun, Sequential)
    assert all(
        torch.allclose(a, b, atol=1e-6)
        for a, b in zip(begun.parameters(), expected.parameters(), strict=True)
    )
    assert same(begun[3:], this.start[3:])
    assert same(seen[-2][2], after(this, both, begun, again, rounds - half))


@pytest.mark.parametrize(
    ("rounds", "scored"),
    [(1, [1]), (4, [4]), (10, [10]), (20, [19, 20]), (50, [46, 47, 48, 49, 50]),
     (200, [*range(182, 201, 2)]), (500, [*range(455, 501, 5)]), (250, [*range(226, 251, 2)])],
)  # fmt: skip
def test_ten_rounds_of_the_last_tenth_are_scored(
    this: experiment.Scene, monkeypatch: pytest.MonkeyPatch, rounds: int, scored: list[int]
) -> None:
    """All of the last tenth where these are fewer; scores are the means over them."""
    run = this.run(algorithm="fedavg", peers=1, **experiment.evaluated(rounds))

    def learn(run: Run, module: Module, data: Data, kept: new_device.Kept) -> Any:
        for t in range(run.rounds + 1):
            if is_evaluated(t, run):
                kept.evaluated_models(t, {"t": np.array([t])})
        return kept.last

    def scores(scene: experiment.Scene, old: Any, new: Any) -> dict[str, float]:
        seen.append(new)
        return {"normal": float(new), "rotated": float(new) ** 2}

    seen: list[int] = []
    monkeypatch.setattr(experiment, "learn", learn)
    monkeypatch.setattr(experiment, "scores", scores)
    found, last = experiment.followed(
        this,
        run,
        this.start,
        this.newest,
        lambda models: {"a": ([], int(models["t"]))},  # type: ignore[dict-item]
    )
    assert seen == scored
    assert int(last["t"]) == rounds
    assert found == {
        "a": {
            "normal": pytest.approx(np.mean(scored)),
            "rotated": pytest.approx(np.mean(np.square(scored))),
        }
    }


def test_scores_are_means_over_the_models_of_these_rounds(this: experiment.Scene) -> None:
    """The models of rounds 19 and 20, which shorter runs have too."""
    this = replace(this, options=replace(this.options, rounds=20))
    run = this.run(algorithm="fedavg", peers=1, rounds=20)
    rows = {row["method"]: row for row in experiment.alone(this)}
    models = [after(this, run, this.start, this.newest, t) for t in (19, 20)]
    scored = {
        experiment.FEDAVG: [experiment.scores(this, [new], new) for new in models],
        experiment.LG: [experiment.scores(this, [this.start[:3] + new[3:]], new) for new in models],
    }
    for method, ends in scored.items():
        for name in ends[0]:
            assert rows[method][name] == pytest.approx(np.mean([end[name] for end in ends]))
    assert scored[experiment.FEDAVG][0] != scored[experiment.FEDAVG][1]


def test_together_the_first_devices_keep_their_part(
    this: experiment.Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, seen = recorded(monkeypatch)
    rows = experiment.together(this)
    names = (experiment.FEDAVG, experiment.FEDPROX, experiment.LG)
    assert [(row["method"], row["C"], row["rounds"]) for row in rows] == [
        (name, 0.1, 4) for name in names
    ]
    assert [row["normal"] for row in rows] == [1, 2, 3]
    assert [run.share for run, _, _ in runs] == ["all", "all", "head:2"]
    assert [str(run.algorithm).partition(":")[0] for run, _, _ in runs] == [
        "newest_fedavg", "newest_fedprox", "newest_fedavg",
    ]  # fmt: skip
    assert f"mu={experiment.MU}" in str(runs[1][0].algorithm)
    assert all(run.peers == 7 and same(module, this.start) for run, module, _ in runs)
    for _, (old,), new in seen[:2]:
        assert same(old, new)
    assert not same(seen[0][2], seen[1][2])
    _, old, new = seen[2]
    assert len(old) == 6
    assert all(same(each[3:], new[3:]) for each in old)
    assert not same(new[3:], this.start[3:])
    still = sum(same(each[:3], this.start[:3]) for each in old)
    assert still >= 6 - 4 * 1  # one of six besides the newest, in each of four rounds
    assert not same(new[:3], this.start[:3])
    with ALGORITHMS.replaced(**new_device.NEWEST):
        assert same(new[:3], after_of(runs[2], 6)[:3])


def after_of(given: tuple[Run, Module, Data], i: int) -> Any:
    """The model of device i after a run."""
    run, module, data = given
    return new_device.filled(module, new_device.learn(run, module, data), i)


def test_together_every_device_trains_on_its_own_examples(
    this: experiment.Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, _ = recorded(monkeypatch)
    experiment.together(this)
    _, _, data = runs[0]
    assert data.train_groups is not None
    for i in range(6):
        own, part = data.train_groups == i, this.split.train[i]
        assert np.array_equal(data.train_inputs[own], this.data.train_inputs[part])
        assert np.array_equal(data.train_labels[own], this.data.train_labels[part])
    own = data.train_groups == 6
    assert np.array_equal(data.train_inputs[own], this.newest.train_inputs)
    assert np.array_equal(data.train_labels[own], this.newest.train_labels)
    assert np.array_equal(data.test_inputs, this.newest.test_inputs)


def test_together_the_last_tenth_of_the_rounds_counts(
    this: experiment.Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, seen = recorded(monkeypatch)
    this = replace(this, options=replace(this.options, rounds=20))
    rows = experiment.together(this)
    assert [row["rounds"] for row in rows] == [20] * 3
    assert [row["normal"] for row in rows] == [1.5, 3.5, 5.5]  # two rounds of each method
    assert [row["rotated"] for row in rows] == [15, 35, 55]
    for k, (run, module, data) in enumerate(runs):
        for t, (_, _, new) in zip((19, 20), seen[2 * k : 2 * k + 2], strict=True):
            short = replace(run, rounds=t, eval_every=t, eval_last=1)
            assert same(new, after_of((short, module, data), 6 if k == 2 else 0))


def test_together_a_run_that_diverged_has_no_figures(
    this: experiment.Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = new_device.learn

    def diverging(run: Run, module: Module, data: Data, kept: Any) -> Any:
        run = replace(run, lr=1e30) if "prox" in str(run.algorithm) else run
        return learn(run, module, data, kept)

    monkeypatch.setattr(experiment, "learn", diverging)
    rows = pd.DataFrame(experiment.together(this)).assign(data="iid", seed=0)
    assert rows["method"].tolist() == [experiment.FEDAVG, experiment.FEDPROX, experiment.LG]
    assert rows["normal"].isna().tolist() == [False, True, False]
    both = pd.concat([rows, rows.assign(seed=1, normal=[10.0, 20, 30], rotated=[40.0, 50, 60])])
    table = experiment.tabulate(both)
    assert table["seeds"].tolist() == [2, 1, 2]
    assert table["diverged"].tolist() == [0, 1, 0]
    assert table["normal"][1] == 20
    assert "iid, C = 0.1, FedProx: 1 of 2 runs diverged." in experiment.finding(table)


class Constant(Module):
    """A model with the same scores for all inputs."""

    def __init__(self, *scores: float) -> None:
        super().__init__()
        self.scores = torch.tensor(scores)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.scores.expand(len(inputs), -1)


def test_marks_are_those_of_all_models_together_and_of_each(this: experiment.Scene) -> None:
    labels, own = this.data.test_labels, this.rotated[1].numpy()
    models = [
        Constant(*(float(k == label) * height for k in range(10)))
        for label, height in ((0, 1.0), (1, 3.0))
    ]
    found = experiment.scores(
        this,
        [models[0], models[1], *[models[0]] * 4],
        Constant(*(float(k == 2) for k in range(10))),
    )
    share = [(labels == k).mean() for k in (0, 1)]
    assert found["normal"] == pytest.approx(
        100 * share[0]
    )  # five have score 1 for label 0, one 3 for label 1
    assert found["normal_alone"] == pytest.approx(100 * (5 * share[0] + share[1]) / 6)
    predicted = [0, 1, 0, 0, 0, 0]
    local = [(labels[part] == k).mean() for k, part in zip(predicted, this.split.test, strict=True)]
    assert found["local"] == pytest.approx(100 * np.mean(local))
    assert found["rotated"] == pytest.approx(100 * (own == 2).mean())


def test_the_shared_part_is_the_last_two_layers() -> None:
    model = Sequential(
        Flatten(), Linear(4, 3), torch.nn.ReLU(), Linear(3, 3), torch.nn.ReLU(), Linear(3, 2)
    )
    assert new_device.cut_of(model) == 3


def test_the_table_and_the_finding_follow_from_the_rows() -> None:
    cases = [
        (experiment.BEFORE, np.nan),
        (experiment.FEDAVG, 0.0),
        (experiment.LG, 0.0),
        (experiment.LG, 0.1),
    ]
    rows = pd.DataFrame(
        [
            {"data": data, "seed": seed, "method": method, "C": c, "rounds": 4.0,
             "normal": 30.0 * k + seed, "normal_alone": 1.0, "local": 2.0, "rotated": 80.0 + seed}
            for data in experiment.PARTITION for seed in range(3)
            for k, (method, c) in enumerate(cases)
        ]
    )  # fmt: skip
    table = experiment.tabulate(rows)
    assert len(table) == 2 * 4
    row = common.by_label(table, ["data", "C", "method"])["non-iid", 0.0, experiment.LG]
    assert (row["normal"], row["normal_std"], row["normal_published"]) == (
        61.0,
        1.0,
        96.31,
    )
    assert (row["rotated"], row["rotated_std"], row["rotated_published"]) == (
        81.0,
        1.0,
        94.12,
    )
    assert table["normal_published"].notna().sum() == 6
    assert (
        "iid, C = 0, LG-FedAvg: normal 61.0 % (+30.0 to FedAvg), rotated 81.0 %"
        in experiment.finding(table)
    )
    left, right = experiment.draw(table, experiment.Options()).axes
    assert [left.get_title(), right.get_title()] == ["iid devices", "non-iid devices"]
    assert [text.get_text() for text in left.get_yticklabels()][1:3] == [
        "FedAvg, C = 0",
        "LG-FedAvg, C = 0",
    ]
    widths = [patch.get_width() for patch in left.patches if isinstance(patch, Rectangle)]
    assert max(widths) == 91.0


def test_the_setting_is_the_published_one() -> None:
    run = experiment.first(experiment.Options(), "non-iid", 2)
    assert (run.dataset, run.partition, run.peers, run.algorithm) == (
        "mnist", "shards:per_peer=2", 100, "fedavg:fraction=0.1",
    )  # fmt: skip
    assert (run.lr, run.momentum, run.batch_size, run.seed) == (0.05, 0.5, 10, 2)
    assert (run.model, run.rounds, run.validation, run.share) == (
        "mlp:hidden=512+256+256+128", 1500, 0.0, "all",
    )  # fmt: skip
    assert run.until == "local_accuracy=0.98"
    options = experiment.Options()
    assert (options.rounds, options.examples) == (500, 3000)
    assert "mnist" in DATASETS
