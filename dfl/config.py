"""What can be asked for: `Run`, a frozen dataclass; its fields that choose a component hold specs (`dfl.core.registry`).

The flags of the command line, the keys of a TOML file and the fields of `Run` are the same names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np

from dfl.core.errors import InputError
from dfl.core.options import options
from dfl.core.parse import KINDS, nearest, read, shown
from dfl.core.registry import flag
from dfl.models.sharing import NETS


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a simulation depends on but its number of ranks, and the model or data that a caller brings.

    Raises:
        InputError: a value of the wrong kind, or a number out of its range.
    """

    topology: str | None = None
    """The graph of the peers; ring where they gossip and it is not given."""
    mixing: str | None = None
    """The mixing matrix W on that graph; metropolis where it is not given."""
    algorithm: str | None = None
    """The method; dfedavgm unless --bits is given, then qdfedavgm."""
    bits: int | None = None
    """Bits per coordinate of a message, 1 to 16: short for --compressor quantize:bits=B."""
    compressor: str | None = None
    """What a message is turned into before it is sent; none unless --bits is given."""
    aggregator: str | None = None
    """What a server, or a peer, makes of what it hears; the mean unless --algorithm says otherwise."""
    attack: str = "none"
    """How some of the peers lie, and which."""
    dataset: str = "digits"
    """The data set."""
    data_dir: Path | None = None
    """Folder of the data sets; $DFL_DATA where it is not given, and a download to the cache where neither is."""
    partition: str = "iid"
    """How the examples are dealt to the peers."""
    examples_per_peer: int | None = None
    """Training examples for each peer, drawn at random before they are dealt; all of them where not given."""
    validation: float = 0.0
    """Share of each peer's training examples to set aside for choices."""
    model: str = "mlp"
    """What the peers train."""
    augment: str = "none"
    """How examples are altered by chance before a peer learns from them."""
    auxiliary: str = "none"
    """What else the model's representation is trained for, by a small net on it."""
    fairness_adversary: str = "none"
    """From whom the representation is to hide protected attributes, a net that learns to predict them."""
    init: Literal["common", "independent"] = "common"
    """Whether all peers start at the same point."""
    init_from: Path | None = None
    """Folder of a finished run whose models to start from: as many as there are peers, or one for all."""
    share: str = "all"
    """What of a model is shared: all, nothing, head:K or first:K layers, or patterns of names joined by +."""
    share_all_until: str | None = None
    """Share everything at first: for a number of rounds, or until an evaluation that is this good: accuracy=0.975."""
    peers: int | None = None
    """Number of peers P; as many as there are ranks where not given."""
    rounds: int = 100
    """Rounds of training and mixing."""
    until: str | None = None
    """Stop at the first evaluation that is this good: accuracy=0.97, train_loss=0.1, or another figure."""
    local_epochs: int | None = None
    """Passes of a peer over its own data per round, E; 1 where neither this nor --local-steps is given."""
    local_steps: int | None = None
    """Local steps per round, the same for every peer, in place of epochs."""
    batch_size: int = 10
    """Examples per local step; 0 is all that a peer has."""
    lr: float = 0.05
    """Learning rate η."""
    momentum: float = 0.9
    """Heavy-ball momentum θ, fresh in every round."""
    weight_decay: float = 0.0
    """Weight decay λ, added to the gradient as λx."""
    lr_schedule: str = "constant"
    """How the learning rate changes from round to round."""
    seed: int = 0
    """The seed of every random number of the run."""
    eval_every: int = 10
    """Rounds between two evaluations."""
    eval_examples: int | None = None
    """Evaluate on N test examples, and N / P training examples per peer; all where not given."""
    faults: str = "none"
    """What goes wrong: links that lose words, peers that are down, late or slow; several are joined by +."""
    links: str = "none"
    """How fast links and peers are, from which sim_seconds is counted."""
    ensemble: bool = False
    """Measure what all peers' models say together, by their mean output and by vote, as for a new device."""
    threads: int = 1
    """Threads per rank; parallelism comes from ranks."""
    engine: Literal["auto", "batched", "loop"] = "auto"
    """Whether a rank trains its peers together or one after the other."""
    device: str = "auto"
    """Where peers train: cpu, cuda, cuda:NUMBER, or auto, a GPU where every rank finds one."""
    out: Path | None = None
    """Folder to write the run to; from the command line runs/<time>-<what> where not given."""
    checkpoint_every: int | None = None
    """Rounds between two checkpoints; where not given there is one only when SIGTERM or SIGUSR1 ends the run."""
    resume: Path | None = None
    """Folder of a run to go on with, from its last checkpoint, with the settings that it has."""
    timeout: float = 600
    """Seconds for which a rank waits for others that do not arrive, before it names them and ends the job."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What to write to the log of every rank."""
    tensorboard: bool = False
    """Write the rows of metrics.csv for TensorBoard as well."""

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            if isinstance(
                value := getattr(self, name), np.generic
            ):  # numpy's numbers are those of Python
                object.__setattr__(self, name, value.item())
        for name in (
            "data_dir",
            "init_from",
            "out",
            "resume",
        ):  # files and notebooks say paths as text
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, read(flag(name), text, "Path"))
        _check_kinds(self)
        _check_numbers(self)
        if self.resume is not None:
            if self.out not in (None, self.resume):
                raise InputError(
                    f"--resume {self.resume} writes to that folder: leave --out {self.out} out"
                )
            object.__setattr__(self, "out", self.resume)
        _ = self.goal, self.opening  # refuses what cannot be one
        if self.init_from is not None and self.init == "independent":
            raise InputError(
                f"--init-from {self.init_from} says where peers start: leave --init independent out"
            )
        if self.share_all_until is not None and self.share == "all":
            raise InputError(
                f"--share-all-until {self.share_all_until} shares everything at first, as --share all always does"
            )

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for TOML and JSON; fields that are None are left out."""
        return {
            k: str(v) if isinstance(v, Path) else v
            for k, v in asdict(self).items()
            if v is not None
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Run:
        """The inverse of `to_dict`.

        Raises:
            InputError: a name that is no field, or a bad value.
        """
        known = list(options(cls))
        for name in values:
            if name not in known:
                raise InputError(f"unknown setting {name!r}{nearest(name, known)}")
        return cls(**values)

    @property
    def goal(self) -> tuple[str, float, bool] | None:
        """Where to stop early: a column of metrics.csv, its value, and whether that is a least or a most."""
        return None if self.until is None else self._figure("until", self.until)

    @property
    def nets(self) -> tuple[str, ...]:
        """The parts of the models that only training has use for."""
        asked = zip(NETS, (self.auxiliary, self.fairness_adversary), strict=True)
        return tuple(name for name, spec in asked if spec != "none")

    @property
    def opening(self) -> int | tuple[str, float, bool]:
        """How long everything is shared: a number of rounds, or a goal as `goal` has one."""
        if self.share_all_until is None:
            return 0
        if self.share_all_until.isdecimal():
            if len(self.share_all_until) > 9 or int(self.share_all_until) > self.rounds:
                raise InputError(
                    f"--share-all-until {self.share_all_until[:20]} is more than all --rounds {self.rounds}"
                )
            return int(self.share_all_until)
        return self._figure("share_all_until", self.share_all_until)

    def _figure(self, where: str, said: str) -> tuple[str, float, bool]:
        name, equals, text = said.partition("=")
        if not equals:
            also = "a number of rounds or " if where == "share_all_until" else ""
            raise InputError(
                f"{flag(where)} must be written {also}FIGURE=VALUE, as accuracy=0.97, not {said!r}"
            )
        if name not in GOALS:
            raise InputError(f"{flag(where)}: unknown figure {name!r}{nearest(name, list(GOALS))}")
        column, at_least = GOALS[name]
        if column == "validation_accuracy_mean" and not self.validation:
            raise InputError(
                f"{flag(where)} {said} needs validation examples: say --validation 0.1"
            )
        if name in ("accuracy_ensemble", "accuracy_vote") and not self.ensemble:
            raise InputError(
                f"{flag(where)} {said} needs what all models say together: say --ensemble"
            )
        return column, read(f"{flag(where)} {name}", text, "float"), at_least

    def settled(self, ranks: int) -> Run:
        """The same run with peers, algorithm, graph, compressor and aggregator written out.

        Raises:
            InputError: flags that contradict each other.
        """
        given, compressor = f"--compressor {self.compressor}", self.compressor
        if self.bits is not None:
            if compressor is not None:
                raise InputError(
                    f"--bits {self.bits} and {given} say the same thing: give one of them"
                )
            given, compressor = f"--bits {self.bits}", f"quantize:bits={self.bits}"
        compressor = "none" if compressor is None else compressor
        algorithm = (
            ("dfedavgm" if self.bits is None else "qdfedavgm")
            if self.algorithm is None
            else self.algorithm
        )
        if _name(algorithm) == "dfedavgm" and _name(compressor) != "none":
            raise InputError(
                f"{given} with --algorithm dfedavgm, which sends its models as they are: choose --algorithm qdfedavgm"
            )
        fitting = _fitting(self, algorithm, (compressor, given))
        if self.local_epochs is not None and self.local_steps is not None:
            raise InputError(
                f"--local-epochs {self.local_epochs} and --local-steps {self.local_steps} contradict: give one of them"
            )
        peers = ranks if self.peers is None else self.peers
        return replace(
            self, compressor=compressor, bits=None, algorithm=algorithm, peers=peers, **fitting
        )


def _fitting(run: Run, algorithm: str, compressor: tuple[str, str]) -> dict[str, Any]:
    """The graph and the aggregator of a run as they go with its algorithm.

    Raises:
        InputError: a flag that has no part in the algorithm.
    """
    from dfl.algorithms import ALGORITHMS

    name = _name(algorithm)
    if name not in ALGORITHMS:
        return {}  # refused where components are chosen
    method = ALGORITHMS[name]
    aggregator = method.rule if run.aggregator is None else run.aggregator
    odd = _name(aggregator) != method.rule
    for given, idle in (
        (f"--topology {run.topology}", run.topology is not None and not method.gossips),
        (f"--mixing {run.mixing}", run.mixing is not None and not method.gossips),
        (compressor[1], _name(compressor[0]) != "none" and "compressor" not in method.takes),
        (
            f"--aggregator {aggregator}",
            odd and ("aggregator" not in method.takes or method.rule != "mean"),
        ),
        (f"--aggregator {aggregator}", odd and method.serves and _name(aggregator) == "fltrust"),
        (
            f"--until {run.until}",
            run.goal and run.goal[0] == "consensus_distance" and method.serves,
        ),
        (
            f"--share-all-until {run.share_all_until}",
            "consensus_distance" in str(run.share_all_until),
        ),
        (f"--share {run.share}", run.share != "all" and not method.splits),
        (f"--init {run.init}", run.init == "independent" and method.serves),
        (f"--links {run.links}", run.links != "none" and name == "pooled"),
    ):
        if idle:
            raise InputError(f"{given} has no part in --algorithm {name}: leave it out")
    graph = {"topology": "ring", "mixing": "metropolis"} if method.gossips else {}
    return {"aggregator": aggregator} | {
        n: d if getattr(run, n) is None else getattr(run, n) for n, d in graph.items()
    }


def _check_kinds(run: Run) -> None:
    for name, hint in get_type_hints(Run).items():
        value, parts = getattr(run, name), get_args(hint) or (hint,)
        if get_origin(hint) is Literal:
            good, accepted = isinstance(value, str) and value in parts, " or ".join(parts)
        else:
            kind = KINDS[parts[0].__name__]
            good, accepted = kind.holds(value) or (value is None and NoneType in parts), kind.meant
        if not good:
            raise InputError(f"{flag(name)} must be {accepted}, not {shown(value)}")


def _check_numbers(run: Run) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(run, name)
        if value is not None and not low <= value <= high:
            raise InputError(f"{flag(name)} must be from {low} to {high}, not {shown(value)}")
    largest = sys.float_info.max  # refuses infinity, and whole numbers that no float can hold
    for name, good, accepted in (
        ("lr", 0 < run.lr <= largest, "a positive number"),
        ("momentum", 0 <= run.momentum < 1, "at least 0 and below 1"),
        ("weight_decay", 0 <= run.weight_decay <= largest, "at least 0"),
        ("validation", 0 <= run.validation < 1, "at least 0 and below 1"),
        ("share", run.share, "all, nothing, head:K, first:K or patterns of names"),
        (
            "device",
            re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", run.device),
            "auto, cpu, cuda or cuda:NUMBER",
        ),
    ):
        if not good:
            raise InputError(f"{flag(name)} must be {accepted}, not {shown(getattr(run, name))}")


GOALS = {
    "accuracy": ("accuracy_mean", True), "accuracy_min": ("accuracy_min", True),
    "accuracy_mean_model": ("accuracy_mean_model", True), "accuracy_ensemble": ("accuracy_ensemble", True),
    "accuracy_vote": ("accuracy_vote", True), "local_accuracy": ("local_accuracy_mean", True),
    "validation_accuracy": ("validation_accuracy_mean", True), "train_loss": ("train_loss", False),
    "consensus_distance": ("consensus_distance", False),
}  # fmt: skip
"""What a run may stop at: its name, the column of metrics.csv, and whether more of it is better."""

MOST = 2**31 - 1
_RANGES = {
    "bits": (1, 16), "examples_per_peer": (1, MOST), "peers": (1, MOST), "rounds": (0, MOST), "local_epochs": (1, MOST),
    "local_steps": (1, MOST), "batch_size": (0, MOST), "seed": (0, 2**63 - 1), "eval_every": (1, MOST),
    "eval_examples": (1, MOST), "threads": (1, 1024), "checkpoint_every": (1, MOST), "timeout": (1, MOST),
}  # fmt: skip


def _name(spec: str) -> str:
    return spec.partition(":")[0]
