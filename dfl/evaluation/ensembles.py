"""The ensemble of all peers' models, evaluated as on new devices, for which no peer's model is
known to fit.

The label is the likeliest by the mean output of all models, or by their majority vote (Liang et al.
2020, LG-FedAvg, section 2.4).
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
    """Collects the outputs of honest peers on the common test set; rank 0 counts the right ones.

    No rank holds the outputs of all peers on more than those, and each adds up its own of them over
    all peers, in float64, in peer order and in fixed blocks.

    Attributes:
        world: the ranks.
        layout: peers and ranks.
        honest: peers whose outputs count.
        examples: number of examples so far.
        right: how many of them the mean output classified right, and the vote.
    """

    world: World
    layout: Layout
    honest: Group
    examples: int = 0
    right: NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))

    @classmethod
    def of(cls, world: World, layout: Layout, attackers: NDArray[np.int64]) -> Ensemble:
        """Return an ensemble of all peers but attackers, without examples yet."""
        honest = np.setdiff1d(np.arange(layout.peers), attackers)
        return cls(world, layout, layout.group(honest, world.rank))

    def add(self, given: Iterable[Tensor], labels: Tensor) -> list[Tensor]:
        """Add the outputs for the next examples, on every rank.

        Args:
            given: outputs (a, n, classes) of this rank's peers, in ascending order and in any
                parts, which may be none; or one row (1, n, classes) for all of them.
            labels: (n,).

        Returns:
            The outputs that were given.
        """
        kept = list(given)
        outputs, known = self._outputs(kept, len(labels)), labels.cpu().numpy()
        mean, votes = self._mean(outputs), self.world.gather(tally(outputs)[None])
        self.examples += len(labels)
        if mean is not None and votes is not None:
            answers = mean.reshape(outputs.shape[1:]), votes.sum(0)
            self.right += [
                (each.argmax(1) == known).sum() for each in answers
            ]  # ties go to the lowest label
        return kept

    def figures(self, single: float) -> dict[str, float]:
        """Return columns of metrics.csv, on rank 0: accuracy by the mean output and by vote.

        Args:
            single: the figure where there are no examples: that of a server's one model, or of
                labels that are no classes.
        """
        mean, vote = self.right / self.examples if self.examples else (single, single)
        return {"accuracy_ensemble": float(mean), "accuracy_vote": float(vote)}

    def _outputs(self, given: list[Tensor], n: int) -> Floats:
        """Outputs of this rank's honest peers, (a, n, classes); (0, n, classes) without peers."""
        classes = -self.world.minimum(-given[0].shape[2] if given else 0)[0]
        if not given:
            return np.zeros((0, n, classes))
        rows = torch.cat(given).cpu().numpy()
        everyone = np.broadcast_to(rows, (len(self.layout.block(self.world.rank)), n, classes))
        return everyone[self.honest.here].astype(np.float64)

    def _mean(self, outputs: Floats) -> Floats | None:
        """The mean over all honest peers of (a, n, classes), flat, on rank 0; None elsewhere."""
        rows = outputs.reshape(len(outputs), int(np.prod(outputs.shape[1:])))
        everyone = self.world.columns(
            rows, columns(rows.shape[1], self.world.size), self.honest.counts
        )
        mean = np.zeros(everyone.shape[1])
        for block in blocks(len(mean)):
            mean[block] = np.add.reduce(everyone[:, block], axis=0) / len(everyone)
        return self.world.gather(mean)


def tally(outputs: Floats) -> NDArray[np.int64]:
    """Return the votes for each label, (n, classes), by outputs (a, n, classes); ties go to the
    lowest.
    """
    _, n, classes = outputs.shape
    places = np.arange(n) * classes + outputs.argmax(2)
    return np.bincount(places.ravel(), minlength=n * classes).reshape(n, classes)
