"""A `Run` is the same, and checked, in Python, in JSON, in TOML and on a command line."""

from __future__ import annotations

import inspect
import json
import math
import re
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.core.options import options
from dfl.core.parse import nearest, read, shown
from dfl.core.registry import choose, flag, usage
from dfl.simulation.components import registries
from dfl.simulation.defaults import settle
from tests.conftest import Command

KINDS = registries()

# The examples of a test share a folder: files have different names, or are overwritten.
quick = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)

counts = st.integers(1, 2**31 - 1)
shares = st.floats(0, 1, exclude_max=True)
sizes = st.floats(0, 1e300)
letters = st.characters(exclude_categories=("Cs", "Cc"))
paths = st.text(letters, min_size=1).filter(lambda text: not text.startswith(("-", "~"))).map(Path)
runs = st.builds(
    Run,
    topology=st.sampled_from(["ring", "small_world:k=4,p=0.1", "edges:path=a b.csv"]),
    algorithm=st.sampled_from([None, "qdfedavgm", "qdfedavgm:gamma=0.5"]),
    bits=st.none() | st.integers(1, 16),
    model=st.sampled_from(["mlp:hidden=20+20", "softmax"]),
    data_dir=st.none() | paths,
    out=st.none() | paths,
    examples_per_peer=st.none() | counts,
    validation=shares,
    init=st.sampled_from(["common", "independent"]),
    peers=st.none() | counts,
    rounds=st.integers(0, 2**31 - 1),
    local_steps=st.none() | counts,
    lr=st.floats(0, 1e300, exclude_min=True),
    momentum=shares,
    weight_decay=sizes,
    seed=st.integers(0, 2**63 - 1),
    ensemble=st.booleans(),
    tensorboard=st.booleans(),
    report=st.booleans(),
    profile=st.booleans(),
    threads=st.integers(1, 1024),
    engine=st.sampled_from(["auto", "batched", "loop"]),
    precision=st.sampled_from(["float32", "tf32", "bf16"]),
)

SWITCHES = ("--ensemble", "--tensorboard", "--report", "--profile")
"""Flags that take no value as a token of its own."""


def toml(run: Run) -> str:
    """Return the text of a TOML file with the settings of a run."""
    return "\n".join(
        f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in run.to_dict().items()
    )


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        make()
    return str(caught.value)


@given(runs)
@quick
def test_a_run_is_read_back_from_json_and_toml(run: Run) -> None:
    assert Run.from_dict(run.to_dict()) == run
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    assert Run.from_dict(tomllib.loads(toml(run))) == run
    assert replace(run) == run


@given(runs)
@settings(quick, max_examples=12)  # each builds the command line twice
def test_a_run_is_read_back_from_a_command_line(dfl_run: Command, run: Run) -> None:
    from dfl.run import read_command

    run = replace(run, out=run.out or Path("out"), topology="ring")
    tokens = [f"{flag(name)}={value}" for name, value in run.to_dict().items()]
    assert read_command(tokens, 1).run == run
    separate = [
        token for t in tokens for token in ([t] if t.startswith(SWITCHES) else t.split("=", 1))
    ]
    assert read_command(separate, 1).run == run


@given(runs, runs)
@settings(quick, max_examples=25)
def test_flags_override_a_file(dfl_run: Command, under: Run, over: Run) -> None:
    from dfl.run import read_command

    path = dfl_run.folder / "settings.toml"
    under = replace(under, out=Path("out"), topology="ring", bits=None)
    path.write_text(toml(under), encoding="utf-8")
    chosen = ("rounds", "lr", "init", "peers", "seed", "validation", "model", "ensemble")
    flags: dict[str, Any] = {n: value for n, value in over.to_dict().items() if n in chosen}
    tokens = [f"{flag(name)}={value}" for name, value in flags.items()]
    half = len(tokens) // 2
    command = read_command([*tokens[:half], f"--config={path}", *tokens[half:]], 1)
    assert command.run == replace(under, **flags)


def test_a_flag_with_the_default_value_overrides_a_file(dfl_run: Command) -> None:
    from dfl.run import read_command

    Path("settings.toml").write_text('rounds = 7\nlr = 1\nout = "out"\n')
    run = read_command(["--config", "settings.toml", "--rounds", str(Run().rounds)], 1).run
    assert run is not None
    assert (run.rounds, run.lr, run.out) == (Run().rounds, 1, Path("out"))


def test_settle_fills_in_peers_algorithm_and_compressor() -> None:
    plain = settle(Run(), 5)
    assert (plain.peers, plain.algorithm, plain.compressor, plain.bits) == (
        5,
        "dfedavgm",
        "none",
        None,
    )
    short = settle(Run(bits=3, peers=2), 5)
    assert (short.peers, short.algorithm, short.compressor, short.bits) == (
        2,
        "qdfedavgm",
        "quantize:bits=3",
        None,
    )
    assert (
        settle(Run(bits=3, algorithm="qdfedavgm:gamma=0.5"), 1).algorithm == "qdfedavgm:gamma=0.5"
    )
    for run in (plain, short):
        assert settle(run, 9) == run
        assert Run.from_dict(run.to_dict()) == run


def test_every_field_has_a_kind_and_a_docstring() -> None:
    assert options(Run).keys() == get_type_hints(Run).keys()
    for name in options(Run):
        documented = rf'\n    {name}: .+\n    """\w[^"]+\.\s*"""\n'
        assert re.search(documented, inspect.getsource(Run)), name


WRONG: dict[str, list[Any]] = {
    "int": ["x", "3", 2.5, 3.0, True, [3], {}, math.nan, b"3", -1, 10**30],
    "float": ["x", "0.5", True, [0.5], {}, math.nan, math.inf, -math.inf, 10**400, 1j, -1, -0.5],
    "str": [1, 1.5, True, b"ring", ["ring"], {"name": "ring"}, Path("ring")],
    "bool": ["x", "true", "", 0, 1, 1.5, [True]],
    "Path": [1, True, b"out", ["out"], "", "a\0b"],
}


def wrong() -> Iterator[tuple[str, Any]]:
    """Return each field with values that it does not accept."""
    for name, option in options(Run).items():
        bad = ["foo", "", 1, True, None] if option.choices else WRONG[option.spelled]
        yield from ((name, value) for value in (bad if option.optional else [*bad, None]))


@pytest.mark.parametrize(("name", "value"), [*wrong()])
def test_values_of_the_wrong_kind_are_refused(name: str, value: Any) -> None:
    line = refused(lambda: Run(**{name: value}))
    assert line.startswith(f"{flag(name)} must be ")
    assert line.endswith(f", not {shown(value)}")
    assert len(line) < 200
    assert refused(lambda: Run.from_dict({name: value})) == line
    assert refused(lambda: replace(Run(), **{name: value})) == line


def test_numpy_scalars_become_python_numbers() -> None:
    numbers: dict[str, Any] = {"peers": np.int64(3), "lr": np.float32(0.5), "seed": np.uint8(1)}
    run = Run(**numbers, ensemble=np.True_)  # type: ignore[arg-type]
    assert run == Run(peers=3, lr=0.5, ensemble=True, seed=1)
    assert [type(value) for value in (run.peers, run.lr, run.ensemble, run.seed)] == [
        int,
        float,
        bool,
        int,
    ]
    assert json.loads(json.dumps(run.to_dict()))["peers"] == 3


def test_values_of_the_right_kind_are_converted() -> None:
    paths: dict[str, Any] = {"out": "runs/a", "data_dir": Path("data")}
    run = Run(lr=1, momentum=0, weight_decay=np.float64(0.5), **paths)
    assert run.out == Path("runs/a")
    assert Run.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    assert Run(out="~/a").out == Path.home() / "a"  # type: ignore[arg-type]


def test_unknown_settings_are_refused() -> None:
    assert refused(lambda: Run.from_dict({"roundz": 3})).startswith(
        "unknown setting 'roundz' (did you mean rounds?)"
    )
    assert refused(lambda: Run.from_dict({"": 3})).startswith(
        "unknown setting ''; choose from peers, "
    )


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("int", "007", 7), ("int", "+7", 7), ("int", "-7", -7), ("float", "1e-3", 0.001),
        ("float", ".5", 0.5), ("float", "5.", 5.0), ("float", "-2E+3", -2000.0),
        ("bool", "true", True), ("bool", "false", False), ("str", "a=b", "a=b"),
        ("Path", "a b", Path("a b")), ("tuple[int, ...]", "200", (200,)),
        ("tuple[int, ...]", "200+100+1", (200, 100, 1)),
    ],
)  # fmt: skip
def test_values_are_read_from_text(kind: str, text: str, value: object) -> None:
    assert read("--x", text, kind) == value
    assert type(read("--x", text, kind)) is type(value)


@pytest.mark.parametrize(
    "text", ["", " ", " 7", "7\n", "1_0", "0x1f", "1e3", "٣", "²", "+", "--7", "7.", "seven"]
)
def test_texts_that_are_no_whole_number_are_refused(text: str) -> None:
    assert refused(lambda: read("--x", text, "int")) == f"--x must be a whole number, not {text!r}"


@pytest.mark.parametrize(
    "text", ["", " 7", "7\n", "1_0", "0x1f", "1e999", "nan", "inf", "٣", ".", "1.2.3", "e", "--7"]
)
def test_texts_that_are_no_number_are_refused(text: str) -> None:
    assert refused(lambda: read("--x", text, "float")) == f"--x must be a number, not {text!r}"


def made(
    *, many: int, share: float = 0.5, sure: bool = False, widths: tuple[int, ...] = (1, 2)
) -> dict[str, object]:
    return {"many": many, "share": share, "sure": sure, "widths": widths}


def perhaps(*, path: Path | None = None) -> Path | None:
    return path


PARTS: dict[str, Callable[..., Any]] = {"made": made, "perhaps": perhaps}


def test_choose_binds_the_options_of_a_spec() -> None:
    part = choose("--part", "made:many=3,widths=7+8,sure=true", PARTS)
    assert part() == {"many": 3, "share": 0.5, "sure": True, "widths": (7, 8)}
    assert choose("--part", "perhaps", PARTS)() is None
    assert choose("--part", "perhaps:path=a=b:c", PARTS)() == Path("a=b:c")


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        ("mad", "--part: unknown 'mad' (did you mean made?); choose from made, perhaps"),
        ("xyz", "--part: unknown 'xyz'; choose from made, perhaps"),
        ("made", "--part made needs many: write made:many=INT"),
        ("made:", "--part made: unknown option ''; choose from many, share, sure, widths"),
        (
            "made:man=3",
            "--part made: unknown option 'man' (did you mean many?); choose from many, share, "
            "sure, widths",
        ),
        ("made:many", "--part made: options are written many=VALUE, each once, not 'many'"),
        (
            "made:many=3,many=4",
            "--part made: options are written many=VALUE, each once, not 'many=3,many=4'",
        ),
        ("made:many=3,share=much", "--part made: share must be a number, not 'much'"),
        ("made:many=3,sure=yes", "--part made: sure must be true or false, not 'yes'"),
        (
            "made:many=3,widths=7;8",
            "--part made: widths must be whole numbers joined by +, as 200+200, not '7;8'",
        ),
        ("perhaps:path=", "--part perhaps: path must be a path, not ''"),
    ],
)
def test_choose_refuses_bad_specs(spec: str, line: str) -> None:
    assert refused(lambda: choose("--part", spec, PARTS)) == line


def test_usage_lists_options_and_nearest_handles_no_choices() -> None:
    assert [usage(name, part) for name, part in PARTS.items()] == [
        "made:many=INT,share=0.5,sure=false,widths=1+2",
        "perhaps:[path=PATH]",
    ]
    assert nearest("x", []) == "; it has none"


COMPLETE = [
    (field, name)
    for field, registry in KINDS.items()
    for name, component in registry.items()
    if all(not parameter.required for parameter in options(component).values())
]


@pytest.mark.parametrize(("field", "name"), COMPLETE)
def test_the_options_that_help_shows_can_be_given(field: str, name: str) -> None:
    """A component with its defaults given is the component without them."""
    component = KINDS[field][name]
    written = [
        item
        for item in usage(name, component).partition(":")[2].split(",")
        if item and "[" not in item
    ]
    spec = f"{name}:{','.join(written)}" if written else name
    defaults = {key: parameter.default for key, parameter in options(component).items()}
    assert choose(flag(field), spec, KINDS[field]).keywords == {
        k: v for k, v in defaults.items() if v is not None
    }
