"""Random configurations either run or are refused in one line.

python -m tests.simulation.test_fuzz 2000 tries 2000 configurations.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, get_type_hints

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import dfl
from dfl.config import Run
from dfl.core.options import Component, options
from dfl.evaluation.goals import GOALS
from dfl.simulation.components import registries

pytestmark = pytest.mark.slow

KINDS: dict[str, st.SearchStrategy[str]] = {
    "int": st.sampled_from(["0", "1", "2", "3", "4", "7", "16", "-1"]),
    "float": st.sampled_from(
        ["0", "0.1", "0.25", "0.5", "0.9", "1", "1.5", "3", "-0.5", "1e-30", "1e30"]
    ),
    "bool": st.sampled_from(["true", "false"]),
    "str": st.sampled_from(
        ["nearest", "stochastic", "replica", "paper", "uniform", "drop", "everyone", "lognormal"]
    ),
    "Path": st.just("/no/such/file"),
    "tuple[int, ...]": st.sampled_from(["0", "1+3", "8", "6+5", "0+1+2+3", "-1"]),
}
"""Values of options, by the spelling of their type."""

SMALL = {"dataset gaussian examples": "90", "dataset gaussian test": "30"}
"""Fixed values of options that would make runs slow."""

PLAIN: dict[str, st.SearchStrategy[Any]] = {
    "peers": st.integers(1, 9), "rounds": st.just(2),
    "examples_per_peer": st.sampled_from([1, 5, 12, 40]),
    "validation": st.sampled_from([0.0, 0.2, 0.7]), "eval_examples": st.sampled_from([None, 1, 40]),
    "local_epochs": st.sampled_from([None, None, 1, 3]),
    "local_steps": st.sampled_from([None, None, 1, 4]),
    "batch_size": st.sampled_from([0, 1, 4, 10]), "lr": st.sampled_from([1e-3, 0.05, 1.0, 1e20]),
    "momentum": st.sampled_from([0.0, 0.9]), "weight_decay": st.sampled_from([0.0, 0.1]),
    "seed": st.integers(0, 3), "bits": st.sampled_from([None, None, 1, 2, 3, 4, 8, 16]),
    "init": st.sampled_from(["common", "independent"]),
    "share": st.sampled_from(
        ["all", "all", "nothing", "head:1", "first:1", "3.*", "*.bias", "head:9"]
    ),
    "share_all_until": st.sampled_from([None, None, "1", "2", "3", "train_loss=2", "accuracy=0.1"]),
    "until": st.sampled_from([None, None, *(f"{name}=0.1" for name in GOALS)]),
    "ensemble": st.booleans(),
    "norm_stats": st.sampled_from([*["refuse"] * 9, "local", "share", "recompute"]),
    "eval_every": st.integers(1, 3), "engine": st.sampled_from(["auto", "batched", "loop"]),
    "eval_last": st.integers(1, 3),
    "precision": st.sampled_from([*["float32"] * 4, "bf16", "tf32"]),
    "checkpoint_every": st.sampled_from([None, 1]), "threads": st.just(1), "device": st.just("cpu"),
}  # fmt: skip
"""Values of the fields that choose no component."""
UNTRIED = {
    "data_dir", "init_from", "out", "resume", "timeout", "log_level", "tensorboard", "report",
    "profile",
}  # fmt: skip
"""Fields of files and launches, which keep their defaults."""


def spec(kind: str, name: str, component: Component) -> st.SearchStrategy[str]:
    """Return specs `name:key=value,key=value` with some of the options of a component."""

    def written(drawn: dict[str, str]) -> str:
        given = ",".join(f"{key}={value}" for key, value in drawn.items())
        return f"{name}:{given}" if given else name

    known = {
        key: st.just(SMALL[option])
        if (option := f"{kind} {name} {key}") in SMALL
        else KINDS[parameter.spelled]
        for key, parameter in options(component).items()
    }
    needed = {
        key
        for key, one in options(component).items()
        if one.required or f"{kind} {name} {key}" in SMALL
    }
    optional = {key: value for key, value in known.items() if key not in needed}
    return st.fixed_dictionaries({key: known[key] for key in needed}, optional=optional).map(
        written
    )


def configurations() -> st.SearchStrategy[dict[str, Any]]:
    """Return some fields of `Run` with any values of their kinds."""
    chosen = {
        kind: st.one_of(*(spec(kind, name, each) for name, each in registry.items()))
        for kind, registry in registries().items()
    }
    faults = chosen["faults"]
    chosen["faults"] = st.lists(faults, min_size=1, max_size=3).map("+".join)
    fields = PLAIN | chosen
    assert fields.keys() | UNTRIED == get_type_hints(Run).keys(), "a new field needs a line here"
    always = {name: fields.pop(name) for name in ("peers", "rounds", "examples_per_peer")}
    always["model"] = st.one_of(st.just("softmax"), st.just("mlp:hidden=6+5"), fields.pop("model"))
    rare = st.dictionaries(st.sampled_from(sorted(fields)), st.none(), max_size=6)
    return rare.flatmap(
        lambda names: st.fixed_dictionaries(always | {name: fields[name] for name in names})
    )


class Hang(BaseException):
    """A run takes too long."""


@contextmanager
def in_time(seconds: int) -> Iterator[None]:
    def late(number: int, frame: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(values: dict[str, Any]) -> str:
    """Run a configuration and return ran, diverged or refused."""
    with in_time(60), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        try:
            rows = list(dfl.simulate(Run(**values)))
        except dfl.InputError as error:
            message = str(error)
            one_line = 0 < len(message) < 1000 and "\n" not in message
            return "refused" if one_line else f"refused in several lines: {message}"
        except dfl.DivergedError:
            return "diverged"
    assert rows[0]["round"] == 0
    assert rows[-1]["round"] == 2 or Run(**values).until
    return "ran"


def fuzz(many: int) -> Counter[str]:
    """Return how many configurations ran, diverged and were refused."""
    counted: Counter[str] = Counter()

    @settings(
        max_examples=many, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(configurations())
    def one(values: dict[str, Any]) -> None:
        counted[outcome(values)] += 1
        assert counted.keys() <= {"ran", "refused", "diverged"}

    run: Callable[[], None] = one
    run()
    return counted


def test_random_configurations_run_or_are_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DFL_DATA", "/no/such/folder")
    counted = fuzz(120)
    assert counted["ran"] > 20
    assert counted["refused"] > 20


def test_the_fuzzer_knows_every_type_of_option() -> None:
    everything = [each for registry in registries().values() for each in registry.values()]
    assert {
        option.spelled for each in everything for option in options(each).values()
    } <= KINDS.keys()


if __name__ == "__main__":
    import os

    os.environ["DFL_DATA"] = "/no/such/folder"
    warnings.simplefilter("error")
    print(fuzz(int(sys.argv[1])))
