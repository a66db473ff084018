"""The ensemble's mean output and vote agree with plain numpy."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

import dfl
from dfl.comm.mpi import World
from dfl.core.layout import Layout
from dfl.datasets import DATASETS, Data
from dfl.evaluation import metrics
from dfl.evaluation.ensembles import Ensemble, tally
from dfl.reporting import plots
from dfl.run import read_command
from dfl.simulation.measure import measure
from dfl.sweep import Cell, run_grid
from dfl.training.examples import normalize
from dfl.training.task import Task
from tests.conftest import Command
from tests.reporting.callbacks.test_terminal import shown
from tests.support.quadratic import FEW, digits, run_states

BOTH = ["accuracy_ensemble", "accuracy_vote"]
ALONE: dict[str, Any] = {
    "algorithm": "local_only", "partition": "shards:per_peer=2", "model": "mlp:hidden=8",
    "lr": 0.1, "peers": 5, "rounds": 3, "eval_every": 3, "ensemble": True,
}  # fmt: skip
SMALL: dict[str, Any] = {**FEW, "ensemble": True}


def last(**settings: Any) -> dict[str, float]:
    *_, row = dfl.simulate(dfl.Run(**{**ALONE, **settings}))
    return row


def honest_outputs(folder: Path) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the outputs (a, n, 10) of a finished run's honest peers on the test digits, and the
    labels.
    """
    run = dfl.load(folder)
    data = DATASETS["digits"](None)
    scale, shift = (
        torch.as_tensor(value, dtype=torch.float32) for value in (data.scale, data.shift)
    )
    inputs = normalize(torch.from_numpy(data.test_inputs), scale, shift)
    honest = [
        i
        for i in range(run.run.peers or 0)
        if "is_attacker" not in run.peers or not run.peers["is_attacker"][i]
    ]
    outputs = [run.model(i)(inputs).detach().double().numpy() for i in honest]
    return np.stack(outputs), data.test_labels


def by_hand(outputs: NDArray[np.float64], labels: NDArray[np.int64]) -> list[float]:
    """Return the accuracy of the mean output and of the vote, computed example by example."""
    right = np.zeros(2)
    for k, label in enumerate(labels):
        votes = Counter(int(np.argmax(one[k])) for one in outputs)
        winner = min(votes, key=lambda each: (-votes[each], each))
        right += [np.argmax(sum(one[k] for one in outputs)) == label, winner == label]
    return [float(each) for each in right / len(labels)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"engine": "loop"},
        {"init": "independent"},
        {"algorithm": "dfedavgm", "attack": "sign_flip:peers=1+3"},
    ],
    ids=["batched", "loop", "independent", "sign_flip"],
)
@pytest.mark.usefixtures("without_figures")
def test_figures_are_those_of_the_saved_models(tmp_path: Path, settings: dict[str, Any]) -> None:
    row = last(out=tmp_path / "run", **settings)
    outputs, labels = honest_outputs(tmp_path / "run")
    assert len(outputs) == (3 if "attack" in settings else 5)
    assert [row[name] for name in BOTH] == by_hand(outputs, labels)
    assert dfl.load(tmp_path / "run").rows[BOTH].iloc[-1].tolist() == [row[name] for name in BOTH]
    assert row["accuracy_mean"] != row["accuracy_ensemble"] != row["accuracy_mean_model"]


def test_an_ensemble_of_linear_models_is_their_mean_model() -> None:
    row = last(model="softmax", init="independent")
    assert row["accuracy_ensemble"] == row["accuracy_mean_model"] > row["accuracy_mean"]


def test_an_ensemble_of_equal_models_has_the_accuracy_of_one() -> None:
    first, *_ = dfl.simulate(dfl.Run(**ALONE))
    assert first["accuracy_ensemble"] == first["accuracy_vote"] == first["accuracy_mean"] > 0
    agreed = last(
        algorithm="dfedavgm", topology="complete", mixing="uniform", attack="gaussian:peers=2"
    )
    assert agreed["accuracy_vote"] == pytest.approx(agreed["accuracy_mean"], abs=0.05)


@pytest.mark.parametrize("algorithm", ["fedavg", "pooled", "fltrust:root=20"])
def test_the_ensemble_of_one_global_model_is_its_accuracy(algorithm: str) -> None:
    row = last(algorithm=algorithm)
    assert [row[name] for name in BOTH] == [row["accuracy_mean"]] * 2


def test_without_the_option_there_are_no_columns() -> None:
    expected, plain = last(), last(ensemble=False)
    assert list(expected) == [*plain, *BOTH]
    assert {**expected, "seconds": 0} == {
        **plain,
        **{name: expected[name] for name in BOTH},
        "seconds": 0,
    }


def ensemble(peers: int, attackers: tuple[int, ...] = ()) -> Ensemble:
    layout = Layout(peers, 1)
    honest = np.setdiff1d(np.arange(peers), attackers)
    return Ensemble(World(), layout, layout.group(honest, 0))


PLANTED = torch.tensor(
    [  # three peers, four examples, three labels
        [[9.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]],
        [[0, 1, 0], [0, 1, 0], [0, 1, 0], [0, 0, 1]],
        [[0, 1, 0], [5, 0, 0], [2, 0, 0], [0, 1, 0]],
    ]
)


def test_the_vote_and_the_mean_output_may_differ() -> None:
    """In examples 0 and 1 two peers outvote one with a larger output; in 2 and 3 all three vote
    for different labels, and the lowest label wins.
    """
    ballots = tally(PLANTED.double().numpy())
    assert ballots.tolist() == [[1, 2, 0], [1, 2, 0], [1, 1, 1], [1, 1, 1]]
    for labels, mean, vote in (
        ([0, 0, 0, 0], 1.0, 0.5),
        ([1, 1, 1, 1], 0.0, 0.5),
        ([0, 1, 0, 2], 0.5, 0.5),
    ):
        members = ensemble(3)
        members.add([PLANTED], torch.tensor(labels))
        assert members.figures(0.1) == {"accuracy_ensemble": mean, "accuracy_vote": vote}, labels


def test_a_peer_with_equal_outputs_votes_for_the_lowest_label() -> None:
    outputs = np.array([[[0.0, 2.0, 2.0]], [[0.0, 0.0, 0.0]], [[-1.0, -1.0, 3.0]]])
    assert tally(outputs).tolist() == [[1, 1, 1]]


def test_attackers_are_not_in_the_ensemble() -> None:
    members = ensemble(3, attackers=(0,))
    members.add([PLANTED[:2], PLANTED[2:]], torch.tensor([1, 0, 0, 1]))
    assert members.figures(0.1) == {
        "accuracy_ensemble": 1.0,
        "accuracy_vote": 1.0,
    }  # two honest peers with different votes: the lowest label wins


def test_outputs_are_returned_and_one_row_may_stand_for_all_peers() -> None:
    members = ensemble(4)
    labels = torch.tensor([0, 1, 2, 1])
    passed = members.add((part for part in [PLANTED[:1]]), labels)
    assert len(passed) == 1
    assert torch.equal(passed[0], PLANTED[:1])
    members.add([PLANTED[:1]], torch.tensor([1, 1, 1, 1]))
    assert members.figures(0.1) == {
        "accuracy_ensemble": 0.5,
        "accuracy_vote": 0.5,
    }  # 3 + 1 of 8 examples
    assert ensemble(4).figures(0.1) == {"accuracy_ensemble": 0.1, "accuracy_vote": 0.1}


def test_the_mean_is_taken_in_float64_and_in_peer_order() -> None:
    """The sum of 1e8, 1 and -1e8 is 0 in float32 and 1 in float64."""
    outputs = torch.tensor([[[1e8, 1e8]], [[0.0, 1.0]], [[-1e8, -1e8]]])
    members = ensemble(3)
    members.add([outputs], torch.tensor([1]))
    assert members.figures(0.1)["accuracy_ensemble"] == 1
    wide = np.random.default_rng(0).normal(size=(9, 700, 10))  # more than a block
    mean = ensemble(9)._mean(wide)
    assert mean is not None
    np.testing.assert_allclose(mean.reshape(700, 10), wide.mean(0), rtol=1e-12, atol=1e-15)


class Halves(World):
    """Two ranks in one program: rank 1 runs first, and `kept` holds its messages for rank 0."""

    def __init__(self, rank: int, kept: dict[str, Any]) -> None:
        super().__init__(rank=rank, size=2)
        self.kept = kept

    def minimum(self, *numbers: int) -> tuple[int, ...]:
        return (min(*numbers, -3),)  # the other rank has three labels

    def columns(self, rows: NDArray[Any], cut: list[range], counts: list[int]) -> NDArray[Any]:
        assert [len(each) for each in cut] == [0, rows.shape[1]]
        assert len(rows) == counts[self.rank]
        mine = np.concatenate([rows, self.kept.setdefault("rows", rows)])
        return mine[:, cut[self.rank].start : cut[self.rank].stop]

    def gather(self, rows: NDArray[Any]) -> NDArray[Any] | None:
        if self.rank:
            self.kept.setdefault("gathered", []).append(rows)
            return None
        return np.concatenate([rows, self.kept["gathered"].pop(0)])


def test_a_rank_without_peers_takes_part_in_collective_calls() -> None:
    """Rank 0 hosts no peers and counts; rank 1 hosts the one peer and adds up all columns."""
    layout = Layout(1, 2)
    kept: dict[str, Any] = {}
    labels = torch.tensor([0, 1, 0, 0])
    ranks = [
        Ensemble(Halves(rank, kept), layout, layout.group(np.arange(1), rank)) for rank in (0, 1)
    ]
    assert [len(each.honest.here) for each in ranks] == [0, 1]
    ranks[1].add([PLANTED[:1]], labels)
    assert ranks[0].add([], labels) == []
    assert ranks[0].figures(0.1) == {"accuracy_ensemble": 0.75, "accuracy_vote": 0.75}


def test_figures_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = last()
    monkeypatch.setattr(metrics, "CHUNK", 37)
    monkeypatch.setattr(metrics, "MODELS", 2)
    assert [last()[name] for name in BOTH] == [whole[name] for name in BOTH]


def test_models_are_evaluated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[int] = []
    outputs = Task.outputs

    def counted(self: Task, parameters: dict[str, Any], inputs: Any, each: bool = True) -> Any:
        evaluated.append(len(next(iter(parameters.values()))))
        return outputs(self, parameters, inputs, each)

    monkeypatch.setattr(Task, "outputs", counted)
    last(ensemble=False)
    without_ensemble = evaluated.copy()
    evaluated.clear()
    last()
    assert evaluated == without_ensemble


def test_examples_with_a_trigger_are_not_in_the_ensemble() -> None:
    setting = digits(attack="backdoor:peers=0", ensemble=True)
    no_attackers = np.array([], np.int64)
    together = Ensemble.of(setting.world, setting.layout, no_attackers)
    assert "backdoor_success" in (
        measure(list(run_states(setting, 1))[-1], setting, together) or {}
    )
    assert together.examples == len(setting.test_sets.labels) == 359


def test_an_ensemble_of_regression_is_refused() -> None:
    inputs = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    targets = inputs @ np.ones((3, 1), np.float32)
    data = Data(inputs, targets, inputs, targets, classes=0)
    run = dfl.Run(peers=4, model=nn.Linear(3, 1), dataset=data, loss="squared_error", ensemble=True)
    with pytest.raises(dfl.InputError, match=r"^--ensemble: labels that are no classes"):
        next(dfl.simulate(run))


def test_a_run_stops_at_the_accuracy_of_the_ensemble(dfl_run: Command) -> None:
    rows = list(dfl.simulate(dfl.Run(**{**SMALL, "rounds": 40, "eval_every": 1,
                                        "until": "accuracy_ensemble=0.5"})))  # fmt: skip
    assert rows[-1]["accuracy_ensemble"] >= 0.5 > max(row["accuracy_ensemble"] for row in rows[:-1])
    for name in BOTH:
        line = dfl_run.refused("--until", f"{name}=0.5", "--peers", "4")
        assert line.startswith(f"--until {name}=0.5 ")
        assert "--ensemble" in line
    assert dfl.Run(until="accuracy_vote=0.5", ensemble=True).goal == ("accuracy_vote", 0.5, True)


@pytest.mark.parametrize(
    ("tokens", "file", "expected"),
    [
        ([], "", False),
        (["--ensemble"], "", True),
        ([], "ensemble = true", True),
        (["--ensemble"], "lr = 0.1", True),
        (["--no-ensemble"], "ensemble = true", False),
        (["--ensemble=false"], "ensemble = true", False),
        (["--ensemble"], "ensemble = false", True),
    ],
)
def test_the_option_is_read_from_flags_and_files(
    dfl_run: Command, tokens: list[str], file: str, expected: bool
) -> None:
    (dfl_run.folder / "run.toml").write_text(file)
    run = read_command([*tokens, "--config", "run.toml", "--out", "out"], 4).run
    assert run is not None
    assert run.ensemble is expected
    (dfl_run.folder / "run.json").write_text(json.dumps({"run": run.to_dict()}))
    again = read_command(["--config", "run.json", "--out", "out"], 4).run
    assert again is not None
    assert again.ensemble is expected


def test_values_other_than_booleans_are_refused(dfl_run: Command) -> None:
    assert (
        dfl_run.refused("--ensemble=perhaps") == "--ensemble must be true or false, not 'perhaps'"
    )
    (dfl_run.folder / "run.toml").write_text('ensemble = "yes"')
    assert dfl_run.refused("--config", "run.toml").endswith(
        "--ensemble must be true or false, not 'yes'"
    )


def test_the_ensemble_is_printed_and_drawn(tmp_path: Path) -> None:
    run = dfl.Run(**{**SMALL, "out": tmp_path / "run"})
    line = next(line for line in shown(run).splitlines() if "ensemble" in line)
    rows = dfl.load(tmp_path / "run").rows
    mean, vote = rows[BOTH].iloc[-1]
    assert line.startswith(f"  ensemble {mean:.4f}")
    assert f"{vote:.4f} by vote" in line
    drawn = {str(each.get_label()): each for each in plots.accuracy_by_round(rows).axes[0].lines}
    curve = drawn["ensemble of all models, by mean output"]
    assert np.asarray(curve.get_ydata()).tolist() == rows["accuracy_ensemble"].tolist()


@pytest.mark.slow
def test_a_grid_may_set_the_option(tmp_path: Path) -> None:
    cell = Cell({"seed": 0}, dfl.Run(**SMALL))
    rows = run_grid([cell], tmp_path)
    assert dfl.load(tmp_path / cell.name).run.ensemble
    assert set(BOTH) <= set(rows)
