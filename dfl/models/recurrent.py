"""Recurrent models of text.

This module imports torch at once. Modules that check a command line import it in their functions.
"""

from __future__ import annotations

from torch import Tensor, nn


class NextCharacter(nn.Module):
    """An embedding of characters, LSTM layers, and a dense layer on the last of their states, or on
    all of them.

    Args:
        characters: the number of characters, of the inputs and of the outputs.
        embedding, hidden: the width of an embedded character, and of a layer's state.
        layers: the number of LSTM layers.
        everywhere: whether every state gives an output, in place of the last.
    """

    def __init__(
        self, characters: int, embedding: int, hidden: int, layers: int, everywhere: bool = False
    ) -> None:
        super().__init__()
        self.everywhere = everywhere
        self.embedding = nn.Embedding(characters, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.last = nn.Linear(hidden, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (n, characters), or (n, steps, characters), for the numbers of the
        characters in x (n, steps).
        """
        states, _ = self.lstm(self.embedding(x.long()))
        out: Tensor = self.last(states if self.everywhere else states[:, -1])
        return out


class LastState(nn.Module):
    """LSTM layers over the steps of signals, and a dense layer on the last of their states.

    Args:
        channels, classes: the number of signals, and of outputs.
        hidden: the width of a layer's state.
        layers: the number of LSTM layers.
    """

    def __init__(self, channels: int, classes: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(channels, hidden, layers, batch_first=True)
        self.last = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs (n, classes) for signals x (n, channels, steps)."""
        states, _ = self.lstm(x.mT)
        out: Tensor = self.last(states[:, -1])
        return out
