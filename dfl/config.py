"""What can be asked for: `Run`, a frozen dataclass, and the specs `name:key=value` that its fields hold.

The flags of the command line, the keys of a TOML file and the fields of `Run` are the same names.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dfl.errors import InputError

Component = Callable[..., Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that a simulation depends on but its data and its number of ranks."""

    topology: str = "ring"
    """The graph of the peers."""
    mixing: str = "metropolis"
    """The mixing matrix W on that graph."""
    algorithm: str | None = None
    """The method; dfedavgm unless --bits is given, then qdfedavgm."""
    bits: int | None = None
    """Bits per coordinate of a message, 1 to 16: short for --compressor quantize:bits=B."""
    compressor: str = "none"
    """What a message is turned into before it is sent."""
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
    local_epochs: int = 1
    """Passes of a peer over its own data per round, E."""
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
    out: Path | None = None
    """Folder to write the run to; from the command line runs/<time>-<what> where not given."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for TOML and JSON; fields that are None are left out."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in asdict(self).items() if v is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Run:
        """The inverse of `to_dict`.

        Raises:
            InputError: a name that is no field.
        """
        known = [f.name for f in fields(cls)]
        for name in values:
            if name not in known:
                raise InputError(f"unknown setting {name!r}{_nearest(name, known)}")
        made: dict[str, Any] = {k: Path(v) if k in ("data_dir", "out") else v for k, v in values.items()}
        return cls(**made)

    def to_json(self) -> bytes:
        """The fields as JSON, as ranks tell each other."""
        return json.dumps(self.to_dict()).encode()

    def settled(self, ranks: int) -> Run:
        """The same run with peers, algorithm and compressor written out.

        Raises:
            InputError: a number out of its range, or flags that contradict each other.
        """
        _check_numbers(self)
        compressor, algorithm = self.compressor, self.algorithm
        if self.bits is not None:
            if compressor != "none":
                raise InputError(
                    f"--bits {self.bits} and --compressor {compressor} say the same thing: give one of them"
                )
            compressor, algorithm = f"quantize:bits={self.bits}", algorithm or "qdfedavgm"
        algorithm = algorithm or "dfedavgm"
        if compressor != "none" and algorithm.partition(":")[0] == "dfedavgm":
            raise InputError(
                f"--compressor {compressor} with --algorithm dfedavgm, which sends its models as they are: "
                "choose --algorithm qdfedavgm"
            )
        peers = ranks if self.peers is None else self.peers
        return replace(self, compressor=compressor, bits=None, algorithm=algorithm, peers=peers)


def _check_numbers(run: Run) -> None:
    whole = {
        "bits": (1, 16), "examples_per_peer": (1, None), "peers": (1, None), "rounds": (0, None),
        "local_epochs": (1, None), "local_steps": (1, None), "batch_size": (0, None), "eval_every": (1, None),
        "eval_examples": (1, None), "threads": (1, None), "seed": (0, 2**63 - 1),
    }  # fmt: skip
    for name, (low, high) in whole.items():
        value = getattr(run, name)
        if value is not None and (value < low or (high is not None and value > high)):
            accepted = f"at least {low}" if high is None else f"from {low} to {high}"
            raise InputError(f"{flag(name)} must be {accepted}, not {value}")
    for name, top, accepted in (
        ("lr", math.inf, "a positive number"), ("momentum", 1, "at least 0 and below 1"),
        ("weight_decay", math.inf, "at least 0"), ("validation", 1, "at least 0 and below 1"),
    ):  # fmt: skip
        value = getattr(run, name)
        if not (0 <= value < top) or (name == "lr" and value == 0):
            raise InputError(f"{flag(name)} must be {accepted}, not {value}")


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
    name, _, rest = spec.partition(":")
    if name not in registry:
        raise InputError(f"{where}: unknown {name!r}{_nearest(name, list(registry))}")
    known, given = options(registry[name]), {}
    for item in rest.split(",") if rest else []:
        key, equals, text = item.partition("=")
        if key not in known:
            raise InputError(f"{where} {name}: unknown option {key!r}{_nearest(key, list(known))}")
        if not equals or key in given:
            raise InputError(f"{where} {name}: options are written {key}=VALUE, each once, not {rest!r}")
        given[key] = _read(f"{where} {name}: {key}", text, known[key])
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
    shown = [f"{key}={_default(parameter)}" for key, parameter in options(component).items()]
    return f"{name}:{','.join(shown)}" if shown else name


def _default(parameter: inspect.Parameter) -> str:
    value = parameter.default
    if value is parameter.empty or value is None:
        return _kind(parameter).upper()
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _kind(parameter: inspect.Parameter) -> str:
    """An option's type, as its annotation spells it, without `None`."""
    spelled = parameter.annotation
    text = spelled if isinstance(spelled, str) else getattr(spelled, "__name__", str(spelled))
    return text.removesuffix(" | None")


def _read(where: str, text: str, parameter: inspect.Parameter) -> Any:
    kinds: dict[str, tuple[Callable[[str], Any], str]] = {
        "int": (int, "a whole number"),
        "float": (_finite, "a number"),
        "bool": (_truth, "true or false"),
        "Path": (Path, "a path"),
        "str": (str, "a word"),
        "tuple[int, ...]": (lambda s: tuple(map(int, s.split("+"))), "whole numbers joined by +, as 200+200"),
    }
    read, meant = kinds[_kind(parameter)]
    try:
        return read(text)
    except ValueError:
        raise InputError(f"{where} must be {meant}, not {text!r}") from None


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


def _nearest(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    return f"{hint}; choose from {', '.join(known)}" if known else "; it has none"
