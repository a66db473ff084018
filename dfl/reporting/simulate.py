"""`dfl.simulate`: runs a simulation with the callbacks that write its folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.simulation.loop import rows_of_run
from dfl.store.callbacks import Callback, Row, as_callbacks


def simulate(run: Run, callbacks: Sequence[Callback] = ()) -> Iterator[Row]:
    """Run a simulation and yield a row of figures at round 0, every `eval_every` rounds and after
    each of the last `eval_last`.

    Args:
        run: what to simulate. `run.out` is the folder to write to, if any.
        callbacks: watch the run on rank 0, after those that write `run.out`.

    Yields:
        The rows of metrics.csv, on every rank; nothing where the run to resume is finished.

    Raises:
        InputError: something cannot be done.
        DivergedError: the model of an honest peer is no longer finite, or its training loss or
            accuracy at an evaluation although it has examples.
    """
    return rows_of_run(run, (*default_callbacks(run), *as_callbacks(callbacks)))


def default_callbacks(run: Run) -> tuple[Callback, ...]:
    """Return the callbacks that keep the history of a run and draw its figures; those that write
    for TensorBoard or a profile if these are on; and that of the report unless it is off.

    Raises:
        InputError: `tensorboard` or `profile` is set without `out`, or TensorBoard is
            not installed.
    """
    if not isinstance(run, Run):
        return ()
    if run.out is None:
        for name in ("tensorboard", "profile"):
            if getattr(run, name):
                raise InputError(f"--{name} writes into the folder of the run: give --out")
        return ()
    from dfl.reporting.callbacks.figures import Figures
    from dfl.reporting.callbacks.report import Report
    from dfl.store.history import History

    callbacks: list[Callback] = [History(run.out), Figures(run.out)]
    if run.tensorboard:
        from dfl.reporting.callbacks import tensorboard

        tensorboard.check()
        callbacks.append(tensorboard.TensorBoard(run.out / "tensorboard"))
    if run.profile:
        from dfl.reporting.callbacks.profile import ProfileFiles

        callbacks.append(ProfileFiles(run.out / "profile"))
    return (*callbacks, *((Report(run.out),) if run.report else ()))
