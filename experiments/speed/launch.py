"""How is a measurement started? As a program of its own, on any number of ranks, that says what it
found in JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from dfl.core.errors import InputError
from dfl.sweep.scheduler import mpirun


def launch(ranks: int, *words: str) -> dict[str, Any]:
    """Run `python WORDS` on some ranks, and read the last line that it prints.

    Args:
        ranks: how many; 1 is started without a launcher.
        words: what follows `python`.

    Returns:
        What the line said, a list under `found`; and under `wall` the seconds from start to end,
        imports included.

    Raises:
        InputError: it failed, or several ranks are asked for and there is no mpirun.
    """
    printed, wall = timed(ranks, *words)
    said = json.loads(printed.strip().splitlines()[-1])
    return (said if isinstance(said, dict) else {"found": said}) | {"wall": wall}


def timed(ranks: int, *words: str) -> tuple[str, float]:
    """Run `python WORDS` on some ranks: what was printed, and the seconds from start to end; else
    like `launch`.
    """
    begun = time.perf_counter()
    done = subprocess.run(
        [*_launcher(ranks), sys.executable, *words], capture_output=True, text=True
    )
    wall = time.perf_counter() - begun
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise InputError(f"{' '.join(words)} on {ranks} ranks: {lines[-1]}")
    return done.stdout, wall


def _launcher(ranks: int) -> list[str]:
    """The words before `python`."""
    return [mpirun(f"{ranks} ranks need"), "-n", str(ranks)] if ranks > 1 else []
