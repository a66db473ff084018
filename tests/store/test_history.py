"""The history of a run holds every peer's figures at every evaluation, also after a resume."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import dfl
from dfl.comm.mpi import World
from dfl.simulation.prepare import prepare
from dfl.store.callbacks import Peers
from dfl.store.history import Start, read_evaluations, read_start
from tests.support.small_run import small

pytestmark = pytest.mark.usefixtures("without_figures")


class Seen(dfl.Callback):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.peers: dict[int, Peers] = {}

    def evaluated(self, t: int, peers: Peers) -> None:
        self.peers[t] = peers


def test_it_holds_what_callbacks_receive(tmp_path: Path) -> None:
    seen = Seen()
    list(dfl.simulate(small(out=tmp_path), callbacks=[seen]))
    held = read_evaluations(tmp_path)
    assert held is not None
    assert held.rounds.tolist() == list(seen.peers) == [0, 2, 4, 6]
    assert held.columns == tuple(name for name in seen.peers[0] if name != "is_attacker")
    for row, peers in zip(held.values, seen.peers.values(), strict=True):
        for name, values in zip(held.columns, row, strict=True):
            np.testing.assert_array_equal(values, peers[name].astype(np.float32))


def test_load_gives_the_history_a_row_for_each_evaluation_and_peer(tmp_path: Path) -> None:
    seen = Seen()
    list(dfl.simulate(small(out=tmp_path), callbacks=[seen]))
    run = dfl.load(tmp_path)
    figures = {name: value for name, value in seen.peers[0].items() if name != "is_attacker"}
    assert [*run.history] == ["round", "peer", *figures]
    peers = len(run.peers)
    assert len(run.history) == len(seen.peers) * peers
    for t, expected in seen.peers.items():
        own = run.history[run.history["round"] == t]
        assert own["peer"].tolist() == list(range(peers))
        for name in figures:
            np.testing.assert_array_equal(own[name], expected[name].astype(np.float32))
    end = run.history[run.history["round"] == 6].reset_index()
    np.testing.assert_allclose(end["accuracy"], run.peers["accuracy"], rtol=1e-6)


def test_load_refuses_a_history_that_is_missing_or_damaged(tmp_path: Path) -> None:
    list(dfl.simulate(small(out=tmp_path)))
    path = tmp_path / "history/peers.bin"
    path.write_bytes(b"no JSON\n")
    with pytest.raises(dfl.InputError, match=r"history/peers\.bin is damaged"):
        _ = dfl.load(tmp_path).history
    path.unlink()
    with pytest.raises(dfl.InputError, match="has no history: the run is finished"):
        _ = dfl.load(tmp_path).history


def test_a_resumed_run_has_the_history_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    list(dfl.simulate(small(out=tmp_path / "whole")))
    for row in dfl.simulate(small(out=tmp_path / "cut", eval_every=2, checkpoint_every=3)):
        if row.round == 4:  # after the checkpoint of round 3
            break
    with (tmp_path / "cut/history/peers.bin").open("ab") as file:
        file.write(b"a record that is cut short")
    list(dfl.simulate(dfl.resumed(tmp_path / "cut")))
    whole, cut = (tmp_path / name / "history/peers.bin" for name in ("whole", "cut"))
    assert cut.read_bytes() == whole.read_bytes()


def test_a_run_that_starts_again_forgets_its_history(tmp_path: Path) -> None:
    rows = dfl.simulate(small(out=tmp_path, checkpoint_every=None))
    next(rows)
    rows.close()  # type: ignore[attr-defined]
    list(dfl.simulate(dfl.resumed(tmp_path)))
    held = read_evaluations(tmp_path)
    assert held is not None
    assert held.rounds.tolist() == [0, 2, 4, 6]


def test_the_start_is_read_as_it_was_written() -> None:
    run = small(topology="exponential", partition="shards:per_peer=2", attack="sign_flip:peers=1")
    info = prepare(run, World()).info
    assert info is not None
    assert info.graph is not None
    start = Start.of(info)
    again = Start.from_bytes(start.to_bytes())
    assert again.facts == start.facts
    assert again.attackers.tolist() == [1]
    np.testing.assert_array_equal(again.label_counts, info.label_counts)
    np.testing.assert_array_equal(again.sizes, info.sizes)
    assert again.degrees is not None
    assert again.weights is not None
    np.testing.assert_array_equal(again.degrees, info.graph.degrees)
    np.testing.assert_array_equal(again.weights.toarray(), info.graph.weights[0].toarray())


def test_the_weights_of_a_sequence_of_matrices_are_their_mean() -> None:
    info = prepare(small(topology="one_peer_exponential"), World()).info
    assert info is not None
    assert info.graph is not None
    weights = Start.of(info).weights
    assert weights is not None
    wanted = np.mean([each.toarray() for each in info.graph.weights], axis=0)
    np.testing.assert_allclose(weights.toarray(), wanted)


def test_a_record_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    list(dfl.simulate(small(out=tmp_path)))
    path = tmp_path / "history/peers.bin"
    path.write_bytes(path.read_bytes()[:-1])
    held = read_evaluations(tmp_path)
    assert held is not None
    assert held.rounds.tolist() == [0, 2, 4]


def test_a_folder_without_a_history_has_none(tmp_path: Path) -> None:
    assert read_start(tmp_path) is None
    assert read_evaluations(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        b"\xff\n",
        b"{}\n",
        b"[]\n",
        b'{"peers": "x", "columns": []}\n',
        b'{"peers": 1e999, "columns": []}\n',
        b"[" * 60_000 + b"\n",
    ],
)
def test_a_damaged_history_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "history").mkdir()
    (tmp_path / "history/peers.bin").write_bytes(content)
    (tmp_path / "history/start.safetensors").write_bytes(content)
    with pytest.raises(dfl.InputError, match=r"peers\.bin is damaged"):
        read_evaluations(tmp_path)
    with pytest.raises(dfl.InputError, match=r"start\.safetensors is damaged"):
        read_start(tmp_path)


def test_a_damaged_history_does_not_keep_a_run_from_going_on(tmp_path: Path) -> None:
    list(dfl.simulate(small(out=tmp_path / "whole")))
    for row in dfl.simulate(small(out=tmp_path / "cut")):
        if row.round == 4:
            break
    path = tmp_path / "cut/history/peers.bin"
    path.write_bytes(path.read_bytes().replace(b'"peers": 4', b'"peers": 2'))
    list(dfl.simulate(dfl.resumed(tmp_path / "cut")))
    held, whole = read_evaluations(tmp_path / "cut"), read_evaluations(tmp_path / "whole")
    assert held is not None
    assert whole is not None
    assert held.rounds.tolist() == [4, 6]
    np.testing.assert_array_equal(held.values, whole.values[2:])
