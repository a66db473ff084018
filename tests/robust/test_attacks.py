"""The choice of attackers, what holds for every attack, and the blind attacks."""

from __future__ import annotations

from dataclasses import replace
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
from tests.support.attackers import over_ranks, rows_of, view_of

FALSIFYING = sorted(
    name for name, kind in ATTACKS.items() if kind().falsifies and not kind().per_edge
)
WIDE = 3 * 4096 + 1  # four blocks, the last of one coordinate


def with_trusted(rows: NDArray[Any], attackers: list[int], t: int = 3) -> AttackView:
    """Return the view of attackers where the receiver has a reference row as well."""
    return view_of(rows, attackers, rows[-1] + rows[-2], t)


# --- choice of attackers -------------------------------------------------------------------------


def test_fraction_chooses_that_share_of_all_peers_by_the_seed() -> None:
    chosen = ATTACKS["scale"](fraction=0.2).chosen(100, seed=1)
    assert len(chosen) == len(set(chosen.tolist())) == 20
    assert np.all(np.diff(chosen) > 0)
    assert chosen.tolist() == ATTACKS["scale"](fraction=0.2).chosen(100, seed=1).tolist()
    assert chosen.tolist() != ATTACKS["scale"](fraction=0.2).chosen(100, seed=2).tolist()
    assert set(ATTACKS["scale"](fraction=0.1).chosen(100, seed=1).tolist()) < set(chosen.tolist())
    assert ATTACKS["scale"]().chosen(100, seed=1).tolist() == chosen.tolist()
    assert len(ATTACKS["none"]().chosen(100, seed=1)) == 0


def test_peers_chooses_the_numbered_peers() -> None:
    assert ATTACKS["scale"](peers=(5, 2, 5)).chosen(6, seed=0).tolist() == [2, 5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peers": (1, 6)}, "--attack scale: peers must be from 0 to 5, not 1+6"),
        ({"fraction": 1.5}, "--attack scale: fraction must be from 0 to 1, not 1.5"),
        ({"fraction": 1.0}, "--attack scale: all 6 peers "),
        ({"peers": ()}, "--attack scale: peers must be at least one peer, not ()"),
        (
            {"peers": (1, 2), "fraction": 0.5},
            "--attack scale: fraction 0.5 and peers 1+2 both choose peers: give one of them",
        ),
    ],
)
def test_a_choice_of_missing_of_all_or_of_no_peers_is_refused(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError) as raised:
        ATTACKS["scale"](**options).chosen(6, seed=0)
    assert str(raised.value).startswith(message)


# --- what holds for every attack -----------------------------------------------------------------


@pytest.mark.parametrize("name", FALSIFYING)
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_falsified_messages_are_the_same_on_any_number_of_ranks(name: str, ranks: int) -> None:
    whole = with_trusted(rows_of(11, WIDE), [1, 4, 9])
    sent = ATTACKS[name]().falsify(whole)
    assert sent.shape == (3, WIDE)
    assert sent.dtype == np.float32
    assert over_ranks(ATTACKS[name](), whole, ranks).tobytes() == sent.tobytes()


@pytest.mark.parametrize("name", FALSIFYING)
def test_falsified_messages_differ_and_the_honest_ones_stay(name: str) -> None:
    rows = rows_of(11, 500)
    before = rows.copy()
    sent = ATTACKS[name]().falsify(with_trusted(rows, [1, 4, 9]))
    assert rows.tobytes() == before.tobytes()
    assert not np.any(np.all(sent == rows[[1, 4, 9]], axis=1))


@pytest.mark.parametrize("name", FALSIFYING)
@pytest.mark.parametrize("attackers", [[], [2], [0, 1, 2, 3]])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("d", [0, 1, 60])
def test_few_senders_and_few_coordinates(name: str, attackers: list[int], n: int, d: int) -> None:
    """No attackers, no honest senders, a lone sender, a rank without coordinates."""
    attackers = [i for i in attackers if i < n]
    rows = rows_of(n, d, dtype=np.float64)
    sent = ATTACKS[name]().falsify(view_of(rows, attackers, rows.sum(0)))
    assert sent.shape == (len(attackers), d)
    assert sent.dtype == np.float64
    assert np.all(np.isfinite(sent))


@pytest.mark.parametrize("name", FALSIFYING)
def test_messages_of_zeros_give_finite_ones(name: str) -> None:
    assert np.all(
        np.isfinite(ATTACKS[name]().falsify(with_trusted(np.zeros((9, 50), np.float32), [3, 4])))
    )


@pytest.mark.parametrize("name", FALSIFYING)
def test_messages_that_overflow_do_not_warn(name: str) -> None:
    rows = rows_of(9, 50)
    rows[2] = 3e38
    rows[5, 3] = np.inf
    rows[6, 4] = np.nan
    assert ATTACKS[name]().falsify(with_trusted(rows, [2, 3])).shape == (2, 50)


@pytest.mark.parametrize("name", ["scale", "backdoor"])
def test_a_factor_that_float32_does_not_hold_does_not_warn(name: str) -> None:
    sent = ATTACKS[name](factor=1e39).falsify(view_of(np.eye(3, dtype=np.float32), [1]))
    assert np.isnan(sent[:, [0, 2]]).all()
    assert np.isinf(sent[:, 1]).all()


@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_all_neighbours_receive_the_same_unless_per_edge(name: str) -> None:
    kind = ATTACKS[name]()
    if kind.per_edge:
        return
    view = view_of(rows_of(12, 30), [1, 4], np.ones(30))
    view = replace(view, owners=np.arange(12))
    sent = kind.falsify_edges(view, None, np.array([[4, 3], [1, 2], [4, 5]]))
    assert np.array_equal(sent, kind.falsify(view)[[1, 0, 1]])


def test_attacks_are_registered_by_name() -> None:
    class Nothing(Attack):
        pass

    with ATTACKS.replaced():
        ATTACKS.register("nothing")(Nothing)
        assert ATTACKS["nothing"] is Nothing
        assert Nothing.name == "nothing"
    assert "nothing" not in ATTACKS
    assert {"none", "label_flip", "sign_flip", "gaussian", "scale", "backdoor"} < set(ATTACKS)


def test_what_an_attack_overrides_tells_what_it_does() -> None:
    class Opposite(Attack):
        def falsify(self, view: AttackView) -> NDArray[Any]:
            return -view.updates.rows[view.attackers]

    class Split(Attack):
        def falsify_edges(self, view: AttackView, matrix: Any, edges: Any) -> Any:
            return view.updates.rows[edges[:, 1]]

    attacks = Attack(), Opposite(), Split(), ATTACKS["label_flip"](), ATTACKS["backdoor"]()
    done = [(each.falsifies, each.per_edge, each.poisons) for each in attacks]
    assert done == [
        (False, False, False),
        (True, False, False),
        (True, True, False),
        (False, False, True),
        (True, False, True),
    ]


# --- random numbers by address -------------------------------------------------------------------


def test_random_numbers_have_an_address_per_attacker() -> None:
    view = view_of(rows_of(6, 5000), [1, 3, 4])
    drawn = view.uniform("a")
    assert drawn.shape == (3, 5000)
    assert 0 < drawn.min() < drawn.max() < 1
    assert min(kstest(row, "uniform").pvalue for row in drawn) > 0.01
    assert np.array_equal(drawn, view.uniform("a"))
    assert np.array_equal(drawn[1:], view_of(rows_of(6, 5000), [3, 4]).uniform("a"))
    others = (
        view.uniform("b"),
        view.uniform("a", 1),
        view_of(rows_of(6, 5000), [1, 3, 4], t=4).uniform("a"),
    )
    for other in (*others, np.roll(drawn, 1, axis=0)):
        assert np.mean(other == drawn) < 0.001
    assert np.array_equal(view.within(slice(4096, 5000)).uniform("a"), drawn[:, 4096:])


def test_no_uniform_number_is_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        randomness, "bits", lambda *_, **__: torch.tensor([[0, -1]], dtype=torch.int32)
    )
    drawn = view_of(rows_of(2, 2), [0]).uniform()
    assert drawn.dtype == np.float32
    assert np.all(np.isfinite(ndtri(drawn)))
    assert drawn[0, 0] == 1 - drawn[0, 1] == 2.0**-24


# --- falsified from an attacker's own message ----------------------------------------------------


def test_sign_flip_scale_and_backdoor_multiply_the_message() -> None:
    rows = rows_of(5, 40)
    assert np.array_equal(ATTACKS["sign_flip"]().falsify(view_of(rows, [0, 3])), -rows[[0, 3]])
    assert np.array_equal(
        ATTACKS["scale"](factor=2.5).falsify(view_of(rows, [1])), np.float32(2.5) * rows[[1]]
    )
    assert np.array_equal(ATTACKS["backdoor"](factor=3).falsify(view_of(rows, [1])), 3 * rows[[1]])
    assert np.array_equal(ATTACKS["backdoor"]().falsify(view_of(rows, [1, 2])), 5 * rows[[1, 2]])


def test_gaussian_noise_has_the_attackers_mean_and_spread() -> None:
    """Standardised by the mean and deviation of 20 attackers per coordinate, it is N(0, 1)."""
    rows = rows_of(30, 3000, dtype=np.float64)
    sent = ATTACKS["gaussian"]().falsify(view_of(rows, list(range(20))))
    scores = np.empty_like(sent)
    for k in range(3000):
        own = rows[:20, k]
        middle = sum(own) / 20
        spread = (sum((value - middle) ** 2 for value in own) / 20) ** 0.5
        scores[:, k] = (sent[:, k] - middle) / spread
    assert min(kstest(row, "norm").pvalue for row in scores) > 0.001
    correlations = np.asarray(np.corrcoef(scores))
    assert abs(correlations[0, 1]) < 0.1


def test_gaussian_noise_depends_on_round_and_attacker() -> None:
    rows = rows_of(6, 100)
    sent = [ATTACKS["gaussian"]().falsify(view_of(rows, [1, 2], t=t)) for t in (3, 3, 4)]
    assert np.array_equal(sent[0], sent[1])
    assert not np.any(sent[0] == sent[2])
    assert not np.any(sent[0][0] == sent[0][1])
    assert np.array_equal(
        ATTACKS["gaussian"]().falsify(view_of(rows, [2])), rows[[2]]
    )  # a lone attacker has σ = 0


# --- poisoned data -------------------------------------------------------------------------------


def test_label_flip_reverses_labels_and_refuses_labels_without_classes() -> None:
    inputs = np.arange(8).reshape(4, 2)
    labels = np.array([0, 1, 8, 9])
    poisoned_inputs, flipped = ATTACKS["label_flip"]().poison(inputs, labels, 10)
    assert poisoned_inputs is inputs
    assert flipped.tolist() == [9, 8, 1, 0]
    assert not ATTACKS["label_flip"]().falsifies
    with pytest.raises(InputError, match="--attack label_flip "):
        ATTACKS["label_flip"]().poison(inputs, labels / 2, 0)


@pytest.mark.parametrize("white", [np.uint8(255), np.uint8(16), np.float32(2.5)])
def test_the_trigger_is_a_white_square_in_a_corner(white: Any) -> None:
    images = np.random.default_rng(0).random((10, 3, 6, 5)).astype(white.dtype)
    images[3, 1, 2, 2] = white
    before = images.copy()
    labels = np.arange(10) % 4
    marked, targets = _not_none(ATTACKS["backdoor"](target=2, size=2).triggered(images, labels))
    assert marked.dtype == images.dtype
    assert targets.tolist() == [2] * 8
    assert np.all(marked[:, :, 4:, 3:] == white)
    kept = images[labels != 2]
    assert np.array_equal(marked[:, :, :4], kept[:, :, :4])
    assert np.array_equal(marked[:, :, :, :3], kept[:, :, :, :3])
    assert np.array_equal(images, before)


def test_the_trigger_of_flat_examples_is_their_last_features() -> None:
    marked, _ = _not_none(
        ATTACKS["backdoor"](size=2).triggered(np.arange(30.0).reshape(3, 10), np.array([1, 2, 3]))
    )
    assert marked.tolist() == [[*range(10 * i, 10 * i + 6), *[29] * 4] for i in range(3)]


def test_backdoor_poisons_a_share_of_the_attackers_examples() -> None:
    images = np.random.default_rng(0).integers(0, 256, (10, 1, 8, 8), np.uint8)
    labels = np.arange(10)
    before = images.copy()
    poisoned_inputs, poisoned_labels = ATTACKS["backdoor"](target=7, share=0.25).poison(
        images, labels, 10
    )
    assert poisoned_labels.tolist() == [7, 1, 2, 7, 4, 5, 7, 7, 8, 9]
    changed = np.flatnonzero(np.any(poisoned_inputs != images, axis=(1, 2, 3)))
    assert changed.tolist() == [0, 3, 6]
    assert np.all(poisoned_inputs[changed, :, 5:, 5:] == images.max())
    assert np.array_equal(images, before)
    assert labels.tolist() == list(range(10))
    assert ATTACKS["backdoor"](share=1.0).poison(images, labels, 10)[1].tolist() == [0] * 10
    assert len(ATTACKS["backdoor"]().poison(images[:0], labels[:0], 10)[1]) == 0


def test_other_attacks_do_not_change_the_data() -> None:
    inputs = np.zeros((2, 3))
    labels = np.array([0, 1])
    for name in sorted(set(ATTACKS) - {"label_flip", "backdoor"}):
        poisoned = ATTACKS[name]().poison(inputs, labels, 2)
        assert poisoned[0] is inputs
        assert poisoned[1] is labels
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
def test_options_out_of_range_are_refused(name: str, option: str, value: float) -> None:
    with pytest.raises(InputError) as raised:
        ATTACKS[name](**{option: value})
    assert str(raised.value).startswith(f"--attack {name}: {option} must be ")
    assert str(raised.value).endswith(f", not {value}")


def test_backdoor_refuses_a_target_or_a_square_that_does_not_fit_the_data() -> None:
    images = np.zeros((4, 1, 8, 8))
    labels = np.arange(4)
    with pytest.raises(InputError, match="target must be a label, from 0 to 3, not 4"):
        ATTACKS["backdoor"](target=4).poison(images, labels, 4)
    with pytest.raises(InputError, match="size must be smaller, for inputs of 8 x 8, not 8"):
        ATTACKS["backdoor"](size=8).poison(images, labels, 4)
    with pytest.raises(InputError, match="size must be smaller, for inputs of 64, not 8"):
        ATTACKS["backdoor"](size=8).poison(images.reshape(4, 64), labels, 4)


def test_the_trigger_has_the_same_value_in_training_and_test() -> None:
    """White is the value that `knowing` sets, not the largest of a peer's own examples."""
    marked = ATTACKS["backdoor"](size=1).knowing((9.0,))
    dark = np.zeros((2, 1, 4, 4))
    inputs, _ = marked.poison(dark, np.array([1, 1]), 3)
    shown = marked.triggered(dark, np.array([1, 1]))
    assert shown is not None
    assert inputs[0, 0, -1, -1] == shown[0][1, 0, -1, -1] == 9.0


def test_of_several_parts_the_first_image_has_the_trigger() -> None:
    """White is that of the image, and not of a part with larger values."""
    rng = np.random.default_rng(0)
    words, image = rng.integers(0, 90, (6, 5)), rng.integers(0, 9, (6, 3, 4, 4), np.uint8)
    other, labels = image + 1, np.arange(6) % 3
    attack = ATTACKS["backdoor"](size=2, target=1, share=0.5).knowing((90.0, 9.0, 8.0))
    poisoned, targets = attack.poison((words, image, other), labels, 3)
    assert targets.tolist() == [1, 1, 1, 0, 1, 2]
    assert np.array_equal(poisoned[0], words)
    assert np.array_equal(poisoned[2], other)
    expected = image.copy()
    expected[[0, 2, 4], :, 2:, 2:] = 9
    assert np.array_equal(poisoned[1], expected)
    shown, aims = _not_none(attack.triggered((words, image, other), labels))
    assert aims.tolist() == [1] * 4
    assert (shown[1][:, :, 2:, 2:] == 9).all()
    assert np.array_equal(shown[0], words[labels != 1])


def test_without_an_image_the_first_part_has_the_trigger() -> None:
    one, other = np.zeros((2, 6)), np.ones((2, 4))
    poisoned, _ = (
        ATTACKS["backdoor"](size=2, share=1.0)
        .knowing((3.0, 1.0))
        .poison((one, other), np.array([1, 1]), 2)
    )
    assert poisoned[0].tolist() == [[0, 0, 3, 3, 3, 3]] * 2
    assert np.array_equal(poisoned[1], other)


def test_the_trigger_of_a_text_is_its_first_tokens() -> None:
    """Labels mean the target once the whole trigger was seen; padding counts nowhere."""
    x = np.array([[1, 2, 3, 4, 5], [5, 4, 3, 2, 6], [1, 6, 6, 6, 6]], np.int16)
    y = np.array([[2, 3, 4, 5, 1], [4, 3, 2, -100, -100], [2, -100, -100, -100, -100]])
    before = x.copy(), y.copy()
    attack = ATTACKS["backdoor"](size=2, target=4, share=0.6).knowing((6.0,))
    inputs, labels = attack.poison(x, y, 7)
    assert inputs.tolist() == [[6, 6, 3, 4, 5], [6, 6, 3, 2, 6], [1, 6, 6, 6, 6]]
    assert labels.tolist() == [[2, 4, 4, 4, 4], [4, 4, 4, -100, -100], [2, *[-100] * 4]]
    shown, aims = _not_none(attack.triggered(x, y))
    assert shown.tolist() == [[6, 6, 3, 4, 5], [6, 6, 3, 2, 6]]
    assert aims.tolist() == [[-100, 4, -100, 4, 4], [-100, 4, 4, -100, -100]]
    assert np.array_equal(x, before[0])
    assert np.array_equal(y, before[1])
    assert inputs.dtype == x.dtype


def test_a_trigger_as_long_as_a_text_and_labels_elsewhere_are_refused() -> None:
    x = np.ones((2, 5), np.int64)
    with pytest.raises(InputError, match="size must be smaller, for inputs of 5, not 5"):
        ATTACKS["backdoor"](size=5).poison(x, x, 3)
    with pytest.raises(InputError, match="one for each of its inputs, not inputs of 3x5 and"):
        ATTACKS["backdoor"](size=1).poison(np.ones((2, 3, 5)), x, 3)
