"""Misuses of the Python interface: each runs correctly, diverges, or is refused in one line.

`python -m tests.campaigns.misuse` runs and prints all cases. A case has a name, a function that is
called with an empty folder, and what is expected of it: RUNS, DIVERGES, or a part of the refusal.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import rich.style  # noqa: F401  its first import draws from the generator of `random`
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import dfl
from dfl.comm.mpi import connect
from dfl.store import manifest
from dfl.store.logs import LOG

SECONDS = 60
"""The longest time of a case."""
LONGEST = 1000
"""A refusal has fewer characters than this."""
RUNS, DIVERGES = "(runs)", "(diverges)"

Try = Callable[[Path], Any]


@dataclass(frozen=True)
class Case:
    """One misuse.

    Attributes:
        name: what is wrong.
        call: runs the case in an empty folder.
        expected: RUNS, DIVERGES, or a part of the refusal.
    """

    name: str
    call: Try
    expected: str


CASES: list[Case] = []


def case(name: str, expected: str) -> Callable[[Try], Try]:
    def enter(call: Try) -> Try:
        CASES.append(Case(name, call, expected))
        return call

    return enter


def calling(call: Callable[..., Any], *given: Any, **more: Any) -> Try:
    """Return a call for a case that needs no folder."""
    return lambda folder: call(*given, **more)


X = np.random.default_rng(0).normal(size=(40, 4)).astype(np.float32)
Y = np.arange(40) % 3
GOOD = dfl.Data(X, Y, X[:12], Y[:12], 3)
FEW: dict[str, Any] = {"peers": 4, "rounds": 2, "eval_every": 1, "lr": 0.05, "model": "softmax"}


def run(
    model: Any = None, data: Any = GOOD, loss: Any = None, callbacks: Any = (), **settings: Any
) -> Any:
    """Run to the end, check that the rows are sound, and return them."""
    given = {"model": model, "dataset": data, "loss": loss}
    settings |= {name: value for name, value in given.items() if value is not None}
    rows = list(dfl.simulate(dfl.Run(**{**FEW, **settings}), callbacks=callbacks))
    sound(rows)
    return rows


def sound(rows: list[dfl.Row]) -> None:
    assert [row["round"] for row in rows] == [0, 1, 2]
    assert all(np.isfinite([row["train_loss"], row["consensus_distance"]]).all() for row in rows)


def with_data(**change: Any) -> Any:
    return run(data=replace(GOOD, **change))


def layer() -> nn.Linear:
    return nn.Linear(4, 3)


class Of(nn.Module):
    """A layer whose output goes through a function."""

    def __init__(self, then: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.then = layer(), then

    def forward(self, x: Tensor) -> Any:
        return self.then(self.layer(x))


def cross(outputs: Tensor, labels: Tensor, **more: Any) -> Tensor:
    return nn.functional.cross_entropy(outputs, labels, **more)


# Fields of Run.
FIELDS: list[tuple[str, Any]] = [
    ("peers", "16"),
    ("peers", 4.0),
    ("peers", True),
    ("peers", 10**5000),
    ("peers", -1),
    ("peers", X),
    ("rounds", None),
    ("lr", "0.1"),
    ("lr", float("nan")),
    ("lr", 10**400),
    ("lr", 1j),
    ("bits", 4.0),
    ("bits", "8"),
    ("seed", -1),
    ("seed", torch.tensor(3)),
    ("momentum", 1),
    ("validation", [0.1]),
    ("topology", 3),
    ("topology", ["ring"]),
    ("topology", "no such"),
    ("model", nn.Linear),
    ("model", "mlp\nhidden"),
    ("init", np.array(["common", "independent"])),
    ("engine", None),
    ("out", 3),
    ("out", b"folder"),
    ("init_from", ""),
    ("share", ""),
    ("share", None),
    ("timeout", "long"),
    ("ensemble", 1),
    ("partition", "x" * 5000),
    ("topology", "\ud800"),
    ("until", 0.9),
    ("compressor", "quantize:bits=99"),
]


def simulated(given: Any) -> list[dfl.Row]:
    return list(dfl.simulate(given))


def name_of(value: Any) -> str:
    return f"{value!r:.20}" if not isinstance(value, int) or value < 10**20 else "10**5000"


def with_field(field: str, value: Any) -> None:
    list(dfl.simulate(dfl.Run(**{**FEW, field: value}, dataset=GOOD)))


CASES += [
    Case(f"Run({f}={name_of(value)})", calling(with_field, f, value), f"--{f.replace('_', '-')}")
    for f, value in FIELDS
]
CASES.append(Case("Run(dataset=Data)", calling(lambda: run(data=None, dataset=GOOD)), RUNS))
CASES += [
    Case("a dict in place of a Run", lambda _: simulated({"rounds": 3}), "dfl.Run"),
    Case("None in place of a Run", lambda _: simulated(None), "dfl.Run"),
    Case(
        "numpy numbers",
        lambda _: run(peers=np.int64(4), lr=np.float32(0.05), ensemble=np.bool_(True)),
        RUNS,
    ),
    Case("topology=None", lambda _: run(topology=None, bits=None), RUNS),
    Case("a folder as text", lambda folder: run(out=str(folder / "run")), RUNS),
]

# Data.
NAN, INF = X.copy(), X.copy()
NAN[3, 1], INF[39, 0] = np.nan, np.inf
MASKED = np.ma.masked_array(X, mask=X > 2)
UNEVEN: Any = [[1.0, 2.0], [3.0]]
CASES += [
    Case(f"data: {name}", calling(with_data, **change), expected)
    for name, change, expected in (
        (
            "lists",
            {"train_inputs": X.tolist(), "train_labels": Y.tolist(), "test_labels": (0, 1, 2) * 4},
            RUNS,
        ),
        (
            "torch tensors",
            {"train_inputs": torch.from_numpy(X), "train_labels": torch.from_numpy(Y)},
            RUNS,
        ),
        ("tensors with gradients", {"train_inputs": torch.from_numpy(X).requires_grad_()}, RUNS),
        ("a bfloat16 tensor", {"train_inputs": torch.from_numpy(X).bfloat16()}, RUNS),
        ("a sparse tensor", {"train_inputs": torch.from_numpy(X).to_sparse()}, "train_inputs"),
        ("a meta tensor", {"train_inputs": torch.from_numpy(X).to("meta")}, "train_inputs"),
        ("float64 inputs", {"train_inputs": X.astype(float)}, RUNS),
        (
            "float16 inputs",
            {"train_inputs": X.astype(np.float16), "test_inputs": X[:12].astype(np.float16)},
            RUNS,
        ),
        ("long doubles", {"train_inputs": X.astype(np.longdouble)}, "train_inputs"),
        (
            "big-endian inputs",
            {"train_inputs": X.astype(">f4"), "train_labels": Y.astype(">i2")},
            RUNS,
        ),
        ("backward inputs", {"train_inputs": X[::-1], "test_inputs": X[:12][:, ::-1]}, RUNS),
        ("read-only inputs", {"train_inputs": np.broadcast_to(X[0], X.shape)}, RUNS),
        ("int32 labels", {"train_labels": Y.astype(np.int32)}, RUNS),
        ("uint16 labels", {"train_labels": Y.astype(np.uint16)}, RUNS),
        (
            "uint64 labels beyond int64",
            {"train_labels": Y.astype(np.uint64) + np.uint64(2**63)},
            "train_labels",
        ),
        ("float labels", {"train_labels": torch.from_numpy(Y).float()}, "train_labels"),
        ("a column of labels", {"train_labels": torch.from_numpy(Y)[:, None]}, "train_labels"),
        ("one-hot labels", {"test_labels": np.eye(3)[Y[:12]]}, "test_labels"),
        ("negative labels", {"train_labels": Y - 1}, "train_labels"),
        ("labels that are too large", {"test_labels": Y[:12] + 1}, "test_labels"),
        ("text as labels", {"train_labels": np.array(["a", "b"] * 20)}, "train_labels"),
        ("None as labels", {"train_labels": None}, "train_labels"),
        ("huge numbers", {"train_inputs": [[10**30] * 4] * 40}, "train_inputs"),
        ("object arrays", {"train_inputs": X.astype(object)}, "train_inputs"),
        ("complex inputs", {"train_inputs": X.astype(np.complex64)}, "train_inputs"),
        ("dates", {"train_inputs": np.zeros((40, 4), "M8[D]")}, "train_inputs"),
        ("rows of unequal length", {"train_inputs": UNEVEN}, "train_inputs"),
        ("a dict", {"train_inputs": {"x": 1}}, "train_inputs"),
        ("a generator", {"train_inputs": (row for row in X)}, "train_inputs"),
        ("one number", {"train_inputs": 3.0}, "train_inputs"),
        ("masked values", {"train_inputs": MASKED}, "train_inputs"),
        ("NaN in training inputs", {"train_inputs": NAN}, "train_inputs"),
        ("infinity in training inputs", {"train_inputs": INF}, "train_inputs"),
        ("NaN in test inputs", {"test_inputs": NAN[:12]}, "test_inputs"),
        ("floats beyond float32", {"train_inputs": X.astype(float) * 1e300}, DIVERGES),
        ("test inputs of another shape", {"test_inputs": X[:12, :3]}, "test_inputs"),
        (
            "test inputs of another kind",
            {"test_inputs": np.zeros((12, 4), np.uint8)},
            "test_inputs",
        ),
        (
            "examples without numbers",
            {"train_inputs": X[:, :0], "test_inputs": X[:12, :0]},
            "train_inputs",
        ),
        ("no examples", {"train_inputs": X[:0], "train_labels": Y[:0]}, "0 train"),
        ("no test examples", {"test_inputs": X[:0], "test_labels": Y[:0]}, "0 test"),
        ("fewer labels than inputs", {"train_labels": Y[:39]}, "39 labels"),
        (
            "examples that are numbers",
            {"train_inputs": X[:, 0], "test_inputs": X[:12, 0]},
            "--model",
        ),
        ("classes as text", {"classes": "3"}, "classes"),
        ("negative classes", {"classes": -3}, "classes"),
        ("very many classes", {"classes": 10**12}, "classes"),
        ("classes=0 and a built-in model", {"classes": 0}, "classes=0"),
        ("a scale of NaN", {"scale": float("nan")}, "scale"),
        ("a scale that does not fit", {"scale": np.ones(3)}, "scale"),
        ("a shift of text", {"shift": "a"}, "shift"),
        ("groups of floats", {"train_groups": X[:, 0]}, "train_groups"),
        ("protected attributes of no half", {"protected": ("a",)}, "train_protected"),
        (
            "protected attributes of one half",
            {"protected": ("a",), "train_protected": np.eye(1)},
            "_protected",
        ),
    )
]
CASES += [
    Case("three arrays in place of Data", lambda _: run(data=(X, Y, Y)), "dfl.Data"),
    Case("the class Data", lambda _: run(data=dfl.Data), "dfl.Data"),
    Case("more peers than examples", lambda _: run(peers=41), "--peers"),
]

# Models.
MODELS: list[tuple[str, Callable[[], Any], str]] = [
    ("text", lambda: "no such", "--model"),
    ("a class", lambda: nn.Linear, "torch.nn.Module"),
    ("a function", lambda: lambda x: x, "torch.nn.Module"),
    ("a state", lambda: layer().state_dict(), "--model"),
    ("an empty list", lambda: [], "--model"),
    ("a list with something else", lambda: [layer(), 3], "torch.nn.Module"),
    ("a ModuleList", lambda: nn.ModuleList([layer()]), "ModuleList"),
    ("a lazy layer", lambda: nn.LazyLinear(3), "lazy"),
    ("a meta layer", lambda: nn.Linear(4, 3, device="meta"), "meta"),
    ("no parameters", lambda: nn.Flatten(), "no parameters"),
    ("all frozen", lambda: layer().requires_grad_(False), "frozen"),
    ("bfloat16", lambda: layer().bfloat16(), "bfloat16"),
    ("float16", lambda: layer().half(), "float16"),
    ("float64", lambda: layer().double(), RUNS),
    ("two dtypes", lambda: nn.Sequential(layer(), nn.Linear(3, 3).double()), "float64"),
    ("BatchNorm", lambda: nn.Sequential(nn.BatchNorm1d(4), layer()), "BatchNorm"),
    ("Dropout", lambda: nn.Sequential(nn.Dropout(), layer()), "Dropout"),
    ("dropout by function", lambda: Of(nn.functional.dropout), "generator"),
    ("too few outputs", lambda: nn.Linear(4, 2), "(2, 3)"),
    ("more outputs than labels", lambda: nn.Linear(4, 5), RUNS),
    ("other inputs", lambda: nn.Linear(5, 3), "shape (2, 4)"),
    ("labels as outputs", lambda: Of(lambda x: x.argmax(1)), "returns (2,)"),
    ("outputs without a gradient", lambda: Of(lambda x: x.detach()), "do not depend"),
    ("a pair of outputs", lambda: Of(lambda x: (x, x)), "Of"),
    ("None as outputs", lambda: Of(lambda x: None), "Of"),
    ("an output for the whole batch", lambda: Of(lambda x: x.mean(0)), "Of"),
    ("outputs of another shape", lambda: Of(lambda x: x[:, :, None]), "(2, 3, 1)"),
    ("a forward that raises", lambda: Of(lambda x: dict[str, int]()["no"]), "KeyError"),
    ("a forward that raises many lines", lambda: Of(lambda x: int("a\n" * 5000)), "ValueError"),
    (
        "a forward that branches",
        lambda: Of(lambda x: x if float(x.detach().sum()) > 1e9 else x * 2),
        RUNS,
    ),
    ("a forward that couples examples", lambda: Of(lambda x: x - x.mean(0)), "other examples"),
    ("a forward that writes in place", lambda: Of(lambda x: x.relu_()), RUNS),
    ("a module that cannot be copied", lambda: with_attribute(threading.Lock()), "copied"),
    ("NaN in the weights", lambda: scaled(float("nan")), DIVERGES),
    ("outputs that overflow", lambda: scaled(1e38), DIVERGES),
    ("outputs of NaN", lambda: Of(lambda x: x * float("nan")), DIVERGES),
    ("an unused layer", lambda: with_attribute(layer()), RUNS),
    ("a tied weight", lambda: tied(), RUNS),
    ("gradients that are there already", lambda: with_gradients(), RUNS),
    ("a module in eval mode", lambda: layer().eval(), RUNS),
]


def scaled(factor: float) -> nn.Module:
    module = layer()
    with torch.no_grad():
        module.weight.mul_(0).add_(factor)
    return module


def with_attribute(value: Any) -> nn.Module:
    module = layer()
    module.attribute = value
    return module


def tied() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), layer())
    module[1].weight = module[0].weight
    return module


def with_gradients() -> nn.Module:
    module = layer()
    module(torch.zeros(1, 4)).sum().backward()
    return module


def kinds(*modules: nn.Module, **settings: Any) -> Any:
    return run(modules, **settings)


CASES += [
    Case(f"model: {name}", calling(lambda make: run(make()), make), expected)
    for name, make, expected in MODELS
]
CASES += [
    Case(
        "kinds with other outputs",
        calling(kinds, layer(), nn.Linear(4, 4), share="nothing"),
        "outputs",
    ),
    Case("kinds with everything shared", calling(kinds, layer(), layer()), "--share"),
    Case(
        "kinds that share other shapes",
        calling(kinds, layer(), nn.Linear(4, 4), share="*"),
        "--share",
    ),
    Case("kinds of other dtypes", calling(kinds, layer(), layer().double(), share="bias"), "dtype"),
]


# Losses.
def each(outputs: Tensor, labels: Tensor) -> Tensor:
    return cross(outputs, labels, reduction="none")


NUMBERS = replace(GOOD, classes=0, train_labels=X[:, 0], test_labels=X[:12, 0])
CASES += [
    Case(f"loss: {name}", calling(lambda given: run(layer(), loss=given), given), expected)
    for name, given, expected in (
        ("text", "no such", "--loss"),
        ("a scalar", cross, "reduction"),
        ("torch's module that returns a scalar", nn.CrossEntropyLoss(), "reduction"),
        ("torch's module that returns one each", nn.CrossEntropyLoss(reduction="none"), RUNS),
        ("a number", lambda outputs, labels: 3.0, "3.0"),
        ("a column", lambda outputs, labels: each(outputs, labels)[:, None], "(2, 1)"),
        ("one for every output", lambda outputs, labels: outputs**2, "(2, 3)"),
        ("one that raises", lambda outputs, labels: outputs @ labels, "loss fails"),
        ("one that takes one argument", lambda outputs: outputs, "loss fails"),
        (
            "one without a gradient",
            lambda outputs, labels: outputs.detach().sum(1),
            "differentiated",
        ),
        ("one that ignores the outputs", lambda outputs, labels: labels.float(), "differentiated"),
        ("NaN", lambda outputs, labels: each(outputs, labels) * float("nan"), DIVERGES),
        (
            "NaN for one label",
            lambda outputs, labels: each(outputs, labels) / (labels != 2),
            DIVERGES,
        ),
        (
            "one that draws",
            lambda outputs, labels: each(outputs + torch.rand(3), labels),
            "generator",
        ),
    )
]
CASES += [
    Case(
        "numbers as labels",
        calling(run, Of(lambda x: x[:, 0]), NUMBERS, lambda out, y: (out - y) ** 2),
        RUNS,
    ),
    Case("numbers as labels without a loss", calling(run, layer(), NUMBERS), "loss"),
]


# Callbacks, generators, and the surroundings of a run.
class Calls(dfl.Callback):
    """Records the names of the methods that are called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, info: Any) -> None:
        self.calls.append("start")

    def row(self, row: Any) -> None:
        self.calls.append("row")

    def finish(self, outcome: Any) -> None:
        self.calls.append("finish")

    def close(self, error: BaseException | None) -> None:
        self.calls.append("close")


class Failing(Calls):
    """Raises at the first row."""

    def row(self, row: Any) -> None:
        raise KeyError("of the caller's own")


@case("callbacks: an object without methods", "callbacks")
def _(_: Path) -> Any:
    return run(callbacks=[object()])


@case("callbacks: a function", "callbacks")
def _(_: Path) -> Any:
    return run(callbacks=[print])


@case("callbacks: one of the caller's", RUNS)
def _(_: Path) -> Any:
    calls = Calls()
    run(callbacks=[calls])
    assert calls.calls == ["start", "row", "row", "row", "finish", "close"]


@case("callbacks: one of the caller's, with a folder and checkpoints", RUNS)
def _(folder: Path) -> Any:
    calls = Calls()
    run(callbacks=[calls], out=folder / "run", checkpoint_every=1)
    assert calls.calls == ["start", "row", "row", "row", "finish", "close"]


@case("callbacks: one of the caller's when SIGTERM comes", RUNS)
def _(folder: Path) -> Any:
    run = dfl.Run(**FEW, out=folder / "run", dataset=GOOD)
    rows = dfl.simulate(run, callbacks=[Calls()])
    world = connect()
    next(rows)
    world.stop_signal = signal.SIGTERM
    try:
        list(rows)
    except dfl.Suspended:
        world.stop_signal = 0
    assert world.stop_signal == 0
    resumed = dfl.simulate(dfl.resumed(folder / "run", dataset=GOOD), callbacks=[Calls()])
    assert [row["round"] for row in resumed] == [1, 2]
    assert len(dfl.load(folder / "run").rows) == 3


@case("callbacks: one that raises", RUNS)
def _(_: Path) -> Any:
    calls = Failing()
    try:
        run(callbacks=[calls])
    except KeyError:
        assert calls.calls == ["start", "close"]
    else:
        raise AssertionError("nothing was raised")


@case("a generator that is left", RUNS)
def _(folder: Path) -> Any:
    rows: Any = dfl.simulate(dfl.Run(**FEW, out=folder / "run", dataset=GOOD))
    next(rows)
    rows.close()
    assert dfl.load(folder / "run").record["ending"] == "interrupted"
    run(out=folder / "run", resume=folder / "run")


@case("a generator that is used again", RUNS)
def _(_: Path) -> Any:
    rows = dfl.simulate(dfl.Run(**FEW, dataset=GOOD))
    sound(list(rows))
    assert list(rows) == []


@case("two runs in turns", RUNS)
def _(folder: Path) -> Any:
    settings = [dfl.Run(**FEW, seed=k, out=folder / str(k), threads=k + 1) for k in range(2)]
    pairs = list(
        zip(*(dfl.simulate(replace(each, dataset=GOOD)) for each in settings), strict=True)
    )
    for k, rows in enumerate(zip(*pairs, strict=True)):
        sound(list(rows))
        alone = run(seed=k, threads=k + 1)
        assert [row["train_loss"] for row in rows] == [row["train_loss"] for row in alone]


@case("two runs in turns in one folder", "run")
def _(folder: Path) -> Any:
    run = dfl.Run(**FEW, out=folder / "run")
    return list(zip(*(dfl.simulate(replace(run, dataset=GOOD)) for _ in range(2)), strict=True))


@case("a run in a thread", RUNS)
def _(_: Path) -> Any:
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(run()))
    thread.start()
    thread.join()
    assert ended


@case("data that change between rounds", RUNS)
def _(_: Path) -> Any:
    inputs = X.copy()
    plain = run()
    rows: list[dfl.Row] = []
    for row in dfl.simulate(dfl.Run(**FEW, dataset=replace(GOOD, train_inputs=inputs))):
        rows.append(row)
        inputs[:] = 0
    assert [row["train_loss"] for row in rows] == [row["train_loss"] for row in plain]


def inside(around: Callable[[], Any], **settings: Any) -> None:
    """Assert that a run under settings of the caller has the same rows as one without them."""
    torch.manual_seed(0)
    module = layer()
    plain = run(module, **settings)
    with around():
        rows = run(module, **settings)
    same = [name for name in plain[0] if name != "seconds"]
    assert [[row[name] for name in same] for row in rows] == [
        [row[name] for name in same] for row in plain
    ]


@contextmanager
def changed(setter: Callable[[Any], Any], value: Any, getter: Callable[[], Any]) -> Iterator[None]:
    before = getter()
    setter(value)
    try:
        yield
    finally:
        setter(before)


CASES += [
    Case(f"inside {name}", calling(inside, around), RUNS)
    for name, around in (
        ("torch.no_grad", torch.no_grad),
        ("torch.inference_mode", torch.inference_mode),
        ("autocast", partial(torch.autocast, "cpu", torch.bfloat16)),
        ("a device context", partial(torch.device, "meta")),
        (
            "default dtype float64",
            partial(changed, torch.set_default_dtype, torch.float64, torch.get_default_dtype),
        ),
        ("three threads", partial(changed, torch.set_num_threads, 3, torch.get_num_threads)),
        (
            "deterministic algorithms",
            partial(
                changed,
                torch.use_deterministic_algorithms,
                True,
                torch.are_deterministic_algorithms_enabled,
            ),
        ),
        ("numpy that raises", partial(np.errstate, all="raise")),
        ("other seeds", partial(changed, torch.manual_seed, 1, torch.initial_seed)),
    )
]
CASES += [
    Case(
        "messages of few bits inside a device context",
        calling(inside, partial(torch.device, "meta"), bits=4),
        RUNS,
    ),
    Case(
        "faults inside a device context",
        calling(inside, partial(torch.device, "meta"), bits=8, faults="link_loss:p=0.2"),
        RUNS,
    ),
]


# Folders to start from.
def start_from(state: dict[str, Tensor] | bytes, folder: Path, **settings: Any) -> Any:
    run(out=folder / "ended")
    path = folder / "ended" / "state.safetensors"
    path.unlink()
    if isinstance(state, bytes):
        path.write_bytes(state)
    else:
        save_file(state, path)
    record = json.loads((path.parent / "run.json").read_text())
    manifest.write(path.parent, record, list(record["files"]))  # the checksums are right
    return run(init_from=folder / "ended", **settings)


WEIGHT, BIAS = torch.zeros(4, 3, 4), torch.zeros(4, 3)
CASES += [
    Case(f"start: {name}", partial(start_from, state), expected)
    for name, state, expected in (
        ("no tensors", {}, "no tensors"),
        ("scalars", {"1.weight": torch.tensor(1.0), "1.bias": BIAS}, "1.weight"),
        ("bfloat16", {"1.weight": WEIGHT.bfloat16(), "1.bias": BIAS}, "bfloat16"),
        ("whole numbers", {"1.weight": WEIGHT.long(), "1.bias": BIAS}, "int64"),
        ("unequal rows", {"1.weight": WEIGHT, "1.bias": BIAS[:3]}, "3 rows"),
        ("no rows", {"1.weight": WEIGHT[:0], "1.bias": BIAS[:0]}, "1."),
        (
            "too many rows",
            {"1.weight": WEIGHT.repeat(2, 1, 1), "1.bias": BIAS.repeat(2, 1)},
            "8 models",
        ),
        ("other names", {"weight": WEIGHT, "bias": BIAS}, "bias"),
        ("a name too many", {"1.weight": WEIGHT, "1.bias": BIAS, "2.bias": BIAS + 1}, "2.bias"),
        ("other shapes", {"1.weight": WEIGHT[:, :, :2].contiguous(), "1.bias": BIAS}, "1.weight"),
        ("models of several kinds", {"0/1.weight": WEIGHT, "1.bias": BIAS}, "kinds"),
        ("NaN", {"1.weight": WEIGHT * float("nan"), "1.bias": BIAS}, "not finite"),
        ("no safetensors", b"PK\x03\x04", "state.safetensors"),
        ("an empty file", b"", "state.safetensors"),
        ("a long header", (2**40).to_bytes(8, "little") + b"{}", "state.safetensors"),
        (
            "float64 for a float32 model",
            {"1.weight": WEIGHT.double(), "1.bias": BIAS.double()},
            RUNS,
        ),
        ("one model for all", {"1.weight": WEIGHT[:1], "1.bias": BIAS[:1]}, RUNS),
    )
]


# Loading a run directory.
def ended(folder: Path, model: Any = None) -> Any:
    run(model, out=folder / "run")
    return dfl.load(folder / "run")


CASES += [
    Case("load: no folder", lambda folder: dfl.load(folder / "none"), "none"),
    Case("load: a number", lambda _: dfl.load(3), "3"),  # type: ignore[arg-type]
    Case("load: a peer that is not there", lambda folder: ended(folder).model(4), "0 to 3"),
    Case("load: a peer as text", lambda folder: ended(folder).model("0"), "'0'"),
    Case("load: a peer as a float", lambda folder: ended(folder).model(0.5), "0.5"),
    Case("load: own module missing", lambda folder: ended(folder, layer()).model(0), "module="),
    Case("load: another module", lambda folder: other(folder, nn.Linear(4, 2)), "another model"),
    Case("load: text as a module", lambda folder: other(folder, "mlp"), "torch.nn.Module"),
    Case("load: a lazy module", lambda folder: other(folder, nn.LazyLinear(3)), "LazyLinear"),
    Case("load: a meta module", lambda folder: other(folder, nn.Linear(4, 3, device="meta")), RUNS),
]


def other(folder: Path, module: Any) -> Any:
    ended(folder, layer())
    made = dfl.load(folder / "run", module).model(0)
    assert torch.isfinite(made(torch.zeros(1, 4))).all()


def surroundings() -> tuple[Any, ...]:
    """Return the global state that a run must not change."""
    return (
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_float32_matmul_precision(),
        np.geterr(),
        warnings.showwarning,
        LOG.level,
        len(LOG.handlers),
        signal.getsignal(signal.SIGTERM),
        random.getstate(),
        threading.active_count(),
    )


def attempt(one: Case, folder: Path) -> None:
    """Run a case.

    Raises:
        AssertionError: it does not end as expected.
    """

    def late(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"more than {SECONDS} s")

    filters = list(warnings.filters)
    before = surroundings()
    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        one.call(folder)
        ending, line = RUNS, ""
    except dfl.InputError as error:
        ending, line = "refused", str(error)
    except dfl.DivergedError as error:
        ending, line = DIVERGES, str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
    assert surroundings() == before
    assert all(each in warnings.filters for each in filters)  # imports during the run add some
    assert ending == (one.expected if one.expected in (RUNS, DIVERGES) else "refused"), (
        ending,
        line,
    )
    assert "\n" not in line
    assert len(line) < LONGEST
    assert ending != "refused" or one.expected in line, line


def main() -> int:
    """Run all cases, and return the number of those that do not end as expected."""
    failed = 0
    for one in CASES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                attempt(one, Path(folder))
                ending = "ok"
            except Exception as error:
                failed += 1
                ending = f"FAILED {type(error).__name__}: {error}"
        print(f"{one.name:<50} {one.expected:<20} {ending}")
    print(f"{len(CASES)} cases, {failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 1))
