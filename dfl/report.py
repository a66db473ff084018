"""What does a run leave behind?

    DIR/run.json            what was asked for, of which program, where; at the end, how it ended
    DIR/metrics.csv         a row per evaluation
    DIR/peers.csv           a row per peer, at the end
    DIR/state.safetensors   the models by parameter name, axis 0 = peers
    DIR/figures/*.png       `dfl.plots`
    DIR/tensorboard/        `dfl.events`
    DIR/logs/rank-3.log     `dfl.logs`, of every rank
    DIR/checkpoint/         `dfl.checkpoint`

All but metrics.csv appear whole or not at all. Nothing is pickled. `dfl.results` reads it back.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dfl import keeping
from dfl.errors import InputError
from dfl.events import Events
from dfl.files import Lock, atomically, cut_back
from dfl.models import frozen
from dfl.record import circumstances, continued, ending

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from dfl.simulation import Setting
    from dfl.task import Task
else:
    from dfl.lazy import torch

Peers = Mapping[str, NDArray[np.float64]]


class Listener(Protocol):
    """Who is told, on rank 0, how a run goes."""

    def start(self, setting: Setting) -> None:
        """The run is about to start."""

    def tick(self, t: int) -> None:
        """Round t - 1 is done and nobody was evaluated."""

    def row(self, row: Mapping[str, float]) -> None:
        """An evaluation, by column of metrics.csv."""

    def finish(self, peers: Peers, models: NDArray[Any]) -> None:
        """The last round is done: every peer's figures (P,) by name, and the models (P, d)."""

    def close(self, error: BaseException | None) -> None:
        """The run is over, by an error or without."""


class Report:
    """Passes what happens on to a folder and a terminal; either may be missing. On rank 0 only."""

    def __init__(self, folder: Path | None, terminal: Listener | None = None) -> None:
        self.listeners: list[Listener] = [Folder(folder)] if folder is not None else []
        self.listeners += [terminal] if terminal is not None else []

    def start(self, setting: Setting) -> None:
        """Create the folder and say what is about to run.

        Raises:
            InputError: the folder holds a run already, or cannot be written to.
        """
        if setting.run.tensorboard and setting.run.out is not None:
            self.listeners.append(Events(setting.run.out / "tensorboard"))
        started: list[Listener] = []
        try:
            for each in self.listeners:
                each.start(setting)
                started.append(each)
        except BaseException as error:
            for each in started:
                each.close(error)
            raise

    def tick(self, t: int) -> None:
        """Tell that t rounds are done."""
        for each in self.listeners:
            each.tick(t)

    def row(self, row: Mapping[str, float]) -> None:
        """Tell the figures of an evaluation, by column of metrics.csv."""
        for each in self.listeners:
            each.row(row)

    def finish(self, peers: Peers, models: NDArray[Any]) -> None:
        """Keep and show the outcome.

        Args:
            peers: every peer's figures (P,), by name, as `metrics.measure` gives them.
            models: (P, d).
        """
        for each in self.listeners:
            each.finish(peers, models)

    def close(self, error: BaseException | None) -> None:
        """Tell how the run ended; the terminal first, which must be left tidy whatever the disk does."""
        for each in reversed(self.listeners):
            each.close(error)


class Folder:
    """Writes the run directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.begun, self.earlier, self.known = time.perf_counter(), 0.0, False
        self.record: dict[str, Any] = {}
        self.setting: Setting
        self.lock: Lock

    def start(self, setting: Setting) -> None:
        """Create the folder with run.json in it.

        Raises:
            InputError: the folder holds a run already, or cannot be written to.
        """
        self.setting = setting
        if setting.run.resume is None and any((self.path / name).exists() for name in ("run.json", "metrics.csv")):
            raise InputError(
                f"--out {self.path} holds a run already, and runs are never overwritten: give another folder, or "
                f"--resume {self.path}"
            )
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = Lock(self.path)
        self.record = circumstances(setting)
        with self.lock.unless_this_fails(), self._writing():
            if (self.path / "run.json").exists():
                self._go_on()
            self._write_record()

    def tick(self, t: int) -> None:
        """Rounds without an evaluation leave nothing behind."""

    def row(self, row: Mapping[str, float]) -> None:
        """Append to metrics.csv; the first row brings the header."""
        with self._writing(), (self.path / "metrics.csv").open("a", newline="") as file:
            table = csv.DictWriter(file, list(row), lineterminator="\n")
            if not file.tell():
                table.writeheader()
            elif not self.known:
                self._check_header(list(row))
            self.known = True
            table.writerow(row)

    def finish(self, peers: Peers, models: NDArray[Any]) -> None:
        """Write the models, the peers and the figures."""
        from safetensors.numpy import save

        views = by_name(self.setting.task, torch.from_numpy(models))
        state = {name: np.ascontiguousarray(view.numpy()) for name, view in views.items()}
        with self._writing():
            with atomically(self.path / "state.safetensors") as part:
                part.write_bytes(save(state))
            with atomically(self.path / "peers.csv") as part, part.open("w", newline="") as file:
                columns = peer_columns(self.setting, peers)
                table = csv.writer(file, lineterminator="\n")
                table.writerow(columns)
                table.writerows(zip(*columns.values(), strict=True))
            self._draw(peers)

    def close(self, error: BaseException | None) -> None:
        """Add to run.json how long it took and how it ended."""
        code, how = ending(error)
        self.record |= {"seconds": self.earlier + time.perf_counter() - self.begun, "exit": code, "ending": how}
        try:
            self._write_record()
        except OSError as full:
            if error is None:  # else there is something more important to say
                raise InputError(f"{self.path}/run.json cannot be written: {full.strerror}") from None
        finally:
            self.lock.release()

    def _check_header(self, columns: list[str]) -> None:
        """Refuse to write under other columns, as another version of this program would."""
        with (self.path / "metrics.csv").open(newline="") as file:
            if (header := next(csv.reader(file))) != columns:
                raise InputError(f"{self.path}/metrics.csv has columns {header}, and these rows have {columns}")

    def _go_on(self) -> None:
        """Take back what was written after the checkpoint at which the run goes on."""
        assert self.setting.facts is not None
        begun, table = self.setting.facts.begun, self.path / "metrics.csv"
        found = begun.found
        if keeping.trace(self.path) != begun.trace:
            raise InputError(f"{self.path} has been gone on with meanwhile: ask for it again")
        if found:
            cut_back(table, found.content["table"])
            self.earlier = found.content["seconds"]
        else:
            table.unlink(missing_ok=True)
        before = json.loads((self.path / "run.json").read_text())
        self.record = continued(self.record, before, found.round if found else 0)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Say in one line what the disk does not take.

        Raises:
            InputError: instead of an OSError.
        """
        try:
            yield
        except OSError as error:
            raise InputError(f"--out {self.path} cannot be written to: {error.strerror or error}") from None

    def _draw(self, peers: Peers) -> None:
        import pandas as pd

        from dfl import plots

        run, facts = self.setting.run, self.setting.facts
        assert facts is not None
        rows = pd.read_csv(self.path / "metrics.csv")
        graph = f"{run.topology}, " if run.topology else ""
        ways = (f"sharing {run.share}", run.aggregator, run.attack, run.faults)
        plain = ("sharing all", "mean", "none", "fltrust")
        said = "".join(f", {each}" for each in ways if each not in plain)
        name = f"{graph}{run.peers} peers, {run.algorithm}{said}, {run.dataset} ({run.partition}), {run.model}"
        drawn = plots.figures(rows, peers, self.setting.network.weights, facts.label_counts, name)
        (self.path / "figures").mkdir(exist_ok=True)
        for title, figure in drawn.items():
            with atomically(self.path / "figures" / f"{title}.png") as part:
                figure.savefig(part, format="png", dpi=150)

    def _write_record(self) -> None:
        with atomically(self.path / "run.json") as part:
            part.write_text(json.dumps(self.record, indent=2) + "\n")


def by_name(task: Task, models: Tensor) -> dict[str, Tensor]:
    """Models (P, d) by parameter name, (P, *shape).

    Frozen parameters are there once, (1, *shape). Of several kinds, what peers keep to themselves is called
    `kind/name`, with a row for each peer of the kind.
    """
    if not task.kinds:
        return task.spec.views(models) | {n: value[None].cpu() for n, value in frozen(task.module).items()}
    shared = task.spec.common
    named: dict[str, Tensor] = {}
    for k, (module, spec) in enumerate(task.kinds):
        own = spec.views(models[k :: len(task.kinds)])
        own |= {name: value[None].cpu() for name, value in frozen(module).items()}
        named |= {f"{k}/{name}": value for name, value in own.items() if name not in shared}
    return {name: value for name, value in task.spec.views(models).items() if name in shared} | named


def peer_columns(setting: Setting, peers: Peers) -> dict[str, list[Any]]:
    """The columns of peers.csv, each with P entries."""
    facts, said = setting.facts, peers["payload_bytes"].astype(np.int64)
    assert facts is not None
    everyone = range(setting.layout.peers)
    measured = ("accuracy", "local_accuracy", "validation_accuracy", "train_loss", "backdoor_success", "trust")
    labels = [" ".join(f"{label}:{row[label]}" for label in np.flatnonzero(row)) for row in facts.label_counts]
    return {
        "peer": list(everyone),
        "rank": [setting.layout.rank_of(i) for i in everyone],
        **({"degree": facts.graph.degrees.tolist()} if facts.graph else {}),
        "n_train": facts.sizes[:, 0].tolist(),
        "labels": labels,
        **{name: peers[name].tolist() for name in measured if name in peers},
        **({"liar": peers["liar"].astype(int).tolist()} if peers["liar"].any() else {}),
        "payload_bytes_sent": said.tolist(),
        **({"payload_bytes_received": peers["told_bytes"].astype(int).tolist()} if setting.algorithm.serves else {}),
    }
