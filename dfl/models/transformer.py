"""A transformer of text.

This module imports torch at once. Modules that check a command line import it in their functions.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor, nn

from dfl.models.layers import LoRALinear, adapters, embedding_layer


class Attention(nn.Module):
    """Causal attention of several heads: a place sees itself and those before it.

    Its products are written out, since torch's fused attention rounds by how many peers train
    together.

    Args:
        width: of a place's state, a multiple of the heads.
        heads: the number of heads.
        lora, alpha: the rank and the scale of the adapters of query and value; no adapters at 0.

    Source:
        Vaswani et al., "Attention Is All You Need", NeurIPS 2017, section 3.2; Hu et al., "LoRA:
        Low-Rank Adaptation of Large Language Models", ICLR 2022, section 7.1, for the layers that
        have adapters.
    """

    def __init__(self, width: int, heads: int, lora: int, alpha: float) -> None:
        super().__init__()
        self.heads = heads
        adapted = partial(LoRALinear, rank=lora, alpha=alpha) if lora else nn.Linear
        self.query = adapted(width, width)
        self.key = nn.Linear(width, width)
        self.value = adapted(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (n, steps, width) for x (n, steps, width)."""
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -math.inf)
        out: Tensor = self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """x + attention(norm(x)), and that of it plus two dense layers of it with a GELU between.

    Attributes:
        numbers: the most numbers that a part of it computes for an example.

    Source:
        Xiong et al., "On Layer Normalization in the Transformer Architecture", ICML 2020, for the
        normalisation before a sublayer; Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.
    """

    def __init__(self, width: int, heads: int, steps: int, lora: int, alpha: float) -> None:
        super().__init__()
        self.numbers = steps * max(4 * width, heads * steps)
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, lora, alpha)
        self.norm_2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the states (n, steps, width) after the block, for those before it."""
        x = x + self.attention(self.norm_1(x))
        out: Tensor = x + self.narrow(nn.functional.gelu(self.wide(self.norm_2(x))))
        return out


class Transformer(nn.Module):
    """An embedding of tokens and places, blocks, a normalisation and a dense layer.

    A place sees no later one, so padding at the end of a row changes no output before it.

    Attributes:
        causal: whether a row may end at any place, and its outputs do not depend on later ones.

    Args:
        tokens: the number of tokens, of the inputs and of the outputs.
        steps: the length of a row.
        width, depth, heads: the width of a place's state, the number of blocks, and that of the
            heads of each.
        everywhere: whether every place gives an output, in place of the last.
        lora, alpha: the rank and the scale of the adapters; no adapters at 0.
        frozen: whether only the adapters are trained, where there are any.

    Source:
        Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3.
    """

    causal = True

    def __init__(
        self,
        tokens: int,
        steps: int,
        width: int,
        depth: int,
        heads: int,
        everywhere: bool,
        lora: int = 0,
        alpha: float = 1.0,
        frozen: bool = True,
    ) -> None:
        super().__init__()
        self.everywhere = everywhere
        self.embedding = embedding_layer(tokens, width)
        self.places = embedding_layer(steps, width)
        blocks = (Block(width, heads, steps, lora, alpha) for _ in range(depth))
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.last = nn.Linear(width, tokens)
        if lora and frozen:
            trained = adapters(self)
            for name, value in self.named_parameters():
                value.requires_grad_(name in trained)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (n, tokens), or (n, steps, tokens), for the numbers of the tokens in x
        (n, steps), of as many steps as the model has or fewer.
        """
        states = self.blocks(self.embedding(x.long()) + self.places.weight[: x.shape[1]])
        out: Tensor = self.last(self.norm(states if self.everywhere else states[:, -1]))
        return out
