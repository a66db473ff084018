"""The finished cells of an experiment in one file, and an experiment that continues from it."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from zipfile import ZipFile

import numpy as np
import pandas as pd
import pytest

import dfl
from dfl.store import manifest
from dfl.sweep import Cell, run_grid, runner
from experiments import cells

RUN = dfl.Run(dataset="digits", data_dir=Path("anywhere"), peers=3, rounds=2, model="softmax")


def grid(*seeds: int) -> list[Cell]:
    return [
        Cell({"seed": seed}, dfl.Run.from_dict(RUN.to_dict() | {"seed": seed})) for seed in seeds
    ]


def measured(folder: Path, *seeds: int) -> pd.DataFrame:
    return run_grid(grid(*seeds), folder / "cells", in_process=True, report=False)


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """The folder of an experiment with two finished cells and one that has not begun, packed.

    The second has a row per peer, as a run of a program of its own.
    """
    folder = tmp_path / "here"
    measured(folder, 0, 1)
    own = folder / "cells/seed=1"
    (own / cells.PEERS).write_text("peer,n_train\n0,500\n1,479\n2,479\n")
    manifest.write(own, manifest.read(own), ["metrics.csv", cells.PEERS])
    waiting = folder / "cells/seed=2"
    waiting.mkdir()
    (waiting / "cell.toml").write_text("")
    cells.pack(folder)
    return folder


def test_another_machine_continues_from_the_finished_cells(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    cells.unpack(packed, there)
    assert sorted(path.name for path in there.glob("cells/*=*")) == ["seed=0", "seed=1"]
    ran = []
    simulate = runner._simulate

    def recorded(folder: Path, run: dfl.Run) -> str:
        ran.append(run.seed)
        return simulate(folder, run)

    monkeypatch.setattr(runner, "_simulate", recorded)
    rows = measured(there, 0, 1, 3)
    assert ran == [3]
    alone = measured(tmp_path / "alone", 0, 1, 3).drop(columns="seconds")
    pd.testing.assert_frame_equal(rows.drop(columns="seconds"), alone)
    assert dfl.load(there / "cells/seed=1").peers["n_train"].tolist() == [500, 479, 479]


def test_the_file_names_no_folder_of_this_machine(packed: Path) -> None:
    with ZipFile(packed / cells.NAME) as archive:
        assert sorted(archive.namelist()) == [
            f"cells/seed={seed}/{name}"
            for seed in (0, 1)
            for name in sorted(cells.FILES if seed == 0 else (*cells.FILES, cells.PEERS))
        ]
        for name in archive.namelist():
            assert str(packed).encode() not in archive.read(name)
            assert b"anywhere" not in archive.read(name)


def test_what_is_unpacked_packs_to_the_same_file(packed: Path, tmp_path: Path) -> None:
    """One of its cells has no peers.csv, as all in files of earlier versions."""
    there = tmp_path / "there"
    cells.unpack(packed, there)
    cells.pack(there)
    assert (there / cells.NAME).read_bytes() == (packed / cells.NAME).read_bytes()


def test_the_row_of_each_peer_that_a_launched_run_wrote_is_kept(tmp_path: Path) -> None:
    run = dfl.Run.from_dict(RUN.to_dict() | {"data_dir": None})
    run_grid([Cell({"seed": 0}, run)], tmp_path / "cells", keep_models=False, report=False)
    cells.pack(tmp_path)
    cells.unpack(tmp_path, tmp_path / "there")
    kept, own = (
        dfl.load(folder / "cells/seed=0").peers for folder in (tmp_path / "there", tmp_path)
    )
    pd.testing.assert_frame_equal(kept, own)


def test_cells_that_are_there_stay(packed: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    measured(there, 1)
    before = (there / "cells/seed=1/run.json").read_bytes()
    cells.unpack(packed, there)
    assert (there / "cells/seed=1/run.json").read_bytes() == before
    assert (there / "cells/seed=0/run.json").exists()


def changed(archive: Path, name: str, content: bytes | None) -> None:
    """Replace a member of an archive, or remove it."""
    with ZipFile(archive) as old:
        kept = {each: old.read(each) for each in old.namelist() if each != name}
    with ZipFile(archive, "w") as new:
        for each, text in (kept | ({} if content is None else {name: content})).items():
            new.writestr(each, text)


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("cells/seed=1/metrics.csv", b"round\n0\n", "metrics.csv is damaged"),
        ("cells/seed=1/metrics.csv", None, "metrics.csv"),
        ("cells/seed=1/peers.csv", b"peer\n0\n", "peers.csv is damaged"),
        ("cells/seed=1/peers.csv", None, "peers.csv is missing"),
        ("cells/seed=0/peers.csv", b"peer\n0\n", "run.json does not name it"),
        ("cells/seed=1/run.json", b"{}", "run.json"),
        ("../seed=1/run.json", b"{}", "../seed=1/run.json"),
        ("/seed=1/run.json", b"{}", "/seed=1/run.json"),
        ("cells/seed=1/other.txt", b"", "other.txt"),
        ("cell.toml", b"", "cell.toml"),
        ("cells\\seed=1/run.json", b"{}", "run.json"),
        ("cells/seed=0/cell.toml", bytes(cells.LARGEST + 1), "more than"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(
    packed: Path, tmp_path: Path, name: str, content: bytes | None, named: str
) -> None:
    changed(packed / cells.NAME, name, content)
    with pytest.raises(dfl.InputError) as refused:
        cells.unpack(packed, tmp_path / "there")
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir() if path.name != "there"] == ["here"]
    left = {path.name for path in (tmp_path / "there").glob("cells/*")}
    assert left <= {".dfl", "seed=0"}  # what was whole


def test_what_is_no_archive_is_refused(packed: Path, tmp_path: Path) -> None:
    (packed / cells.NAME).write_bytes(b"no archive")
    with pytest.raises(dfl.InputError, match=r"cells\.zip is damaged"):
        cells.unpack(packed, tmp_path / "there")
    with pytest.raises(dfl.InputError, match="holds no finished cell"):
        cells.pack(tmp_path / "there")
    with pytest.raises(dfl.InputError, match="No such file"):
        cells.unpack(tmp_path / "nothing", tmp_path / "there")


def test_every_flipped_bit_is_refused_in_one_line_or_harmless(packed: Path, tmp_path: Path) -> None:
    whole = (packed / cells.NAME).read_bytes()
    places = np.random.default_rng(0).integers(8 * len(whole), size=150).tolist()
    for place in places:
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        (packed / cells.NAME).write_bytes(damaged)
        with suppress(dfl.InputError):
            cells.unpack(packed, tmp_path / "there")
        shutil.rmtree(tmp_path / "there", ignore_errors=True)


def test_a_damaged_cell_is_not_left_out(packed: Path) -> None:
    before = (packed / cells.NAME).read_bytes()
    (packed / "cells/seed=1/metrics.csv").write_text("round\n0\n")
    with pytest.raises(dfl.InputError, match=r"seed=1 is damaged, .*metrics\.csv"):
        cells.pack(packed)
    assert (packed / cells.NAME).read_bytes() == before


def test_a_cell_that_diverged_is_packed(tmp_path: Path) -> None:
    run = dfl.Run.from_dict(RUN.to_dict() | {"lr": 1e30})
    run_grid([Cell({"seed": 0}, run)], tmp_path / "cells", in_process=True, report=False)
    cells.pack(tmp_path)
    with ZipFile(tmp_path / cells.NAME) as archive:
        assert "cells/seed=0/run.json" in archive.namelist()
