"""What does a run leave behind?

    DIR/.dfl                that the folder is ours (`dfl.run_directory`)
    DIR/run.json            what was asked for, of which program, where; at the end, how it ended
                            and checksums of the other files (`dfl.manifest`)
    DIR/metrics.csv         a row per evaluation
    DIR/peers.csv           a row per peer, at the end
    DIR/state.safetensors   the models by parameter name, axis 0 = peers
    DIR/figures/*.png       `dfl.plots`
    DIR/tensorboard/        `dfl.events`
    DIR/logs/rank-3.log     `dfl.logs`, of every rank
    DIR/checkpoint/         `dfl.checkpoint`

All but metrics.csv and logs appear whole or not at all, and nothing is written through a link.
Nothing is pickled. `dfl.results` reads it back.
"""

from __future__ import annotations

import csv
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dfl import keeping, manifest
from dfl.errors import InputError
from dfl.events import Events
from dfl.files import Lock, atomically, make_directory, no_follow, read_bytes
from dfl.models import frozen
from dfl.record import circumstances, continued, ending
from dfl.run_directory import claim, refuse_unusable, take_back

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
        self.folder = folder
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

    def table(self) -> str:
        """Return metrics.csv so far; empty where there is no folder.

        Raises:
            InputError: it was removed or changed by another program.
        """
        return next((each.table() for each in self.listeners if isinstance(each, Folder)), "")

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
        self.metrics = path / "metrics.csv"
        self.begun, self.earlier = time.perf_counter(), 0.0
        self.record: dict[str, Any] = {}
        self.columns: list[str] = []
        self.written, self.size = hashlib.sha256(), 0
        self.files: list[str] = []
        self.setting: Setting
        self.lock: Lock

    def start(self, setting: Setting) -> None:
        """Create the folder with run.json in it.

        Raises:
            InputError: the folder holds a run already, or cannot be written to.
        """
        self.setting, resume = setting, setting.run.resume is not None
        refuse_unusable(self.path, resume)
        made = claim(self.path, "--resume" if resume else "--out")
        try:
            with self._writing():
                self.lock = Lock(self.path)
            self.record = circumstances(setting)
            with self.lock.unless_this_fails(), self._writing():
                refuse_unusable(self.path, resume)  # another run may have been faster
                if resume:
                    self._go_on()
                manifest.write(self.path, self.record)
        except BaseException:
            take_back(made)
            raise

    def tick(self, t: int) -> None:
        """Rounds without an evaluation leave nothing behind."""

    def row(self, row: Mapping[str, float]) -> None:
        """Append to metrics.csv; the first row brings the header."""
        text = StringIO()
        table = csv.DictWriter(text, list(row), lineterminator="\n")
        if not self.size:
            table.writeheader()
        elif self.columns != list(row):  # as another version of this program would have
            line = f"has columns {self.columns}, and these rows have {list(row)}"
            raise InputError(f"{self.metrics} {line}")
        table.writerow(row)
        self.columns = list(row)
        with self._writing():
            try:
                with open(self.metrics, "r+b" if self.size else "xb", opener=no_follow) as file:
                    if file.seek(0, os.SEEK_END) != self.size:
                        raise self._changed()
                    file.write(self._noted(text.getvalue()))
            except FileNotFoundError:
                raise self._changed() from None

    def table(self) -> str:
        """Return metrics.csv so far.

        Raises:
            InputError: it was removed or changed by another program.
        """
        try:
            held = read_bytes(self.metrics)
        except OSError:
            held = b""
        if not held or hashlib.sha256(held).digest() != self.written.digest():
            raise self._changed()
        return held.decode()

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
            drawn = self._draw(peers, self.table())
        self.files = ["metrics.csv", "peers.csv", "state.safetensors", *drawn]

    def close(self, error: BaseException | None) -> None:
        """Add to run.json how long it took and how it ended."""
        code, how = ending(error)
        self.record |= {"seconds": self.earlier + time.perf_counter() - self.begun, "exit": code, "ending": how}
        try:
            final = self.files or (["metrics.csv"] if self._whole() else [])
            manifest.write(self.path, self.record, final)
        except OSError as full:
            if error is None:  # else there is something more important to say
                why = full.strerror or full
                raise InputError(f"{self.path}/run.json cannot be written: {why}") from None
        finally:
            self.lock.release()

    def _noted(self, text: str) -> bytes:
        """Return a text as bytes that are counted as written to metrics.csv."""
        held = text.encode()
        self.written.update(held)
        self.size += len(held)
        return held

    def _whole(self) -> bool:
        """Whether metrics.csv has rows, those that were written."""
        try:
            self.table()
        except InputError:
            return False
        return True

    def _changed(self) -> InputError:
        return InputError(f"{self.metrics} was removed or changed by another program during the run")

    def _go_on(self) -> None:
        """Have metrics.csv as it was at the checkpoint at which the run goes on."""
        assert self.setting.facts is not None
        begun = self.setting.facts.begun
        found = begun.found
        if keeping.trace(self.path) != begun.trace:
            raise InputError(f"{self.path} has been gone on with meanwhile: ask for it again")
        if found:
            with atomically(self.metrics) as part:
                part.write_bytes(self._noted(found.content["table"]))
            self.columns = next(csv.reader(StringIO(found.content["table"])), [])
            self.earlier = found.content["seconds"]
        elif self.metrics.is_file() and not self.metrics.is_symlink():
            self.metrics.unlink()
        try:
            before = manifest.read(self.path)
        except InputError:  # a run that begins here, or whose run.json is damaged
            before = {}
        if before or found:
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
            inside = error.filename and Path(error.filename).is_relative_to(self.path)
            name = f"{Path(error.filename).relative_to(self.path)}: " if inside else ""
            why = f"{name}{error.strerror or error}"
            raise InputError(f"--out {self.path} cannot be written to: {why}") from None

    def _draw(self, peers: Peers, table: str) -> list[str]:
        """Draw the figures; their names in the folder."""
        import pandas as pd

        from dfl import plots

        run, facts = self.setting.run, self.setting.facts
        assert facts is not None
        rows = pd.read_csv(StringIO(table))
        graph = f"{run.topology}, " if run.topology else ""
        ways = (f"sharing {run.share}", run.aggregator, run.attack, run.faults)
        plain = ("sharing all", "mean", "none", "fltrust")
        said = "".join(f", {each}" for each in ways if each not in plain)
        name = f"{graph}{run.peers} peers, {run.algorithm}{said}, {run.dataset} ({run.partition}), {run.model}"
        drawn = plots.figures(rows, peers, self.setting.network.weights, facts.label_counts, name)
        make_directory(self.path / "figures")
        for title, figure in drawn.items():
            with atomically(self.path / "figures" / f"{title}.png") as part:
                figure.savefig(part, format="png", dpi=150)
        return [f"figures/{title}.png" for title in drawn]


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
