"""The callback that draws the figures of a run into its directory."""

from __future__ import annotations

from pathlib import Path

from dfl.config import Run
from dfl.core.files import atomically, make_directory, writing
from dfl.store.callbacks import Callback, Outcome, RunInfo
from dfl.store.tables import read


class Figures(Callback):
    """Draws `figures/*.png` after the last round, from the tables of the run directory.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info: RunInfo

    def start(self, info: RunInfo) -> None:
        """Keep the description of the run for the figures."""
        self.info = info

    def finish(self, outcome: Outcome) -> None:
        """Draw the figures.

        Raises:
            InputError: metrics.csv is damaged, or the folder cannot be written to.
        """
        from dfl.reporting import plots

        table = read(self.folder / "metrics.csv").arrays
        weights = self.info.graph.weights if self.info.graph else ()
        drawn = plots.figures(
            table, outcome.peers, weights, self.info.label_counts, title(self.info.run)
        )
        with writing(f"--out {self.folder}"):
            make_directory(self.folder / "figures")
            for name, figure in drawn.items():
                with atomically(self.folder / "figures" / f"{name}.png") as part:
                    figure.savefig(part, format="png", dpi=150)


def title(run: Run) -> str:
    """Return the main settings of a run in one line; some only if they differ from the default."""
    graph = f"{run.topology}, " if run.topology else ""
    settings = (f"sharing {run.share}", run.aggregator, run.attack, run.faults)
    default = ("sharing all", "mean", "none", "fltrust")
    others = "".join(f", {each}" for each in settings if each not in default)
    data = f"{run.dataset} ({run.partition}), {run.model}"
    return f"{graph}{run.peers} peers, {run.algorithm}{others}, {data}"
