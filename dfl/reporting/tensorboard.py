"""How do the figures of a run get to TensorBoard? `--tensorboard`: every column of metrics.csv, by round."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.core.files import make_directory

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from dfl.reporting.report import Peers
    from dfl.simulation.loop import Setting


def check(run: Run) -> None:
    """Refuse what there is no package for.

    Raises:
        InputError: it is not installed.
    """
    if run.tensorboard and find_spec("tensorboard") is None:
        raise InputError(
            "--tensorboard needs a package that is not installed: pip install 'dfl[tensorboard]'"
        )


class Events:
    """Writes the rows of a run to `DIR/tensorboard`, for `tensorboard --logdir DIR`. On rank 0 only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: SummaryWriter | None = None

    def start(self, setting: Setting) -> None:
        """Nothing is written before there is a row."""

    def tick(self, t: int) -> None:
        """Only what is evaluated is shown."""

    def row(self, row: Mapping[str, float]) -> None:
        """Write a scalar per column; a run that goes on takes back what was written of later rounds.

        Raises:
            InputError: the disk does not take it.
        """
        t = int(row["round"])
        try:
            if self.writer is None:
                from torch.utils.tensorboard import SummaryWriter

                make_directory(self.folder)
                self.writer = SummaryWriter(str(self.folder), purge_step=t)
            for name in row.keys() - {"round"}:
                self.writer.add_scalar(name, row[name], t)
            self.writer.flush()
        except OSError as error:
            raise InputError(
                f"{self.folder} cannot be written to: {error.strerror or error}"
            ) from None

    def finish(self, peers: Peers, models: NDArray[Any]) -> None:
        """All figures have been written."""

    def close(self, error: BaseException | None) -> None:
        """End the file, whatever the disk does."""
        with suppress(OSError):
            if self.writer:
                self.writer.close()
