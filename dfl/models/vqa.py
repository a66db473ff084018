"""A model of images and questions about them, and its encoders.

This module imports torch at once. Modules that check a command line import it in their functions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class VQA(nn.Module):
    """A head on the product of the encodings of an image and of a question.

    Where an encoder is absent, its encoding is 1 and its input is not read, so that devices with
    one modality share the head of those with both.

    Args:
        image, question: the encoders, of inputs (n, *shape) to (n, width); None where it is absent.
        head: of inputs (n, width).

    Source:
        Antol et al., "VQA: Visual Question Answering", ICCV 2015, section 4.3, for the product.
    """

    image: nn.Module
    question: nn.Module
    head: nn.Module

    def __init__(
        self, image: nn.Module | None, question: nn.Module | None, head: nn.Module
    ) -> None:
        super().__init__()
        if image is not None:
            self.image = image
        if question is not None:
            self.question = question
        self.head = head

    def forward(self, image: Tensor, question: Tensor) -> Tensor:
        """Return the outputs (n, answers) for n images and questions."""
        inputs = {"image": image, "question": question}
        encoders = {name: each for name, each in self.named_children() if name in inputs}
        encoded = [torch.tanh(each(inputs[name])) for name, each in encoders.items()]
        out: Tensor = self.head(encoded[0] if len(encoded) == 1 else encoded[0] * encoded[1])
        return out
