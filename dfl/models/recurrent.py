"""Recurrent layers and models of text.

This module imports torch at once. Modules that check a command line import it in their functions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from dfl.models.layers import embedding_layer
from dfl.models.modules import STACKED

ALIGNED = 64
"""Numbers to which the end of a buffer is padded.

Torch rounds a sigmoid or a tanh differently at the end of an array that is no multiple of its
vectors, and the place of that end depends on which peers train together.
"""


def _states(layers: nn.RNNBase, layer: type[torch.autograd.Function], x: Tensor) -> Tensor:
    """Return the states (n, steps, hidden) of the last layer under `torch.func.vmap` over models.

    The gates of all peers are batched products, and the input projections of all steps are one.

    Args:
        layers: the module, of torch, batch first.
        layer: one layer of several models.
        x: (n, steps, inputs).
    """
    for k in range(layers.num_layers):
        weights = (
            getattr(layers, f"{kind}_l{k}")
            for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        x = _PerPeer.apply(layer, x, *weights)  # type: ignore[no-untyped-call]
    return x


class _PerPeer(torch.autograd.Function):
    """A layer under vmap: there it is one of several models."""

    @staticmethod
    def forward(layer: type[torch.autograd.Function], *arguments: Tensor) -> Tensor:
        """Return the states of a frozen layer whose inputs all models have in common."""
        out: Tensor = layer.apply(*(each[None] for each in arguments))
        return out[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[int | None, ...],
        layer: type[torch.autograd.Function],
        *arguments: Tensor,
    ) -> tuple[Tensor, int]:
        """Return the layer of all models, with models at axis 0."""
        stacked = (
            value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)
            for value, dim in zip(arguments, in_dims[1:], strict=True)
        )
        out: Tensor = layer.apply(*stacked)
        return out, 0


class _LSTMLayer(torch.autograd.Function):
    """An LSTM layer of a models.

        i, f, o = σ(W x_t + U h_{t-1} + b),   g = tanh(W x_t + U h_{t-1} + b)
        c_t = f c_{t-1} + i g,   h_t = o tanh(c_t)

    Every operation rounds once, so that a peer's numbers do not depend on the other peers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, u: Tensor, b_w: Tensor, b_u: Tensor) -> Tensor:
        """Return the states (a, n, steps, hidden) for x (a, n, steps, inputs)."""
        a, n, steps, _ = x.shape
        hidden = u.shape[2]
        x = x.transpose(1, 2).reshape(a, steps * n, -1)
        gates = torch.baddbmm((b_w + b_u).unsqueeze(1), x, w.mT).view(a, steps, n, 4 * hidden)
        now, flat = (each[0] for each in _buffers(1, (a, n, 4 * hidden), x))
        i, f, g, o = now.split(hidden, 2)
        cells, flat_cells = _buffers(steps, (a, n, hidden), x)
        tanhs, flat_tanhs = _buffers(steps, (a, n, hidden), x)
        states = x.new_empty(a, steps + 1, n, hidden)
        states[:, 0] = 0
        for t in range(steps):
            torch.baddbmm(gates[:, t], states[:, t], u.mT, out=now)
            g.mul_(2)  # tanh(z) = 2 σ(2 z) - 1
            flat.sigmoid_()
            g.mul_(2).sub_(1)
            gates[:, t] = now
            torch.mul(i, g, out=cells[t])
            if t:
                cells[t].add_(f * cells[t - 1])
            torch.tanh(flat_cells[t], out=flat_tanhs[t])
            torch.mul(o, tanhs[t], out=states[:, t + 1])
        ctx.save_for_backward(x, w, u, gates, tanhs, cells, states)
        return states[:, 1:].transpose(1, 2).contiguous()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, None where nothing asks for it, and of the parameters."""
        x, w, u, gates, tanhs, cells, states = ctx.saved_tensors
        steps, a, n, hidden = cells.shape
        d = torch.empty_like(gates)
        of_cell = x.new_zeros(a, n, hidden)
        of_state = x.new_zeros(a, n, hidden)
        for t in reversed(range(steps)):
            i, f, g, o = gates[:, t].split(hidden, 2)
            to_i, to_f, to_g, to_o = d[:, t].split(hidden, 2)
            of_state = of_state + above[0][:, :, t]
            through = torch.mul(tanhs[t], tanhs[t]).neg_().add_(1).mul_(o)
            of_cell = of_cell + through.mul_(of_state)
            # The slopes of a sigmoid s and of a tanh g are s - s s and 1 - g g.
            torch.mul(gates[:, t], gates[:, t], out=d[:, t])
            torch.sub(i, to_i, out=to_i).mul_(g).mul_(of_cell)
            to_g.neg_().add_(1).mul_(i).mul_(of_cell)
            torch.sub(o, to_o, out=to_o).mul_(tanhs[t]).mul_(of_state)
            if t:
                torch.sub(f, to_f, out=to_f).mul_(cells[t - 1]).mul_(of_cell)
                of_cell = of_cell * f
                of_state = torch.bmm(d[:, t], u)
            else:
                to_f.zero_()
        d = d.view(a, steps * n, 4 * hidden)
        before = states[:, :-1].reshape(a, steps * n, hidden)
        bias = d.sum(1)
        of_x = _of_inputs(ctx, d, w, n)
        return of_x, torch.bmm(d.mT, x), torch.bmm(d.mT, before), bias, bias


class _GRULayer(torch.autograd.Function):
    """A GRU layer of a models.

        r, z = σ(W x_t + U h_{t-1} + b_W + b_U),   n = tanh(W x_t + b_W + r (U h_{t-1} + b_U))
        h_t = z (h_{t-1} - n) + n

    Every operation rounds once, so that a peer's numbers do not depend on the other peers.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, u: Tensor, b_w: Tensor, b_u: Tensor) -> Tensor:
        """Return the states (a, n, steps, hidden) for x (a, n, steps, inputs)."""
        a, n, steps, _ = x.shape
        hidden = u.shape[2]
        x = x.transpose(1, 2).reshape(a, steps * n, -1)
        projected = torch.baddbmm(b_w.unsqueeze(1), x, w.mT).view(a, steps, n, 3 * hidden)
        of_gates, of_new = projected.split([2 * hidden, hidden], 3)
        products = x.new_empty(steps, a, n, 3 * hidden)
        gates, flat = _buffers(steps, (a, n, 2 * hidden), x)
        news, flat_news = _buffers(steps, (a, n, hidden), x)
        states = x.new_empty(steps + 1, a, n, hidden)
        states[0] = 0
        for t in range(steps):
            torch.baddbmm(b_u.unsqueeze(1), states[t], u.mT, out=products[t])
            torch.add(of_gates[:, t], products[t, ..., : 2 * hidden], out=gates[t])
            flat[t].sigmoid_()
            r, z = gates[t].split(hidden, 2)
            torch.mul(r, products[t, ..., 2 * hidden :], out=news[t])
            news[t].add_(of_new[:, t])
            flat_news[t].tanh_()
            torch.sub(states[t], news[t], out=states[t + 1])
            states[t + 1].mul_(z).add_(news[t])
        ctx.save_for_backward(x, w, u, products, gates, news, states)
        return states[1:].permute(1, 2, 0, 3).contiguous()

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, None where nothing asks for it, and of the parameters."""
        x, w, u, products, gates, news, states = ctx.saved_tensors
        steps, a, n, hidden = news.shape
        outer = above[0].permute(2, 0, 1, 3)
        r, z = gates.split(hidden, 3)
        # Slopes of r, z and U h_{t-1} in n; those of n itself are in of_news.
        slopes = torch.cat([(gates * gates).neg_().add_(gates), r], 3)
        slopes[..., :hidden].mul_(products[..., 2 * hidden :])
        slopes[..., hidden : 2 * hidden].mul_(states[:-1] - news)
        of_news = (news * news).neg_().add_(1).mul_(1 - z)
        of_state = x.new_zeros(a, n, hidden)
        for t in reversed(range(steps)):
            of_state = of_state + outer[t]
            d_new = of_news[t].mul_(of_state)
            d = slopes[t]
            to_r, to_z, to_product = d.split(hidden, 2)
            to_r.mul_(d_new)
            to_z.mul_(of_state)
            to_product.mul_(d_new)
            if t:
                of_state = torch.bmm(d, u).add_(of_state.mul_(z[t]))
        d = slopes.transpose(0, 1).reshape(a, steps * n, 3 * hidden)
        before = states[:-1].transpose(0, 1).reshape(a, steps * n, hidden)
        of_u, bias_u = torch.bmm(d.mT, before), d.sum(1)
        d[..., 2 * hidden :] = of_news.transpose(0, 1).reshape(a, steps * n, hidden)
        of_x = _of_inputs(ctx, d, w, n)
        return of_x, torch.bmm(d.mT, x), of_u, d.sum(1), bias_u


def _of_inputs(ctx: Any, d: Tensor, w: Tensor, n: int) -> Tensor | None:
    """Return the gradient (a, n, steps, inputs) of x, given that of its projection (a, steps · n,
    gates); None where nothing asks for it.
    """
    if not ctx.needs_input_grad[0]:
        return None
    of_x: Tensor = torch.bmm(d, w).unflatten(1, (-1, n)).transpose(1, 2)
    return of_x


def _buffers(steps: int, shape: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a buffer (steps, *shape), and the same as rows with an aligned end."""
    size = math.prod(shape)
    flat = like.new_empty(steps, -(-size // ALIGNED) * ALIGNED)
    flat[:, size:] = 0
    return flat[:, :size].view(steps, *shape), flat


class Stackable(nn.RNNBase):
    """A recurrent layer of torch, batch first, which several peers can also compute together,
    within `stacked_models`.

    Attributes:
        together: whether a layer can be computed for several peers at once.
        fused: whether torch has a fused kernel for a layer of one peer on a processor.
        layer: how one layer is computed for several peers.
    """

    together = True
    fused: bool
    layer: type[torch.autograd.Function]

    def __init__(self, inputs: int, hidden: int, layers: int = 1) -> None:
        super().__init__(inputs, hidden, layers, batch_first=True)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the states (n, steps, hidden) of the last layer for x (n, steps, inputs)."""
        if STACKED.get():
            return _states(self, self.layer, x), None
        return super().forward(x)[0], None


class LSTM(Stackable, nn.LSTM):  # type: ignore[misc]  # torch returns the last state, too
    """Torch's LSTM."""

    fused = True
    layer = _LSTMLayer


class GRU(Stackable, nn.GRU):  # type: ignore[misc]
    """Torch's GRU.

    Source:
        Cho et al., "Learning Phrase Representations using RNN Encoder-Decoder for Statistical
        Machine Translation", EMNLP 2014, with the reset gate applied after the product with U.
    """

    fused = False
    layer = _GRULayer


class PeepholeLSTM(nn.Module):
    """LSTM layers whose gates see the cell, with one bias for each gate.

        i, f = σ(W x_t + U h_{t-1} + p c_{t-1} + b),   o = σ(W x_t + U h_{t-1} + p c_t + b)

    Attributes:
        together: whether a layer can be computed for several peers at once.
        initial_bound: the bound of initial values, which are uniform.

    Source:
        Gers, Schraudolph, Schmidhuber, "Learning Precise Timing with LSTM Recurrent Networks", JMLR
        2002; Sak, Senior, Beaufays, Interspeech 2014.
    """

    together = False

    def __init__(self, inputs: int, hidden: int, layers: int = 1) -> None:
        super().__init__()
        self.layers = layers
        self.hidden_size = hidden
        self.initial_bound = 1 / math.sqrt(hidden)
        for k in range(layers):
            shapes = {
                "weight_ih": (4 * hidden, hidden if k else inputs),
                "weight_hh": (4 * hidden, hidden),
                "bias": (4 * hidden,),
                "peepholes": (3, hidden),
            }
            for kind, shape in shapes.items():
                value = torch.empty(shape).uniform_(-self.initial_bound, self.initial_bound)
                self.register_parameter(f"{kind}_l{k}", nn.Parameter(value))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the states (n, steps, hidden) of the last layer for x (n, steps, inputs)."""
        for k in range(self.layers):
            x = self._layer(
                x,
                *(
                    getattr(self, f"{kind}_l{k}")
                    for kind in ("weight_ih", "weight_hh", "bias", "peepholes")
                ),
            )
        return x, None

    @staticmethod
    def _layer(x: Tensor, w: Tensor, u: Tensor, b: Tensor, peepholes: Tensor) -> Tensor:
        """Return the states (n, steps, hidden) of one layer."""
        of_i, of_f, of_o = peepholes.unbind(0)
        h = c = x.new_zeros(len(x), u.shape[1])
        states = []
        for projected in nn.functional.linear(x, w, b).unbind(1):
            i, f, g, o = (projected + nn.functional.linear(h, u)).chunk(4, 1)
            i, f = torch.sigmoid(i + of_i * c), torch.sigmoid(f + of_f * c)
            c = f * c + i * torch.tanh(g)
            h = torch.sigmoid(o + of_o * c) * torch.tanh(c)
            states.append(h)
        return torch.stack(states, 1)


CELLS: dict[str, type[LSTM | GRU]] = {"lstm": LSTM, "gru": GRU}
"""Recurrent layers by the name of their cell."""


class NextToken(nn.Module):
    """An embedding of tokens, recurrent layers, and a dense layer on the last of their states, or
    on all of them.

    The recurrent layers are the submodule `lstm` or `gru`.

    Attributes:
        causal: whether a row may end at any place, and its outputs do not depend on later ones.

    Args:
        tokens: the number of tokens, of the inputs and of the outputs.
        embedding, hidden: the width of an embedded token, and of a layer's state.
        layers: the number of recurrent layers.
        everywhere: whether every state gives an output, in place of the last.
        cell: their cell, see `CELLS`.
        peepholes: whether the gates of an LSTM see the cell.
        tied: whether the embedding is also the matrix of the outputs.
    """

    causal = True

    def __init__(
        self,
        tokens: int,
        embedding: int,
        hidden: int,
        layers: int,
        everywhere: bool = False,
        cell: str = "lstm",
        peepholes: bool = False,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.everywhere = everywhere
        self.cell = cell
        self.embedding = embedding_layer(tokens, embedding)
        kind = PeepholeLSTM if peepholes else CELLS[cell]
        self.add_module(cell, kind(embedding, hidden, layers))
        self.narrow = nn.Linear(hidden, embedding) if tied else nn.Identity()
        self.last = nn.Linear(embedding if tied else hidden, tokens)
        if tied:
            self.last.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (n, tokens), or (n, steps, tokens), for the numbers of the tokens in x
        (n, steps).
        """
        states, _ = self.get_submodule(self.cell)(self.embedding(x.long()))
        out: Tensor = self.last(self.narrow(states if self.everywhere else states[:, -1]))
        return out


class LastState(nn.Module):
    """Recurrent layers over the steps of signals, and a dense layer on the last of their states.

    The recurrent layers are the submodule `lstm` or `gru`.

    Args:
        channels, classes: the number of signals, and of outputs.
        hidden: the width of a layer's state.
        layers: the number of recurrent layers.
        cell: their cell, see `CELLS`.
    """

    def __init__(
        self, channels: int, classes: int, hidden: int, layers: int, cell: str = "lstm"
    ) -> None:
        super().__init__()
        self.cell = cell
        self.add_module(cell, CELLS[cell](channels, hidden, layers))
        self.last = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (n, classes) for signals x (n, channels, steps)."""
        states, _ = self.get_submodule(self.cell)(x.mT)
        out: Tensor = self.last(states[:, -1])
        return out
