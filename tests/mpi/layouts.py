"""Runs whose results must not depend on the number of ranks.

python -m tests.mpi.layouts FOLDER N          run every N-th combination on all ranks of the job
python -m tests.mpi.layouts FOLDER N tests    then run the tests of this folder as well
python -m tests.mpi.layouts FOLDER few        run the sample of `few`
"""

import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import chain, combinations, islice, product
from pathlib import Path

import pytest

import dfl
from dfl.algorithms import ALGORITHMS
from dfl.algorithms.assumptions import STATIC
from dfl.compression import COMPRESSORS
from dfl.datasets import PARTITIONS
from dfl.environment.faults import FAULTS
from dfl.reporting import plots
from dfl.robust.aggregators import AGGREGATORS
from dfl.robust.attacks import ATTACKS
from tests.support.protected import shaded

METHODS = {
    "choco": ["choco:gamma=0.2"],
    "dfedavgm": ["dfedavgm"],
    "qdfedavgm": ["qdfedavgm", "qdfedavgm:gamma=0.7", "qdfedavgm:exchange=paper,alpha=0.5"],
    "fedavg": ["fedavg", "fedavg:fraction=0.4,stragglers=0.5,server_momentum=0.5"],
    "fedsgd": ["fedsgd"],
    "fedprox": ["fedprox:mu=0.1,fraction=0.6,stragglers=0.5"],
    "fltrust": ["fltrust:root=20"],
    "power_gossip": ["power_gossip:rank=2"],
    "push_sum": ["push_sum"],
    "relay_sgd": ["relay_sgd"],
    "epidemic": ["epidemic:s=3", "epidemic:s=4,form=oracle"],
    "local_only": ["local_only"],
    "pooled": ["pooled"],
    "dpsgd": ["dpsgd:order=cta"],
    "dsgdm": ["dsgdm"],
    "qg_dsgdm": ["qg_dsgdm"],
    "gradient_tracking": ["gradient_tracking", "gradient_tracking:form=non_atc"],
    "d2": ["d2"],
    "exact_diffusion": ["exact_diffusion"],
    "momentum_tracking": ["momentum_tracking"],
    "decentlam": ["decentlam"],
    "dfedsam": ["dfedsam:rho=0.1"],
}
COMPRESSOR_SPECS = {
    "none": ["none"],
    "quantize": [f"quantize:bits={b}" for b in (1, 2, 3, 4, 8, 11)] + ["quantize:bits=5,block=64"],
    "top_k": ["top_k:share=0.1"],
    "low_rank": ["low_rank:rank=2"],
    "random_k": ["random_k:share=0.3"],
}
OWN_GRAPH = ("relay_sgd", "epidemic")
PARTITION_SPECS = {"dirichlet": "dirichlet:alpha=0.3"}
GRAPHS = ("ring", "small_world:k=4,p=0.3", "one_peer_exponential")


def runs() -> Iterator[tuple[str, dfl.Run]]:
    """Yield runs of every registered algorithm, compressor and partition, with 16 and 17 peers."""
    assert set(METHODS) == set(ALGORITHMS), "a new algorithm needs a line here"
    assert set(COMPRESSOR_SPECS) == set(COMPRESSORS), "a new compressor needs a line here"
    methods = [*chain(*METHODS.values())]
    compressors = [*chain(*COMPRESSOR_SPECS.values())]
    sending = [
        pair
        for pair in product(methods, compressors)
        if "compressor" in ALGORITHMS[pair[0].partition(":")[0]].applies or pair[1] == "none"
    ]
    seen: set[tuple[str, str, str | None]] = set()
    for k, (method, compressor) in enumerate(
        [*sending, *[("dfedavgm", "none"), ("qdfedavgm", "none")] * 2]
    ):
        kind = ALGORITHMS[method.partition(":")[0]]
        own = not kind.gossips or method.startswith(OWN_GRAPH)
        graphs = GRAPHS[:2] if STATIC in kind.requires else GRAPHS
        turned = (graphs[(k + more) % len(graphs)] for more in range(len(graphs)))
        graph = None if own else next(g for g in turned if (method, compressor, g) not in seen)
        seen.add((method, compressor, graph))
        yield (
            name(f"{k:02}", method, compressor, str(graph)),
            setting(k, algorithm=method, compressor=compressor, topology=graph),
        )
    # The digits have no natural groups.
    for k, partition in enumerate(name for name in PARTITIONS if name != "natural"):
        spec = PARTITION_SPECS.get(partition, partition)
        yield partition, setting(k, partition=spec, validation=0.2, bits=4)
        yield (
            f"{partition}-steps",
            setting(k + 1, partition=spec, local_steps=5, init="independent", bits=4),
        )
    yield from attacks()
    yield from shares()
    yield from steps()
    yield from faults()
    yield "loop", setting(0, engine="loop", weight_decay=1e-3)
    yield "cnn", setting(0, model="cnn", peers=5, examples_per_peer=20)
    yield "cnn-together", setting(0, model="cnn", peers=5, examples_per_peer=20, engine="batched")
    yield (
        "threads-together",
        setting(0, threads=2, engine="batched", partition="dirichlet:alpha=0.3"),
    )
    yield "threads", setting(0, model="2nn", threads=2, bits=4, examples_per_peer=20)
    clouds = "gaussian:features=16,examples=300,test=900"
    yield (
        "together",
        setting(
            0, ensemble=True, dataset=clouds, eval_examples=700, peers=5, attack="sign_flip:peers=3"
        ),
    )
    yield (
        "full-batch",
        setting(1, batch_size=0, partition="dirichlet:alpha=0.5", lr_schedule="cosine"),
    )


def shares() -> Iterator[tuple[str, dfl.Run]]:
    """Yield runs that share a part of the models, from the start and after some rounds."""
    served = {
        "algorithm": "fedavg:fraction=0.4,weighting=gradient,broadcast_to=everyone",
        "share": "head:1",
    }
    yield "split-server", setting(0, **served)
    yield "split-server-later", setting(1, **served, share_all_until="1", bits=4)
    yield (
        "split-graph",
        setting(0, topology="ring", share="first:1", bits=3, share_all_until="1", attack="alie"),
    )
    yield "split-edges", setting(1, topology="one_peer_exponential", share="1.*", bits=3)
    yield (
        "split-memory",
        setting(1, algorithm="momentum_tracking", share="head:1", share_all_until="1"),
    )
    yield "split-nothing", setting(0, topology="ring", share="nothing", bits=5, momentum=0.5)


def steps() -> Iterator[tuple[str, dfl.Run]]:
    """Yield runs whose steps draw random numbers or have several losses, in padded batches."""
    uneven = {"partition": "dirichlet:alpha=0.3", "momentum": 0.5}
    yield (
        "draws",
        setting(
            1,
            **uneven,
            model="mlp:hidden=12+8,dropout=0.3",
            augment="crop_flip:padding=2",
            local_epochs=2,
        ),
    )
    yield "auxiliary", setting(0, **uneven, auxiliary="jigsaw:hidden=9", bits=4)
    yield "ascent", setting(1, **uneven, algorithm="dfedsam:rho=0.2", weight_decay=0.01)
    yield "ascent-full", setting(0, **uneven, algorithm="dfedsam", batch_size=0, threads=2)
    yield "kept", setting(0, **uneven, algorithm="dsgdm", lr_schedule="cosine", local_epochs=2)
    for engine in ("batched", "loop"):
        hidden = {
            "fairness_adversary": "adversary:lambda_global=0.5,lambda_local=0.2",
            "auxiliary": "autoencoder",
        }
        few = {"peers": 7, "eval_examples": 20, "batch_size": 3}
        yield f"adversary-{engine}", setting(0, **uneven, **hidden, **few, engine=engine)


def faults() -> Iterator[tuple[str, dfl.Run]]:
    """Yield runs with faults of every kind, over graphs and with a server, some with attacks."""
    assert {"link_loss", "burst", "outage", "leave", "join", "stragglers"} == set(FAULTS) - {"none"}
    links = "link_loss:p=0.3"
    peers = "outage:p=0.2,length=2+leave:peers=7,at=1+join:peers=2+3,at=2+stragglers"
    yield "lost-edges", setting(0, topology="small_world:k=4,p=0.3", bits=3, faults=links)
    yield (
        "lost-weights",
        setting(
            0,
            algorithm="push_sum",
            topology="one_peer_exponential",
            share="first:1",
            share_all_until="1",
            faults=f"{links}+{peers}",
        ),
    )
    yield "relayed-shares", setting(1, algorithm="relay_sgd", share="first:1", momentum=0.5)
    yield "lost-bursts", setting(1, topology="ring", faults="burst:p=0.4,length=3")
    yield (
        "lost-peers",
        setting(0, topology="exponential", faults=peers, partition="dirichlet:alpha=0.3"),
    )
    yield (
        "lost-server",
        setting(
            1, algorithm="fedavg:fraction=0.7,stragglers=0.3", bits=6, faults=f"{links}+{peers}"
        ),
    )
    yield (
        "lost-changing",
        setting(
            0, topology="one_peer_exponential", bits=3, attack="alie", faults=f"{links}+{peers}"
        ),
    )
    tracked = {"algorithm": "gradient_tracking", "partition": "dirichlet:alpha=0.3"}
    yield "lost-tracked", setting(1, topology="small_world:k=4,p=0.3", **tracked, faults=peers)
    attacked = {"attack": "dissensus:peers=1+9", "aggregator": "clipping:tau=1"}
    yield "lost-lies", setting(0, topology="small_world:k=4,p=0.3", **attacked, faults=links)


def attacks() -> Iterator[tuple[str, dfl.Run]]:
    """Yield runs of every attack with the mean and of every aggregator with an attack."""
    for k, attack in enumerate(ATTACKS):
        method = {"adaptive": "fltrust:root=20", "dissensus": "dfedavgm"}.get(
            attack, "fedavg:fraction=0.7"
        )
        yield (
            name("server", attack),
            setting(
                k,
                algorithm=method,
                attack=attack,
                bits=None if k % 2 or method == "dfedavgm" else 6,
            ),
        )
        if attack not in ("adaptive", "none"):
            yield (
                name("graph", attack),
                setting(k, topology="small_world:k=4,p=0.3", attack=attack, rounds=2),
            )
    for attack in ("gaussian:peers=2+5", "trim"):
        changing = {"topology": "one_peer_exponential", "bits": 3, "attack": attack}
        yield name("edges", attack), setting(0, **changing)
    for k, rule in enumerate(AGGREGATORS):
        spec = f"{rule}:f=1" if rule in ("krum", "multi_krum", "trimmed_mean") else rule
        method = "fltrust:root=20" if rule == "fltrust" else "fedavg"
        yield (
            name("server", "rule", rule),
            setting(k, algorithm=method, aggregator=spec, attack="alie"),
        )
        yield (
            name("graph", "rule", rule),
            setting(k, topology="regular:k=4", aggregator=spec, attack="sign_flip:peers=3"),
        )


def setting(k: int, **values: object) -> dfl.Run:
    """Return a small run of 16 peers, or of 17 for an odd k."""
    few = {
        "rounds": 3,
        "eval_every": 2,
        "model": "mlp:hidden=12",
        "eval_examples": 100,
        "peers": 16 + k % 2,
    }
    return dfl.Run(**{**few, **values})  # type: ignore[arg-type]


def few(count: int = 12) -> list[tuple[str, dfl.Run]]:
    """Return runs that together have many pairs of settings.

    Each is the first of those with the most pairs that no earlier one has.
    """
    rest = {label: (run, _pairs(run)) for label, run in runs()}
    seen: set[object] = set()
    chosen = []
    for _ in range(count):
        label = max(rest, key=lambda label: len(rest[label][1] - seen))
        run, pairs = rest.pop(label)
        seen |= pairs
        chosen.append((label, run))
    return chosen


def _pairs(run: dfl.Run) -> set[object]:
    """Return the pairs of settings of a run, without the options of components."""
    values = {field.name: getattr(run, field.name) for field in fields(run)}
    shown = [(key, str(value).partition(":")[0]) for key, value in values.items()]
    return set(combinations(shown, 2))


def name(*parts: str) -> str:
    """Return the name of a run's folder."""
    return "-".join(part.replace(":", "_").replace(",", "_") for part in parts)


def main(folder: Path, which: str) -> None:
    """Run every `which`-th combination, or a few, each to its own folder."""
    for label, run in few() if which == "few" else islice(runs(), 0, None, int(which)):
        given = replace(run, dataset=shaded()) if run.fairness_adversary != "none" else run
        for _ in dfl.simulate(replace(given, out=folder / label)):
            pass


if __name__ == "__main__":
    plots.figures = lambda *args: {}  # they are drawn from tables that are compared
    main(Path(sys.argv[1]), sys.argv[2])
    if sys.argv[3:] == ["tests"]:
        plugins = ["--with-mpi", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
        sys.exit(pytest.main([*plugins, "--override-ini=addopts=-q", str(Path(__file__).parent)]))
