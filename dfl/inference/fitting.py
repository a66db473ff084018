"""Fit a model to the examples of sites: `fit`.

Rank 0 checks the examples and gives every rank its sites; from then on only messages cross.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from dfl.comm.mpi import World, connect
from dfl.comm.network import Network
from dfl.comm.schedule import MixingMatrices
from dfl.comm.threat_model import ThreatModel
from dfl.compression import COMPRESSORS, Compressor
from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.core.isolation import isolated
from dfl.core.layout import Layout
from dfl.core.options import options
from dfl.core.parse import shown
from dfl.core.registry import Registry, choose, choose_several, flag, own, split_specs
from dfl.environment.clock import Clock
from dfl.environment.faults import FAULTS, Leave
from dfl.environment.link_models import LINK_MODELS
from dfl.inference.estimators import ESTIMATORS, Estimate, Estimator, Led
from dfl.inference.exchange import Centre, Exchange, Graph, NoConsensusError
from dfl.inference.frames import (
    Columns,
    Examples,
    all_sites,
    error_column,
    examples_of,
    parts_of,
    site_of,
)
from dfl.inference.likelihood import efficient, inverted, is_maximum, maximize
from dfl.inference.models import MODELS, Model
from dfl.inference.separation import separated
from dfl.inference.sites import Separate

if TYPE_CHECKING:
    import torch
    from scipy.sparse import csr_array
    from torch import Tensor

    from dfl.inference.result import Result
else:
    from dfl.core.lazy import torch

T = TypeVar("T")
DRAWS = 20_000
"""The number of messages that are averaged to find what a compressor loses."""


@dataclass(frozen=True, kw_only=True)
class Messaging:
    """How messages cross between sites."""

    topology: str | None = None
    """The graph over which sites send to their neighbours; without it there is a centre."""
    mixing: str = "metropolis"
    """The mixing matrix on the graph, which must be doubly stochastic."""
    gossip_rounds: int | None = None
    """Rounds of each mean over a graph; until sites agree where not given."""
    bits: int | None = None
    """Bits per number of a message: short for --compressor quantize:bits=B."""
    compressor: str | None = None
    """The compressor of messages; tables of sizes and nuisance parameters are float64 always."""
    faults: str = "none"
    """Faults, several joined by +."""
    links: str = "none"
    """The speeds of links."""
    seed: int = 0
    """The seed of graph, faults and rounding."""


def fit(
    frame: Any,
    *,
    outcome: str,
    covariates: Sequence[str],
    site: str,
    model: str | Model = "logistic",
    estimator: str | Estimator = "tilted_score",
    own_covariates: Sequence[str] = (),
    intercept: bool = True,
    event: str | None = None,
    offset: str | None = None,
    topology: str | None = None,
    mixing: str = "metropolis",
    gossip_rounds: int | None = None,
    bits: int | None = None,
    compressor: str | None = None,
    faults: str = "none",
    links: str = "none",
    seed: int = 0,
) -> Result:
    """Estimate the coefficients that all sites have in common.

    Args:
        frame: a pandas DataFrame, a row per example; only that of rank 0 is used.
        outcome: the column of outcomes, or of times.
        covariates: the columns whose coefficients are common to all sites.
        site: the column with the name of the site.
        model: a spec of `MODELS`, or a `Model`, as `Density(log_density_of=f, own=1)`.
        estimator: a spec of `ESTIMATORS`, or an `Estimator`.
        own_covariates: columns whose coefficients are each site's own.
        intercept: whether each site has an intercept of its own; a model of times has none, nor
            a log density of your own.
        event: the column with 1 for events and 0 for censored times.
        offset: a column that is added to the linear predictor.
        topology: the graph over which sites send to their neighbours; without it they send to a
            coordinating centre.
        mixing: the mixing matrix on the graph; it must be doubly stochastic.
        gossip_rounds: rounds of each mean over a graph; until sites agree where not given.
        bits: bits per number of a message: short for compressor quantize:bits=B.
        compressor: a spec of the compressor of messages; exact float64 where not given, and always
            for tables of the sites' sizes and nuisance parameters.
        faults: specs of faults, joined by +.
        links: a spec of the speeds of links.
        seed: of the graph, of faults, and of stochastic rounding.

    Raises:
        InputError: on every rank, a bad value, or examples without an estimate; the message names
            column, and row or site.
    """
    world = connect()
    world.busy = True
    messaging = Messaging(
        topology=topology, mixing=mixing, gossip_rounds=gossip_rounds, bits=bits,
        compressor=compressor, faults=faults, links=links, seed=seed,
    )  # fmt: skip
    for name, option in options(Messaging).items():
        option.check(flag(name), getattr(messaging, name))
    if not isinstance(intercept, bool):
        raise InputError(f"--intercept must be true or false, not {shown(intercept)}")
    estimator = component("--estimator", estimator, ESTIMATORS, Estimator)
    model = component("--model", model, MODELS, Model)
    _check_fitting(estimator, model, messaging)
    columns = Columns(
        outcome=outcome, covariates=_names("--covariates", covariates), site=site,
        own=_names("--own-covariates", own_covariates),
        intercept=intercept and model.has_predictor and not model.timed,
        event=event, offset=offset,
    )  # fmt: skip
    with isolated(1):
        found = _fit(frame, columns, model, estimator, messaging, world)
    world.busy = False
    return found


def component(flag: str, given: str | T, registry: Registry[type[T]], kind: type[Any]) -> T:
    """Return the component of a spec, or the caller's own.

    Raises:
        InputError: there is none.
    """
    if isinstance(given, str):
        return choose(flag, given, registry)()
    fits = isinstance(given, kind)
    if not fits:
        raise InputError(
            f"{flag} must be a spec or an object of class {kind.__name__}, not {shown(given)}"
        )
    return given


def _names(flag: str, names: object) -> tuple[Any, ...]:
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise InputError(f"{flag} must be a list of columns, not {shown(names)}")
    return tuple(names)


def _check_fitting(estimator: Estimator, model: Model, messaging: Messaging) -> None:
    """Refuse what contradicts each other."""
    if estimator.needs_density and not model.has_density:
        others = [name for name, each in ESTIMATORS.items() if not each.needs_density]
        raise InputError(
            f"--estimator {estimator.name} tilts densities, and --model {_spec(model)} has none: "
            f"choose {', '.join(others)}"
        )
    if estimator.needs_graph and messaging.topology is None:
        raise InputError(f"--estimator {estimator.name} needs a graph: give --topology")
    if messaging.topology is None and messaging.gossip_rounds is not None:
        raise InputError(
            f"--gossip-rounds {messaging.gossip_rounds} needs a graph: give --topology"
        )
    if messaging.topology is None and messaging.mixing != Messaging.mixing:
        raise InputError(f"--mixing {messaging.mixing} needs a graph: give --topology")
    rounds = messaging.gossip_rounds
    if rounds is not None and not 1 <= rounds < 2**31:
        raise InputError(f"--gossip-rounds must be a whole number from 1, not {shown(rounds)}")
    if messaging.bits is not None and messaging.compressor is not None:
        raise InputError(
            f"--bits {messaging.bits} and --compressor {messaging.compressor} both choose a "
            "compressor"
        )


def _spec(component: Model | Estimator) -> str:
    """Return the spec of a component: its name, and the options that are not the defaults."""
    name = getattr(component, "name", None)
    if name is None:
        return own(component)
    values = {
        key: getattr(component, key)
        for key, option in options(type(component)).items()
        if getattr(component, key) != option.default
    }
    written = [f"{key}={_text(value)}" for key, value in values.items()]
    return f"{name}:{','.join(written)}" if written else str(name)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _fit(
    frame: Any,
    columns: Columns,
    model: Model,
    estimator: Estimator,
    messaging: Messaging,
    world: World,
) -> Result:
    """Return the result on every rank."""
    root: list[Examples] = []

    def read() -> bytes:
        root.append(examples_of(frame, columns, model, estimator.fitted_parts))
        sizes = [len(arrays["y"]) for arrays in root[0].sites]
        return json.dumps({"names": root[0].names, "sizes": sizes}).encode()

    common = json.loads(world.from_root(read))
    layout = Layout(len(common["names"]), world.size)
    sites = _scatter(root, columns, model, layout, world)
    net = _exchange(messaging, layout, world)
    try:
        estimate = estimator.estimate(sites, net)
        params, covariance, step = _agreed(estimate, world)
    except NoConsensusError as error:
        world.from_root(partial(_explain, root, estimator, model, str(error)))
        raise
    if not (np.isfinite(params).all() and is_maximum(torch.from_numpy(covariance))):
        line = f"--estimator {_spec(estimator)}: its equation has no solution: choose "
        line += _remedies(estimator, messaging)
        world.from_root(partial(_explain, root, estimator, model, line))
    result = _result(common, columns, (model, estimator), (params, covariance, step), sites, net)
    if estimate.effective is None:
        return result
    return replace(result, effective=float(world.all_gather(estimate.effective.numpy()).min()))


def _remedies(estimator: Estimator, messaging: Messaging) -> str:
    """Return what to choose where an estimator has no solution."""
    remedies = ["another estimator"]
    if isinstance(estimator, Led):
        remedies.append("another lead")
    if messaging.bits is not None or messaging.compressor is not None:
        remedies.append("more bits")
    if messaging.gossip_rounds is not None:
        remedies.append("more gossip rounds")
    return " or ".join(remedies)


def _scatter(
    root: list[Examples], columns: Columns, model: Model, layout: Layout, world: World
) -> Separate:
    """Return the sites of this rank."""
    from safetensors.numpy import load, save

    def part(rank: int) -> bytes:
        of = root[0].sites
        arrays = {f"{k} {name}": a for k in layout.hosted(rank) for name, a in of[k].items()}
        return save({name: np.ascontiguousarray(array) for name, array in arrays.items()})

    arrays = load(world.scatter(part))
    names = ["y", "x", "z", "offset"] + ["event"] * model.timed
    here = layout.hosted(world.rank)
    sites = [site_of({name: arrays[f"{k} {name}"] for name in names}) for k in here]
    p, q = len(columns.covariates), len(columns.own_names)
    shape = {"y": (2,), "x": (2, p), "z": (2, q), "offset": (2,), "event": (2,)}
    return Separate(model, p, sites, site_of({name: np.ones(shape[name]) for name in names}))


def _exchange(messaging: Messaging, layout: Layout, world: World) -> Exchange:
    """Return what connects the sites."""
    spec = (
        f"quantize:bits={messaging.bits}"
        if messaging.bits is not None
        else messaging.compressor or "none"
    )
    flag = "--bits" if messaging.bits is not None else "--compressor"
    compressor: Compressor = choose(flag, spec, COMPRESSORS)()
    every = [fault() for fault in choose_several("--faults", messaging.faults, FAULTS)]
    for spec, each in zip(split_specs(messaging.faults), every, strict=True):
        if each.touches == "work":
            raise InputError(f"--faults {spec}: slows local training, and inference has none")
        if isinstance(each, Leave) and messaging.topology and messaging.gossip_rounds is None:
            raise InputError(
                f"--faults {spec}: a site that has left agrees with no other: give --gossip-rounds"
            )
    faults = tuple(each for each in every if each.touches in ("links", "peers"))
    weights = _weights(messaging, layout.peers) if messaging.topology is not None else ()
    network = Network(
        layout,
        MixingMatrices(weights),
        world,
        ThreatModel(compressor, faults=faults),
        messaging.seed,
    )
    links = choose("--links", messaging.links, LINK_MODELS)()
    connections = links.connections(
        layout.peers, messaging.seed, network.schedule.edges, world.from_root
    )
    if connections is not None:
        network.clock = Clock(layout.peers, connections, lambda: np.zeros(layout.peers))
    if messaging.topology is None:
        if _loses(compressor):
            raise InputError(
                f"{flag} {messaging.compressor or messaging.bits}: messages to a centre lose small "
                "numbers beside large ones: choose --bits from 4 on, or --topology, where sites "
                "send again what was lost"
            )
        return Centre(network)
    return Graph(network, rounds=messaging.gossip_rounds)


def _loses(compressor: Compressor) -> bool:
    """Return whether a number that is a hundredth of the largest in its message loses a quarter or
    more of itself, in the mean over many messages.
    """
    message = torch.logspace(0, -2, 32)[None]
    draw = randomness.draws(0, "rehearsed rounding", range(DRAWS))
    encoded = compressor.encode(message.expand(DRAWS, -1).contiguous(), draw)
    last = compressor.decode(encoded, message.shape[1], message.dtype)[:, -1]
    return bool((last.mean() / message[0, -1] - 1).abs() > 0.25)


def _weights(messaging: Messaging, peers: int) -> Sequence[csr_array]:
    """Return the mixing matrices."""
    import topologies

    assert messaging.topology is not None
    topology = choose("--topology", messaging.topology, topologies.TOPOLOGIES)
    mixing = choose("--mixing", messaging.mixing, topologies.MIXINGS)
    generator = randomness.generator(messaging.seed, "topology")
    try:
        graph = topologies.build(topology, mixing, peers, generator)
    except topologies.GraphError as error:
        raise InputError(f"--topology {messaging.topology} with {peers} sites: {error}") from None
    if not (graph.rows_sum and graph.columns_sum):
        raise InputError(
            f"--mixing {messaging.mixing} on --topology {messaging.topology} is not doubly "
            "stochastic, so consensus is not the mean: choose another"
        )
    return graph.weights


def _agreed(found: Estimate, world: World) -> tuple[Any, Any, float]:
    """Return what the first site found, on every rank: (p,), (p, p) and the last step."""
    p = found.beta.shape[-1]
    step = torch.zeros_like(found.beta[:, 0]) if found.step is None else found.step
    rows = torch.cat([step[:, None], found.beta, found.covariance.flatten(-2)], -1)
    first = world.all_gather(rows.numpy())[0]
    return first[1 : p + 1], first[p + 1 :].reshape(p, p), float(first[0])


def _explain(root: list[Examples], estimator: Estimator, model: Model, otherwise: str) -> bytes:
    """Refuse examples that have no estimate: name the site, and the column.

    Raises:
        InputError: always; with the line `otherwise` where every site has what estimates it needs.
    """
    examples = root[0]
    names = [*examples.columns.covariates, *examples.columns.own_names]
    if not estimator.fitted_parts:
        column = separated(model, *all_sites(examples))
        if column is not None:
            raise InputError(f"all sites: {column} separates the outcomes: leave the column out")
        raise InputError(otherwise)
    for where, arrays in parts_of(examples, estimator.fitted_parts):
        site = site_of(arrays)
        if not maximize(model, site, model.start(site)).isnan().any():
            continue
        column = separated(model, arrays, names)
        if column is not None:
            raise InputError(
                f"{where}: {column} separates the outcomes, so it has no estimate of its own: "
                "leave the site or the column out, or choose --estimator pooled"
            )
        raise InputError(f"{where}: no maximum of the likelihood was found")
    raise InputError(otherwise)


def _result(
    common: dict[str, Any],
    columns: Columns,
    kinds: tuple[Model, Estimator],
    found: tuple[Any, Any, float],
    sites: Separate,
    net: Exchange,
) -> Result:
    """Return the result, the same on every rank."""
    import pandas as pd

    from dfl.inference.result import Result

    world, traffic = net.network.transport.world, net.network.traffic
    names = list(columns.covariates)
    model, p = kinds[0], len(names)

    def each(site: Any) -> Tensor:
        theta = maximize(model, site, model.start(site))
        information = efficient(model, site, theta, p).information
        return torch.cat([theta[:p], inverted(information).diagonal().sqrt()])

    own = world.all_gather(sites.each(each).numpy())
    table = pd.DataFrame({"site": common["names"], "n": common["sizes"]})
    for k, name in enumerate(names):
        table[name], table[error_column(name)] = own[:, k], own[:, p + k]
    sent = world.all_gather(np.stack([traffic.payload, traffic.downloaded], 1))
    counts = world.all_gather(
        np.array([[*(r.bytes for r in net.revealed.values()), traffic.lost]], np.int64)
    ).sum(0)
    revealed = pd.DataFrame(
        [
            {
                "what": what,
                "numbers": r.numbers,
                "times": r.times,
                "rounds": r.rounds,
                "bytes": size,
            }
            for (what, r), size in zip(net.revealed.items(), counts[:-1].tolist(), strict=True)
        ]
    )
    clock = net.network.clock
    net.network.close()
    return Result(
        params=pd.Series(found[0], names),
        cov=pd.DataFrame(found[1], names, names),
        sites=table,
        revealed=revealed,
        traffic=pd.DataFrame({"site": common["names"], "sent": sent[:, 0], "received": sent[:, 1]}),
        model=_spec(kinds[0]),
        estimator=_spec(kinds[1]),
        outcome=columns.outcome,
        gap=net.gap,
        step=found[2],
        lost=int(counts[-1]),
        rounded=isinstance(net, Centre) and not net.exact,
        seconds=clock.seconds if clock else float("nan"),
    )
