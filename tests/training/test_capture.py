"""Captured local steps, on a stand-in for the graphs of a GPU; `test_gpu` captures real ones."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dfl.core import profiling
from dfl.core.profiling import Profile
from dfl.simulation.engine import is_captured
from dfl.training import capture
from dfl.training import sgd as training
from dfl.training.capture import captured_tensors
from dfl.training.problem import Captures
from dfl.training.sgd import sgd, sgd_with_momentum
from dfl.training.task import Task
from tests.support.quadratic import digits

CASES: dict[str, dict[str, Any]] = {
    "equal": {},
    "unequal": {"partition": "dirichlet:alpha=0.3", "batch_size": 4, "local_epochs": 2},
    "all examples": {"partition": "dirichlet:alpha=0.3", "batch_size": 0, "local_steps": 3},
    "loop": {"engine": "loop"},
    "proximal": {"algorithm": "fedprox:mu=0.1", "weight_decay": 0.01},
    "ascent": {"algorithm": "dfedsam:rho=0.1"},
    "rates": {"lr_schedule": "step:every=1,factor=0.5"},
    "rate of 0": {"lr_schedule": lambda t, rounds: float(t > 0)},
    "statistics": {"model": "resnet20:norm=batch", "norm_stats": "share", "examples_per_peer": 3},
}


class Graph:
    """Keeps the steps that were taken while it was captured, and takes them again."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.replays = 0
        self.pool: object = None

    def replay(self) -> None:
        self.replays += 1
        for step in self.steps:
            step()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that are captured: while one is, steps are kept and not taken."""
    made: list[Graph] = []
    capturing: list[Graph] = []
    take = training._step

    def step(*given: Any, moves: bool) -> None:
        if capturing:
            capturing[0].steps.append(lambda: take(*given, moves=moves))
        else:
            take(*given, moves=moves)

    @contextmanager
    def captured(graph: Graph, pool: object) -> Iterator[None]:
        assert pool not in unfinished, "already recording"
        made.append(graph)
        graph.pool = pool
        capturing.append(graph)
        unfinished.append(pool)
        try:
            yield
        finally:
            capturing.clear()
        unfinished.remove(pool)

    unfinished: list[object] = []
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, fake in {
        "CUDAGraph": Graph, "graph": captured, "Stream": lambda: stream,
        "current_stream": lambda device=None: stream, "stream": lambda other: nullcontext(),
        "device": lambda device: nullcontext(), "graph_pool_handle": object,
        "set_stream": lambda other: None, "synchronize": lambda device: None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(training, "_step", step)
    return made


def trained(task: Task, rounds: int = 2) -> list[Tensor]:
    """Return what every form of training makes of the same models, in some rounds."""
    generator = torch.Generator().manual_seed(0)
    x, momentum = 0.1 * torch.randn(2, 6, task.parameter_layout.d, generator=generator)
    found = []
    for t in range(rounds):
        found += [sgd(x, task, t), sgd(x, task, t, momentum)]
        found += sgd_with_momentum(x, momentum, task, t)
    return found


@pytest.mark.parametrize("size", [0, 6, 8])
@pytest.mark.parametrize("name", CASES)
def test_captured_steps_train_the_same_models(name: str, size: int, graphs: list[Graph]) -> None:
    task = digits(**CASES[name]).task
    wanted = trained(task)
    solver = replace(task.solver, group_size=size if task.solver.batched else 0)
    captures = Captures()
    found = trained(replace(task, captures=captures, solver=solver))
    for own, known in zip(found, wanted, strict=True):
        assert torch.equal(own, known)
    assert all(len(graph.steps) == 1 for graph in graphs)
    assert len({id(graph.pool) for graph in graphs}) == 1
    if size:
        assert sum(graph.replays for graph in graphs) > 2 * len(graphs)


class Curved(nn.Module):
    """A model of another kind with parameters of the same shapes."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 5), nn.Linear(5, 10)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.two(self.activation(self.one(x.flatten(1))))
        return found


def test_kinds_of_the_same_shapes_have_steps_of_their_own(graphs: list[Graph]) -> None:
    kinds: Any = [Curved(nn.Tanh()), Curved(nn.Softplus())]
    task = digits(model=kinds, share="one.*", engine="batched").task
    found = trained(replace(task, captures=Captures()))
    for own, known in zip(found, trained(task), strict=True):
        assert torch.equal(own, known)
    assert len({id(graph) for graph in graphs}) == 4


@pytest.mark.parametrize(
    "change", [{"momentum": 0.5}, {"weight_decay": 0.1}, {"prox_mu": 0.5}, {"sam_rho": 0.5}]
)
def test_solvers_that_differ_have_steps_of_their_own(
    change: dict[str, Any], graphs: list[Graph]
) -> None:
    """A server and its peers may share what is captured."""
    task = digits(engine="batched").task
    # With a proximal term, there are tensors of where the round began.
    first = replace(task, solver=replace(task.solver, prox_mu=0.1), captures=Captures())
    trained(first)
    other = replace(first, solver=replace(first.solver, **change))
    for own, known in zip(trained(other), trained(replace(other, captures=None)), strict=True):
        assert torch.equal(own, known)


def test_a_profile_is_not_asked_while_a_step_is_captured(graphs: list[Graph]) -> None:
    """It would wait for the GPU."""
    waits: list[int] = []
    task = digits(engine="batched").task
    capturing = torch.cuda.graph

    @contextmanager
    def noted(graph: Any, pool: Any) -> Iterator[None]:
        with capturing(graph, pool=pool):
            before = len(waits)
            yield
            assert profiling.active() is None
            assert len(waits) == before

    with (
        pytest.MonkeyPatch.context() as patch,
        profiling.profiled(Profile(lambda: waits.append(0))),
    ):
        patch.setattr(torch.cuda, "graph", noted)
        trained(replace(task, captures=Captures()))
    assert waits


@pytest.mark.parametrize(
    ("settings", "captured"),
    [
        ({}, True),
        ({"model": "mlp:hidden=8,dropout=0.2"}, False),
        ({"auxiliary": "supervised:weight=0.5"}, False),
    ],
)
def test_steps_with_draws_of_their_own_are_not_captured(
    settings: dict[str, Any], captured: bool
) -> None:
    task = digits(**settings).task
    assert is_captured(task, [task.module]) == captured


def test_a_step_is_captured_once_for_each_shape(graphs: list[Graph]) -> None:
    """Models alone, and with a correction: two, in any number of rounds."""
    task = digits().task
    solver = replace(task.solver, group_size=6)
    trained(replace(task, captures=Captures(), solver=solver), rounds=4)
    assert len(graphs) == 2


def test_models_are_copied_to_the_tensors_of_the_first_of_their_shape() -> None:
    captures = Captures()
    first = {"a": torch.ones(2, 3), "b": torch.zeros(2)}
    models, none = captured_tensors(captures, first, {})
    assert none == {}
    assert models["a"].data_ptr() != first["a"].data_ptr()
    again, _ = captured_tensors(captures, {"a": torch.full((2, 3), 5.0), "b": torch.ones(2)}, {})
    assert again is models
    assert (models["a"] == 5).all()
    assert (models["b"] == 1).all()
    assert (first["a"] == 1).all()
    other, _ = captured_tensors(captures, {"a": torch.ones(3, 3), "b": torch.zeros(3)}, {})
    assert other is not models


@pytest.mark.parametrize("name", ["equal", "unequal", "loop"])
def test_steps_that_cannot_be_captured_are_taken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []
    monkeypatch.setattr(capture, "_capture", lambda *given, **more: tried.append(given))
    task = digits(**CASES[name]).task
    for own, wanted in zip(trained(replace(task, captures=Captures())), trained(task), strict=True):
        assert torch.equal(own, wanted)
    assert tried


@pytest.mark.parametrize("error", [RuntimeError, torch.OutOfMemoryError])
def test_a_step_that_fails_while_it_is_captured_is_none(
    error: type[Exception],
    graphs: list[Graph],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where memory is lacking, the run ends as without captures."""
    caplog.set_level("INFO", "dfl")
    known = training._step

    def fails(*given: Any, moves: bool) -> None:
        if isinstance(given[-1], Tensor):  # the rate of a captured step
            raise error("it waits\nfor the GPU")
        known(*given, moves=moves)

    monkeypatch.setattr(training, "_step", fails)
    task = digits().task
    keeping = replace(task, captures=Captures())
    if error is torch.OutOfMemoryError:
        with pytest.raises(torch.OutOfMemoryError):
            trained(keeping)
    else:
        for own, wanted in zip(trained(keeping), trained(task), strict=True):
            assert torch.equal(own, wanted)
        message = "local steps are not captured as a CUDA graph, and are slower: it waits"
        assert [record.getMessage() for record in caplog.records] == [message]


def test_a_kind_of_model_that_cannot_be_captured_is_tried_once(
    graphs: list[Graph], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It leaves the memory in which it failed, and the stream. Another kind is captured."""
    caplog.set_level("INFO", "dfl")
    kinds: Any = [Curved(nn.Tanh()), Curved(nn.Softplus())]
    task = digits(model=kinds, share="one.*", engine="batched").task
    known = training._step
    failed: list[object] = []
    streams: list[object] = []

    def fails(models: Any, step: Any, rate: Any, *, moves: bool) -> None:
        waits = step.problem.module is task.kinds[0][0] and isinstance(rate, Tensor)
        if waits and graphs and not graphs[-1].steps:  # not in the step before the capture
            failed.append(graphs[-1].pool)
            raise RuntimeError("it waits for the GPU")
        known(models, step, rate, moves=moves)

    monkeypatch.setattr(training, "_step", fails)
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    for own, wanted in zip(trained(replace(task, captures=Captures())), trained(task), strict=True):
        assert torch.equal(own, wanted)
    assert len(failed) == len(streams) == len(caplog.records) == 1
    assert streams == [torch.cuda.current_stream()]
    others = [graph for graph in graphs if graph.replays]
    assert len(others) == 2
    assert failed[0] not in [graph.pool for graph in others]


def test_the_reason_for_a_failed_capture_is_its_first_error(
    graphs: list[Graph], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The end of `torch.cuda.graph` raises an error of its own after one of the steps."""
    caplog.set_level("INFO", "dfl")
    known, capturing = training._step, []

    @contextmanager
    def captured(graph: Graph, pool: object) -> Iterator[None]:
        capturing.append(graph)
        try:
            yield
        finally:
            capturing.clear()
            raise RuntimeError("operation failed due to a previous error during capture")

    def fails(*given: Any, moves: bool) -> None:
        if capturing:
            raise RuntimeError("it waits for the GPU")
        known(*given, moves=moves)

    monkeypatch.setattr(torch.cuda, "graph", captured)
    monkeypatch.setattr(training, "_step", fails)
    task = digits().task
    for own, wanted in zip(trained(replace(task, captures=Captures())), trained(task), strict=True):
        assert torch.equal(own, wanted)
    assert {record.getMessage().rpartition(": ")[2] for record in caplog.records} == {
        "it waits for the GPU"
    }
