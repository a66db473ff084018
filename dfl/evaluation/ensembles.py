"""The ensemble of all peers' models, evaluated as on a new device, which has no model of its own.

The predicted label has the largest mean output of all models, or the most votes (Liang et al. 2020,
LG-FedAvg, section 2.4).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dfl.core.layout import Group, Layout, blocks, columns

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.comm.mpi import World
else:
    from dfl.core.lazy import torch

Floats = NDArray[np.float64]


@dataclass
class Ensemble:
    """The ensemble of honest peers on the common test set, added to batch by batch.

    Each rank adds up its own coordinates of a batch's outputs over all peers, in float64, in peer
    order and in fixed blocks. No rank holds the outputs of all peers on more than one batch. Rank 0
    counts the correct predictions.

    Attributes:
        world: the ranks.
        layout: peers and ranks.
        honest: the honest peers.
        examples: the number of examples so far.
        correct: how many of them were classified correctly by the mean output, and by vote.
    """

    world: World
    layout: Layout
    honest: Group
    examples: int = 0
    correct: NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))

    @classmethod
    def of(cls, world: World, layout: Layout, attackers: NDArray[np.int64]) -> Ensemble:
        """Return an ensemble of all peers but attackers, without examples."""
        honest = np.setdiff1d(np.arange(layout.peers), attackers)
        return cls(world, layout, layout.group(honest, world.rank))

    def add(self, parts: Iterable[Tensor], labels: Tensor) -> list[Tensor]:
        """Add the outputs for the next examples, on every rank.

        Args:
            parts: outputs (a, n, classes) of this rank's peers in ascending order, in any number of
                parts; or one row (1, n, classes) for all of them.
            labels: (n,).

        Returns:
            The parts as a list.
        """
        kept = list(parts)
        outputs = self._outputs(kept, len(labels))
        known = labels.cpu().numpy()
        mean = self._mean(outputs)
        votes = self.world.gather(tally(outputs)[None])
        self.examples += len(labels)
        if mean is not None and votes is not None:
            scores = mean.reshape(outputs.shape[1:]), votes.sum(0)
            self.correct += [
                (each.argmax(1) == known).sum() for each in scores
            ]  # ties go to the lowest label
        return kept

    def figures(self, single: float) -> dict[str, float]:
        """Return columns of metrics.csv, on rank 0: accuracy by the mean output and by vote.

        Args:
            single: the accuracy if no examples were added: that of a server's one model.
        """
        mean, vote = self.correct / self.examples if self.examples else (single, single)
        return {"accuracy_ensemble": float(mean), "accuracy_vote": float(vote)}

    def _outputs(self, parts: list[Tensor], n: int) -> Floats:
        """Return the outputs (a, n, classes) of this rank's honest peers; a is 0 without peers."""
        classes = -self.world.minimum(-parts[0].shape[2] if parts else 0)[0]
        if not parts:
            return np.zeros((0, n, classes))
        rows = torch.cat(parts).cpu().numpy()
        everyone = np.broadcast_to(rows, (self.layout.counts[self.world.rank], n, classes))
        return everyone[self.honest.here].astype(np.float64)

    def _mean(self, outputs: Floats) -> Floats | None:
        """Return the mean over all honest peers of (a, n, classes), flat; None on ranks but 0."""
        rows = outputs.reshape(len(outputs), int(np.prod(outputs.shape[1:])))
        cut = columns(rows.shape[1], self.world.size)
        everyone = self.honest.ascending(self.world.columns(rows, cut, self.honest.counts))
        mean = np.zeros(everyone.shape[1])
        for block in blocks(len(mean)):
            mean[block] = np.add.reduce(everyone[:, block], axis=0) / len(everyone)
        return self.world.gather(mean)


def tally(outputs: Floats) -> NDArray[np.int64]:
    """Return the votes for each label, (n, classes), for outputs (a, n, classes).

    Ties go to the lowest label.
    """
    _, n, classes = outputs.shape
    places = np.arange(n) * classes + outputs.argmax(2)
    return np.bincount(places.ravel(), minlength=n * classes).reshape(n, classes)
