"""Recurrent layers and models: tokens, initial values, engines, and what they learn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dfl
from dfl.comm.mpi import World
from dfl.models.layers import embedding_layer
from dfl.models.modules import stacked_models
from dfl.models.parameter_layout import ParameterLayout, draw
from dfl.models.recurrent import CELLS, GRU, LSTM, LastState, PeepholeLSTM
from dfl.models.zoo import MODELS
from dfl.simulation.prepare import prepare
from tests.conftest import Command

SPEC = "char_lstm:hidden=8,embedding=4"


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


def test_outputs_of_a_gru_are_those_of_the_layer_by_hand() -> None:
    """Its gates are reset, update and new, of one step after the other."""
    module = MODELS["char_lstm"]((3,), 5, embedding=4, hidden=2, layers=1, cell="gru")
    named = {name: value.detach() for name, value in module.named_parameters()}
    x = torch.tensor([[4.0, 0.0, 2.0]])
    h = torch.zeros(2)
    for character in x[0].long():
        of_x = named["gru.weight_ih_l0"] @ named["embedding.weight"][character]
        of_x = (of_x + named["gru.bias_ih_l0"]).view(3, 2)
        of_h = (named["gru.weight_hh_l0"] @ h + named["gru.bias_hh_l0"]).view(3, 2)
        r, z = (of_x + of_h)[:2].sigmoid()
        new = (of_x[2] + r * of_h[2]).tanh()
        h = (1 - z) * new + z * h
    expected = named["last.weight"] @ h + named["last.bias"]
    torch.testing.assert_close(module(x)[0].detach(), expected)


@pytest.mark.parametrize("cell", CELLS)
def test_initial_values_are_on_the_scale_of_torch(cell: str) -> None:
    module = MODELS["char_lstm"]((80,), 80, cell=cell)
    layout = ParameterLayout.of(module)
    (row,) = draw(module, layout, seed=0, peers=[0])
    views = layout.views(row)
    for name, value in views.items():
        if name.startswith(f"{cell}."):
            assert 0.99 / 16 < float(value.abs().max()) <= 1 / 16
    assert float(views["embedding.weight"].std()) == pytest.approx(1, abs=0.1)
    assert float(views["embedding.weight"].abs().max()) <= math.sqrt(3)


def signals() -> dfl.Data:
    """Return signals of 3 channels and 40 steps."""
    x, y = np.zeros((60, 3, 40), np.float32), np.arange(60) % 2
    return dfl.Data(x, y, x[:9], y[:9], classes=2)


def engine(**settings: Any) -> bool:
    """Return whether the peers of a run train together."""
    given = signals() if str(settings.get("model")).startswith("har") else data()
    run = dfl.Run(**{"dataset": given, "peers": 3, "model": SPEC, **settings})
    return prepare(run, World(0, 1)).task.solver.batched


@pytest.mark.parametrize(
    ("settings", "together"),
    [
        ({}, True),
        ({"model": "char_lstm:hidden=300"}, False),
        ({"batch_size": 0, "model": "char_lstm:hidden=200"}, False),
        ({"threads": 2}, False),
        ({"engine": "loop"}, False),
        ({"model": "char_lstm:hidden=300", "engine": "batched"}, True),
        ({"model": f"{SPEC},peepholes=true"}, False),
        ({"model": "har_lstm:hidden=64,layers=1", "batch_size": 10}, True),
        ({"model": "har_lstm:hidden=64,layers=1", "batch_size": 20}, False),
        ({"model": "char_lstm:hidden=300,cell=gru"}, True),
        ({"model": "char_lstm:hidden=500,cell=gru", "batch_size": 20}, False),
    ],
)
def test_auto_takes_the_engine_by_the_states_of_a_batch(
    settings: dict[str, Any], together: bool
) -> None:
    assert engine(**settings) == together


class Torchs(nn.Module):
    """A layer of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lstm(x.float())[0]
        return out


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"model": f"{SPEC},peepholes=true"}, ["--engine batched", "PeepholeLSTM", "loop"]),
        ({"threads": 2}, ["--engine batched", "--threads 2", "loop"]),
        ({"model": Torchs()}, ["--engine batched", "LSTM", "loop"]),
    ],
)
def test_engine_batched_is_refused(settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(dfl.InputError) as caught:
        engine(**settings, engine="batched")
    assert [part for part in parts if part not in str(caught.value)] == []


def gradients(
    module: nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor, together: bool
) -> dict[str, torch.Tensor]:
    """Return the gradients of weighted squares of the outputs of models (a, *shape) on (a, ...)."""
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}

    def call(own: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        return torch.func.functional_call(module, own, (x,))[0]

    if together:
        with stacked_models():
            out = torch.func.vmap(call)(leaves, x)
    else:
        rows = [{name: value[i] for name, value in leaves.items()} for i in range(len(x))]
        out = torch.stack([call(row, own) for row, own in zip(rows, x, strict=True)])
    loss = (out * torch.linspace(-1, 2, out.shape[-1])).square().sum()
    found = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True)) | {"out": out.detach()}


@pytest.mark.parametrize("kind", CELLS.values())
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize(("n", "steps", "hidden"), [(1, 1, 1), (4, 7, 5), (3, 2, 16)])
def test_gradients_of_stacked_layers_are_those_of_torch(
    kind: type[LSTM | GRU], layers: int, n: int, steps: int, hidden: int
) -> None:
    torch.manual_seed(0)
    modules = [kind(3, hidden, layers).double() for _ in range(4)]
    parameters = {
        name: torch.stack([module.get_parameter(name).detach() for module in modules])
        for name, _ in modules[0].named_parameters()
    }
    x = torch.randn(4, n, steps, 3, dtype=torch.float64)
    expected = gradients(modules[0], parameters, x, together=False)
    found = gradients(modules[0], parameters, x, together=True)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)
    single = {name: value.float() for name, value in parameters.items()}
    module = modules[0].float()
    one, other = (gradients(module, single, x.float(), together=each) for each in (True, False))
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", CELLS.values())
def test_gradients_of_the_inputs_are_those_of_torch(kind: type[LSTM | GRU]) -> None:
    torch.manual_seed(0)
    module = kind(3, 4).double()
    x = torch.randn(2, 5, 6, 3, dtype=torch.float64, requires_grad=True)
    own = {
        name: value.detach().expand(2, *value.shape) for name, value in module.named_parameters()
    }
    with stacked_models():
        call = torch.func.vmap(lambda p, x: torch.func.functional_call(module, p, (x,))[0])
        together = call(own, x)
    alone = module(x.flatten(0, 1))[0].view(together.shape)
    (one,) = torch.autograd.grad(together.square().sum(), x)
    (other,) = torch.autograd.grad(alone.square().sum(), x)
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", CELLS.values())
@pytest.mark.parametrize("others", [1, 2, 30])
def test_a_peer_has_the_same_bits_among_any_others(kind: type[LSTM | GRU], others: int) -> None:
    """The state has an odd width, so that the ends of the arrays move with the number of peers."""
    torch.manual_seed(0)
    module = kind(3, 5, 2)
    many = {name: torch.randn(32, *value.shape) for name, value in module.named_parameters()}
    x = torch.randn(32, 3, 6, 3)
    whole = gradients(module, many, x, together=True)
    some = [31, *range(others)]
    part = gradients(module, {name: value[some] for name, value in many.items()}, x[some], True)
    for name, value in part.items():
        assert torch.equal(value, whole[name][some])


@pytest.mark.parametrize("cell", CELLS)
def test_engines_agree(cell: str) -> None:
    """The peers have unequal numbers of examples, so that batches are padded."""

    def losses(engine: Any) -> list[float]:
        run = dfl.Run(
            model=f"{SPEC},cell={cell}", dataset=data(), peers=3, rounds=3, lr=0.3, engine=engine,
            partition="quantity:alpha=1",
        )  # fmt: skip
        return [row.train_loss for row in dfl.simulate(run)]

    assert losses("batched") == pytest.approx(losses("loop"), rel=1e-5)


def test_peepholes_have_the_parameters_of_the_paper() -> None:
    """Torch's layers have two biases for every gate, and no peepholes."""
    published = MODELS["char_lstm"]((80,), 258, (80,), peepholes=True)
    assert sum(value.numel() for value in published.parameters()) == 866_578
    torchs = MODELS["char_lstm"]((80,), 258, (80,))
    one_bias, peepholes = 2 * 4 * 256, 2 * 3 * 256
    count = sum(value.numel() for value in torchs.parameters())
    assert count == 867_090 == 866_578 + one_bias - peepholes


def test_layers_with_peepholes_of_zero_are_those_of_torch() -> None:
    torch.manual_seed(0)
    own, torchs = PeepholeLSTM(3, 5, 2), nn.LSTM(3, 5, 2, batch_first=True)
    with torch.no_grad():
        for k in range(2):
            for kind in ("weight_ih", "weight_hh"):
                value = own.get_parameter(f"{kind}_l{k}")
                torchs.get_parameter(f"{kind}_l{k}").copy_(value)
            torchs.get_parameter(f"bias_ih_l{k}").copy_(own.get_parameter(f"bias_l{k}"))
            torchs.get_parameter(f"bias_hh_l{k}").zero_()
            own.get_parameter(f"peepholes_l{k}").zero_()
    x = torch.randn(4, 6, 3)
    torch.testing.assert_close(own(x)[0], torchs(x)[0])


def test_peepholes_see_the_cell() -> None:
    """One unit, two steps, by hand."""
    torch.manual_seed(0)
    module = PeepholeLSTM(1, 1)
    w, u, b, p = (value.detach().flatten() for _, value in module.named_parameters())
    h = c = torch.zeros(())
    for x in (0.5, -2.0):
        i, f, g, o = w * x + u * h + b
        i, f = (i + p[0] * c).sigmoid(), (f + p[1] * c).sigmoid()
        c = f * c + i * g.tanh()
        h = (o + p[2] * c).sigmoid() * c.tanh()
    out, _ = module(torch.tensor([[[0.5], [-2.0]]]))
    torch.testing.assert_close(out[0, 1, 0].detach(), h)


def test_a_peer_trains_as_torch_does() -> None:
    """One peer, one step of all examples: the loss after it is that of torch's own SGD."""
    run = dfl.Run(
        model=SPEC, dataset=data(), peers=1, rounds=1, batch_size=0, lr=0.5, momentum=0,
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
        ("digits", ["--model char_lstm", "range(10)", "digits", "from 0 to 16"]),
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


def test_labels_without_a_number_of_classes_are_no_tokens() -> None:
    """Arrays whose labels are tables are numbers, as a `Data` without classes is."""
    x, _ = rows(20, 0)
    with pytest.raises(dfl.InputError, match=r"--model char_lstm predicts.*classes=K"):
        list(dfl.simulate(dfl.Run(model="char_lstm", dataset=(x, x), peers=2, rounds=1)))


def test_har_lstm_answers_by_the_last_state_of_signals() -> None:
    module = MODELS["har_lstm"]((9, 20), 6, hidden=5)
    assert isinstance(module, LastState)
    x = torch.randn(3, 9, 20)
    states, _ = module.get_submodule("lstm")(x.transpose(1, 2))
    assert torch.equal(module(x), module.last(states[:, -1]))
    assert not torch.equal(module(x.flip(2)), module(x))
    whole = MODELS["har_lstm"]((9, 128), 6)
    assert sum(value.numel() for value in whole.parameters()) == 14_150
    with pytest.raises(dfl.InputError, match="--model har_lstm"):
        MODELS["har_lstm"]((3, 32, 32), 6)


def test_cells_have_the_parameters_of_torch() -> None:
    """A GRU has three gates where an LSTM has four."""
    counts = [
        sum(value.numel() for value in MODELS["har_lstm"]((9, 128), 6, cell=cell).parameters())
        for cell in CELLS
    ]
    dense = 33 * 6
    assert [(count - dense) * k for count, k in zip(counts, (3, 4), strict=True)] == [41_856] * 2


@pytest.mark.parametrize("name", ["char_lstm", "word_lstm"])
def test_peepholes_of_a_gru_are_refused(name: str) -> None:
    with pytest.raises(dfl.InputError) as caught:
        MODELS[name]((6,), 5, cell="gru", peepholes=True)
    parts = [f"--model {name}", "peepholes=true", "cell=lstm", "cell=gru"]
    assert [part for part in parts if part not in str(caught.value)] == []


@pytest.mark.parametrize("kind", CELLS.values())
@pytest.mark.parametrize("kept", ["weight_hh", "weight_ih", "_l1", ""])
def test_frozen_weights_are_those_of_all_models(kind: type[LSTM | GRU], kept: str) -> None:
    """Those whose names have `kept` differ between models; the others are the module's own."""
    torch.manual_seed(0)
    module = kind(3, 4, 2).double().requires_grad_(False)
    own = {
        name: torch.randn(3, *value.shape, dtype=torch.float64)
        for name, value in module.named_parameters()
        if kept in name
    }
    x = torch.randn(3, 2, 5, 3, dtype=torch.float64)
    expected = gradients(module, own, x, together=False)
    for name, value in gradients(module, own, x, together=True).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-10, atol=1e-12)


def test_an_embedding_starts_at_the_values_of_torch() -> None:
    torch.manual_seed(0)
    torchs = nn.Embedding(5, 3)
    torch.manual_seed(0)
    ours = embedding_layer(5, 3)
    assert torch.equal(ours.weight, torchs.weight)
    assert ours.weight.requires_grad
    assert repr(ours) == repr(torchs)
    with torch.device("meta"):
        blank = embedding_layer(5, 3)
    assert blank.weight.is_meta
    assert blank.weight.requires_grad
