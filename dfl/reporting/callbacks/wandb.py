"""The callback that writes a run for Weights & Biases."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from dfl.core.errors import InputError
from dfl.core.version import DISTRIBUTION
from dfl.store.callbacks import Callback, Row, RunInfo


class WeightsAndBiases(Callback):
    """Logs settings and rows of metrics.csv: `callbacks=[dfl.WeightsAndBiases(project="dfl")]`.

    Args:
        project: the project.
        init: further arguments of `wandb.init`, as name, group, dir, or mode="offline".

    Raises:
        InputError: wandb is not installed.
    """

    def __init__(self, project: str = "dfl", **init: Any) -> None:
        if find_spec("wandb") is None:
            install = f"pip install '{DISTRIBUTION}[wandb]'"
            raise InputError(f"dfl.WeightsAndBiases needs wandb, which is not installed: {install}")
        self.init = {"project": project, **init}
        self.log: Any = None

    def start(self, info: RunInfo) -> None:
        """Begin a run of the project, with the settings as its config and the earlier rows."""
        import wandb

        config = {**self.init.get("config", {}), **info.run.to_dict()}
        self.log = wandb.init(**self.init | {"config": config})
        known = self.log.step  # of a run of the project that `init` continues
        for row in info.earlier:
            if row.round >= known:
                self.row(row)

    def row(self, row: Row) -> None:
        """Log an evaluation, at the step of its round."""
        self.log.log(
            {name: value for name, value in row.items() if name != "round"}, step=row.round
        )

    def close(self, error: BaseException | None) -> None:
        """End the run, as failed where an error ended it."""
        if self.log is not None:
            self.log.finish(exit_code=0 if error is None else 1)
