"""Recurrent models of text: tokens, initial values, engines, and what they learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dfl
from dfl.comm.mpi import World
from dfl.models.parameter_layout import ParameterLayout, draw
from dfl.models.zoo import MODELS
from dfl.simulation.prepare import prepare
from tests.conftest import Command

LSTM = "char_lstm:hidden=8,embedding=4"


def rows(n: int, seed: int) -> tuple[Any, Any]:
    """Return characters (n, 6) from 0 to 4, and the one that follows: the second, again."""
    x = np.random.default_rng(seed).integers(5, size=(n, 6)).astype(np.uint8)
    return x, x[:, 1].astype(np.int64)


def data(n: int = 60) -> dfl.Data:
    return dfl.Data(*rows(n, 0), *rows(40, 1), classes=5)


def test_outputs_are_those_of_the_layers_by_hand() -> None:
    """The gates of a layer are input, forget, cell and output, of one step after the other."""
    module = MODELS["char_lstm"]((3,), 5, embedding=4, hidden=2, layers=1)
    named = {name: value.detach() for name, value in module.named_parameters()}
    x = torch.tensor([[4.0, 0.0, 2.0]])
    h, c = torch.zeros(2), torch.zeros(2)
    for character in x[0].long():
        e = named["embedding.weight"][character]
        gates = named["lstm.weight_ih_l0"] @ e + named["lstm.bias_ih_l0"]
        gates = gates + named["lstm.weight_hh_l0"] @ h + named["lstm.bias_hh_l0"]
        i, f, g, o = gates.view(4, 2)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    expected = named["last.weight"] @ h + named["last.bias"]
    torch.testing.assert_close(module(x)[0].detach(), expected)


def test_initial_values_are_on_the_scale_of_torch() -> None:
    module = MODELS["char_lstm"]((80,), 80)
    layout = ParameterLayout.of(module)
    (row,) = draw(module, layout, seed=0, peers=[0])
    views = layout.views(row)
    for name, value in views.items():
        if name.startswith("lstm."):
            assert 0.99 / 16 < float(value.abs().max()) <= 1 / 16
    assert float(views["embedding.weight"].std()) == pytest.approx(1, abs=0.1)
    assert float(views["embedding.weight"].abs().max()) <= math.sqrt(3)


def test_auto_trains_one_peer_after_the_other() -> None:
    run = dfl.Run(model=LSTM, dataset=data(), peers=3)
    assert not prepare(run, World(0, 1)).task.solver.batched


def test_engine_batched_is_refused() -> None:
    run = dfl.Run(model=LSTM, dataset=data(), peers=3, engine="batched")
    with pytest.raises(dfl.InputError, match=r"--engine batched.* LSTM .*loop"):
        prepare(run, World(0, 1))


def test_a_peer_trains_as_torch_does() -> None:
    """One peer, one step of all examples: the loss after it is that of torch's own SGD."""
    run = dfl.Run(
        model=LSTM, dataset=data(), peers=1, rounds=1, batch_size=0, lr=0.5, momentum=0,
        algorithm="local_only",
    )  # fmt: skip
    first, last = list(dfl.simulate(run))
    module = MODELS["char_lstm"]((6,), 5, hidden=8, embedding=4)
    layout = ParameterLayout.of(module)
    (row,) = draw(module, layout, seed=0, peers=[0])
    module.load_state_dict(layout.views(row))
    x, y = (torch.from_numpy(each) for each in rows(60, 0))
    losses = []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(2):
        loss = nn.functional.cross_entropy(module(x.float()), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [first.train_loss, last.train_loss] == pytest.approx(losses, rel=1e-5)


@pytest.mark.slow
def test_peers_learn_which_character_is_repeated() -> None:
    run = dfl.Run(
        model="char_lstm:hidden=24,embedding=5,layers=1", dataset=data(600), peers=3, rounds=40,
        local_epochs=2, batch_size=20, lr=0.5, eval_every=40, topology="complete",
    )  # fmt: skip
    *_, last = dfl.simulate(run)
    assert last.accuracy_mean > 0.9


@pytest.mark.parametrize(
    ("dataset", "parts"),
    [
        ("digits", ["--model char_lstm", "range(10)", "digits", "up to 16"]),
        ("gaussian:features=16", ["--model char_lstm", "range(", "gaussian", "float32"]),
    ],
)
def test_inputs_that_are_no_characters_are_refused(
    dfl_run: Command, dataset: str, parts: list[str]
) -> None:
    line = dfl_run.refused("--model=char_lstm", f"--dataset={dataset}", "--peers=4")
    assert [part for part in parts if part not in line] == []


@pytest.mark.parametrize("change", ["large", "negative", "scaled", "floats"])
def test_tokens_are_whole_numbers_below_the_classes(change: str) -> None:
    x, y = rows(20, 0)
    scale = 0.5 if change == "scaled" else 1.0
    train = {"large": x + 1, "negative": x.astype(np.int64) - 1, "floats": x.astype(np.float32)}
    inputs = train.get(change, x)
    given = dfl.Data(inputs, y, inputs, y, classes=5, scale=scale)
    with pytest.raises(dfl.InputError, match=r"--model char_lstm.*range"):
        list(dfl.simulate(dfl.Run(model="char_lstm", dataset=given, peers=2, rounds=1)))
