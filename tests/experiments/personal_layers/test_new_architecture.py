"""The experiment on a device with another architecture: models, data, training, table, figure."""

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import dfl
from experiments import common
from experiments.personal_layers import new_architecture as experiment

pytestmark = pytest.mark.slow

SMALL: dict[str, Any] = {"dataset": "digits", "devices": 6, "each": 30, "rounds": 4, "seeds": 2}
CASES = ((20, 3), (60, 2))


@pytest.fixture(scope="module", autouse=True)
def few_epochs() -> Any:
    """Let new devices have few examples and epochs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(experiment, "CASES", CASES)
        patch.setattr(experiment, "MOST", 60)
        yield


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the experiment, run on digits."""
    out = tmp_path_factory.mktemp("experiment")
    experiment.experiment(experiment.Options(**SMALL, out=out))
    return out


def options() -> experiment.Options:
    return experiment.Options(**SMALL)


def test_the_experiment_ends_in_a_table_a_figure_and_a_finding(published: Path) -> None:
    table = pd.read_csv(published / "table.csv")
    assert len(table) == 2 * 2 * (1 + 2 * 2)
    assert table["accuracy"].between(0, 100).all()
    assert (published / "figure.png").read_bytes().startswith(b"\x89PNG")
    text = (published / "table.md").read_text()
    assert "\n\nFinding: points ahead of training alone" in text


def test_one_cell_alone_has_its_rows(
    published: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    experiment.experiment(experiment.Options(**SMALL, out=tmp_path, only="others=MLPs+CNNs,seed=1"))
    rows = pd.read_csv(StringIO(capsys.readouterr().out))
    seeds = pd.read_csv(published / "seeds.csv")
    own = seeds[(seeds["others"] == "MLPs+CNNs") & (seeds["seed"] == 1)].reset_index(drop=True)
    assert len(rows) == 2 * 2 * 2
    pd.testing.assert_frame_equal(rows, own[list(rows)])


def test_models_of_both_kinds_agree_in_the_head() -> None:
    data, _ = experiment.halves(options(), 0)
    mlp, cnn = (experiment.model(kind, data, 0, 0).state_dict() for kind in experiment.KINDS)
    heads = [{name for name in each if name.startswith("head.")} for each in (mlp, cnn)]
    assert heads[0] == heads[1]
    assert all(torch.equal(mlp[name], cnn[name]) for name in heads[0])
    assert "encoder.2.weight" in cnn
    assert "encoder.2.weight" not in mlp
    other = experiment.model("MLP", data, 0, 6).state_dict()
    assert not any(torch.equal(mlp[name], other[name]) for name in mlp)


def test_encoders_fit_digits_and_mnist() -> None:
    for side in (8, 28):
        for kind in experiment.KINDS:
            made = experiment.encoder(kind, (1, side, side))
            assert made(torch.zeros(2, 1, side, side)).shape == (2, experiment.WIDTH)


def test_the_new_device_has_examples_that_no_other_has() -> None:
    own, rest = experiment.halves(options(), 0)
    assert len(own.train_labels) == 60
    data = dfl.datasets.DATASETS["digits"](None)
    known = [
        image.tobytes() + bytes([label])
        for half in (own, rest)
        for image, label in zip(half.train_inputs, half.train_labels, strict=True)
    ]
    whole = [
        image.tobytes() + bytes([label])
        for image, label in zip(data.train_inputs, data.train_labels, strict=True)
    ]
    assert sorted(known) == sorted(whole)
    again, _ = experiment.halves(options(), 1)
    assert not np.array_equal(own.train_labels, again.train_labels)


@pytest.mark.parametrize("others", experiment.OTHERS)
def test_the_head_is_the_one_that_all_first_devices_share(others: str) -> None:
    own, rest = experiment.halves(options(), 0)
    run = experiment.first(options(), others, 0, rest)
    ended = experiment.Ended()
    rows = list(dfl.simulate(run, callbacks=[ended]))
    head = experiment.head_of(ended.state)
    start = experiment.model("CNN", own, 0, 0).state_dict()
    assert set(head) == {name for name in start if name.startswith("head.")}
    for name, value in head.items():
        assert value.shape == start[name].shape
        assert not torch.equal(value, start[name])
        assert np.all(ended.state[name] == ended.state[name][0])
    numbers = sum(value.numel() for value in head.values())
    assert rows[-1].payload_bytes == 4 * 3 * 2 * 4 * numbers  # 3 of 6 devices in 4 rounds


@pytest.mark.parametrize(("others", "heads"), [("alone", 1), ("MLPs", 2)])
def test_what_a_new_device_trains(others: str, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its encoder is the same with every head, and a fixed head has no parameter to train."""
    seen: list[tuple[dict[str, torch.Tensor], bool, tuple[int, int]]] = []

    def learned(seed: int, start: torch.nn.Module, data: dfl.Data, epochs: int) -> float:
        learns = all(value.requires_grad for value in start.parameters())
        seen.append((start.state_dict(), learns, (len(data.train_labels), epochs)))
        return 0.5

    monkeypatch.setattr(experiment, "learned", learned)
    rows = experiment.measured(options(), others, 0)
    assert rows["accuracy"].eq(50).all()
    assert rows["others_test"].isna().all() == (others == "alone")
    cases = list(rows[["examples", "epochs"]].itertuples(index=False, name=None))
    assert [case for *_, case in seen] == cases
    assert set(cases) == set(CASES)
    assert [learns for _, learns, _ in seen] == rows["head"].ne(experiment.FIXED).tolist()
    own, _ = experiment.halves(options(), 0)
    for (state, *_), kind in zip(seen, rows["new"], strict=True):
        drawn = experiment.model(kind, own, 0, 6).state_dict()
        equal = {name: torch.equal(value, drawn[name]) for name, value in state.items()}
        assert all(same for name, same in equal.items() if name.startswith("encoder."))
        assert any(same for name, same in equal.items() if name.startswith("head.")) == (
            others == "alone"
        )
    assert len(seen) == 2 * 2 * heads


def test_a_fixed_head_stays_as_it_is_and_the_encoder_learns() -> None:
    own, _ = experiment.halves(options(), 0)
    start = experiment.model("MLP", own, 0, 6)
    before = {name: value.clone() for name, value in start.state_dict().items()}
    free = experiment.learned(0, start, own, 2)
    start.get_submodule("head").requires_grad_(False)
    held = experiment.learned(0, start, own, 2)
    start.get_submodule("encoder").requires_grad_(False)
    with pytest.raises(dfl.InputError, match="no parameters to train"):
        experiment.learned(0, start, own, 2)
    assert all(torch.equal(before[name], value) for name, value in start.state_dict().items())
    assert free != held


def test_the_figure_of_a_device_is_the_mean_over_its_last_tenth() -> None:
    own, _ = experiment.halves(options(), 0)
    run = experiment.run_of(40, 3)
    assert (run.rounds, run.eval_every, run.eval_last, run.seed) == (40, 40, 4, 3)
    expected = list(
        dfl.simulate(
            dfl.Run(
                dataset=own, peers=1, model=experiment.model("MLP", own, 0, 6), rounds=2,
                algorithm="local_only", batch_size=10, lr=0.05, momentum=0.5, seed=5,
            )
        )
    )[-1].accuracy_mean  # fmt: skip
    assert experiment.learned(5, experiment.model("MLP", own, 0, 6), own, 2) == expected


def test_the_setting() -> None:
    _, rest = experiment.halves(options(), 0)
    run = experiment.first(options(), "MLPs+CNNs", 1, rest)
    assert (run.peers, run.partition, run.share, run.algorithm, run.seed) == (
        6, "shards:per_peer=2", "head.*", "fedavg:fraction=0.5", 1,
    )  # fmt: skip
    assert isinstance(run.model, list)
    assert len(run.model) == 2


def rows() -> pd.DataFrame:
    """Three seeds, between which all figures differ; a CNN gains 1, 2 and 3 points by the head
    of MLPs, an MLP 1.
    """
    found = []
    for seed in range(3):
        for others, head in (("alone", "own"), ("MLPs", "given, fixed")):
            for new in experiment.KINDS:
                gain = (1 + seed if new == "CNN" else 1) * (others != "alone")
                labels = dict(
                    zip(experiment.LABELS, (others, head, new, 50, 9), strict=True), seed=seed
                )
                found.append(labels | {"accuracy": 60.0 + 10 * seed + gain, "others_test": 97.0})
    return pd.DataFrame(found)


def table() -> pd.DataFrame:
    made = experiment.tabulate(experiment.with_differences(rows()))
    return common.with_intervals(made, 3)


def test_differences_are_paired_by_seed() -> None:
    by = common.by_label(table(), ["others", "new"])
    row = by["MLPs", "CNN"]
    assert (row["accuracy"], row["minus_alone"], row["minus_alone_std"]) == (72, 2, 1)
    assert (row["minus_mlp"], row["minus_mlp_std"]) == (1, 1)
    assert row["minus_alone_ci95"] == pytest.approx(4.302653 / np.sqrt(3), rel=1e-6)
    assert (by["MLPs", "MLP"]["minus_alone"], by["MLPs", "MLP"]["minus_mlp"]) == (1, 0)
    assert by["alone", "CNN"]["minus_alone"] == 0


def test_the_finding_and_the_figure_show_the_gains() -> None:
    assert experiment.finding(table()) == (
        "points ahead of training alone: "
        "MLP, head of MLPs given, fixed: +1.0 ± 0.0 with 50 in 9 epochs; "
        "CNN, head of MLPs given, fixed: +2.0 ± 2.5 with 50 in 9 epochs."
    )
    left, right = experiment.draw_gains(table(), experiment.Options()).axes
    assert [left.get_title(), right.get_title()] == ["new device with MLP", "new device with CNN"]
    assert [text.get_text() for text in right.get_xticklabels()] == ["50, 9\n(alone 70.0 %)"]
    points = [np.asarray(axes.lines[0].get_ydata(), float).tolist() for axes in (left, right)]
    assert points == [[1], [2]]
