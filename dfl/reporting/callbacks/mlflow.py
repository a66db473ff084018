"""The callback that writes a run for MLflow."""

from __future__ import annotations

import math
import time
from importlib.util import find_spec
from typing import Any

from dfl.core.errors import InputError, one_line
from dfl.core.version import DISTRIBUTION
from dfl.store.callbacks import Callback, Row, RunInfo


class MLflow(Callback):
    """Logs settings and rows of metrics.csv: `callbacks=[dfl.MLflow(experiment="dfl")]`.

    Args:
        experiment: the name of the experiment, which is created where there is none.
        tracking_uri: the server or the store; that of MLflow's own settings where not given.

    Raises:
        InputError: mlflow is not installed.
    """

    def __init__(self, experiment: str = "dfl", tracking_uri: str | None = None) -> None:
        if find_spec("mlflow") is None:
            install = f"pip install '{DISTRIBUTION}[mlflow]'"
            raise InputError(f"dfl.MLflow needs mlflow, which is not installed: {install}")
        self.experiment, self.tracking_uri = experiment, tracking_uri
        self.client: Any = None
        self.id = ""

    def start(self, info: RunInfo) -> None:
        """Begin a run of the experiment, with the settings as its parameters and the earlier rows.

        Raises:
            InputError: the server does not answer, or the store cannot be used.
        """
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException

        settings = [Param(name, str(value)) for name, value in info.run.to_dict().items()]
        try:
            self.client = client = MlflowClient(self.tracking_uri)
            found = client.get_experiment_by_name(self.experiment)
            number = found.experiment_id if found else client.create_experiment(self.experiment)
            self.id = client.create_run(number).info.run_id
            client.log_batch(self.id, params=settings)
        except (ImportError, MlflowException) as error:  # a database needs more packages
            raise InputError(
                f"dfl.MLflow with tracking_uri={self.tracking_uri!r} cannot begin a run "
                f"({one_line(error)}): give a server's address, a folder as file:mlruns with "
                "MLFLOW_ALLOW_FILE_STORE=true in the environment, or install the package mlflow, "
                "which has a database"
            ) from None
        for row in info.earlier:
            self.row(row)

    def row(self, row: Row) -> None:
        """Log the finite figures of an evaluation, at the step of its round."""
        from mlflow.entities import Metric

        now = time.time_ns() // 1_000_000
        figures = [
            Metric(name, value, now, row.round)
            for name, value in row.items()
            if name != "round" and math.isfinite(value)
        ]
        self.client.log_batch(self.id, metrics=figures)

    def close(self, error: BaseException | None) -> None:
        """End the run, as failed where an error ended it."""
        if self.id:
            self.client.set_terminated(self.id, "FINISHED" if error is None else "FAILED")
