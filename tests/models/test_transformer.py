"""The transformer of text: its layers, padding, engines, and what it learns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dfl
from dfl.comm.mpi import World
from dfl.core.isolation import isolated
from dfl.models.parameter_layout import ParameterLayout, draw
from dfl.models.transformer import Block, Transformer
from dfl.models.zoo import MODELS
from dfl.simulation.prepare import prepare
from dfl.training.batches import groups
from tests.conftest import Command
from tests.support.sequences import CLASSES, STEPS, padded, sequences

SPEC = "transformer:width=6,depth=2,heads=2"
FEW: dict[str, Any] = {"peers": 3, "rounds": 2, "lr": 0.2, "eval_every": 1}


def made(steps: int = STEPS, everywhere: bool = True, **options: int) -> Transformer:
    torch.manual_seed(0)
    options = {"width": 6, "depth": 2, "heads": 2} | options
    places = (steps,) if everywhere else ()
    module = MODELS["transformer"]((steps,), CLASSES, places, **options)
    assert isinstance(module, Transformer)
    return module


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(CLASSES, size=shape)).float()


def of_torch(module: Transformer, x: torch.Tensor) -> torch.Tensor:
    """Return the outputs at every place, by torch's own layers with the same parameters."""
    states = module.embedding(x.long()) + module.places.weight
    later = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    for block in module.blocks:
        assert isinstance(block, Block)
        given = {name: value.detach() for name, value in block.named_parameters()}
        width, four = block.wide.in_features, block.wide.out_features
        layer = nn.TransformerEncoderLayer(
            width, block.attention.heads, four, 0.0, "gelu", batch_first=True, norm_first=True
        ).to(x.dtype)
        parts = [f"attention.{name}" for name in ("query", "key", "value")]
        joined = {
            f"self_attn.in_proj_{kind}": torch.cat([given[f"{part}.{kind}"] for part in parts])
            for kind in ("weight", "bias")
        }
        names = {
            "attention.out": "self_attn.out_proj", "wide": "linear1", "narrow": "linear2",
            "norm_1": "norm1", "norm_2": "norm2",
        }  # fmt: skip
        others = {
            f"{theirs}.{kind}": given[f"{ours}.{kind}"]
            for ours, theirs in names.items()
            for kind in ("weight", "bias")
        }
        layer.load_state_dict(joined | others)
        states = layer(states, src_mask=later, is_causal=True)
    out: torch.Tensor = module.last(module.norm(states))
    return out


@pytest.mark.parametrize(("width", "heads", "steps"), [(6, 2, 6), (8, 1, 3), (3, 3, 1)])
def test_outputs_are_those_of_torchs_layers(width: int, heads: int, steps: int) -> None:
    module = made(steps, width=width, heads=heads).double()
    x = tokens(4, steps).double()
    torch.testing.assert_close(module(x), of_torch(module, x), rtol=1e-10, atol=1e-12)
    module.everywhere = False
    torch.testing.assert_close(module(x), of_torch(module, x)[:, -1], rtol=1e-10, atol=1e-12)


def test_no_place_sees_a_later_one() -> None:
    module, x = made(), tokens(3, STEPS)
    before = module(x)
    for k in range(STEPS):
        changed = x.clone()
        changed[:, k] = (changed[:, k] + 1) % CLASSES
        after = module(changed)
        assert torch.equal(after[:, :k], before[:, :k])
        assert not torch.equal(after[:, k], before[:, k])


def test_padding_changes_no_figure() -> None:
    """Tokens at padded places have no part in training or in evaluation."""
    x, y = padded(100, 0)
    other = np.where(y < 0, (x + 1) % CLASSES, x).astype(np.uint8)
    assert (other != x).any()

    def figures(x: Any) -> list[dict[str, Any]]:
        data = dfl.Data(x[:60], y[:60], x[60:], y[60:], classes=CLASSES)
        rows = dfl.simulate(dfl.Run(dataset=data, model=SPEC, **FEW))
        return [{**row, "seconds": 0} for row in rows]

    assert figures(x) == figures(other)


def gradients(
    module: nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor, together: bool
) -> dict[str, torch.Tensor]:
    """Return outputs, and gradients of their squares, of models (a, *shape) on x (a, n, steps)."""
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}

    def call(own: dict[str, torch.Tensor], x: torch.Tensor) -> Any:
        return torch.func.functional_call(module, own, (x,))

    if together:
        out = torch.func.vmap(call)(leaves, x)
    else:
        rows = [{name: value[i] for name, value in leaves.items()} for i in range(len(x))]
        out = torch.stack([call(row, own) for row, own in zip(rows, x, strict=True)])
    loss = (out * torch.linspace(-1, 2, out.shape[-1], dtype=out.dtype)).square().sum()
    found = torch.autograd.grad(loss, list(leaves.values()))
    return dict(zip(leaves, found, strict=True)) | {"out": out.detach()}


def models(module: nn.Module, a: int) -> dict[str, torch.Tensor]:
    return {
        name: torch.randn(a, *value.shape, dtype=value.dtype)
        for name, value in module.named_parameters()
    }


@pytest.mark.parametrize("everywhere", [True, False])
def test_gradients_of_peers_together_are_those_of_each(everywhere: bool) -> None:
    module = made(everywhere=everywhere).double()
    parameters, x = models(module, 4), tokens(4, 3, STEPS).double()
    one, other = (gradients(module, parameters, x, together) for together in (True, False))
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("others", [1, 2, 30])
@pytest.mark.parametrize(("width", "n", "steps"), [(5, 3, 7), (3, 1, 1), (16, 2, 5)])
def test_a_peer_has_the_same_bits_among_any_others(
    width: int, n: int, steps: int, others: int
) -> None:
    """Odd widths move the ends of the arrays with the number of peers."""
    with isolated(1):
        module = made(steps, width=width, heads=1)
        many, x = models(module, 32), tokens(32, n, steps)
        whole = gradients(module, many, x, together=True)
        some = [31, *range(others)]
        part = gradients(module, {name: value[some] for name, value in many.items()}, x[some], True)
    for name, value in part.items():
        assert torch.equal(value, whole[name][some])


def test_engines_agree() -> None:
    def losses(engine: Any) -> list[float]:
        run = dfl.Run(
            model=SPEC, dataset=sequences(), engine=engine, partition="quantity:alpha=1", **FEW
        )
        return [row.train_loss for row in dfl.simulate(run)]

    assert losses("batched") == pytest.approx(losses("loop"), rel=1e-5)


def test_a_peer_trains_as_torch_does() -> None:
    """One peer, one step of all examples: the loss after it is that of torch's own SGD."""
    run = dfl.Run(
        model=SPEC, dataset=sequences(), peers=1, rounds=1, batch_size=0, lr=0.5, momentum=0,
        algorithm="local_only",
    )  # fmt: skip
    first, last = list(dfl.simulate(run))
    module = made()
    layout = ParameterLayout.of(module)
    (row,) = draw(module, layout, seed=0, peers=[0])
    module.load_state_dict(layout.views(row))
    x, y = (torch.from_numpy(each) for each in padded(60, 0))
    losses = []
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    for _ in range(2):
        loss = nn.functional.cross_entropy(module(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [first.train_loss, last.train_loss] == pytest.approx(losses, rel=1e-5)


def test_few_peers_train_together_where_a_layer_computes_many_numbers() -> None:
    """Groups are bounded by what a block computes, not by the size of the model alone."""

    def largest(steps: int) -> int:
        x = np.zeros((80, steps), np.uint8)
        data = dfl.Data(x, np.zeros(80, np.int64), x[:2], np.zeros(2, np.int64), classes=5)
        run = dfl.Run(dataset=data, peers=40, model="transformer:width=4,depth=1,heads=4")
        task = prepare(run, World(0, 1)).task
        assert task.solver.batched
        assert task.layer_numbers == steps * 4 * max(4, steps)
        return max(map(len, groups(task)))

    assert largest(4) == 40
    assert largest(200) == 2


@pytest.mark.parametrize(("name", "count"), [("", 824_144), ("width=384,depth=6,heads=6", 10.7e6)])
def test_number_of_parameters(name: str, count: float) -> None:
    """12 w^2 + 13 w of a block, 2 w of the last normalisation, and tokens and places."""
    options = dict(part.split("=") for part in name.split(",") if part)
    module = MODELS["transformer"]((80,), 80, **{key: int(n) for key, n in options.items()})
    w, depth = int(options.get("width", 128)), int(options.get("depth", 4))
    found = sum(value.numel() for value in module.parameters())
    assert found == depth * (12 * w * w + 13 * w) + 2 * w + (80 + 80 + 80) * w + 80
    assert found == pytest.approx(count, rel=5e-3 if name else 0)


@pytest.mark.slow
def test_peers_learn_which_token_is_repeated() -> None:
    x = np.random.default_rng(0).integers(CLASSES, size=(700, STEPS)).astype(np.uint8)
    y = x[:, 1].astype(np.int64)
    run = dfl.Run(
        model="transformer:width=16,depth=2,heads=2", peers=3, rounds=30, lr=0.05, eval_every=30,
        dataset=dfl.Data(x[:600], y[:600], x[600:], y[600:], classes=CLASSES), topology="complete",
    )  # fmt: skip
    *_, last = dfl.simulate(run)
    assert last.accuracy_mean > 0.9


@pytest.mark.parametrize(
    ("model", "dataset", "parts"),
    [
        ("transformer", "digits", ["range(10)", "digits", "from 0 to 16"]),
        ("transformer:depth=0", "digits", ["depth", "0"]),
    ],
)
def test_what_it_cannot_take_is_refused(
    dfl_run: Command, model: str, dataset: str, parts: list[str]
) -> None:
    line = dfl_run.refused(f"--model={model}", f"--dataset={dataset}", "--peers=4")
    assert [part for part in ["--model transformer", *parts] if part not in line] == []


def test_images_and_heads_that_do_not_divide_the_width_are_refused() -> None:
    with pytest.raises(dfl.InputError, match="--model transformer needs rows of tokens"):
        MODELS["transformer"]((1, 8, 8), 10)
    with pytest.raises(dfl.InputError, match=r"width=6 .* heads=4: choose width=8"):
        MODELS["transformer"]((8,), 10, width=6, heads=4)
