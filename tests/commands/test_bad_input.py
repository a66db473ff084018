"""Bad flags and options end in one line and exit code 2, without a traceback or a file.

The flags and the options come from `Run` and from the registries, so that these tests cover new
components.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dfl
from dfl.config import Run
from dfl.core.errors import InputError
from dfl.core.options import options
from dfl.core.parse import KINDS as VALUES
from dfl.core.registry import flag
from dfl.simulation.components import check, registries
from dfl.simulation.defaults import settle
from tests.conftest import Command

KINDS = registries()

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
BAD = {
    "int": ("", "x", "1.5", "1e3", "0x10", "1_0", "\N{ARABIC-INDIC DIGIT THREE}", "nan", "-1"),
    "float": ("", "x", "nan", "inf", "-inf", "1e999", "1_0", "0x10", "-1"),
    "bool": ("", "x", "1", "True"),
    "str": ("", "no-such"),
    "Path": ("", "no/such/file"),
    "tuple[int, ...]": ("", "x", "1.5", "200+", "200+-1", "0", "-1"),
}
"""Values that no option of a type accepts: of the wrong kind, or out of range."""

HUGE = {"int": "9" * 30, "float": "1e308", "tuple[int, ...]": f"{10**30}+2", "str": "x" * 500}
"""Values that may be refused or not, but must not end in a traceback."""

GOOD = {"erdos_renyi": "p=0.5", "edges": "path=no-such.edges", "links": "path=no-such.csv"}
"""Values of required options."""


OPTIONS = [
    (field, name, key, parameter.spelled)
    for field, registry in KINDS.items()
    for name, component in registry.items()
    for key, parameter in options(component).items()
]
"""Field, component, option and type of all options."""
PLAIN = {name: p.spelled for name, p in options(Run).items() if name not in KINDS}
FLAGS = {name: each for name, each in PLAIN.items() if each in ("int", "float")}


def spell(field: str, name: str, key: str, text: str) -> list[str]:
    """Return a command line that is valid but for this option."""
    rest = [
        item for item in GOOD.get(name, "").split(",") if item and not item.startswith(f"{key}=")
    ]
    more = ["--algorithm", "qdfedavgm"] if field == "compressor" else []
    return [
        flag(field),
        f"{name}:{','.join([*rest, f'{key}={text}'])}",
        *more,
        "--peers",
        "16",
        "--dry-run",
    ]


def refused(**settings: Any) -> str:
    """Assert that settings are refused, as a command line refuses them, and return the line."""
    with pytest.raises(InputError) as caught:
        check(settle(Run(**settings), 1))
    return str(caught.value)


def test_bad_values_cover_every_type_of_option() -> None:
    assert {each for *_, each in OPTIONS} <= set(BAD)
    assert set(BAD) == set(VALUES)
    assert all(len(values) >= 2 for values in BAD.values())
    assert set(PLAIN) - set(FLAGS) == {
        "data_dir", "init", "engine", "device", "until", "ensemble", "out", "share",
        "share_all_until", "init_from", "resume", "log_level", "tensorboard", "report",
        "profile", "norm_stats", "precision",
    }  # fmt: skip


def bad_values(first: bool) -> Iterator[Any]:
    """Yield every option with one bad value; or with every other bad value."""
    for number, option in enumerate(OPTIONS):
        texts = [text for text in BAD[option[-1]] if (option[2], text) != ("peers", "0")]
        for k, text in enumerate(texts):
            if (k == number % len(texts)) == first:
                yield option, text


@pytest.mark.parametrize(
    ("option", "text"), [*bad_values(True)], ids=lambda x: ":".join(x[1:3]) or x
)
def test_bad_values_of_options_are_refused(
    dfl_run: Command, option: tuple[str, str, str, str], text: str
) -> None:
    _, name, key, _ = option
    line = dfl_run.refused(*spell(*option[:3], text))
    assert name in line
    assert key in line
    assert text in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "text"), [*bad_values(False)], ids=lambda x: ":".join(x[1:3]) or x
)
def test_other_bad_values_of_options_are_refused(
    option: tuple[str, str, str, str], text: str
) -> None:
    """In this process, which takes a fifth of the time of a command line."""
    field, name, key, _ = option
    settings: dict[str, Any] = {field: spell(field, name, key, text)[1]}
    if field == "compressor":
        settings["algorithm"] = "qdfedavgm"
    with pytest.raises(InputError) as caught:
        next(dfl.simulate(Run(peers=16, **settings)))
    line = str(caught.value)
    assert "\n" not in line
    assert all(each in line for each in (name, key, text))


@pytest.mark.slow
@pytest.mark.parametrize(
    "option", [o for o in OPTIONS if o[-1] in HUGE], ids=lambda x: ":".join(x[1:3])
)
def test_huge_values_of_options_do_not_end_in_a_traceback(
    dfl_run: Command, option: tuple[str, str, str, str]
) -> None:
    field, name, key, each = option
    ended = dfl_run(*spell(field, name, key, HUGE[each]))
    assert ended.code in (0, 2)
    assert ended.err.count("\n") == ended.code // 2


def bad_numbers() -> Iterator[Any]:
    """Yield every numeric flag with every bad value: the quick tier has one value of each flag."""
    for number, (name, each) in enumerate(FLAGS.items()):
        texts = (*BAD[each], "9" * 400, "-" + "9" * 400)
        for k, text in enumerate(texts):
            quick = k == number % len(texts)
            yield pytest.param(name, text, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "text"), [*bad_numbers()])
def test_bad_numbers_of_flags_are_refused(dfl_run: Command, name: str, text: str) -> None:
    line = dfl_run.refused(f"{flag(name)}={text}")
    assert line.startswith(f"{flag(name)} must be ")
    if len(text) > 100:  # shown by its beginning or its kind
        assert text[:60] in line or "of type int" in line
    else:
        assert text.removesuffix("_0") in line or float(text) == float(line.split()[-1])


@pytest.mark.parametrize(
    "name", [name for name, each in PLAIN.items() if each not in FLAGS.values()]
)
def test_bad_texts_and_paths_of_flags_are_refused(dfl_run: Command, name: str) -> None:
    line = dfl_run.refused(f"{flag(name)}=", "--dry-run")
    assert line.startswith(f"{flag(name)} must be ")
    assert line.endswith("not ''")
    if name in ("init", "engine"):
        assert "'Common'" in dfl_run.refused(flag(name), "Common")


@pytest.mark.parametrize("field", KINDS)
def test_unknown_names_of_components_are_refused(dfl_run: Command, field: str) -> None:
    longest = max(KINDS[field], key=len)
    more = {"algorithm": "qdfedavgm"} if field == "compressor" else {}
    tokens = [f"--{name}={value}" for name, value in more.items()]
    line = dfl_run.refused(flag(field), longest[:-1], *tokens)
    assert line.startswith(f"{flag(field)}: unknown {longest[:-1]!r} (did you mean ")
    assert all(name in line for name in KINDS[field])
    for text in ("", ":", "=", " ", "no such\nname", longest.swapcase()):
        line = refused(**{field: text}, **more)
        assert line.startswith(f"{flag(field)}: unknown {text.partition(':')[0]!r}")


@pytest.mark.parametrize(
    ("field", "name"), [(field, name) for field in KINDS for name in KINDS[field]]
)
def test_malformed_specs_are_refused(dfl_run: Command, field: str, name: str) -> None:
    known = options(KINDS[field][name])
    more = {"algorithm": "qdfedavgm"} if field == "compressor" else {}
    tokens = [f"--{name}={value}" for name, value in more.items()]
    printed = dfl_run.refused(flag(field), f"{name}:no-such=1", *tokens)
    assert printed == refused(**{field: f"{name}:no-such=1"}, **more)
    for rest in ("", "=", "=1", "no-such=1", ",", ":"):
        line = refused(**{field: f"{name}:{rest}"}, **more)
        assert line.startswith(f"{flag(field)} {name}: unknown option ")
        assert all(key in line for key in known)
        assert known or line.endswith("it has none")
    for key in known:
        for rest in (key, f"{key}=1,{key}=1", f"{key}=1,"):
            line = refused(**{field: f"{name}:{rest}"}, **more)
            assert line.startswith(f"{flag(field)} {name}: ")
    needed = [key for key, parameter in known.items() if parameter.required]
    for key in needed[:1]:
        assert f"{flag(field)} {name} needs {key}" in refused(**{field: name}, **more)


def test_the_nearest_option_is_named(dfl_run: Command) -> None:
    line = dfl_run.refused("--compressor", "quantize:bit=4", "--algorithm", "qdfedavgm")
    assert line == (
        "--compressor quantize: unknown option 'bit' (did you mean bits?); choose from bits, "
        "rounding, block"
    )


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        (
            "--round 3",
            "unknown flag '--round' (did you mean --rounds?); choose from --help, --peers, ",
        ),
        (
            "--local_stepz=3",
            "unknown flag '--local_stepz' (did you mean --local-steps?); choose from ",
        ),
        ("-x", "unknown flag '-x'"),
        (
            "--rounds 3 --rounds 3",
            "--rounds is given twice, the second time with '3': give it once",
        ),
        ("--dry-run --dry-run", "--dry-run is given twice"),
        ("--rounds", "--rounds needs a value: write --rounds VALUE"),
        ("--rounds --peers 3", "--rounds needs a value"),
        ("ring", "'ring' belongs to no flag"),
        ("--peers 3 4", "'4' belongs to no flag"),
        ("--no-dry-run", "unknown flag '--no-dry-run'"),
        ("--dry-run=maybe", "--dry-run must be true or false, not 'maybe'"),
        ("--tensorboard=7", "--tensorboard must be true or false, not '7'"),
        ("--ensemble=2", "--ensemble must be true or false, not '2'"),
        ("--bits 0", "--bits must be from 1 to 16, not 0"),
        ("--bits 17", "--bits must be from 1 to 16, not 17"),
        ("--validation 1", "--validation must be at least 0 and below 1, not 1.0"),
        ("--momentum 1", "--momentum must be at least 0 and below 1, not 1.0"),
        ("--lr 0", "--lr must be a positive number, not 0.0"),
        ("--threads 0", "--threads must be from 1 to 1024, not 0"),
        ("--threads 1025", "--threads must be from 1 to 1024, not 1025"),
        (f"--seed {2**63}", f"--seed must be from 0 to {2**63 - 1}, not {2**63}"),
        (f"--rounds {2**31}", f"--rounds must be from 0 to {2**31 - 1}, not {2**31}"),
    ],
)
def test_bad_flags_are_refused(dfl_run: Command, tokens: str, line: str) -> None:
    assert dfl_run.refused(*tokens.split()).startswith(line)


COLD = """
import sys
from collections.abc import Iterator
from dfl.run import main
for line in sys.stdin.read().splitlines():
    sys.argv[1:] = line.split()
    assert main() == 2, line
heavy = {"torch", "sklearn", "matplotlib", "pandas", "mpi4py"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""


def test_a_bad_command_line_is_refused_without_torch() -> None:
    lines = [
        "--rouns 3",
        "--rounds x",
        "--topology rign",
        "--model mlp:hidden=x",
        "--bits 4 --algorithm dfedavgm",
    ]
    lines += [
        "--compressor quantize:bits=99 --algorithm qdfedavgm",
        "--lr-schedule step:every=0",
        "--config no.toml",
    ]
    command = [sys.executable, "-c", COLD]
    cold = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, env=ENV)
    assert cold.returncode == 0, cold.stderr
    assert cold.stderr.count("dfl: ") == len(lines) == cold.stderr.count("\n")


def test_a_path_that_is_no_text_is_printed_escaped() -> None:
    """Bytes that are no UTF-8 reach Python as lone surrogates, which cannot be encoded."""
    command = [sys.executable.encode(), b"-m", b"dfl.run", b"--config", b"\xff.toml"]
    ended = subprocess.run(command, capture_output=True, text=True, env=ENV)
    assert ended.returncode == 2
    assert (
        ended.stderr == "dfl: --config \\udcff.toml: cannot be read (No such file or directory)\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokens",
    [
        "--rounds=x",
        "--topology=rign",
        "--topology=torus --peers=7",
        "--model=lenet",
        "--config=/",
        "--out=/dev/null",
    ],
)
def test_bad_input_from_a_shell_is_refused(tmp_path: Path, tokens: str) -> None:
    command = [sys.executable, "-m", "dfl.run", *tokens.split()]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENV)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith("dfl: ")
    assert ended.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
