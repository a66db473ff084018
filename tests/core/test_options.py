"""Options are read from annotations, and checked by a class's constructor and by a function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pytest
from annotated_types import Ge, Gt, Interval, Lt

from dfl.core.errors import InputError
from dfl.core.options import Component, Count, Share, checked, options

if TYPE_CHECKING:
    from somewhere import Unknown  # type: ignore[import-not-found]  # as torch is, in our modules


@dataclass(frozen=True, kw_only=True)
class Base:
    many: Count = 1
    share: Share = 0.5
    which: Literal["first", "last", "all"] = "all"


@dataclass(frozen=True, kw_only=True)
class Part(Base):
    rate: Annotated[float, Gt(0), Lt(2)] | None = None
    widths: tuple[Annotated[int, Interval(ge=1, le=9)], ...] = (3,)
    sure: bool = False
    path: Path | None = None
    seen: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.many * self.share > 10:  # would fail on values that are no numbers
            raise InputError("many times share is more than 10")


def function(given: Unknown, *, many: Count = 1, least: Annotated[float, Ge(-1)] = 0) -> float:
    return many + least


checked("--part made", Part)
made = checked("--part function", function)
KINDS: list[Callable[..., Any]] = [Part, lambda **given: made(None, **given)]


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [
        ("many", 0, "from 1 to 2147483647"),
        ("many", 2**31, "from 1 to 2147483647"),
        ("many", 1.0, "a whole number"),
        ("many", True, "a whole number"),
        ("many", None, "a whole number"),
        ("share", -0.1, "from 0 to 1"),
        ("share", math.nan, "from 0 to 1"),
        ("share", "half", "a number"),
        ("share", 10**400, "from 0 to 1"),
        ("which", "second", "first, last or all"),
        ("which", 1, "first, last or all"),
        ("rate", 0, "above 0 and below 2"),
        ("rate", 2.0, "above 0 and below 2"),
        ("rate", math.inf, "above 0 and below 2"),
        ("widths", (3, 0), "from 1 to 9 each"),
        ("widths", (3, 1.5), "whole numbers joined by +, as 200+200"),
        ("widths", ("3",), "whole numbers joined by +, as 200+200"),
        ("widths", (3, True), "whole numbers joined by +, as 200+200"),
        ("seen", (1.5,), "whole numbers joined by +, as 200+200"),
        ("widths", [3], "whole numbers joined by +, as 200+200"),
        ("sure", 1, "true or false"),
        ("path", "a b", "a path"),
    ],
)
def test_bad_values_are_refused(option: str, value: Any, accepted: str) -> None:
    with pytest.raises(InputError) as caught:
        Part(**{option: value})
    line = str(caught.value)
    assert line.startswith(f"--part made: {option} must be {accepted}, not ")
    with pytest.raises(InputError, match=f"{option} must be "):
        replace(Part(), **{option: value})


def test_good_values_are_accepted() -> None:
    part = Part(many=3, share=1, rate=None, widths=(1, 9), which="last", path=Path("a"))
    assert (part.many, part.share, part.rate, part.widths) == (3, 1, None, (1, 9))
    assert replace(part, rate=1.5).rate == 1.5
    numbers = Part(many=np.int64(3), share=np.float32(0.5))  # type: ignore[arg-type]
    assert [type(numbers.many), type(numbers.share)] == [int, float]


def test_ranges_come_before_the_checks_of_a_class() -> None:
    with pytest.raises(InputError, match="many must be "):
        Part(many="x")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="many times share"):
        Part(many=100)


@dataclass(frozen=True, kw_only=True)
class Strict:
    size: int = 2

    def __post_init__(self) -> None:
        if self.size % 2:
            raise ValueError("size must be\neven")


def test_a_constructor_that_raises_a_value_error_refuses_the_value() -> None:
    with pytest.raises(InputError, match=r"^--part strict: ValueError: size must be even$"):
        checked("--part strict", Strict)(size=3)


def test_numbers_of_numpy_become_plain_ones() -> None:
    part = Part(many=np.int64(3), seen=(np.int64(1), 2))  # type: ignore[arg-type]
    assert [type(each) for each in (part.many, *part.seen)] == [int, int, int]


def test_functions_check_their_options() -> None:
    assert made(None, many=2, least=-1) == 1
    with pytest.raises(InputError, match=r"least must be at least -1, not -1\.5"):
        made(None, least=-1.5)
    with pytest.raises(TypeError, match="unknown"):
        made(None, unknown=1)  # type: ignore[call-arg]


def test_options_are_read_off_annotations() -> None:
    found = options(Part)
    assert list(found) == [*("many", "share", "which"), *("rate", "widths", "sure", "path", "seen")]
    assert [
        found[name].spelled for name in ("many", "share", "which", "rate", "widths", "path")
    ] == [*("int", "float", "str", "float", "tuple[int, ...]", "Path")]
    assert [name for name, option in found.items() if option.optional] == ["rate", "path"]
    assert found["which"].choices == ("first", "last", "all")
    assert list(options(made)) == ["many", "least"]


def unannotated(*, many=1):  # type: ignore[no-untyped-def]
    return many


def unknown(*, many: Unknown = 1) -> Any:
    return many


def dictionary(*, many: dict[str, int] | None = None) -> Any:
    return many


def several(*, many: int | str = 1) -> Any:
    return many


@pytest.mark.parametrize(
    ("component", "reason"),
    [
        (unannotated, "it has no annotation"),
        (unknown, "name 'Unknown' is not defined"),
        (dictionary, "dict is none of them"),
        (several, "int | str is none of them"),
    ],
)
def test_annotations_that_a_spec_cannot_spell_are_refused(
    component: Component, reason: str
) -> None:
    with pytest.raises(InputError) as caught:
        options(component)
    line = str(caught.value)
    assert line.startswith(f"option many of {component.__name__} must be annotated as one of int, ")
    assert line.endswith(f": {reason}")
