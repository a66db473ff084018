"""Commands of inference whose files must not depend on the number of ranks."""

import sys
from pathlib import Path
from unittest.mock import patch

from dfl.inference.__main__ import main
from tests.support.hospitals import command_line

COMMANDS = {
    "centre": [
        "--estimator",
        "pooled+tilted_score+surrogate+one_shot+debiased+meta",
        "--bits",
        "12",
    ],
    "graph": [
        *("--estimator", "tilted_score_graph+gradient_tracking:rounds=5"),
        *("--topology", "ring", "--faults", "link_loss:p=0.2"),
    ],
}
FILES = ("estimates.csv", "sites.csv", "revealed.csv", "traffic.csv", "summary.txt")


def estimate(table: Path, folder: Path) -> None:
    """Run every command on a table, each to its own folder."""
    for name, arguments in COMMANDS.items():
        tokens = command_line(table, *arguments, "--out", str(folder / name))
        with patch.object(sys, "argv", ["dfl", *tokens]):
            code = main()
        assert code == 0, name
