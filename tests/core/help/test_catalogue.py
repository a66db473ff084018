"""What `--help KIND` and `dfl list` show is what the components and their docstrings state."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from dfl.core.errors import InputError
from dfl.core.help.catalogue import _SAMPLES, find, kind_of, page
from dfl.core.help.docstrings import described
from dfl.core.options import options
from dfl.core.parse import KINDS
from dfl.core.registry import Registry, choose
from dfl.inference.estimators import ESTIMATORS
from dfl.inference.models import MODELS
from dfl.simulation.components import registries
from tests.conftest import Command
from tests.datasets.test_datasets import WRITERS
from tests.support.idx_files import write as write_idx

EVERY = [*registries().values(), MODELS, ESTIMATORS]


@pytest.mark.parametrize("registry", EVERY, ids=kind_of)
def test_every_component_has_a_line_its_options_and_an_example(registry: Registry[Any]) -> None:
    text = page(registry, (), "dfl run", 80)
    _, *entries = text.split("\n\n")
    assert [entry.split("\n")[0] for entry in entries] == list(registry)
    for (name, component), entry in zip(registry.items(), entries, strict=True):
        _, line, *others = entry.split("\n")
        assert re.match(r"  \S+ ", line), name
        assert not line.startswith("  Return "), name
        assert all(any(f"{key}=" in other for other in others) for key in options(component)), name
        example = shlex.split(entry.rpartition("$ ")[2])
        assert example[:3] == ["dfl", "run", registry.flag]
        choose(registry.flag, example[3], registry)
        assert max(map(len, entry.split("\n")[:-1])) <= 80


def test_every_kind_of_option_has_a_sample_of_its_kind() -> None:
    assert _SAMPLES.keys() == KINDS.keys()
    for kind, sample in _SAMPLES.items():
        KINDS[kind].read(sample)


def test_a_docstring_is_taken_apart() -> None:
    def made(peers: int, *, first: int = 1, second: float = 0.5, third: bool = False) -> None:
        """One line (A. Author, B. Author 2001, section 2),
        and its end (2002).

        More (see above), as in C. Author (2003).

            x <- y

        Args:
            peers: not an option.
            first, second: both of
                them.

        Raises:
            InputError: never.

        Source:
            D. Author, "Title", 2004.
        """

    found = described(made)
    assert found.summary == "One line, and its end (2002)."
    assert found.body == "More (see above), as in C. Author (2003).\n\n    x <- y"
    assert found.options == {"first": "both of them", "second": "both of them"}
    assert found.source == 'D. Author, "Title", 2004; A. Author, B. Author 2001, section 2'


def test_options_of_base_classes_are_described() -> None:
    assert "share of all peers" in described(registries()["attack"]["ipm"]).options["fraction"]


def test_the_source_of_a_module_is_that_of_its_only_component() -> None:
    assert "Koloskova, Stich, Jaggi 2019" in page(registries()["algorithm"], ["choco"], "x", 80)


def test_a_kind_is_found_by_its_plural_and_its_flag() -> None:
    for kind in ("topologies", "topology", "--topology"):
        assert find(kind, EVERY).group == "dfl.topologies"
    for kind in ("schedules", "lr-schedule", "lr_schedule", "--lr-schedule"):
        assert find(kind, EVERY).group == "dfl.schedules"
    assert find("models", EVERY) is registries()["model"]
    assert find("inference.models", EVERY) is MODELS
    assert find("estimators", EVERY) is ESTIMATORS
    with pytest.raises(InputError, match=r"'topologys' \(did you mean topologies\?\)"):
        find("topologys", EVERY)


SLOW = {"topology", "mixing", "algorithm", "attack", "auxiliary", "lr_schedule", "faults"}
"""Kinds whose examples are tested in the slow tier."""


@pytest.mark.parametrize(
    "field",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in registries()],
)
def test_examples_run(dfl_run: Command, field: str) -> None:
    """Each on small files in the official form, which have examples for few peers. Those with a
    file of the user's are left out.
    """
    for name, write in WRITERS.items():
        write(dfl_run.folder / name)
    for name in ("mnist", "fashion_mnist"):
        write_idx(dfl_run.folder / name)
    for entry in page(registries()[field], (), "", 80).split("\n\n")[1:]:
        example = shlex.split(entry.rpartition("$ ")[2])
        if any("FILE" in word for word in example):
            continue
        peers = 2 if "--dataset" in example or "--model" in example else 16
        done = dfl_run(*example, f"--peers={peers}", "--data-dir=.", "--dry-run", "--quiet")
        assert done.code == 0, (example, done.err)
