"""The default callbacks of a run with a folder."""

from __future__ import annotations

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.store.callbacks import Callback


def default_callbacks(run: Run) -> tuple[Callback, ...]:
    """Return the callbacks that keep the history of a run, draw its figures, write for TensorBoard
    if it is on, and write the report unless it is off.

    Raises:
        InputError: `tensorboard` is set without `out`, or the package is not installed.
    """
    if not isinstance(run, Run) or (run.out is None and not run.tensorboard):
        return ()
    if run.out is None:
        raise InputError("--tensorboard writes into the folder of the run: give --out")
    from dfl.reporting.figures import Figures
    from dfl.reporting.report import Report
    from dfl.store.history import History

    callbacks: list[Callback] = [History(run.out), Figures(run.out)]
    if run.tensorboard:
        from dfl.reporting import tensorboard

        tensorboard.check()
        callbacks.append(tensorboard.TensorBoard(run.out / "tensorboard"))
    return (*callbacks, *((Report(run.out),) if run.report else ()))
