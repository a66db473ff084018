"""The command `python -m dfl.report DIR...`: write report.html of runs."""

from __future__ import annotations

if __name__ == "__main__":
    from dfl.core.command_line import leave_on_interrupt, spare_imports

    leave_on_interrupt()
    spare_imports()

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from dfl.core import command_line
from dfl.core.errors import InputError, printable
from dfl.store.manifest import NAME, read_now, runs_in
from dfl.store.run_directory import GRID

_ABOUT = "Write report.html of runs, sweeps and comparisons from what their folders hold."


def main() -> int:
    """Run the command line of this process and return the exit code: 0, 2, or 130 for Ctrl-C."""
    return command_line.run_command(_run_command_line)


def _run_command_line(tokens: Sequence[str]) -> None:
    app = command_line.app("report", _ABOUT)

    @app.default
    def command(*folders: Path) -> None:
        """Write reports.

        Parameters
        ----------
        folders: Path
            Folders of runs, sweeps or comparisons, one or more.
        """
        if not folders:
            raise InputError("DIR is missing: give the folders of some runs or sweeps")
        for folder in dict.fromkeys(folders):
            print(f"written: {printable(str(report(folder)))}")

    command_line.call(app, tokens)


def report(folder: Path) -> Path:
    """Write the page of a folder, and return its path.

    Raises:
        InputError: it holds no run, no sweep and no comparison, or cannot be written to.
    """
    if os.path.lexists(folder / NAME):
        from dfl.reporting.callbacks.report import Report

        return Report(folder).write(read_now(folder))
    if os.path.lexists(folder / GRID):
        from dfl.sweep.page import write_again

        return write_again(folder)
    if os.path.lexists(folder / "compare.csv"):
        from dfl import compare

        return compare.write_again(folder)
    raise InputError(f"{folder} holds no run, no sweep and no comparison{runs_in(folder)}")


if __name__ == "__main__":
    sys.exit(main())
