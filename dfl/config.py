"""The settings of a simulation: `Run`, a frozen dataclass.

The flags of the command line, the keys of a TOML file and the fields of `Run` are the same names. A
field that chooses a component holds a spec, `name:key=value,key=value`; from Python it may hold the
component itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Interval

from dfl.core.equality import equal
from dfl.core.errors import InputError
from dfl.core.options import (
    MOST,
    BelowOne,
    Count,
    Index,
    NotNegative,
    Positive,
    options,
    require,
)
from dfl.core.parse import nearest, read, shown
from dfl.core.registry import flag, own
from dfl.evaluation.goals import GOALS, SHARING_GOALS, Goal
from dfl.models.sharing import NormStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import TypeAlias

    import numpy as np
    from networkx import Graph
    from numpy.typing import NDArray
    from scipy.sparse import csr_array
    from torch import Tensor
    from torch.nn import Module
    from torch.utils.data import Dataset

    from dfl.algorithms.base import Method
    from dfl.compression import Compressor
    from dfl.core.arrays import Array
    from dfl.datasets.data import Data
    from dfl.datasets.partitions.base import Assignment, Partition
    from dfl.environment.faults import Fault
    from dfl.environment.link_models import LinkModel
    from dfl.robust.aggregators import Aggregate, Updates
    from dfl.robust.attacks import Attack
    from dfl.training.augmentation import Augment
    from dfl.training.auxiliaries import Auxiliary
    from dfl.training.losses import Loss
    from dfl.training.objectives import Adversary

    Matrix: TypeAlias = csr_array | NDArray[np.bool_] | NDArray[np.floating]
    Examples: TypeAlias = Dataset[object] | tuple[Array | Tensor, Array | Tensor]

    Graphs: TypeAlias = Graph | Matrix | Sequence[Graph] | Sequence[Matrix]
    TopologySpec: TypeAlias = str | Graphs | Callable[[int, np.random.Generator], object]
    MixingSpec: TypeAlias = str | Matrix | Sequence[Matrix] | Callable[[csr_array], csr_array]
    AlgorithmSpec: TypeAlias = str | Method
    CompressorSpec: TypeAlias = str | Compressor
    AggregatorSpec: TypeAlias = str | Callable[[Updates], Aggregate]
    AttackSpec: TypeAlias = str | Attack
    DatasetSpec: TypeAlias = str | Data | Examples | tuple[Examples, Examples]
    Parts: TypeAlias = Sequence[NDArray[np.integer]] | Sequence[Sequence[int]] | Assignment
    PartitionSpec: TypeAlias = str | Partition | Parts
    ModelSpec: TypeAlias = str | Module | Sequence[Module]
    LossSpec: TypeAlias = str | Loss
    AugmentSpec: TypeAlias = str | Augment
    AuxiliarySpec: TypeAlias = str | Auxiliary
    AdversarySpec: TypeAlias = str | Adversary
    ScheduleSpec: TypeAlias = str | Callable[[int, int], float]
    FaultsSpec: TypeAlias = str | Fault | Sequence[Fault]
    LinksSpec: TypeAlias = str | LinkModel
else:  # a command line and a file hold specs
    TopologySpec = MixingSpec = AlgorithmSpec = CompressorSpec = AggregatorSpec = str
    AttackSpec = DatasetSpec = PartitionSpec = ModelSpec = LossSpec = str
    AugmentSpec = AuxiliarySpec = AdversarySpec = ScheduleSpec = FaultsSpec = LinksSpec = str

COMPONENTS = (
    "topology",
    "mixing",
    "algorithm",
    "compressor",
    "aggregator",
    "attack",
    "dataset",
    "partition",
    "model",
    "loss",
    "augment",
    "auxiliary",
    "fairness_adversary",
    "lr_schedule",
    "faults",
    "links",
)
"""The fields that choose a component: each holds a spec, or an object of the caller."""
SECTIONS = {
    "peers": "Peers and graph",
    "algorithm": "Method and messages",
    "attack": "Attacks, faults and links",
    "dataset": "Data",
    "model": "Model",
    "rounds": "Training",
    "eval_every": "Evaluation",
    "threads": "Machine",
    "out": "Folder, checkpoints and logs",
}
"""The field of `Run` with which a section of --help begins -> the title of the section."""
PLAIN = (str, bytes, bool, int, float, complex, dict, set, Path, type(None))
"""Types of which no component is."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings of a simulation: everything that it depends on except the number of ranks.

    Wherever a spec is accepted, Python may give the component itself:

        Run(algorithm=MyMethod(beta=0.9), topology=graph, mixing=W, dataset=(x, y), model=module)

    Every rank must give equal objects. run.json describes them; such a run is replayed and resumed
    from Python, with the objects given again. Two runs are equal where their settings are, objects
    by identity or by their values.

    Raises:
        InputError: a value of the wrong kind, or a number out of its range.
    """

    peers: Count | None = None
    """Number of peers P; default the nodes of a graph, or the parts of a partition, that is an
    object, or the number of ranks.
    """
    topology: TopologySpec | None = None
    """The graph of the peers; default ring, or what the method needs, for methods in which peers
    have neighbours.

    An object: a networkx graph, whose nodes in order are the peers; a matrix (P, P) of bool, entry
    (i, j) where peer i receives from peer j, or of float, the mixing matrix itself; a sequence of
    either or an array (T, P, P), entry t modulo its length for round t; a
    `topologies.sequences.EveryRound`, which makes the graph of every round; or a function
    (peers, rng) that returns one of these.
    """
    mixing: MixingSpec | None = None
    """The mixing matrix W on that graph; default metropolis, or what the method needs.

    An object: W, (P, P), or a sequence of matrices, or an array (T, P, P), for a sequence of
    graphs; without a topology its nonzero entries are the graph. Or a function from the graph
    (P, P) of bool to W.
    """
    algorithm: AlgorithmSpec | None = None
    """The method; default dfedavgm, or qdfedavgm where --bits is given."""
    bits: Annotated[int, Interval(ge=1, le=16)] | None = None
    """Bits per coordinate of a message, 1 to 16: short for --compressor quantize:bits=B."""
    compressor: CompressorSpec | None = None
    """The compressor that encodes messages; default none, or quantize where --bits is given."""
    aggregator: AggregatorSpec | None = None
    """The rule by which a server, or a peer, combines the messages it receives; default that of
    --algorithm, mostly the mean.

    An object: a function from `dfl.robust.aggregators.Updates` to `Aggregate`.
    """
    attack: AttackSpec = "none"
    """The attack, and which peers are attackers."""
    faults: FaultsSpec = "none"
    """Faults, several joined by +: links that lose messages, peers that are down, late or slow."""
    links: LinksSpec = "none"
    """The speeds of links and peers, for the column sim_seconds."""
    dataset: DatasetSpec = "digits"
    """The data set.

    An object: a `dfl.Data`; a pair of arrays (inputs, labels) or a torch Dataset, of which a fifth,
    drawn at random, becomes the common test set; or two of these, (train, test). Labels of arrays
    that are whole numbers are classes, unless the loss is one of regression. Inputs of several
    parts are a tuple of arrays; a model takes them as its arguments. Labels at every place of a
    sequence are those of a `dfl.Data`.
    """
    data_dir: Path | None = None
    """Folder of the data sets; default $DFL_DATA, or a download to the cache without it."""
    partition: PartitionSpec = "iid"
    """How the examples are distributed to the peers.

    An object: a function as in `dfl.datasets.partitions`; P arrays, or lists, of indices of
    training examples; or an `Assignment`, which has those of local test examples too.
    """
    examples_per_peer: Count | None = None
    """Training examples per peer, drawn at random before the partition; default all."""
    validation: BelowOne = 0.0
    """Fraction of each peer's training examples that are set aside for validation."""
    model: ModelSpec = "mlp"
    """The model that peers train, or several that agree in the shared parameters, joined by +: peer
    i has the one numbered i modulo their number. FILE.py:FUNCTION takes them from a Python file,
    which is run.

    An object: a torch module, whose parameters are the common starting point; or several. The run
    works on copies. Frozen parameters (`requires_grad=False`) are neither trained nor sent; tied
    weights are one parameter. All parameters are float32 or all float64.
    """
    loss: LossSpec = "cross_entropy"
    """The loss of an example.

    An object: a function (outputs, labels) -> (n,).
    """
    augment: AugmentSpec = "none"
    """Random changes of the examples of a batch."""
    auxiliary: AuxiliarySpec = "none"
    """An auxiliary task of the model's representation, with a small net of its own."""
    fairness_adversary: AdversarySpec = "none"
    """A net that predicts protected attributes from the representation, which is trained to hide
    them.
    """
    init: Literal["common", "independent"] = "common"
    """Whether all peers start at the same point, or each at its own."""
    init_from: Path | None = None
    """Folder of a finished run whose models the peers start from: one model, or at most P.

    The frozen base of a built-in model is their mean over honest peers. Adapters that they lack
    start as without this setting.
    """
    share: str = "all"
    """The shared parameters: all, nothing, head:K or first:K layers, or patterns of names joined by
    +.
    """
    norm_stats: NormStats = "refuse"
    """Running statistics of BatchNorm: refuse such models, keep statistics local, share them as
    parameters, or recompute them after mixing, on each peer's own examples.

    `local` is FedBN's, of statistics; the affine parameters are shared as `share` states. Messages
    hold statistics with `share` alone, which needs messages without a lossy compressor.
    """
    share_all_until: str | None = None
    """Share all parameters at first: for a number of rounds, or until a figure, accuracy=0.975."""
    rounds: Index = 100
    """Rounds of training and mixing."""
    until: str | None = None
    """Stop at the first evaluation that reaches a figure: accuracy=0.97, train_loss=0.1, ..."""
    local_epochs: Count | None = None
    """Local epochs per round, E; default 1, unless --local-steps is given."""
    local_steps: Count | None = None
    """Local steps per round, K, the same for every peer, in place of epochs."""
    batch_size: Index = 10
    """Examples per local step, fewer in the last one of an epoch if fewer are left; 0 for all of a
    peer's examples.
    """
    lr: Positive = 0.05
    """Learning rate η."""
    momentum: BelowOne = 0.9
    """Heavy-ball momentum θ, fresh in every round unless the method keeps it."""
    weight_decay: NotNegative = 0.0
    """Weight decay λ, added to the gradient as λx."""
    lr_schedule: ScheduleSpec = "constant"
    """The factor on the learning rate in each round.

    An object: a function (t, rounds) -> factor.
    """
    seed: Annotated[int, Interval(ge=0, le=2**63 - 1)] = 0
    """The seed of every random number of the run."""
    eval_every: Count = 10
    """Rounds between two evaluations."""
    eval_last: Count = 1
    """Number of rounds at the end of the run, each of which is evaluated."""
    eval_examples: Count | None = None
    """Evaluate on N test examples, and N / P training examples per peer; default all. `local_*` are
    over all own test examples in any case, and `backdoor_success` over all with the trigger.
    """
    ensemble: bool = False
    """Evaluate the ensemble of all peers' models, by mean output and by vote."""
    threads: Annotated[int, Interval(ge=1, le=1024)] = 1
    """Threads per rank; parallelism comes from ranks."""
    engine: Literal["auto", "batched", "loop"] = "auto"
    """Whether a rank trains its peers together or one after the other."""
    precision: Literal["float32", "tf32", "bf16"] = "float32"
    """Precision of products in local training; tf32 needs a GPU. Models stay float32."""
    device: str = "auto"
    """The device of training: cpu, cuda, cuda:NUMBER, or auto, a GPU where every rank has one."""
    out: Path | None = None
    """Run directory; default none in Python, runs/<time>-<components> on the command line."""
    checkpoint_every: Count | None = None
    """Rounds between two checkpoints; default none but the one that SIGTERM or SIGUSR1 causes."""
    resume: Path | None = None
    """Directory of a run to resume from its last checkpoint, with its own settings."""
    timeout: Annotated[float, Interval(ge=1, le=MOST)] = 600
    """Seconds that a rank waits for others before it names the missing ones and ends the job."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The lowest level of the messages in each rank's log."""
    tensorboard: bool = False
    """Also write the rows of metrics.csv for TensorBoard."""
    profile: bool = False
    """Measure the seconds of each rank by phase of its rounds; print a table, and write it and a
    trace for chrome://tracing into the folder `profile` of the run directory.
    """
    report: bool = True
    """Write report.html into the run directory, and refresh it while the run goes on."""

    def __post_init__(self) -> None:
        if isinstance(self.partition, list | tuple):
            object.__setattr__(self, "partition", [*map(_as_array, self.partition)])
        for name in options(Run):
            object.__setattr__(self, name, _checked_value(name, getattr(self, name)))
        if self.resume is not None:
            if self.out not in (None, self.resume):
                raise InputError(
                    f"--resume {self.resume} writes to that folder: leave --out {self.out} out"
                )
            object.__setattr__(self, "out", self.resume)
        _ = self.goal, self.share_all_goal  # refuse values that are none
        if self.init_from is not None and self.init == "independent":
            raise InputError(
                f"--init-from {self.init_from} gives the starting models: leave --init "
                "independent out"
            )
        if self.share_all_until is not None and self.share == "all":
            raise InputError(
                f"--share-all-until {self.share_all_until} has no part in --share all: leave it out"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Run):
            return NotImplemented
        return all(equal(getattr(self, name), getattr(other, name)) for name in COMPONENTS) and all(
            getattr(self, each.name) == getattr(other, each.name)
            for each in fields(self)
            if each.name not in COMPONENTS
        )

    def __hash__(self) -> int:
        given = self.objects  # equal ones may have different hashes, as tensors have
        return hash(tuple(getattr(self, f.name) for f in fields(self) if f.name not in given))

    @property
    def objects(self) -> dict[str, object]:
        """The components that the caller gave as objects, by field."""
        values = {name: getattr(self, name) for name in COMPONENTS}
        return {name: value for name, value in values.items() if is_object(value)}

    def described(self) -> Run:
        """Return the run with a description in place of each object, own:MyMethod(beta=0.9)."""
        specs: dict[str, Any] = {name: own(value) for name, value in self.objects.items()}
        return replace(self, **specs) if specs else self

    def to_dict(self) -> dict[str, object]:
        """Return the fields as plain values, for TOML and JSON, without those that are None.

        An object becomes its description.
        """
        run = self.described()
        values = {each.name: getattr(run, each.name) for each in fields(run)}
        return {
            name: str(value) if isinstance(value, Path) else value
            for name, value in values.items()
            if value is not None
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Run:
        """Return the inverse of `to_dict`.

        Raises:
            InputError: an unknown name, or a bad value.
        """
        _refuse_unknown(values)
        return cls(**values)

    @property
    def goal(self) -> Goal | None:
        """The figure of `until`."""
        return None if self.until is None else self._figure("until", self.until)

    @property
    def share_all_goal(self) -> int | Goal:
        """The number of rounds, or the figure, of `share_all_until`; 0 without it.

        Raises:
            InputError: it is more than all rounds, or no figure.
        """
        if self.share_all_until is None:
            return 0
        if self.share_all_until.isascii() and self.share_all_until.isdecimal():
            if len(self.share_all_until) > 9 or int(self.share_all_until) > self.rounds:
                raise InputError(
                    f"--share-all-until {self.share_all_until[:20]} is more than all --rounds "
                    f"{self.rounds}"
                )
            return int(self.share_all_until)
        return self._figure("share_all_until", self.share_all_until)

    def _figure(self, field: str, text: str) -> Goal:
        """Return the goal that is written FIGURE=VALUE in a field."""
        name, equals, number = text.partition("=")
        if not equals:
            also = "a number of rounds or " if field == "share_all_until" else ""
            raise InputError(
                f"{flag(field)} must be written {also}FIGURE=VALUE, as accuracy=0.97, not {text!r}"
            )
        known = SHARING_GOALS if field == "share_all_until" else list(GOALS)
        if name not in known:
            raise InputError(f"{flag(field)}: unknown figure {name!r}{nearest(name, known)}")
        column, at_least = GOALS[name]
        if column == "validation_accuracy_mean" and not self.validation:
            raise InputError(
                f"{flag(field)} {text} needs validation examples: give --validation 0.1"
            )
        if name in ("accuracy_ensemble", "accuracy_vote") and not self.ensemble:
            raise InputError(f"{flag(field)} {text} needs the ensemble: give --ensemble")
        value = read(f"{flag(field)} {name}", number, "float")
        if "accuracy" in name:
            require(0 <= value <= 1, f"{flag(field)} {name}", "from 0 to 1", value)
        if name == "consensus_distance":
            require(value >= 0, f"{flag(field)} {name}", "0 or more", value)
        return Goal(column, value, at_least)


def checked_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings, each checked by itself; not whether they are compatible.

    Raises:
        InputError: an unknown name, or a bad value.
    """
    _refuse_unknown(values)
    return {name: _checked_value(name, value) for name, value in values.items()}


def _refuse_unknown(values: Mapping[str, Any]) -> None:
    known = list(options(Run))
    for name in values:
        if name not in known:
            raise InputError(f"unknown setting {name!r}{nearest(name, known)}")


def _checked_value(name: str, value: Any) -> Any:
    """Return the value of a field of `Run`, checked by itself."""
    if name in COMPONENTS and is_object(value):
        return value  # it is checked where components are chosen
    option = options(Run)[name]
    if name in COMPONENTS and isinstance(value, list | tuple):
        raise InputError(
            f"{flag(name)} must be text, or in Python an object with arrays in place of lists, "
            f"not {shown(value)}"
        )
    if option.spelled == "Path" and isinstance(value, str):  # as in a file or a notebook
        value = read(flag(name), value, "Path")
    value = option.check(flag(name), value)
    if name == "share" and not value:
        raise InputError("--share must be all, nothing, head:K, first:K or patterns, not ''")
    if name == "device" and not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", value):
        raise InputError(f"--device must be auto, cpu, cuda or cuda:NUMBER, not {shown(value)}")
    return value


def _as_array(value: object) -> object:
    """Return a list of whole numbers as an array; anything else as it is."""
    if not isinstance(value, list | tuple) or not all(isinstance(each, int) for each in value):
        return value
    import numpy as np

    return np.array(value, dtype=None if value else np.int64)


def is_object(value: object) -> bool:
    """Return whether a value may be a component, or several."""
    if isinstance(value, list | tuple):
        return any(map(is_object, value))
    return not isinstance(value, PLAIN)
