"""The experiment on rotated digits: the parts of models that are combined, and their scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
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
from experiments import common
from experiments.personal_layers import lg_rotated as experiment
from experiments.personal_layers import new_device
from tests.support.launched import here

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {
    "dataset": "digits", "devices": 6, "examples": 120, "model": "mlp:hidden=16+8",
    "goal": 0.8, "most": 20, "rounds": 2, "epochs": 2, "seeds": 1,
}  # fmt: skip


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
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with here() as launched:
        experiment.experiment(experiment.Options(**SMALL, out=tmp_path))
    table = pd.read_csv(tmp_path / "table.csv")
    assert launched == ["data=iid,seed=0", "data=non-iid,seed=0"]
    assert len(table) == 2 * 8
    shares = table[["normal", "normal_alone", "local", "rotated"]].to_numpy()
    assert ((shares >= 0) & (shares <= 100)).all()
    before = table[table["method"] == experiment.BEFORE].set_index("data")["normal"]
    for data, cell in zip(("iid", "non-iid"), launched, strict=True):
        end = dfl.load(tmp_path / "cells" / cell).rows.iloc[-1]
        assert before[data] == pytest.approx(100 * end["accuracy_mean"], rel=1e-5)
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.strip() == (tmp_path / "table.md").read_text().strip()
    assert not set(new_device.NEWEST) & set(ALGORITHMS)


def test_images_are_turned_by_a_quarter() -> None:
    image = np.array([[[[1, 2], [3, 4]]]], np.uint8)
    assert new_device.rotated(image).tolist() == [[[[2, 4], [1, 3]]]]
    assert new_device.rotated(image).dtype == np.uint8


def test_the_new_device_has_turned_digits_of_its_own(this: experiment.Scene) -> None:
    newest, data = this.newest, this.data
    assert (len(newest.train_labels), len(newest.test_labels), len(this.rotated[1])) == (
        100,
        20,
        20,
    )
    found = np.concatenate([newest.train_inputs, newest.test_inputs])
    assert (
        len(np.unique(found.reshape(120, -1), axis=0)) > 115
    )  # validation examples are others than those of training
    known = {
        image.tobytes(): label
        for image, label in zip(data.train_inputs, data.train_labels, strict=True)
    }
    back = np.rot90(found, k=3, axes=(2, 3))
    labels = np.concatenate([newest.train_labels, newest.test_labels])
    assert [known[np.ascontiguousarray(image).tobytes()] for image in back] == labels.tolist()


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
    rows, models = new_device.learn(run, this.start, this.data)
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
    text = sum(
        value.numel() for name, value in rows_of(this.start).items() if name.startswith("5.")
    )
    assert rows[-1]["upload_bytes"] == rows[-1]["download_bytes"] == 3 * 4 * text


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
    assert new_device.WithNewest(fraction=0.0)._sizes(101) == (1, 0)


def test_prox_pulls_back(this: experiment.Scene) -> None:
    run: dict[str, Any] = {"peers": 4, "rounds": 1, "dataset": "digits"}
    _, plain = new_device.learn(Run(**run, algorithm="newest_fedavg"), this.start, this.data)
    _, free = new_device.learn(Run(**run, algorithm="newest_fedprox:mu=0"), this.start, this.data)
    _, held = new_device.learn(Run(**run, algorithm="newest_fedprox:mu=5"), this.start, this.data)
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
    _, models = new_device.learn(Run(algorithm="fedavg", peers=1, rounds=2), module, this.newest)
    trained = new_device.filled(module, models)
    assert not torch.equal(trained.f[1].weight, before["1.weight"])
    assert same(trained.fixed[0], this.start[3:])
    assert all(torch.equal(before[name], value) for name, value in rows_of(this.start).items())


def test_the_length_is_the_shortest_of_the_best_on_validation(
    this: experiment.Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, Data]] = []

    def learn(
        run: Run, module: Module, data: Data
    ) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
        calls.append((run.rounds, data))
        rows = [
            {"round": t, "accuracy_mean": value}
            for t, value in enumerate([0.99, 0.1, 0.7, 0.7, 0.6])
        ]
        return rows[: run.rounds + 1], {
            name: value[None] for name, value in rows_of(module).items()
        }

    monkeypatch.setattr(experiment, "learn", learn)
    _, rounds = experiment.longest_that_pays(this, this.start)
    assert rounds == 2  # not 0, at which nothing is learned
    assert calls == [(this.options.epochs, this.newest), (2, this.newest)]


def recorded_scores(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Replace `scores`; return the models that it is then called with, old and new."""
    seen: list[tuple[Any, Any]] = []

    def marks(scene: experiment.Scene, old: Any, new: Any) -> dict[str, float]:
        seen.append((old, new))
        return {}

    monkeypatch.setattr(experiment, "scores", marks)
    return seen


def test_alone_whose_parts_meet(this: experiment.Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = recorded_scores(monkeypatch)
    rows = experiment.alone(this)
    assert [row["method"] for row in rows] == [
        experiment.BEFORE,
        experiment.FEDAVG,
        experiment.LG,
        experiment.BOTH,
        experiment.FIRST,
    ]
    (_, start), (fedavg, joint), (lg, lg_new), (both, both_new), (first, first_new) = (
        (old[0], new) for old, new in seen
    )
    assert start is this.start
    assert fedavg is joint
    assert lg_new is joint
    for old, new in ((lg, lg_new), (both, both_new)):
        assert same(old[:3], start[:3])
        assert same(old[3:], new[3:])
        assert not same(old[3:], start[3:])
    assert first is start
    assert same(first_new[3:], start[3:])
    assert not same(first_new[:3], start[:3])


def test_together_the_first_devices_keep_their_part(
    this: experiment.Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = recorded_scores(monkeypatch)
    rows = experiment.together(this)
    assert [(row["method"], row["C"], row["rounds"]) for row in rows] == [
        (name, 0.1, 2) for name in (experiment.FEDAVG, experiment.FEDPROX, experiment.LG)
    ]
    for old, new in seen[:2]:
        assert old == [new]
    old, new = seen[2]
    assert len(old) == 6
    assert all(same(each[3:], new[3:]) for each in old)
    still = sum(same(each[:3], this.start[:3]) for each in old)
    assert still >= 6 - 2 * 1  # one of six besides the newest, in each of two rounds
    assert not same(new[:3], this.start[:3])


def test_together_the_last_tenth_of_the_rounds_counts(
    this: experiment.Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    def marks_after(scene: experiment.Scene, run: Run, data: Data) -> dict[str, float]:
        return {"normal": 10.0 * run.rounds, "rotated": float(run.eval_every)}

    monkeypatch.setattr(experiment, "_scores_after", marks_after)
    for row in experiment.together(replace(this, options=replace(this.options, rounds=20))):
        assert (row["rounds"], row["normal"], row["rotated"]) == (
            20,
            195,
            19.5,
        )  # of rounds 19 and 20


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
    assert (row["normal"], row["normal_std"], row["normal_published_full_setting"]) == (
        61.0,
        1.0,
        96.31,
    )
    assert (row["rotated"], row["rotated_std"], row["rotated_published_full_setting"]) == (
        81.0,
        1.0,
        94.12,
    )
    assert table["normal_published_full_setting"].notna().sum() == 6
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


def test_the_setting_is_the_published_one_but_for_its_size() -> None:
    run = experiment.first(experiment.Options(), "non-iid", 2)
    assert (run.dataset, run.partition, run.peers, run.algorithm) == (
        "mnist", "shards:per_peer=2", 100, "fedavg:fraction=0.1",
    )  # fmt: skip
    assert (run.lr, run.momentum, run.batch_size, run.seed) == (0.05, 0.5, 10, 2)
    assert (run.goal or ("",))[0] == "validation_accuracy_mean"
    assert "mnist" in DATASETS
