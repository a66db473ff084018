"""Who attacks, and do all attacks keep the rules? Then those that need only their own words or
data.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import kstest

from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.robust.attacks import ATTACKS, Attack, AttackView
from tests.support.attackers import over_ranks, rows_of, seen

SPEAKERS = sorted(name for name, kind in ATTACKS.items() if kind().speaks and not kind().per_edge)
WIDE = 3 * 4096 + 1  # four blocks, the last of one coordinate


def made(rows: NDArray[Any], bad: list[int], t: int = 3) -> AttackView:
    """What attackers see where the listener trusts something as well."""
    return seen(rows, bad, rows[-1] + rows[-2], t)


# --- who attacks ----------------------------------------------------------------------------------
# --------------------


def test_a_share_of_all_attacks() -> None:
    chosen = ATTACKS["scale"](fraction=0.2).chosen(100, seed=1)
    assert len(chosen) == len(set(chosen.tolist())) == 20
    assert np.all(np.diff(chosen) > 0)
    assert chosen.tolist() == ATTACKS["scale"](fraction=0.2).chosen(100, seed=1).tolist()
    assert chosen.tolist() != ATTACKS["scale"](fraction=0.2).chosen(100, seed=2).tolist()
    assert set(ATTACKS["scale"](fraction=0.1).chosen(100, seed=1).tolist()) < set(chosen.tolist())
    assert len(ATTACKS["none"]().chosen(100, seed=1)) == 0


def test_named_peers_attack() -> None:
    assert ATTACKS["scale"](peers=(5, 2, 5)).chosen(6, seed=0).tolist() == [2, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peers": (1, 6)}, "--attack scale: peers must be from 0 to 5, not 1+6"),
        ({"fraction": 1.5}, "--attack scale: fraction must be from 0 to 1, not 1.5"),
        ({"fraction": 1.0}, "--attack scale: all 6 peers lie; leave somebody honest"),
    ],
)
def test_nobody_attacks_who_is_not_there(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as raised:
        ATTACKS["scale"](**options).chosen(6, seed=0)
    assert str(raised.value) == message


# --- what holds for every attack
# --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPEAKERS)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_change_no_bit(name: str, ranks: int) -> None:
    whole = made(rows_of(11, WIDE), [1, 4, 9])
    said = ATTACKS[name]().say(whole)
    assert said.shape == (3, WIDE)
    assert said.dtype == np.float32
    assert over_ranks(ATTACKS[name](), whole, ranks).tobytes() == said.tobytes()


@pytest.mark.parametrize("name", SPEAKERS)
def test_a_lie_is_a_lie_and_leaves_the_words_alone(name: str) -> None:
    rows = rows_of(11, 500)
    before = rows.copy()
    said = ATTACKS[name]().say(made(rows, [1, 4, 9]))
    assert rows.tobytes() == before.tobytes()
    assert not np.any(np.all(said == rows[[1, 4, 9]], axis=1))


@pytest.mark.parametrize("name", SPEAKERS)
@pytest.mark.parametrize("bad", [[], [2], [0, 1, 2, 3]])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("d", [0, 1, 60])
def test_few_speakers_and_few_coordinates(name: str, bad: list[int], n: int, d: int) -> None:
    """Nobody who attacks, nobody who is honest, a lone speaker, a rank without coordinates."""
    bad = [i for i in bad if i < n]
    rows = rows_of(n, d, dtype=np.float64)
    said = ATTACKS[name]().say(seen(rows, bad, rows.sum(0)))
    assert said.shape == (len(bad), d)
    assert said.dtype == np.float64
    assert np.all(np.isfinite(said))


@pytest.mark.parametrize("name", SPEAKERS)
def test_silence_is_no_trouble(name: str) -> None:
    assert np.all(np.isfinite(ATTACKS[name]().say(made(np.zeros((9, 50), np.float32), [3, 4]))))


@pytest.mark.parametrize("name", SPEAKERS)
def test_words_that_overflow_do_not_warn(name: str) -> None:
    rows = rows_of(9, 50)
    rows[2], rows[5, 3], rows[6, 4] = 3e38, np.inf, np.nan
    assert ATTACKS[name]().say(made(rows, [2, 3])).shape == (2, 50)


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_one_word_for_all_neighbours(name: str) -> None:
    if (kind := ATTACKS[name]()).per_edge:
        return
    view = seen(rows_of(12, 30), [1, 4], np.ones(30))
    view = AttackView(view.words, view.bad, view.bad, view.places, view.address)
    told = kind.tell(view, None, np.array([[4, 3], [1, 2], [4, 5]]))
    assert np.array_equal(told, kind.say(view)[[1, 0, 1]])


def test_attacks_are_registered_by_name() -> None:
    class Nothing(Attack):
        pass

    with ATTACKS.replaced():
        ATTACKS.register("nothing")(Nothing)
        assert ATTACKS["nothing"] is Nothing
        assert Nothing.name == "nothing"
    assert "nothing" not in ATTACKS
    assert {"none", "label_flip", "sign_flip", "gaussian", "scale", "backdoor"} < set(ATTACKS)


# --- numbers by address
# -----------------------------------------------------------------------------------------------


def test_an_attackers_numbers_are_its_own() -> None:
    view = seen(rows_of(6, 5000), [1, 3, 4])
    drawn = view.uniform("a")
    assert drawn.shape == (3, 5000)
    assert 0 < drawn.min() < drawn.max() < 1
    assert min(kstest(row, "uniform").pvalue for row in drawn) > 0.01
    assert np.array_equal(drawn, view.uniform("a"))
    assert np.array_equal(drawn[1:], seen(rows_of(6, 5000), [3, 4]).uniform("a"))
    others = (
        view.uniform("b"),
        view.uniform("a", 1),
        seen(rows_of(6, 5000), [1, 3, 4], t=4).uniform("a"),
    )
    for other in (*others, np.roll(drawn, 1, axis=0)):
        assert np.mean(other == drawn) < 0.001
    assert np.array_equal(view.within(slice(4096, 5000)).uniform("a"), drawn[:, 4096:])


def test_no_uniform_number_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        randomness, "bits", lambda *_, **__: torch.tensor([[0, -1]], dtype=torch.int32)
    )
    drawn = seen(rows_of(2, 2), [0]).uniform()
    assert drawn.dtype == np.float32
    assert np.all(np.isfinite(ndtri(drawn)))
    assert drawn[0, 0] == 1 - drawn[0, 1] == 2.0**-24


# --- lies about one's own words
# ---------------------------------------------------------------------------------------


def test_sign_flip_and_scale() -> None:
    rows = rows_of(5, 40)
    assert np.array_equal(ATTACKS["sign_flip"]().say(seen(rows, [0, 3])), -rows[[0, 3]])
    assert np.array_equal(
        ATTACKS["scale"](factor=2.5).say(seen(rows, [1])), np.float32(2.5) * rows[[1]]
    )
    assert np.array_equal(ATTACKS["backdoor"](factor=3).say(seen(rows, [1])), 3 * rows[[1]])
    assert np.array_equal(ATTACKS["backdoor"]().say(seen(rows, [1, 2])), 5 * rows[[1, 2]])


def test_gaussian_noise_has_the_attackers_mean_and_spread() -> None:
    """Twenty attackers, so each coordinate has a mean and a spread of its own; standardised, the
    noise is N(0, 1).
    """
    rows = rows_of(30, 3000, dtype=np.float64)
    said = ATTACKS["gaussian"]().say(seen(rows, list(range(20))))
    scores = np.empty_like(said)
    for k in range(3000):
        own = rows[:20, k]
        middle = sum(own) / 20
        spread = (sum((value - middle) ** 2 for value in own) / 20) ** 0.5
        scores[:, k] = (said[:, k] - middle) / spread
    assert min(kstest(row, "norm").pvalue for row in scores) > 0.001
    assert abs(np.corrcoef(scores)[0, 1]) < 0.1


def test_gaussian_noise_has_an_address() -> None:
    rows = rows_of(6, 100)
    said = [ATTACKS["gaussian"]().say(seen(rows, [1, 2], t=t)) for t in (3, 3, 4)]
    assert np.array_equal(said[0], said[1])
    assert not np.any(said[0] == said[2])
    assert not np.any(said[0][0] == said[0][1])
    assert np.array_equal(
        ATTACKS["gaussian"]().say(seen(rows, [2])), rows[[2]]
    )  # one has no spread


# --- lies in the data
# -------------------------------------------------------------------------------------------------


def test_label_flip() -> None:
    inputs, labels = np.arange(8).reshape(4, 2), np.array([0, 1, 8, 9])
    learnt, flipped = ATTACKS["label_flip"]().poison(inputs, labels, 10)
    assert learnt is inputs
    assert flipped.tolist() == [9, 8, 1, 0]
    assert not ATTACKS["label_flip"]().speaks
    with pytest.raises(InputError, match="label_flip needs labels that are classes"):
        ATTACKS["label_flip"]().poison(inputs, labels / 2, 0)


@pytest.mark.parametrize("white", [np.uint8(255), np.uint8(16), np.float32(2.5)])
def test_the_trigger_is_a_white_square_in_a_corner(white: Any) -> None:
    images = np.random.default_rng(0).random((10, 3, 6, 5)).astype(white.dtype)
    images[3, 1, 2, 2] = white
    before, labels = images.copy(), np.arange(10) % 4
    marked, targets = _not_none(ATTACKS["backdoor"](target=2, size=2).triggered(images, labels))
    assert marked.dtype == images.dtype
    assert targets.tolist() == [2] * 8
    assert np.all(marked[:, :, 4:, 3:] == white)
    kept = images[labels != 2]
    assert np.array_equal(marked[:, :, :4], kept[:, :, :4])
    assert np.array_equal(marked[:, :, :, :3], kept[:, :, :, :3])
    assert np.array_equal(images, before)


def test_the_trigger_without_height_and_width() -> None:
    marked, _ = _not_none(
        ATTACKS["backdoor"](size=2).triggered(np.arange(30.0).reshape(3, 10), np.array([1, 2, 3]))
    )
    assert marked.tolist() == [[*range(10 * i, 10 * i + 6), *[29] * 4] for i in range(3)]


def test_a_share_of_the_attackers_examples_is_poisoned() -> None:
    images, labels = (
        np.random.default_rng(0).integers(0, 256, (10, 1, 8, 8), np.uint8),
        np.arange(10),
    )
    before = images.copy()
    learnt, taught = ATTACKS["backdoor"](target=7, share=0.25).poison(images, labels, 10)
    assert taught.tolist() == [7, 1, 2, 7, 4, 5, 7, 7, 8, 9]
    changed = np.flatnonzero(np.any(learnt != images, axis=(1, 2, 3)))
    assert changed.tolist() == [0, 3, 6]
    assert np.all(learnt[changed, :, 5:, 5:] == images.max())
    assert np.array_equal(images, before)
    assert labels.tolist() == list(range(10))
    assert ATTACKS["backdoor"](share=1.0).poison(images, labels, 10)[1].tolist() == [0] * 10
    assert len(ATTACKS["backdoor"]().poison(images[:0], labels[:0], 10)[1]) == 0


def test_other_attacks_leave_the_data_alone() -> None:
    inputs, labels = np.zeros((2, 3)), np.array([0, 1])
    for name in sorted(set(ATTACKS) - {"label_flip", "backdoor"}):
        learnt = ATTACKS[name]().poison(inputs, labels, 2)
        assert learnt[0] is inputs
        assert learnt[1] is labels
        assert ATTACKS[name]().triggered(inputs, labels) is None


def _not_none(pair: tuple[NDArray[Any], NDArray[Any]] | None) -> tuple[NDArray[Any], NDArray[Any]]:
    assert pair is not None
    return pair


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("scale", "factor", float("inf")),
        ("backdoor", "target", -1),
        ("backdoor", "share", 0.0),
        ("backdoor", "size", 0),
        ("backdoor", "factor", float("nan")),
        ("ipm", "eps", 0.0),
        ("dissensus", "eps", -1.0),
        ("alie", "z", float("nan")),
    ],
)
def test_bad_options(name: str, option: str, value: float) -> None:
    with pytest.raises(InputError) as raised:
        ATTACKS[name](**{option: value})
    assert str(raised.value).startswith(f"--attack {name}: {option} must be ")
    assert str(raised.value).endswith(f", not {value}")


def test_what_the_data_cannot_bear() -> None:
    images, labels = np.zeros((4, 1, 8, 8)), np.arange(4)
    with pytest.raises(InputError, match="target must be a label, from 0 to 3, not 4"):
        ATTACKS["backdoor"](target=4).poison(images, labels, 4)
    with pytest.raises(InputError, match="size must be smaller, for inputs of 8 x 8, not 8"):
        ATTACKS["backdoor"](size=8).poison(images, labels, 4)
    with pytest.raises(InputError, match="size must be smaller, for inputs of 64, not 8"):
        ATTACKS["backdoor"](size=8).poison(images.reshape(4, 64), labels, 4)


def test_a_trigger_is_the_same_wherever_it_is_seen() -> None:
    """White is what the run says it is, not the largest value of a peer's own examples."""
    marked = ATTACKS["backdoor"](size=1).knowing(9.0)
    dark = np.zeros((2, 1, 4, 4))
    inputs, _ = marked.poison(dark, np.array([1, 1]), 3)
    shown = marked.triggered(dark, np.array([1, 1]))
    assert shown is not None
    assert inputs[0, 0, -1, -1] == shown[0][1, 0, -1, -1] == 9.0
