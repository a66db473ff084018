"""A grid has a cell for every combination of its lists, checked and with a unique name."""

from __future__ import annotations

import os
import re
import string
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.sweep.grid import Grid, combinations, name_of, read

BASE = 'peers = 4\nmodel = "softmax"\n'


def grid(folder: Path, text: str, ranks: int = 1) -> Grid:
    (folder / "grid.toml").write_text(text)
    return read(folder / "grid.toml", ranks)


def refused(folder: Path, text: str) -> str:
    with pytest.raises(InputError) as caught:
        grid(folder, text)
    assert str(caught.value).startswith(f"{folder / 'grid.toml'}: ")
    assert "\n" not in str(caught.value)
    return str(caught.value).partition(": ")[2]


def test_cells_are_all_combinations_in_order(tmp_path: Path) -> None:
    found = grid(
        tmp_path,
        BASE + '[sweep]\ntopology = ["ring", "complete"]\nbits = ["none", 4]\nseed = [0, 7]\n',
    )
    assert found.varies == ("topology", "bits", "seed")
    assert [cell.name for cell in found.cells] == [
        f"topology={topology},bits={bits},seed={seed}"
        for topology in ("ring", "complete") for bits in ("none", 4) for seed in (0, 7)
    ]  # fmt: skip
    assert found.cells[0].values == {"topology": "ring", "bits": None, "seed": 0}
    assert found.cells[0].run == Run(peers=4, model="softmax", topology="ring", seed=0)
    assert found.cells[-1].run == Run(peers=4, model="softmax", topology="complete", bits=4, seed=7)


def test_a_grid_may_vary_any_field(tmp_path: Path) -> None:
    lists = (
        "lr = [0.1, 1]\n"
        "ensemble = [true, false]\n"
        'share = ["all", "head:1"]\n'
        'examples_per_peer = ["none", 30]\n'
    )
    cells = grid(tmp_path, f"{BASE}[sweep]\n{lists}").cells
    assert len(cells) == 16
    assert cells[0].name == "lr=0.1,ensemble=true,share=all,examples_per_peer=none"
    assert cells[-1].name == "lr=1,ensemble=false,share=head-1,examples_per_peer=30"
    assert [cell.run.examples_per_peer for cell in cells[:2]] == [None, 30]


def test_a_grid_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    text = BASE + "[sweep]\nseed = [0, 1]\n"
    assert grid(tmp_path, "\ufeff" + text).cells == grid(tmp_path, text).cells


def test_peers_default_to_the_ranks(tmp_path: Path) -> None:
    text = "[sweep]\nseed = [0, 1]\n"
    assert {cell.run.peers for cell in grid(tmp_path, text, ranks=3).cells} == {3}
    assert {cell.run.peers for cell in grid(tmp_path, BASE + text, ranks=3).cells} == {4}
    assert [cell.run.peers for cell in grid(tmp_path, "[sweep]\npeers = [2, 5]\n").cells] == [2, 5]
    assert refused(tmp_path, text).startswith("peers is missing")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("peers = ", "not a TOML file of settings ("),
        (BASE, "a table [sweep] "),
        (BASE + "[sweep]\n", "a table [sweep] "),
        (BASE + "sweep = 3\n", "a table [sweep] "),
        (
            BASE + "[sweep]\nsed = [1]\n",
            "[sweep]: unknown setting 'sed' (did you mean seed?); choose from peers",
        ),
        (BASE + "[sweep]\nout = ['a']\n", "out cannot be set in a grid: every cell"),
        (BASE + "[sweep]\nseed = 3\n", "[sweep] seed must be a list of values, not 3"),
        (BASE + "[sweep]\nseed = []\n", "[sweep] seed must be a list of values, not []"),
        (
            BASE + "seed = 1\n[sweep]\nseed = [1]\n",
            "seed is given twice, at the top and in [sweep]",
        ),
        (BASE + "out = 'x'\n[sweep]\nseed = [1]\n", "out "),
        (BASE + "resume = 'x'\n[sweep]\nseed = [1]\n", "resume "),
        (
            BASE + "lrr = 1\n[sweep]\nseed = [1]\n",
            "cell seed=1: unknown setting 'lrr' (did you mean lr?)",
        ),
        (
            BASE + "[sweep]\nseed = [1, 'x']\n",
            "cell seed=x: --seed must be a whole number, not 'x'",
        ),
        (
            BASE + "[sweep]\nseed = ['none']\n",
            "cell seed=none: --seed must be a whole number, not 'none'",
        ),
        (
            BASE + "[sweep]\nseed = [[1], [2]]\n",
            "cell seed=-1-,e169bd86: --seed must be a whole number, not [1]",
        ),
        (
            BASE + "[sweep]\nseed = [1]\nbits = [99]\n",
            "cell seed=1,bits=99: --bits must be from 1 to 16, not 99",
        ),
        (
            BASE + "[sweep]\ntopology = ['ring', 'rign']\n",
            "cell topology=rign: --topology: unknown 'rign' (did you",
        ),
        (
            BASE + "[sweep]\nlocal_steps = [1]\nlocal_epochs = [1]\n",
            "cell local_steps=1,local_epochs=1: --local-epochs",
        ),
        (BASE + "[sweep]\nseed = [1, 2, 1]\n", "cell seed=1 is the same run as seed=1: leave one"),
        (
            BASE + "[sweep]\nshare = ['head:1', 'head-1']\n",
            "two cells are called share=head-1: write",
        ),
        (BASE + "[sweep]\nlr = [1, 1.0]\n", "cell lr=1.0 is the same run as lr=1"),
        (
            BASE + "[sweep]\ntopology = ['ring', 'none']\n",
            "cell topology=none is the same run as topology=ring",
        ),
    ],
)
def test_a_bad_grid_is_refused_in_one_line(tmp_path: Path, text: str, line: str) -> None:
    assert refused(tmp_path, text).startswith(line)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    with open(tmp_path / "huge.toml", "wb") as huge:
        huge.truncate(2**33)
    for path in (tmp_path / "none.toml", tmp_path, tmp_path / "pipe.toml", tmp_path / "huge.toml"):
        with pytest.raises(InputError, match=r"cannot be read \("):
            read(path, 1)
    (tmp_path / "grid.toml").write_bytes(b"\xff")
    with pytest.raises(InputError, match="not a TOML file"):
        read(tmp_path / "grid.toml", 1)


def test_names_are_readable_and_safe() -> None:
    assert (
        name_of({"topology": "small_world:k=4,p=0.1", "bits": 4})
        == "topology=small_world-k=4,p=0.1,bits=4"
    )
    assert (
        name_of({"lr": 1e-05, "bits": None, "ensemble": True}) == "lr=1e-05,bits=none,ensemble=true"
    )
    path = name_of({"topology": "edges:path=/home/me/my graph.edges", "seed": 0})
    assert re.fullmatch(r"topology=edges-path=-home-me-my-graph\.edges,seed=0,[0-9a-f]{8}", path)
    assert name_of({"init_from": "a/b"}) != name_of({"init_from": "a-b"})
    long = name_of({"share": "x" * 100})
    assert long.startswith("share=xxx")
    assert long != name_of({"share": "x" * 101})


VALUES = st.text(st.sampled_from(string.printable + "é"), max_size=60)


@given(st.tuples(VALUES, VALUES), st.tuples(VALUES, VALUES))
def test_names_differ_where_values_do(one: tuple[str, str], other: tuple[str, str]) -> None:
    names = [name_of(dict(zip(("model", "share"), values, strict=True))) for values in (one, other)]
    for name in names:
        assert re.fullmatch(r"[\w.+=,-]+", name, re.ASCII)
        assert len(name) < 240
    colons = any(
        re.match(r"\w+:", text) for text in (*one, *other)
    )  # head:1 and head-1 have one name
    assert (one == other) == (names[0] == names[1]) or colons


def test_numbers_of_numpy_are_labels_as_plain_ones() -> None:
    numbers = combinations(
        {"model": "softmax"}, {"peers": np.arange(3, 5), "lr": [np.float64(0.1)]}
    )
    assert [cell.name for cell in numbers] == ["peers=3,lr=0.1", "peers=4,lr=0.1"]
