"""Callbacks for Weights & Biases, offline, and for MLflow, in its file store."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dfl

SMALL: dict[str, Any] = {"peers": 3, "rounds": 2, "eval_every": 1, "model": "mlp"}


def interrupted(folder: Path) -> dfl.Run:
    """Return a run of 3 rounds to be resumed, which was left in round 2."""
    settings = {**SMALL, "rounds": 3, "checkpoint_every": 2, "out": folder}
    for row in dfl.simulate(dfl.Run(**settings)):
        if row.round == 2:
            break
    return dfl.resumed(folder)


@pytest.mark.parametrize(
    ("make", "package"),
    [(lambda: dfl.WeightsAndBiases(), "wandb"), (lambda: dfl.MLflow(), "mlflow")],
)
def test_they_are_optional_packages(
    make: Callable[[], object], package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"dfl.reporting.callbacks.{package}.find_spec", lambda name: None)
    with pytest.raises(dfl.InputError, match=rf"pip install 'dfl-sim\[{package}\]'"):
        make()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_gets_settings_and_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # files are asked for, not a database
    uri = (tmp_path / "store").as_uri()
    for lr in (0.1, 1e30):
        callback = dfl.MLflow("tests", tracking_uri=uri)
        try:
            rows = list(dfl.simulate(dfl.Run(**SMALL, lr=lr), callbacks=[callback]))
        except dfl.DivergedError:
            assert lr == 1e30
    client = mlflow.MlflowClient(uri)
    found = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    by_lr = {each.data.params["lr"]: each for each in found}
    assert by_lr["0.1"].data.params["model"] == "mlp"
    assert {lr: each.info.status for lr, each in by_lr.items()} == {
        "0.1": "FINISHED",
        "1e+30": "FAILED",
    }
    history = client.get_metric_history(by_lr["0.1"].info.run_id, "accuracy_mean")
    assert [(each.step, each.value) for each in history] == [
        (row.round, row.accuracy_mean) for row in rows
    ]
    resumed = interrupted(tmp_path / "run")
    list(dfl.simulate(resumed, callbacks=[dfl.MLflow("resumed", tracking_uri=uri)]))
    (again,) = client.search_runs([client.get_experiment_by_name("resumed").experiment_id])
    history = client.get_metric_history(again.info.run_id, "payload_bytes")
    expected = dfl.load(tmp_path / "run").rows
    assert [each.step for each in history] == expected["round"].tolist() == [0, 1, 2, 3]
    assert [each.value for each in history] == expected["payload_bytes"].tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_store_of_mlflow_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    uri = (tmp_path / "store").as_uri()
    with pytest.raises(dfl.InputError, match=f"tracking_uri='{uri}' cannot begin a run"):
        list(dfl.simulate(dfl.Run(**SMALL), callbacks=[dfl.MLflow(tracking_uri=uri)]))
    monkeypatch.setitem(sys.modules, "alembic.migration", None)  # of MLflow's databases
    for name in [name for name in sys.modules if name.startswith("mlflow.store")]:
        monkeypatch.delitem(sys.modules, name)
    given = dfl.MLflow(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    with pytest.raises(dfl.InputError, match=r"tracking_uri='sqlite.*Error.*which has a database"):
        list(dfl.simulate(dfl.Run(**SMALL), callbacks=[given]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_gets_settings_and_rows_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    callback = dfl.WeightsAndBiases("tests", mode="offline", dir=str(tmp_path), config={"note": 1})
    logged: list[tuple[dict[str, float], int]] = []
    begin = wandb.init

    def init(**given: Any) -> Any:
        run = begin(**given)
        log = run.log

        def keep(values: dict[str, float], step: int) -> None:
            logged.append((values, step))
            log(values, step=step)

        monkeypatch.setattr(run, "log", keep)
        return run

    monkeypatch.setattr(wandb, "init", init)
    rows = list(dfl.simulate(dfl.Run(**SMALL), callbacks=[callback]))
    assert callback.log.config["model"] == "mlp"
    assert callback.log.config["note"] == 1
    assert [(values["accuracy_mean"], step) for values, step in logged] == [
        (row.accuracy_mean, row.round) for row in rows
    ]
    assert all("round" not in values for values, _ in logged)
    logged.clear()
    resumed = interrupted(tmp_path / "run")
    list(dfl.simulate(resumed, callbacks=[callback]))
    expected = dfl.load(tmp_path / "run").rows
    assert [step for _, step in logged] == [0, 1, 2, 3]
    for values, row in zip(logged, expected.to_dict("records"), strict=True):
        assert values[0] == {name: value for name, value in row.items() if name != "round"}
    logged.clear()
    continued = dfl.WeightsAndBiases("tests", mode="offline", dir=str(tmp_path))
    started = begin(project="tests", mode="offline", dir=str(tmp_path))
    started.log({"accuracy_mean": 0.5}, step=2)  # which `init` returns, as one that it continues
    list(dfl.simulate(interrupted(tmp_path / "again"), callbacks=[continued]))
    assert [step for _, step in logged] == [2, 3]
    files = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(files) >= 2
    assert all(each.stat().st_size > 0 for each in files)
