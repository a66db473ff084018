"""What can be asked for: `Run`, a frozen dataclass, and the specs `name:key=value` that its fields hold.

The flags of the command line, the keys of a TOML file and the fields of `Run` are the same names.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from dfl.errors import InputError
from dfl.values import KINDS, nearest, read

Component = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a simulation depends on but its number of ranks, and the model or data that a caller brings.

    Raises:
        InputError: a value of the wrong kind, or a number out of its range.
    """

    topology: str = "ring"
    """The graph of the peers."""
    mixing: str = "metropolis"
    """The mixing matrix W on that graph."""
    algorithm: str | None = None
    """The method; dfedavgm unless --bits is given, then qdfedavgm."""
    bits: int | None = None
    """Bits per coordinate of a message, 1 to 16: short for --compressor quantize:bits=B."""
    compressor: str | None = None
    """What a message is turned into before it is sent; none unless --bits is given."""
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
    init: Literal["common", "independent"] = "common"
    """Whether all peers start at the same point."""
    peers: int | None = None
    """Number of peers P; as many as there are ranks where not given."""
    rounds: int = 100
    """Rounds of training and mixing."""
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
    """Test examples to evaluate on, the same at every evaluation; all of them where not given."""
    threads: int = 1
    """Threads per rank; parallelism comes from ranks."""
    engine: Literal["auto", "batched", "loop"] = "auto"
    """Whether a rank trains its peers together or one after the other."""
    device: str = "auto"
    """Where peers train: cpu, cuda, cuda:NUMBER, or auto, a GPU where every rank finds one."""
    out: Path | None = None
    """Folder to write the run to; from the command line runs/<time>-<what> where not given."""

    def __post_init__(self) -> None:
        for name in ("data_dir", "out"):  # files and notebooks say paths as text
            if isinstance(text := getattr(self, name), str):
                object.__setattr__(self, name, read(flag(name), text, "Path"))
        _check_kinds(self)
        _check_numbers(self)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for TOML and JSON; fields that are None are left out."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items() if v is not None}

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

    def settled(self, ranks: int) -> Run:
        """The same run with peers, algorithm and compressor written out.

        Raises:
            InputError: flags that contradict each other.
        """
        given, compressor = f"--compressor {self.compressor}", self.compressor
        if self.bits is not None:
            if compressor is not None:
                raise InputError(f"--bits {self.bits} and {given} say the same thing: give one of them")
            given, compressor = f"--bits {self.bits}", f"quantize:bits={self.bits}"
        compressor = "none" if compressor is None else compressor
        algorithm = ("dfedavgm" if self.bits is None else "qdfedavgm") if self.algorithm is None else self.algorithm
        if _name(algorithm) == "dfedavgm" and _name(compressor) != "none":
            raise InputError(
                f"{given} with --algorithm dfedavgm, which sends its models as they are: choose --algorithm qdfedavgm"
            )
        if self.local_epochs is not None and self.local_steps is not None:
            raise InputError(
                f"--local-epochs {self.local_epochs} and --local-steps {self.local_steps} contradict: give one of them"
            )
        peers = ranks if self.peers is None else self.peers
        return replace(self, compressor=compressor, bits=None, algorithm=algorithm, peers=peers)


def _check_kinds(run: Run) -> None:
    for name, hint in get_type_hints(Run).items():
        value, parts = getattr(run, name), get_args(hint) or (hint,)
        if get_origin(hint) is Literal:
            good, accepted = value in parts, " or ".join(parts)
        else:
            kind = KINDS[parts[0].__name__]
            good, accepted = kind.holds(value) or (value is None and NoneType in parts), kind.meant
        if not good:
            raise InputError(f"{flag(name)} must be {accepted}, not {value!r}")


def _check_numbers(run: Run) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(run, name)
        if value is not None and not low <= value <= high:
            raise InputError(f"{flag(name)} must be from {low} to {high}, not {value}")
    largest = sys.float_info.max  # refuses infinity, and whole numbers that no float can hold
    for name, good, accepted in (
        ("lr", 0 < run.lr <= largest, "a positive number"),
        ("momentum", 0 <= run.momentum < 1, "at least 0 and below 1"),
        ("weight_decay", 0 <= run.weight_decay <= largest, "at least 0"),
        ("validation", 0 <= run.validation < 1, "at least 0 and below 1"),
        ("device", re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", run.device), "auto, cpu, cuda or cuda:NUMBER"),
    ):
        if not good:
            raise InputError(f"{flag(name)} must be {accepted}, not {getattr(run, name)!r}")


MOST = 2**31 - 1
_RANGES = {
    "bits": (1, 16), "examples_per_peer": (1, MOST), "peers": (1, MOST), "rounds": (0, MOST), "local_epochs": (1, MOST),
    "local_steps": (1, MOST), "batch_size": (0, MOST), "seed": (0, 2**63 - 1), "eval_every": (1, MOST),
    "eval_examples": (1, MOST), "threads": (1, 1024),
}  # fmt: skip


def flag(name: str) -> str:
    """The flag of a field: local_steps -> --local-steps."""
    return "--" + name.replace("_", "-")


def choose(where: str, spec: str, registry: Mapping[str, Component]) -> partial[Any]:
    """Read a spec `name` or `name:key=value,key=value` against a registry.

    A component's options are its keyword-only parameters; their annotations say how a value is read.

    Args:
        where: the flag, for messages.
        spec: what the user wrote.
        registry: name -> component.

    Returns:
        The component with its options bound.

    Raises:
        InputError: an unknown name or option, a value of the wrong kind, or a missing option.
    """
    name, colon, rest = spec.partition(":")
    if name not in registry:
        raise InputError(f"{where}: unknown {name!r}{nearest(name, list(registry))}")
    known, given = options(registry[name]), {}
    for item in rest.split(",") if colon else []:
        key, equals, text = item.partition("=")
        if key not in known:
            raise InputError(f"{where} {name}: unknown option {key!r}{nearest(key, list(known))}")
        if not equals or key in given:
            raise InputError(f"{where} {name}: options are written {key}=VALUE, each once, not {rest!r}")
        given[key] = read(f"{where} {name}: {key}", text, _kind(known[key]))
    for key, parameter in known.items():
        if parameter.default is parameter.empty and key not in given:
            raise InputError(f"{where} {name} needs {key}: write {name}:{key}={_kind(parameter).upper()}")
    return partial(registry[name], **given)


def options(component: Component) -> dict[str, inspect.Parameter]:
    """The options of a component, by name."""
    parameters = inspect.signature(component).parameters
    return {name: one for name, one in parameters.items() if one.kind is one.KEYWORD_ONLY}


def describe(registry: Mapping[str, Component]) -> str:
    """Every component of a registry with its options and their defaults, for --help."""
    return " · ".join(map(_usage, registry, registry.values()))


def _usage(name: str, component: Component) -> str:
    shown = [_option(key, parameter) for key, parameter in options(component).items()]
    return f"{name}:{','.join(shown)}" if shown else name


def _option(key: str, parameter: inspect.Parameter) -> str:
    value = parameter.default
    if value is parameter.empty or value is None:
        text = f"{key}={_kind(parameter).upper()}"
        return text if value is not None else f"[{text}]"
    if isinstance(value, tuple):
        return f"{key}={'+'.join(map(str, value))}"
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"


def _name(spec: str) -> str:
    return spec.partition(":")[0]


def _kind(parameter: inspect.Parameter) -> str:
    """An option's type, as its annotation spells it, without `None`."""
    spelled = parameter.annotation
    text = spelled if isinstance(spelled, str) else getattr(spelled, "__name__", str(spelled))
    return text.removesuffix(" | None")
