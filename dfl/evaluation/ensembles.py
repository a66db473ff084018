"""What do all peers' models say together? The test on new devices: nobody knows whose model fits an example.

Liang et al. 2020 (LG-FedAvg), section 2.4: every model is asked, and the likeliest label is that of their mean output;
or that of most of them.
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
    from dfl.simulation.loop import Setting
else:
    from dfl.core.lazy import torch

Floats = NDArray[np.float64]


@dataclass
class Ensemble:
    """Hears every honest peer's outputs on the common test set, some examples at a time; rank 0 counts.

    No rank holds the outputs of all peers on more than those, and each adds up its own of them over all peers, in
    float64, in peer order and in fixed blocks.

    Attributes:
        world, layout: the ranks, and who lives where.
        honest: whose outputs count.
        heard: examples so far.
        right: how many of them the mean output had right, and the vote.
    """

    world: World
    layout: Layout
    honest: Group
    heard: int = 0
    right: NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))

    @classmethod
    def of(cls, setting: Setting) -> Ensemble | None:
        """One that has heard nothing yet, where the run asks for it."""
        if not setting.run.ensemble:
            return None
        world, layout = setting.world, setting.layout
        honest = np.setdiff1d(np.arange(layout.peers), setting.network.threat_model.attackers)
        return cls(world, layout, layout.group(honest, world.rank))

    def hear(self, said: Iterable[Tensor], labels: Tensor) -> list[Tensor]:
        """Listen to what is said of the next examples, on every rank.

        Args:
            said: outputs (a, n, classes) of this rank's peers, in ascending order and in any parts, which may be none;
                or one row (1, n, classes) for all of them.
            labels: (n,).

        Returns:
            What was said.
        """
        kept = list(said)
        outputs, known = self._outputs(kept, len(labels)), labels.cpu().numpy()
        mean, votes = self._mean(outputs), self.world.gather(tally(outputs)[None])
        self.heard += len(labels)
        if mean is not None and votes is not None:
            answers = mean.reshape(outputs.shape[1:]), votes.sum(0)
            self.right += [
                (each.argmax(1) == known).sum() for each in answers
            ]  # ties go to the lowest label
        return kept

    def figures(self, alone: float) -> dict[str, float]:
        """Columns of metrics.csv, on rank 0: the share that was right, by the mean output and by vote.

        Args:
            alone: the figure where nothing was heard: of the one model of a server, or of labels that are no classes.
        """
        mean, vote = self.right / self.heard if self.heard else (alone, alone)
        return {"accuracy_ensemble": float(mean), "accuracy_vote": float(vote)}

    def _outputs(self, said: list[Tensor], n: int) -> Floats:
        """What this rank's honest peers said, (a, n, classes); a rank without peers is told how many classes."""
        classes = -self.world.smallest(-said[0].shape[2] if said else 0)[0]
        if not said:
            return np.zeros((0, n, classes))
        rows = torch.cat(said).cpu().numpy()
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
    """How many models' likeliest label each label is, (n, classes), by outputs (a, n, classes); ties to the lowest."""
    _, n, classes = outputs.shape
    places = np.arange(n) * classes + outputs.argmax(2)
    return np.bincount(places.ravel(), minlength=n * classes).reshape(n, classes)
