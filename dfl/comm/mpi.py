"""MPI: the ranks of a job and what they exchange. One rank needs no MPI.

Nothing is pickled: messages are bytes or arrays of numbers. While ranks wait for a slower one they
yield the processor and then sleep instead of spinning, because ranks may outnumber cores
(`dfl.comm.heartbeat`).
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import logging
import math
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from dfl.comm.heartbeat import Pulse, complain, until
from dfl.comm.shared_memory import remove_unused
from dfl.comm.startup import RANKS, TIMEOUT, StartLimit, first
from dfl.core.errors import DivergedError, InputError
from dfl.core.profiling import in_phase

if TYPE_CHECKING:
    from types import TracebackType

    from mpi4py import MPI
    from torch import Tensor

    Link = MPI.Distgraphcomm | None
    """A communicator of the ranks of a plan; None where there is one rank."""
    Datatype = MPI.Datatype
    """Places of bytes in a memory."""
    Parcels = tuple[NDArray[np.uint8] | Tensor, list[Datatype]]
    """Contiguous bytes, on a device if MPI reads its memory; the type of each rank's part."""

LEAVING = 3
"""The tag of the messages of ranks that stop."""
HANGING = 5.0
"""Seconds that MPI has to end a job, after which a rank ends itself."""

Bytes = NDArray[np.uint8]
_S = TypeVar("_S", bound=np.generic)

_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_SIZE", "SLURM_STEP_NUM_TASKS")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_GPU_AWARE = ("MPICH_GPU_SUPPORT_ENABLED", "OMPI_MCA_opal_cuda_support", "MV2_USE_CUDA")
_BYTE = "B"  # unsigned bytes, as mpi4py spells them


@dataclass
class World:
    """The ranks of this job.

    Attributes:
        rank, size: the number of this rank, and of ranks.
        comm: the communicator; None where there is one rank and no MPI.
        busy: whether the other ranks count on this one.
        stop_signal: the signal on which this rank is to stop; 0 for none.
        start: limits the time until all ranks have arrived; None where there is one.
        pulse: what this rank does.
        arrived: bytes that have arrived at this rank from other ranks. Lengths, and the numbers of
            `minimum`, are not counted.
    """

    rank: int = 0
    size: int = 1
    comm: Any = None
    busy: bool = False
    stop_signal: int = 0
    start: StartLimit | None = None
    pulse: Pulse = field(init=False)
    arrived: int = 0

    def __post_init__(self) -> None:
        self.pulse = Pulse(self.rank, self.size)

    def from_root(self, make: Callable[[], bytes]) -> bytes:
        """Return on every rank what rank 0 makes.

        Raises:
            InputError: on every rank, when `make` raised it on rank 0.
        """
        message = b""
        error: InputError | None = None
        if self.rank == 0:
            try:
                message = b"+" + make()
            except InputError as caught:
                message, error = b"-" + str(caught).encode(errors="backslashreplace"), caught
        message = self._broadcast(message)
        if message[:1] == b"-":
            raise error or InputError(message[1:].decode())
        return message[1:]

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Stop every rank where some ranks cannot go on.

        Raises:
            InputError: on every rank, when the block raised it on some: that of the first of them.
        """
        error: InputError | None = None
        try:
            yield
        except InputError as caught:
            error = caught
        self.agree(error)

    def agree(self, error: InputError | None, *numbers: int) -> tuple[int, ...]:
        """Return the smallest of the ranks' numbers, for each of several, on every rank.

        Raises:
            InputError: on every rank, where some have an error: that of the first of them.
        """
        first, *smallest = self.minimum(self.rank if error else self.size, *numbers)
        if first == self.size:
            return tuple(smallest)
        text = str(error).encode(errors="backslashreplace") if self.rank == first else b""
        message = self.all_gather(np.frombuffer(text, np.uint8)).tobytes().decode()
        raise error if error and self.rank == first else InputError(message)

    def scatter(self, make: Callable[[int], bytes]) -> bytes:
        """Return on every rank what rank 0 makes for it."""
        if self.size == 1:
            return make(0)
        if self.rank:
            length = np.zeros(1, np.int64)
            self._wait(self.comm.Irecv(length, source=0, tag=1))
            buffer = np.empty(int(length[0]), np.uint8)
            self._wait(self.comm.Irecv(buffer, source=0, tag=2), turn=False)
            self.arrived += buffer.nbytes
            return buffer.tobytes()
        for rank in range(1, self.size):
            message = np.frombuffer(make(rank), np.uint8)
            self._wait(
                self.comm.Isend(np.array([message.size], np.int64), dest=rank, tag=1),
                turn=rank == 1,
            )
            self._wait(self.comm.Isend(message, dest=rank, tag=2), turn=False)
            del message  # before the next one is made
        return make(0)

    def gather(self, rows: NDArray[_S]) -> NDArray[_S] | None:
        """Return all ranks' rows on rank 0, stacked along axis 0 in rank order; None elsewhere."""
        if self.size == 1:
            return rows
        mine = np.array([rows.shape[0]], np.int64)
        counts = np.zeros(self.size, np.int64)
        self._wait(self.comm.Iallgather(mine, counts))
        wide = int(np.prod(rows.shape[1:])) * rows.itemsize
        whole = (
            np.empty((int(counts.sum()), *rows.shape[1:]), rows.dtype) if self.rank == 0 else None
        )
        target = (
            None
            if whole is None
            else [whole.view(np.uint8).reshape(-1), *_places(counts * wide), _BYTE]
        )
        self._wait(self.comm.Igatherv([_flat(rows), _BYTE], target, root=0))
        self.arrived += 0 if whole is None else whole.nbytes - rows.nbytes
        return whole

    def all_gather(self, rows: NDArray[_S]) -> NDArray[_S]:
        """Return every rank's rows on every rank, stacked along axis 0 in rank order."""
        if self.size == 1:
            return rows
        counts = np.zeros(self.size, np.int64)
        self._wait(self.comm.Iallgather(np.array([len(rows)], np.int64), counts))
        wide = math.prod(rows.shape[1:]) * rows.itemsize
        whole = np.empty((int(counts.sum()), *rows.shape[1:]), rows.dtype)
        places = _places(counts * wide)
        self._wait(self.comm.Iallgatherv([_flat(rows), _BYTE], [_flat(whole), *places, _BYTE]))
        self.arrived += whole.nbytes - rows.nbytes
        return whole

    def columns(self, rows: NDArray[_S], cut: list[range], counts: list[int]) -> NDArray[_S]:
        """Turn rows of peers into columns of coordinates, (P, len(cut[rank])), rank by rank.

        Args:
            rows: (p, d), this rank's peers.
            cut: the coordinates that each rank is to have (`layout.columns`).
            counts: the peers on each rank.
        """
        if self.size == 1:
            return rows
        mine = len(cut[self.rank])
        out = np.concatenate(
            [np.ascontiguousarray(rows[:, c.start : c.stop]).reshape(-1) for c in cut]
        )
        swapped = self._swap(out, [rows.shape[0] * len(c) for c in cut], [n * mine for n in counts])
        return swapped.reshape(sum(counts), mine)

    def rows(self, whole: NDArray[_S], cut: list[range], counts: list[int]) -> NDArray[_S]:
        """Turn columns of coordinates into rows of peers, (p, d); the inverse of `columns`."""
        if self.size == 1:
            return whole
        mine = len(cut[self.rank])
        peers = counts[self.rank]
        swapped = self._swap(
            whole.reshape(-1), [n * mine for n in counts], [peers * len(c) for c in cut]
        )
        return np.concatenate(
            [swapped[peers * c.start : peers * c.stop].reshape(peers, len(c)) for c in cut], axis=1
        )

    def _swap(self, out: NDArray[_S], sends: list[int], receives: list[int]) -> NDArray[_S]:
        """Exchange numbers with every rank, those of one rank after those of another."""
        into = np.empty(sum(receives), out.dtype)
        places = (
            _places(np.array(counts, np.int64) * out.itemsize) for counts in (sends, receives)
        )
        boxes = [
            [_flat(numbers), *place, _BYTE]
            for numbers, place in zip((out, into), places, strict=True)
        ]
        self._wait(self.comm.Ialltoallv(*boxes))
        self.arrived += into.nbytes - receives[self.rank] * into.itemsize
        return into

    def link(self, sends: dict[int, int], receives: dict[int, int]) -> Link:
        """Return a distributed-graph communicator of the ranks of a plan; call it on all ranks."""
        if self.size == 1:
            return None
        with self.pulse.blocked():
            link: Link = self.comm.Create_dist_graph_adjacent(
                list(receives), list(sends), reorder=False
            )
        return link

    def rows_type(self, runs: Sequence[range], width: int) -> Datatype:
        """Return the type of some rows of a memory, to be freed by the caller.

        Args:
            runs: the rows.
            width: bytes of a row.
        """
        from mpi4py import MPI

        row = MPI.BYTE.Create_contiguous(width)
        rows = row.Create_indexed([len(run) for run in runs], [run.start for run in runs]).Commit()
        row.Free()
        return rows

    def exchange(self, link: Link, leaving: Parcels, arriving: Parcels) -> None:
        """Exchange bytes with the neighbouring ranks.

        Args:
            link: what `link` returned for the same plan.
            leaving: the memory of all messages, and the type of those for each other rank,
                ascending.
            arriving: the same of those from each other rank, ascending; overwritten.
        """
        if link is not None:
            self._wait(link.Ineighbor_alltoallw(leaving, arriving))
            self.arrived += arriving[0].nbytes

    @in_phase("wait")
    def minimum(self, *numbers: int) -> tuple[int, ...]:
        """Return the smallest of the ranks' numbers, for each of several, on every rank."""
        if self.size == 1:
            return numbers
        everyone = np.zeros((self.size, len(numbers)), np.int64)
        self._wait(self.comm.Iallgather(np.array(numbers, np.int64), everyone))
        return tuple(everyone.min(0).tolist())

    def limit_start(self, timeout: float) -> None:
        """End the job if some rank needs more than `timeout` seconds until it is `alive`."""
        if self.start:
            self.start.timeout = timeout
            self.start.begin()

    @contextmanager
    def alive(self, folder: Path | None, timeout: float) -> Iterator[None]:
        """Show the other ranks that this one is alive, and end the job when others are not.

        Args:
            folder: where the ranks' files are; without it a rank that is late cannot be named.
            timeout: seconds for which to wait for others.
        """

        def late(line: str) -> None:
            logging.getLogger("dfl").error(line)
            complain(f"dfl: {line}")
            self.end(1)

        with self.pulse.beating(folder, timeout, late):
            self.minimum(0)  # all ranks show signs of life from here on
            if self.start:
                self.start.met()
            yield

    def leave(self, code: int = 1, why: Exception | None = None, seconds: float = 60.0) -> None:
        """Wait for the other ranks to stop, and end them with exit code `code` if they do not.

        What stops every rank is agreed upon, so this only catches a rank that stops alone, while
        the others are at work. The wait is long because they may still be importing torch.

        Args:
            code: the exit code.
            why: the error that stops this rank, where no other rank prints it.
            seconds: how long to wait.
        """
        if self.size == 1 or not self.busy:
            return
        self.busy = False
        if not self._meet(seconds):
            reason = "" if why is None else f": {why}"
            complain(f"rank {self.rank} of {self.size} ({self.pulse.doing}) stopped alone{reason}")
            self.end(code)

    def _meet(self, seconds: float) -> bool:
        """Return whether all ranks call this within a number of seconds.

        Every rank sends a message to rank 0, and rank 0 answers when it has all of them. A
        collective call would match the one in which the other ranks wait, and end it.
        """
        nothing = np.zeros(0, np.uint8)
        others = range(1, self.size) if self.rank == 0 else (0,)
        arrived = [self.comm.Irecv(nothing, source=rank, tag=LEAVING) for rank in others]
        if self.rank != 0:
            self.comm.Isend(nothing, dest=0, tag=LEAVING)
        if not until(lambda: all(request.Test() for request in arrived), seconds):
            return False
        if self.rank == 0:
            for rank in others:
                self._wait(self.comm.Isend(nothing, dest=rank, tag=LEAVING), turn=False)
        return True

    def end(self, code: int) -> None:
        """End every rank."""
        time.sleep(0.5)  # a launcher may drop what was printed just before
        nowhere = open(os.devnull, "w")  # noqa: SIM115  it is needed until the process ends
        faulthandler.dump_traceback_later(HANGING, exit=True, file=nowhere)
        self.comm.Abort(code)
        os._exit(code)  # where Abort only notifies the launcher, and returns

    @cached_property
    def local_rank(self) -> int:
        """The number of ranks below this one on its machine."""
        if self.size == 1:
            return 0
        from mpi4py import MPI

        with self.pulse.blocked():
            machine = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        place: int = machine.rank
        machine.Free()
        return place

    def reads(self, kind: str) -> bool:
        """Return whether MPI reads the memory of a kind of device: always "cpu", or a GPU's."""
        return kind == "cpu" or any(
            os.environ.get(name, "").lower() in ("1", "true") for name in _GPU_AWARE
        )

    @in_phase("wait")
    def _broadcast(self, message: bytes) -> bytes:
        if self.size == 1:
            return message
        length = np.array([len(message)], np.int64)
        self._wait(self.comm.Ibcast(length, root=0))
        buffer = (
            np.frombuffer(message, np.uint8).copy()
            if self.rank == 0
            else np.empty(int(length[0]), np.uint8)
        )
        self._wait(self.comm.Ibcast(buffer, root=0))
        self.arrived += buffer.nbytes if self.rank else 0
        return buffer.tobytes()

    def _wait(self, request: MPI.Request, turn: bool = True) -> None:
        self.pulse.begin(turn)
        try:
            until(request.Test)
        finally:
            self.pulse.waiting = False


_WORLDS: list[World] = []
"""What `connect` has returned, if it has."""


def connect(timeout: float = TIMEOUT) -> World:
    """Join the job that a launcher started, or be alone. Later calls return the same.

    From here on an exception on any rank prints one traceback with the rank and ends the whole job,
    so that no rank waits for one that is gone.

    Args:
        timeout: seconds for which to wait for ranks that do not start.

    Raises:
        InputError: several processes were started but MPI cannot connect them.
    """
    if not _WORLDS:
        _WORLDS.append(_join(timeout) if _launched() else World())
    return _WORLDS[0]


def _join(timeout: float) -> World:
    if _number_in((*_LOCAL_RANKS, *RANKS)) == 0:
        remove_unused()
    start = StartLimit(_number_in(RANKS), _number_in(_SIZES), timeout)
    start.begin()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of another MPI's launcher; that is refused below
            import mpi4py

            mpi4py.rc.initialize = False
            mpi4py.rc.finalize = True
            from mpi4py import MPI
    except ImportError as error:
        raise InputError(
            f"started under an MPI launcher, but mpi4py cannot be imported ({error}): "
            "pip install 'dfl-sim[mpi]'"
        ) from None
    if not MPI.Is_initialized():
        start.waits = lambda: True
        _initialize()
    world = World(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, MPI.COMM_WORLD, start=start)
    if world.size == 1:
        library = MPI.Get_library_version().split(",")[0].split("\n")[0].strip()
        raise InputError(
            f"a launcher started several processes but mpi4py sees one: it is built on {library}, "
            "take its mpirun (under Slurm: srun --mpi=pmi2 or pmix)"
        )
    start.rank = world.rank
    start.size = world.size
    start.end = world.end
    start.waits = lambda: world.pulse.waiting
    sys.excepthook = _ender(world)
    atexit.register(world.leave)
    return world


def _ender(
    world: World,
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    """Return an exception hook that ends every rank."""

    def end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
        if isinstance(
            error, InputError | DivergedError
        ):  # raised on every rank, in a script of the caller's
            code = error.code
            if world.rank == 0:
                complain(f"dfl: {error}")
            world.leave(code, None if world.rank == 0 else error)
        elif code != 130:
            text = "".join(traceback.format_exception(kind, error, trace))
            complain(f"rank {world.rank} of {world.size} ({world.pulse.doing}) failed:\n{text}")
        world.end(code)

    return end


def _initialize() -> None:
    """Start MPI as mpi4py does, which would let no other thread of this process run meanwhile."""
    from mpi4py import MPI

    with _interruptible():
        ctypes.CDLL(MPI.__file__).MPI_Init_thread(
            None, None, ctypes.c_int(MPI.THREAD_MULTIPLE), ctypes.byref(ctypes.c_int())
        )
    for each in (MPI.COMM_WORLD, MPI.COMM_SELF):
        each.Set_errhandler(MPI.ERRORS_RETURN)


@contextmanager
def _interruptible() -> Iterator[None]:
    """End this process at Ctrl-C during a call that may not return.

    Python itself would handle the signal only after the call.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    read, write = os.pipe()
    os.set_blocking(write, False)
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_end_at_interrupt, args=(read,), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(write)


def _end_at_interrupt(numbers: int) -> None:
    with os.fdopen(numbers, "rb", buffering=0) as file:
        while number := file.read(1):
            if number[0] == signal.SIGINT:
                if first():
                    os.write(2, b"dfl: interrupted\n")
                else:
                    time.sleep(1.0)  # the first rank prints it; the job ends with any
                os._exit(130)


def _number_in(names: tuple[str, ...]) -> int:
    """Return the number in the first of some variables that has one; 0 without any."""
    values = (os.environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal()), 0)


def _launched() -> bool:
    """Whether an MPI launcher, or Slurm, started this process with others."""
    return any(os.environ.get(name, "1") not in ("", "1") for name in _SIZES)


def _flat(rows: NDArray[_S]) -> Bytes:
    return np.ascontiguousarray(rows).view(np.uint8).reshape(-1)


def _places(counts: NDArray[np.int64]) -> tuple[list[int], list[int]]:
    """Counts and displacements, as MPI's v-collectives want them."""
    return counts.tolist(), (np.cumsum(counts) - counts).tolist()
