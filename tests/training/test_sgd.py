"""Batches, orders of examples, groups of peers and learning rates of local training."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dfl
from dfl.comm.mpi import World
from dfl.core import randomness
from dfl.simulation.initialization import start
from dfl.simulation.prepare import prepare
from dfl.training.batches import GROUP_NUMBERS, _Orders, batches, group_size, groups, widths
from dfl.training.sgd import sgd, sgd_with_momentum
from tests.algorithms.test_identities import part
from tests.support.quadratic import H, centres, digits, final, quadratic


def test_every_epoch_uses_every_example_once() -> None:
    setting = digits(partition="dirichlet:alpha=0.3", local_epochs=3, batch_size=4)
    seen = np.zeros(int(setting.task.examples.sizes.sum()), int)
    for group in groups(setting.task):
        own = group[
            int(len(group) > 1 and group[0] == group[1]) :
        ]  # a duplicate of a peer trains the same
        for batch in batches(setting.task, 1, own):
            np.add.at(seen, batch.index[batch.weight.expand(batch.index.shape) > 0].numpy(), 1)
            assert torch.allclose(batch.weight.sum(1), torch.ones(1))
    assert (seen == 3).all()


def test_rounds_and_peers_shuffle_differently() -> None:
    setting = digits(batch_size=0)
    first, second = (next(batches(setting.task, t, np.arange(6))).index for t in (0, 1))
    assert not torch.equal(first, second)
    own = first - torch.from_numpy(setting.task.examples.starts[:, None])
    assert len({tuple(row) for row in own.tolist()}) == 6


def test_every_epoch_has_an_order_of_its_own() -> None:
    setting = digits(batch_size=0, local_epochs=2)
    first, second = (batch.index for batch in batches(setting.task, 0, np.arange(6)))
    assert torch.equal(first.sort().values, second.sort().values)
    assert all(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("constant", [1, 1, 1, 1]),
        ("exponential:decay=0.5", [1, 0.5, 0.25, 0.125]),
        ("step:every=2,factor=0.1", [1, 1, 0.1, 0.1]),
        (
            "cosine:floor=0.2",
            [1, 0.2 + 0.8 * (1 + 2**-0.5) / 2, 0.6, 0.2 + 0.8 * (1 - 2**-0.5) / 2],
        ),
    ],
)
def test_a_schedule_scales_the_steps(schedule: str, factors: list[float]) -> None:
    """On a quadratic with h = 0.7 a step with learning rate lr moves x by lr * h * (c - x)."""
    setting = quadratic(
        lr_schedule=schedule, local_epochs=1, rounds=4, mixing="metropolis", peers=1
    )
    solver = setting.task.solver
    assert [solver.lr(t) for t in range(4)] == pytest.approx([0.1 * f for f in factors])
    left = 1.0
    for factor in factors:
        left *= 1 - 0.1 * factor * 0.7
    c = setting.task.examples.inputs[0]
    assert torch.allclose(final(setting, 4)[0], c * (1 - left), rtol=0, atol=1e-12)


def test_batch_norm_and_dropout_are_refused() -> None:
    from dfl.core.errors import InputError
    from dfl.models.parameter_layout import ParameterLayout

    for layer, advice in ((nn.BatchNorm1d(4), "GroupNorm"), (nn.Dropout(0.1), "p=0")):
        with pytest.raises(InputError, match=advice):
            ParameterLayout.of(nn.Sequential(nn.Linear(4, 4), layer))
    assert (
        ParameterLayout.of(nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.Dropout(0.0))).d
        == 28
    )


def test_full_batches_are_padded_to_powers_of_two() -> None:
    """A peer's padding depends on its number of examples and the largest one, not on its rank."""
    sizes = np.array([1, 3, 4, 5, 17, 100])
    assert widths(sizes, 0).tolist() == [1, 4, 4, 8, 32, 100]
    assert widths(sizes, 10).tolist() == [10] * 6
    assert widths(sizes[:3], 10).tolist() == [4] * 3


@pytest.mark.parametrize("batch_size", [0, 4])
def test_groups_hold_every_peer_once_by_falling_steps(batch_size: int) -> None:
    setting = digits(partition="dirichlet:alpha=0.3", batch_size=batch_size, local_epochs=2)
    task, seen = setting.task, []
    for group in groups(task):
        assert (np.diff(task.steps[group]) <= 0).all()
        assert len(set(task.padded[group])) == 1
        seen += group.tolist()
    assert sorted(seen) == list(range(6))


def test_the_peer_with_the_most_steps_has_a_duplicate_if_needed() -> None:
    setting = digits(
        partition="dirichlet:alpha=0.3", batch_size=1, local_epochs=2
    )  # products with vectors
    assert not setting.task.bit_equal_alone
    for group in groups(setting.task):
        steps = setting.task.steps[group]
        assert steps[0] == steps[1]
        assert len(set(group)) >= len(group) - 1


def test_only_the_orders_of_current_epochs_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fixed number of steps, peers with few examples train for many epochs."""
    setting = digits(partition="dirichlet:alpha=0.3", local_steps=40, batch_size=5)
    epochs = setting.task.steps // setting.task.per_epoch
    in_memory: list[int] = []
    assert epochs.max() >= 8
    of = _Orders.of

    def noted(orders: _Orders, low: int, high: int) -> torch.Tensor:
        found = of(orders, low, high)
        in_memory.append(len(found))
        return found

    monkeypatch.setattr(_Orders, "of", noted)
    seen: list[list[int]] = [[] for _ in range(6)]
    (group,) = groups(setting.task)
    for batch in batches(setting.task, 0, group):
        for peer, own, weight in zip(group, batch.index, batch.weight, strict=True):
            seen[peer] += own[weight > 0].tolist()
    assert max(in_memory) < epochs.max()
    for i, size in enumerate(setting.task.examples.sizes):
        whole = [seen[i][k : k + size] for k in range(0, len(seen[i]) - size + 1, size)]
        assert all(len(set(epoch)) == size for epoch in whole)
        assert len({tuple(epoch) for epoch in whole}) == len(whole) or size < 3


def test_chunks_bound_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = digits(peers=9)
    monkeypatch.setitem(GROUP_NUMBERS, "cpu", 4 * max(setting.task.parameter_layout.d, 640))
    assert [len(group) for group in groups(setting.task)] == [4, 4, 1]
    one_by_one = digits(peers=9, engine="loop")
    assert [len(group) for group in groups(one_by_one.task)] == [1] * 9


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(
    "settings",
    [
        {"partition": "dirichlet:alpha=0.3", "local_epochs": 2, "batch_size": 4},
        {"partition": "dirichlet:alpha=0.3", "batch_size": 0, "local_steps": 3},
        {"model": "cnn", "examples_per_peer": 7, "batch_size": 3},
        {"examples_per_peer": 7, "batch_size": 3},
        {"examples_per_peer": 7, "batch_size": 3, "down": True},
    ],
    ids=["unequal", "all examples", "convolutions", "equal", "some are down"],
)
def test_groups_of_fixed_size_train_the_same_models(settings: dict[str, Any], size: int) -> None:
    """A GPU has such groups; on a processor the bits do not depend on the size."""
    settings = dict(settings)
    down = settings.pop("down", False)
    task = digits(**settings).task
    task = replace(task, solver=replace(task.solver, batched=True))
    if down:
        task = task.paced(np.array([1, 0, 0.5, 1, 0, 0.2]))
    fixed = replace(task, solver=replace(task.solver, group_size=size))
    assert {len(group) for group in groups(fixed)} == {size}
    assert {int(i) for group in groups(fixed) for i in group} == set(range(6))
    for group in groups(fixed):
        assert {len(batch.index) for batch in batches(fixed, 2, group)} <= {size}
    torch.manual_seed(0)
    x, momentum = 0.1 * torch.randn(2, 6, task.parameter_layout.d)
    if size > 1:  # a lone matrix is multiplied in another way
        assert torch.equal(sgd(x, fixed, 2, momentum), sgd(x, task, 2, momentum))
        for own, wanted in zip(
            sgd_with_momentum(x, momentum, fixed, 2),
            sgd_with_momentum(x, momentum, task, 2),
            strict=True,
        ):
            assert torch.equal(own, wanted)


@pytest.mark.parametrize(
    ("peers", "most", "size"), [(16, 200, 16), (1000, 218, 200), (7, 3, 3), (1, 2, 1), (9, 8, 5)]
)
def test_peers_are_shared_out_evenly_among_groups(peers: int, most: int, size: int) -> None:
    assert group_size(peers, most) == size
    assert -(-peers // size) == -(-peers // most)


def test_groups_are_bounded_by_the_states_of_recurrent_layers() -> None:
    """Peers of 10 examples, 128 steps and a width of 32: 12 of them have 2**19 states."""
    x, y = np.zeros((300, 3, 128), np.float32), np.arange(300) % 2
    run = dfl.Run(
        dataset=dfl.Data(x, y, x[:9], y[:9], classes=2), peers=30, batch_size=10, engine="batched",
        model="har_lstm:hidden=32,layers=1",
    )  # fmt: skip
    assert [len(group) for group in groups(prepare(run, World()).task)] == [12, 12, 6]


def test_floats_are_normalised_once_and_bytes_when_they_are_used() -> None:
    setting = digits()
    raw = setting.task.examples.inputs
    assert raw.dtype == torch.uint8
    assert torch.allclose(
        setting.task.inputs(raw), (raw - 0.0) * setting.task.scale + setting.task.shift
    )
    floats = quadratic(d=3).task
    assert floats.inputs(floats.examples.inputs) is floats.examples.inputs


@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_examples_draw_by_address(engine: str) -> None:
    """Random numbers depend on peer, round, step and position in the batch, not on the other peers
    of the group, duplicates or padding.
    """
    task = digits(
        partition="dirichlet:alpha=0.3", batch_size=7, local_epochs=2, engine=engine, seed=5
    ).task
    taken = [
        (group, k, batch)
        for group in groups(task)
        for k, batch in enumerate(batches(task, 3, group))
    ]
    for group, k, batch in taken:
        drawn = batch.draw("test", 2, 3)
        assert drawn.shape == (*batch.index.shape, 2, 3)
        alone = randomness.uniform(5, "test", task.peers[group], 3, k, n=7 * 6).view(-1, 7, 2, 3)
        assert torch.equal(drawn, alone[: len(drawn), : drawn.shape[1]])
    assert sum(len(batch.index) for *_, batch in taken) >= task.steps.sum()


@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_an_epoch_has_every_example_once_and_padding_repeats_one_of_the_batch(engine: str) -> None:
    """So it is for every peer, in each of two epochs, whose orders differ."""
    task = digits(
        partition="dirichlet:alpha=0.3", batch_size=7, local_epochs=2, engine=engine, seed=5
    ).task
    taken: dict[int, list[tuple[int, int]]] = {peer: [] for peer in task.peers.tolist()}
    for group in groups(task):
        for batch in batches(task, 3, group):
            peers, weights = batch.peers[: batch.moving], batch.weight.expand(batch.index.shape)
            for peer, index, weight in zip(peers, batch.index, weights, strict=True):
                real = weight > 0
                assert weight[real].tolist() == pytest.approx([1 / int(real.sum())] * real.sum())
                assert set(index[~real].tolist()) <= set(index[real].tolist())
                taken[int(peer)] += [(batch.k, i) for i in index[real].tolist()]
    for peer, begin, size in zip(
        task.peers, task.examples.starts, task.examples.sizes, strict=True
    ):
        own, per_epoch = list(dict.fromkeys(taken[int(peer)])), -(-size // 7)  # no duplicates
        epochs = [[i for k, i in own if k // per_epoch == e] for e in (0, 1)]
        assert [sorted(each) for each in epochs] == [list(range(begin, begin + size))] * 2
        assert epochs[0] != epochs[1] or size < 3
        assert len(own) == 2 * size


def test_random_numbers_differ_by_purpose() -> None:
    batch = next(batches(digits().task, 0, np.arange(6)))
    one, other, wide = batch.draw("one"), batch.draw("other"), batch.draw("one", 4)
    assert one.shape == batch.index.shape
    assert not torch.equal(one, other)
    assert torch.equal(
        one, wide.flatten(1)[:, : one.shape[1]]
    )  # a wide draw starts with the numbers of a narrow one
    assert 0 <= float(wide.min()) < float(wide.max()) < 1


@pytest.mark.parametrize("factor", [np.float32(1), 1])
def test_a_schedule_may_return_any_number(factor: Any) -> None:
    """The rate of an own schedule, with a model that torch differentiates."""
    settings: dict[str, Any] = {
        "model": "cnn",
        "examples_per_peer": 4,
        "lr": 1,
        "weight_decay": 0.01,
    }
    given = digits(lr_schedule=lambda t, rounds: factor, **settings)
    assert torch.equal(final(given, 1), final(digits(**settings), 1))


def test_a_kept_momentum_outlives_a_round_without_a_rate() -> None:
    """m <- theta m + g + c and y <- y - lr m: with lr = 0 models stay, and the momentum grows."""
    setting = quadratic(lr_schedule=lambda t, rounds: float(t > 0), momentum=0.5, local_epochs=2)
    x = torch.ones(8, 5, dtype=torch.float64)
    m, c = torch.full_like(x, 2.0), torch.full_like(x, 3.0)
    g = H * (x - centres(setting))
    z, kept = sgd_with_momentum(x, m, setting.task, 0, c)
    assert torch.equal(z, x)
    assert torch.allclose(kept, 0.5 * (0.5 * m + g + c) + g + c, rtol=0, atol=1e-12)
    z, kept = sgd_with_momentum(x, m, setting.task, 1, c)
    first = 0.5 * m + g + c
    second = 0.5 * first + H * (x - 0.1 * first - centres(setting)) + c
    assert torch.allclose(kept, second, rtol=0, atol=1e-12)
    assert torch.allclose(z, x - 0.1 * (first + second), rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_ascent_does_not_depend_on_the_other_peers(engine: str) -> None:
    uneven = {"partition": "dirichlet:alpha=0.3", "init": "independent", "weight_decay": 0.01}
    setting = digits(algorithm="dfedsam:rho=0.5", engine=engine, **uneven)
    x = start(setting.run, setting.task, False)
    together = sgd(x, setting.task, 3)
    plain = replace(setting.task, solver=replace(setting.task.solver, sam_rho=0.0))
    assert not torch.allclose(sgd(x, plain, 3), together, rtol=0, atol=1e-4)
    for first, stop in ((0, 1), (1, 3), (2, 6), (5, 6)):
        assert torch.equal(sgd(x[first:stop], part(setting, first, stop), 3), together[first:stop])
