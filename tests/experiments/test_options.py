"""Options of experiments that are refused, and how their commands end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import dfl
import experiments
from experiments import common
from experiments.messages_and_graphs import bits


def counts() -> Iterator[tuple[str, str]]:
    """Yield every experiment with the options of it that are at least 1."""
    root = Path(str(experiments.__file__)).parent
    for path in sorted(root.glob("*/*.py")):
        if "class Options(" in path.read_text():
            module = import_module(f"experiments.{path.parent.name}.{path.stem}")
            for field in fields(module.Options):
                if field.name in common.COUNTS and field.type == "int":
                    yield module.__name__, field.name


@pytest.mark.parametrize(("module", "name"), list(counts()))
def test_a_number_of_things_is_at_least_one(module: str, name: str) -> None:
    flag = name.replace("_", "-")
    options: Any = import_module(module).Options
    for value in (0, -3):
        with pytest.raises(dfl.InputError, match=f"^--{flag} must be at least [12], not {value}$"):
            options(**{name: value})


def test_widths_are_compared_with_float32() -> None:
    with pytest.raises(dfl.InputError, match="--widths must have float32 among them, not 4"):
        bits.Options(widths=("4",))


@pytest.mark.filterwarnings("ignore:Cyclopts application invoked without tokens")
@pytest.mark.parametrize(
    ("error", "code"),
    [(dfl.InputError("bad"), 2), (dfl.DivergedError("bad"), 3), (dfl.Suspended("bad"), 75)],
)
def test_what_ends_an_experiment_is_one_line_and_its_code(
    error: Exception,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def experiment() -> None:
        raise error

    monkeypatch.setattr(sys, "argv", ["scale.py"])
    assert common.start(experiment, "speed.scale") == code
    assert capsys.readouterr() == ("", "scale: bad\n")
