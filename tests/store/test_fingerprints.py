"""A run is resumed only with the model, the loss and the files that it began with."""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dfl
from dfl.datasets.data import Data
from dfl.store import fingerprints
from tests.support.growth import growth
from tests.support.stopping import crash, same
from topologies.sequences import EveryRound

pytestmark = pytest.mark.usefixtures("no_figures")


class Net(nn.Module):
    """Two layers, some of which may be without bias, and a number in between."""

    def __init__(
        self, hidden: int = 5, scale: float = 1.0, bias: bool = True, seed: int = 0
    ) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two = nn.Linear(4, hidden, bias=bias), nn.Linear(hidden, 3)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.two(torch.relu(self.one(x)) * self.scale)
        return hidden


class Other(Net):
    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.two(torch.tanh(self.one(x)) * self.scale)
        return hidden


def checksum(value: Any) -> str:
    return fingerprints.of_object("--loss", value)["object of --loss"]


def loss_of(scale: float) -> Any:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return scale * nn.functional.cross_entropy(outputs, labels, reduction="none")

    return loss


def squares(outputs: Tensor, labels: Tensor, power: int = 2) -> Tensor:
    """A loss."""
    return (outputs - nn.functional.one_hot(labels, 3)).abs().pow(power).mean(1)


RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(60, 4)).astype(np.float32), np.arange(60) % 3
GIVEN: dict[str, Any] = {
    "dataset": Data(X, Y, X[:9], Y[:9], 3),
    "model": Net(),
    "loss": loss_of(2.0),
}


def small(**settings: Any) -> dfl.Run:
    few = {"peers": 4, "rounds": 4, "eval_every": 2, "checkpoint_every": 1}
    return dfl.Run(**{**few, **settings})


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"model": Net(hidden=6)}, "the model is not"),
    ({"model": Net(bias=False)}, "the model is not"),
    ({"model": Net(scale=2.0)}, "the model is not"),
    ({"model": Other()}, "has --model own:Net, not own:Other"),
    ({"model": [Net()]}, ""),
    ({"loss": loss_of(3.0)}, "--loss is not"),
    ({"loss": squares}, "has --loss own:loss, not own:squares"),
    ({"loss": torch.nn.functional.l1_loss}, "has --loss own:loss, not own:l1_loss"),
    ({"loss": loss_of(2.0)}, ""),
    ({"model": Net(seed=1)}, ""),
]


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cut") / "run"
    crash(small(out=folder, **GIVEN), 2)
    return folder


@pytest.mark.parametrize(("other", "message"), [case for case in CHANGES if case[1]])
def test_another_model_or_loss_is_refused(cut: Path, other: dict[str, Any], message: str) -> None:
    before = {file: file.read_bytes() for file in cut.rglob("*") if file.is_file()}
    with pytest.raises(dfl.InputError, match=message) as refused:
        list(dfl.simulate(dfl.resumed(cut, **{**GIVEN, **other})))
    assert f"--resume {cut}" in str(refused.value)
    assert "\n" not in str(refused.value)
    after = {
        file: file.read_bytes()
        for file in cut.rglob("*")
        if file.is_file() and "heartbeats" not in file.parts
    }
    assert {file: before[file] for file in after} == after


@pytest.mark.parametrize("other", [case[0] for case in CHANGES if not case[1]])
def test_the_same_model_and_loss_are_accepted(tmp_path: Path, other: dict[str, Any]) -> None:
    list(dfl.simulate(small(out=tmp_path / "whole", **GIVEN)))
    crash(small(out=tmp_path / "cut", **GIVEN), 2)
    list(dfl.simulate(dfl.resumed(tmp_path / "cut", **{**GIVEN, **other})))
    same(tmp_path / "whole", tmp_path / "cut")


def test_initial_values_have_a_fingerprint_of_their_own_unless_frozen() -> None:
    one, other = (fingerprints.of_models([Net(seed=seed)]) for seed in (0, 1))
    assert {name for name in one if one[name] != other[name]} == {fingerprints.VALUES}
    frozen = [Net(seed=seed).requires_grad_(False) for seed in (0, 1)]
    first, second = (fingerprints.of_models([module]) for module in frozen)
    assert first[fingerprints.MODEL] != second[fingerprints.MODEL]


def test_losses_that_compute_differently_differ() -> None:
    losses = [
        squares,
        loss_of(2.0),
        loss_of(3.0),
        partial(squares, power=3),
        partial(squares, power=4),
        nn.MSELoss(),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        nn.CrossEntropyLoss(),
        nn.functional.cross_entropy,
        lambda o, y: o[:, 0],
        lambda o, y: o[:, 1],
        Net().forward,
        Net(scale=3).forward,
    ]
    found = [checksum(loss) for loss in losses]
    assert len(set(found)) == len(losses)
    assert found == [checksum(loss) for loss in losses]


SCALE, WEIGHTS = 2.0, [1.0, 2.0, 5.0]
TABLE = torch.ones(3)
LAYER = nn.Linear(3, 3)


def helper(outputs: Tensor) -> Tensor:
    return outputs.abs() * SCALE


def by_names(outputs: Tensor, labels: Tensor) -> Tensor:
    def inner() -> Tensor:
        made: Tensor = helper(outputs) * TABLE * torch.tensor(WEIGHTS) + LAYER(outputs)
        return made

    mean: Tensor = inner().mean(1)
    return mean


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SCALE", 3.0),
        ("WEIGHTS", [1.0, 2.0, 6.0]),
        ("TABLE", torch.zeros(3)),
        ("LAYER", nn.Linear(3, 3)),
        ("helper", torch.abs),
        ("helper", lambda outputs: outputs.abs()),
    ],
)
def test_a_changed_global_changes_the_fingerprint(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    before = checksum(by_names)
    assert checksum(by_names) == before
    monkeypatch.setitem(globals(), name, value)
    assert checksum(by_names) != before


def closing_over(*values: Any) -> Any:
    return lambda outputs, labels: (outputs * len(values)).mean(1)


def test_modules_and_shared_or_deep_objects_take_little_time() -> None:
    shared: list[Any] = []
    for _ in range(100):
        shared = [shared, shared]
    chain: list[Any] = []
    for _ in range(100_000):
        chain = [chain]
    ring: list[Any] = []
    ring.append(ring)
    loops = [dfl.simulate, Net, pytest, torch.nn.functional.cross_entropy, np.random.default_rng(0)]
    given = [(torch, np, nn, nn.functional), (torch, np), (shared,), (chain,), (ring,), loops]
    flat = [[each] for each in range(100_000)]
    ratio = growth(
        lambda: [checksum(closing_over(*values)) for values in given],
        lambda: checksum(closing_over(flat)),
    )
    assert ratio < 10
    made = [checksum(closing_over(*values)) for values in given]
    assert len(set(made)) == len(made)


class Noted(Net):
    """A model with other things than tensors in its state, whose repr fails."""

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        """Nothing to set."""

    def extra_repr(self) -> str:
        raise RuntimeError("not now")


def test_a_model_with_extra_state_is_resumed(tmp_path: Path) -> None:
    given = {**GIVEN, "model": Noted()}
    crash(small(out=tmp_path / "run", **given), 2)
    assert [row["round"] for row in dfl.simulate(dfl.resumed(tmp_path / "run", **given))] == [2, 4]


def test_functions_that_are_attributes_of_a_model_count_as_code() -> None:
    def of(function: Any) -> dict[str, str]:
        net: Any = Net()
        net.act, net.own, net.loop = function, lambda x: net(x), net.forward
        return fingerprints.of_models([net])

    one, other = of(lambda x: x), of(lambda x: x + 1)
    assert {name for name in one if one[name] != other[name]} == {fingerprints.CODE}


def test_tied_weights_count_as_initial_values() -> None:
    def tied(seed: int) -> dict[str, str]:
        net = Net(seed=seed)
        net.three = nn.Linear(4, 5)
        net.three.weight = net.one.weight
        net.three.bias.requires_grad_(False).zero_()
        return fingerprints.of_models([net])

    one, other = tied(0), tied(1)
    assert {name for name in one if one[name] != other[name]} == {fingerprints.VALUES}


def test_a_class_of_the_same_name_with_other_code_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprints.of_models([Net()])
    monkeypatch.setattr(Net, "forward", Other.forward)
    after = fingerprints.of_models([Net()])
    assert {name for name in before if before[name] != after[name]} == {fingerprints.CODE}


def test_the_file_of_links_is_compared(tmp_path: Path) -> None:
    lines = [f"{i},{(i + hop) % 4},8,1" for i in range(4) for hop in (1, 3)]
    (path := tmp_path / "links.csv").write_text("\n".join(lines))
    run = small(links=f"links:path={path}", model="softmax", examples_per_peer=10)
    crash(replace(run, out=tmp_path / "run"), 2)
    path.write_text("\n".join(lines).replace(",8,", ",9,"))
    with pytest.raises(dfl.InputError, match=f"--links links:path={path} is not the one"):
        list(dfl.simulate(dfl.resumed(tmp_path / "run")))
    path.write_text("\n".join(lines))
    list(dfl.simulate(dfl.resumed(tmp_path / "run")))


@pytest.mark.parametrize("suffix", ["txt", "csv"])
def test_the_file_of_the_graph_is_compared(tmp_path: Path, suffix: str) -> None:
    texts = {
        "txt": ("0 1\n1 2\n2 3\n3 0\n", "0 1\n1 2\n2 3\n3 1\n"),
        "csv": (".5,.5\n.5,.5", ".6,.4\n.4,.6"),
    }
    (path := tmp_path / f"graph.{suffix}").write_text(texts[suffix][0])
    peers = 4 if suffix == "txt" else 2
    run = small(topology=f"edges:path={path}", model="softmax", examples_per_peer=10, peers=peers)
    crash(replace(run, out=tmp_path / "run"), 2)
    path.write_text(texts[suffix][1])
    with pytest.raises(dfl.InputError, match="the data set or the graph is not the one"):
        list(dfl.simulate(dfl.resumed(tmp_path / "run")))


def test_the_run_of_init_from_is_compared(tmp_path: Path) -> None:
    first = small(model="softmax", examples_per_peer=10, out=tmp_path / "first")
    list(dfl.simulate(first))
    run = small(init_from=tmp_path / "first", model="softmax", examples_per_peer=10)
    crash(replace(run, out=tmp_path / "run"), 2)
    list(dfl.simulate(replace(first, seed=1, out=tmp_path / "second")))
    shutil.rmtree(tmp_path / "first")
    with pytest.raises(dfl.InputError, match=f"--init-from {tmp_path / 'first'} is missing$"):
        list(dfl.simulate(dfl.resumed(tmp_path / "run")))
    (tmp_path / "second").rename(tmp_path / "first")
    with pytest.raises(dfl.InputError, match=f"--init-from {tmp_path / 'first'} is not the one"):
        list(dfl.simulate(dfl.resumed(tmp_path / "run")))


def test_a_subset_of_other_examples_differs() -> None:
    def subset(value: float) -> torch.utils.data.Dataset[Any]:
        whole = torch.utils.data.TensorDataset(torch.full((4, 2), value), torch.arange(4))
        return torch.utils.data.Subset(whole, [0, 2])

    one, same_again, other = (
        fingerprints.of_object("--dataset", subset(v)) for v in (1.0, 1.0, 2.0)
    )
    assert one == same_again != other


def test_graphs_of_every_round_differ_where_their_function_does() -> None:
    one, alike, other = (EveryRound(closing_over(*values)) for values in ((1,), (1,), (1, 2)))
    assert checksum(one) == checksum(alike) != checksum(other)
