"""The callback that writes every column of metrics.csv for TensorBoard, by round."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from dfl.core.errors import InputError
from dfl.core.files import make_directory, writing
from dfl.core.version import DISTRIBUTION
from dfl.store.callbacks import Callback, Row, RunInfo

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Callback):
    """Writes the rows of a run for `tensorboard --logdir FOLDER`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: SummaryWriter | None = None
        self.earlier: tuple[Row, ...] = ()

    def start(self, info: RunInfo) -> None:
        """Check that TensorBoard is installed.

        Raises:
            InputError: it is not installed.
        """
        check()
        self.earlier = info.earlier

    def row(self, row: Row) -> None:
        """Write a scalar per column.

        The first row of a resumed run is written after the earlier ones, which replace all that the
        folder shows: the run may be evaluated in other rounds than before.

        Raises:
            InputError: the folder cannot be written to.
        """
        rows: tuple[Row, ...] = (row,)
        with writing(str(self.folder)):
            if self.writer is None:
                from torch.utils.tensorboard import SummaryWriter

                make_directory(self.folder)
                self.writer = SummaryWriter(str(self.folder), purge_step=0)
                rows = (*self.earlier, row)
            for each in rows:
                for name in each.keys() - {"round"}:
                    self.writer.add_scalar(name, each[name], each.round)
            self.writer.flush()

    def close(self, error: BaseException | None) -> None:
        """Close the file; an error of the disk is ignored."""
        with suppress(OSError):
            if self.writer:
                self.writer.close()


def check() -> None:
    """Check that TensorBoard is installed.

    Raises:
        InputError: it is not.
    """
    if find_spec("tensorboard") is None:
        raise InputError(
            "--tensorboard needs a package that is not installed: "
            f"pip install '{DISTRIBUTION}[tensorboard]'"
        )
