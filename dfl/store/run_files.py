"""The callback that writes the run directory.

    DIR/.dfl                marker of our folders (`dfl.store.run_directory`)
    DIR/run.json            the run's settings, versions and host; at the end, how it ended
                            and checksums of the other files (`dfl.store.manifest`)
    DIR/metrics.csv         a row per evaluation
    DIR/peers.csv           a row per peer, at the end
    DIR/state.safetensors   the models by parameter name, axis 0 = peers
    DIR/figures/*.png       `dfl.reporting.plots`
    DIR/report.html         `dfl.reporting.callbacks.report`
    DIR/history/            `dfl.store.history`: the peers at every evaluation, for the report
    DIR/tensorboard/        `dfl.reporting.callbacks.tensorboard`
    DIR/profile/            `dfl.reporting.callbacks.profile`
    DIR/logs/rank-3.log     `dfl.store.logs`, of every rank
    DIR/checkpoint/         `dfl.simulation.checkpointing`

Files except metrics.csv and logs appear whole or not at all. Nothing is written through a link, and
nothing is pickled. `dfl.store.results` reads the directory.
"""

from __future__ import annotations

import csv
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import FileIO, StringIO
from pathlib import Path

import numpy as np

from dfl.core.errors import InputError
from dfl.core.files import Lock, atomically, no_follow, read_bytes
from dfl.evaluation.fairness import ADVERSARY, ODDS, PARITY
from dfl.store import checkpoint_files, manifest
from dfl.store.callbacks import Callback, Outcome, Peers, Row, RunInfo
from dfl.store.progress import Progress
from dfl.store.record import circumstances, continued, ended
from dfl.store.run_directory import claim, refuse_unusable, take_back


class RunFiles(Callback):
    """Writes the run directory.

    Args:
        path: the folder.
        progress: what the folder held before, and checksums of what the run is given.
    """

    def __init__(self, path: Path, progress: Progress) -> None:
        self.path = path
        self.progress = progress
        self.metrics = path / "metrics.csv"
        self.begun, self.earlier = time.perf_counter(), 0.0
        self.record: dict[str, object] = {}
        self.columns: list[str] = []
        self.written, self.size = hashlib.sha256(), 0
        self.files: list[str] = []
        self.info: RunInfo
        self.lock: Lock

    def start(self, info: RunInfo) -> None:
        """Create the folder with run.json in it.

        Raises:
            InputError: the folder holds a run already, or cannot be written to.
        """
        self.info = info
        resume = info.run.resume is not None
        refuse_unusable(self.path, resume, info.run.report)
        made = claim(self.path, "--resume" if resume else "--out")
        try:
            with self._writing():
                self.lock = Lock(self.path)
            given = {"data": self.progress.data, "given": dict(self.progress.given)}
            self.record = circumstances(info) | given
            with self.lock.unless_this_fails(), self._writing():
                # Another run may have been faster.
                refuse_unusable(self.path, resume, info.run.report)
                if resume:
                    self._go_on()
                manifest.write(self.path, self.record)
        except BaseException:
            take_back(made)
            raise

    def row(self, row: Row) -> None:
        """Append to metrics.csv; a header precedes the first row."""
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
                with open(self.metrics, "r+b" if self.size else "xb", 0, opener=no_follow) as file:
                    if file.seek(0, os.SEEK_END) != self.size:
                        raise self._changed()
                    self._append(file, text.getvalue())
            except FileNotFoundError:
                raise self._changed() from None

    def _append(self, file: FileIO, text: str) -> None:
        """Write a text at the end of metrics.csv, or nothing where that fails."""
        left = memoryview(text.encode())
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(self.size)
            raise
        self._noted(text)

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

    def finish(self, outcome: Outcome) -> None:
        """Write the models and the peers' figures.

        Raises:
            InputError: metrics.csv was changed by another program, or the folder cannot be written
                to.
        """
        from safetensors.numpy import save

        self.table()
        with self._writing():
            with atomically(self.path / "state.safetensors") as part:
                part.write_bytes(save(dict(outcome.state)))
            with atomically(self.path / "peers.csv") as part, part.open("w", newline="") as file:
                columns = peer_columns(self.info, outcome.peers)
                table = csv.writer(file, lineterminator="\n")
                table.writerow(columns)
                table.writerows(zip(*columns.values(), strict=True))
        self.files = ["metrics.csv", "peers.csv", "state.safetensors"]

    def close(self, error: BaseException | None) -> None:
        """Add to run.json how long it took and how it ended."""
        seconds = self.earlier + time.perf_counter() - self.begun
        self.record |= {"seconds": seconds, **ended(error)}
        try:
            final = self.files or (["metrics.csv"] if self._whole() else [])
            if self.files:
                final += [
                    f"figures/{each.name}" for each in sorted((self.path / "figures").glob("*.png"))
                ]
            manifest.write(self.path, self.record, final)
        except OSError as full:
            if error is None:  # else that error is reported
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
        return InputError(
            f"{self.metrics} was removed or changed by another program during the run"
        )

    def _go_on(self) -> None:
        """Have metrics.csv as it was at the checkpoint at which the run goes on."""
        found = self.progress.found
        if checkpoint_files.trace(self.path) != self.progress.trace:
            raise InputError(
                f"{self.path}: another program resumed this run meanwhile: start again"
            )
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
        """Refuse in one line what the disk does not take.

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


def peer_columns(info: RunInfo, peers: Peers) -> dict[str, Sequence[object]]:
    """Return the columns of peers.csv, each with P entries; what a method observes comes last."""
    sent = peers["payload_bytes"].astype(np.int64)
    measured = (
        "accuracy",
        "test_loss",
        "perplexity",
        PARITY,
        ODDS,
        ADVERSARY,
        "local_accuracy",
        "validation_accuracy",
        "train_loss",
        "backdoor_success",
        "trust",
    )
    labels = [
        " ".join([f"{label}:{n}" for label, n in enumerate(row.tolist()) if n])
        for row in info.label_counts
    ]
    columns: dict[str, Sequence[object]] = {
        "peer": list(range(info.layout.peers)),
        "rank": info.layout.ranks_of(np.arange(info.layout.peers)).tolist(),
    }
    if info.graph:
        columns["degree"] = info.graph.degrees.tolist()
    columns |= {"n_train": info.sizes[:, 0].tolist(), "labels": labels}
    columns |= {name: peers[name].tolist() for name in measured if name in peers}
    if peers["is_attacker"].any():
        columns["is_attacker"] = peers["is_attacker"].astype(int).tolist()
    columns["payload_bytes_sent"] = sent.tolist()
    if info.has_server:
        columns["payload_bytes_received"] = peers["download_bytes"].astype(int).tolist()
    known = (*measured, "is_attacker", "payload_bytes", "download_bytes")
    return columns | {name: peers[name].tolist() for name in peers if name not in known}
