"""Runs whose results must not depend on the number of ranks.

python -m tests.mpi.layouts FOLDER all                 run every combination on all ranks of the job
python -m tests.mpi.layouts FOLDER all tests TABLE …    then the tests of this folder, and the
                                                       commands of inference on tables, to
                                                       FOLDER-estimates

In place of `all`, any name in `PARTS` runs a part of the combinations.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import chain, combinations, islice
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

import dfl
from dfl.algorithms import ALGORITHMS
from dfl.algorithms.assumptions import STATIC
from dfl.comm.mpi import connect
from dfl.compression import COMPRESSORS
from dfl.core.layout import Layout
from dfl.datasets import PARTITIONS
from dfl.environment.faults import FAULTS
from dfl.reporting.callbacks.figures import Figures
from dfl.robust.aggregators import AGGREGATORS
from dfl.robust.attacks import ATTACKS
from dfl.simulation import prepare
from tests.models.test_kinds import FEW, WAYS, Half
from tests.mpi.own_model import curved_loss
from tests.support.given import given, small
from tests.support.protected import shaded
from tests.support.sequences import TwoParts, pictures_and_words, sequences, two_parts

METHODS = {
    "choco": ["choco:gamma=0.2"],
    "clique_averaging": ["clique_averaging"],
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
    "gradient_tracking": ["gradient_tracking", "gradient_tracking:order=cta"],
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
EVERY_COMPRESSOR = ("qdfedavgm", "fedavg")
"""Methods that run with every compressor: one that sends to neighbours, one with a server."""
OWN_GRAPH = ("relay_sgd", "epidemic", "clique_averaging")
LINKS = Path(__file__).with_name("links.csv")
"""The speeds of the links of a graph of 7 peers."""
MODEL = Path(__file__).with_name("own_model.py")
MODALITIES = "vqa:width=5+vqa:width=5,inputs=question+vqa:width=5,inputs=image"
"""A model of both modalities, and of each."""
PARTITION_SPECS = {"dirichlet": "dirichlet:alpha=0.3"}
GRAPHS = ("ring", "small_world:k=4,p=0.3", "one_peer_exponential")


def runs() -> Iterator[tuple[str, dfl.Run]]:
    """Yield runs of every registered algorithm, compressor and partition, with 16 and 17 peers."""
    assert set(METHODS) == set(ALGORITHMS), "a new algorithm needs a line here"
    assert set(COMPRESSOR_SPECS) == set(COMPRESSORS), "a new compressor needs a line here"
    methods = [*chain(*METHODS.values())]
    compressors = [*chain(*COMPRESSOR_SPECS.values())]
    again = [("dfedavgm", "none"), ("qdfedavgm", "none")] * 2
    seen: set[tuple[str, str, str | None]] = set()
    for k, (method, compressor) in enumerate([*_sending(methods, compressors), *again]):
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
    # The digits have no natural groups; experiments that other tests import register more.
    ours = [name for name in PARTITIONS if PARTITIONS[name].__module__.startswith("dfl.")]
    for k, partition in enumerate(name for name in ours if name != "natural"):
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
    yield from links()
    yield from drawn_graphs()
    yield from kinds()
    yield from workloads()
    yield "objects", small(**given())
    yield "model-file", setting(1, model=f"{MODEL}:build:width=4", bits=4, peers=5)
    for engine in ("auto", "batched"):
        curved = {"model": f"{MODEL}:curved", "batch_size": 7, "engine": engine}
        yield f"by-place-{engine}", setting(1, **curved, loss=curved_loss, peers=5)
        mixer = curved | {"model": f"{MODEL}:mixer"}
        yield f"by-place-transposed-{engine}", setting(1, **mixer, peers=5)
    yield "by-place-loss", setting(1, loss=curved_loss, batch_size=7, peers=5)
    parts = {"loss": curved_loss, "batch_size": 7, "peers": 5, "auxiliary": "autoencoder"}
    yield "by-place-loss-parts", setting(1, **parts)
    yield "loop", setting(0, engine="loop", weight_decay=1e-3)
    yield "cnn", setting(0, model="cnn", peers=5, examples_per_peer=20)
    yield "resnet", setting(0, model="resnet20", peers=3, examples_per_peer=4, rounds=2)
    yield (
        "characters",
        setting(
            1,
            model="char_lstm:hidden=6,embedding=3",
            dataset=characters(),
            peers=5,
            eval_examples=20,
        ),
    )
    recurrent = "char_lstm:hidden=6,embedding=3"
    yield (
        "sequences",
        setting(0, model=recurrent, dataset=sequences(), peers=5, eval_examples=20, ensemble=True),
    )
    yield (
        "sequences-gru",
        setting(
            0, model="char_lstm:hidden=5,embedding=3,cell=gru", dataset=sequences(), peers=5,
            eval_examples=20, bits=4, partition="quantity:alpha=1",
        ),
    )  # fmt: skip
    yield (
        "transformer",
        setting(
            0, model="transformer:width=6,depth=2,heads=2", dataset=sequences(), peers=5,
            eval_examples=20, engine="batched",
        ),
    )  # fmt: skip
    yield (
        "adapters",
        setting(
            0, model="transformer:width=6,depth=2,heads=2,lora=2", dataset=sequences(), peers=5,
            eval_examples=20, bits=4, share="*.lora_*", batch_size=1, init="independent",
        ),
    )  # fmt: skip
    yield (
        "two-parts",
        setting(1, model=TwoParts(), dataset=two_parts(), peers=5, bits=4, eval_examples=20),
    )
    yield (
        "signals",
        setting(
            0, model="har_cnn", dataset=signals(), partition="natural", peers=5, eval_examples=20
        ),
    )
    yield (
        "resnet-batch",
        setting(
            0, model="resnet20:norm=batch", norm_stats="recompute", peers=3, examples_per_peer=4,
            rounds=2,
        ),
    )  # fmt: skip
    for policy in ("local", "share", "recompute"):
        yield f"normed-{policy}", setting(
            1, model=f"{MODEL}:normed", norm_stats=policy, partition="dirichlet:alpha=0.3", peers=5,
            engine="batched",
        )  # fmt: skip
    for case, model, more in (
        ("mlp", "mlp:hidden=24", {"partition": "dirichlet:alpha=0.3", "bits": 4}),
        ("cnn", "cnn", {"examples_per_peer": 20}),
        ("batch", f"{MODEL}:normed", {"norm_stats": "share", "engine": "batched"}),
    ):
        yield f"bf16-{case}", setting(0, model=model, precision="bf16", peers=5, **more)
    yield "cnn-together", setting(0, model="cnn", peers=5, examples_per_peer=24, engine="batched")
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
    features, targets = np.split(np.random.default_rng(0).normal(size=(700, 4)), [3], axis=1)
    torch.manual_seed(0)
    yield (
        "regression",
        setting(
            0, model=torch.nn.Linear(3, 1, dtype=torch.float64), loss="squared_error", peers=5,
            dataset=dfl.Data(
                features[:100], targets[:100], features[100:], targets[100:], classes=0
            ),
        ),
    )  # fmt: skip
    yield (
        "full-batch",
        setting(1, batch_size=0, partition="dirichlet:alpha=0.5", lr_schedule="cosine"),
    )


def characters() -> dfl.Data:
    """Return short rows of characters, of which the next one is the sum of the first two."""
    x = np.random.default_rng(0).integers(8, size=(120, 7)).astype(np.uint8)
    y = x[:, :2].sum(1, dtype=np.int64) % 8
    return dfl.Data(x[:90], y[:90], x[90:], y[90:], classes=8)


def signals() -> dfl.Data:
    """Return short signals by person, of unequal numbers."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(120, 3, 8)).astype(np.float32), rng.integers(3, size=120)
    people = np.minimum(rng.integers(9, size=120), 4)
    data = dfl.Data(x[:90], y[:90], x[90:], y[90:], classes=3)
    return replace(data, train_groups=people[:90], test_groups=people[90:])


def _sending(methods: list[str], compressors: list[str]) -> Iterator[tuple[str, str]]:
    """Yield every method without compression, and those that compress with some compressors.

    A method of each form of exchange has them all, the others three each in turn.
    """
    turn = 0
    for method in methods:
        yield method, "none"
        if "compressor" not in ALGORITHMS[method.partition(":")[0]].applies:
            continue
        if method in EVERY_COMPRESSOR:
            yield from ((method, each) for each in compressors if each != "none")
        else:
            yield from ((method, compressors[1 + (turn + k) % 10]) for k in range(3))
            turn += 3


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
    yield "split-nothing", setting(0, topology="ring", share="nothing", momentum=0.5)


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
    yield "ascent-full", setting(0, **uneven, algorithm="dfedsam", batch_size=0, threads=2)
    yield "ascent", setting(1, **uneven, algorithm="dfedsam:rho=0.2", weight_decay=0.01)
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
    yield (
        "relayed-shares",
        setting(1, algorithm="relay_sgd", topology="double_tree", share="first:1", momentum=0.5),
    )
    yield "lost-bursts", setting(1, topology="ring", faults="burst:p=0.4,length=3")
    yield (
        "lost-peers",
        setting(
            0, topology="exponential", faults=peers, partition="dirichlet:alpha=0.3", attack="trim"
        ),
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
    yield (
        "lost-lies",
        setting(0, topology="small_world:k=4,p=0.3", **attacked, faults=f"{links}+{peers}"),
    )


def links() -> Iterator[tuple[str, dfl.Run]]:
    """Yield runs with simulated time, in which some peers are faster than others."""
    devices = "compute=lognormal,step_ms=20,sigma=0.7"
    few = {"peers": 7, "model": "softmax", "bits": 3, "partition": "dirichlet:alpha=0.3"}
    graph = nx.circulant_graph(7, [1, 3])
    for label, values in {
        "mixed": {
            "topology": "one_peer_exponential",
            "links": f"mixed:phone=0.5,dsl=0.5,{devices}",
        },
        "server": {
            "algorithm": "fedavg:fraction=0.6",
            "links": f"phone:server_mbps=20,{devices}",
        },
        "file": {"topology": graph, "links": f"links:path={LINKS},{devices}"},
    }.items():
        yield f"links-{label}", setting(0, **few, **values)


def drawn_graphs() -> Iterator[tuple[str, dfl.Run]]:
    """Yield runs on graphs that change for more rounds than communicators are kept."""
    few = {"peers": 7, "rounds": 70, "eval_every": 35, "model": "softmax"}
    for k, graph in enumerate(("random_matching", "base_graph:k=2")):
        lossy = {"bits": 4, "faults": "link_loss:p=0.2"}
        yield f"drawn-{k}", setting(0, **few, topology=graph)
        yield f"drawn-lossy-{k}", setting(0, **few, topology=graph, **lossy)


def kinds() -> Iterator[tuple[str, dfl.Run]]:
    """Yield runs whose peers have models of two kinds, fewer of them than there are ranks."""
    torch.manual_seed(0)
    modules = [Half(True), Half(False, 12)]
    for k, way in enumerate(WAYS):
        yield f"kinds-{k}", dfl.Run(**{**FEW, **way, "peers": 4, "model": modules})
    pictures = {"dataset": pictures_and_words(), "model": MODALITIES, "eval_examples": 20}
    for label, bits in (("exact", None), ("quantized", 5)):
        yield (
            f"kinds-modalities-{label}",
            setting(0, **pictures, share="head.*", peers=4, bits=bits),
        )


def workloads() -> Iterator[tuple[str, dfl.Run]]:
    """Yield runs of a recurrent, a two-input and a normalised model: with shared parts, messages of
    few bits, losses, attacks on examples and on messages, and robust rules.
    """
    models: dict[str, tuple[dict[str, object], str]] = {
        "recurrent": (
            {"model": "char_lstm:hidden=6,embedding=3,layers=1", "dataset": sequences()},
            "last",
        ),
        "two-input": ({"model": "vqa:width=5", "dataset": pictures_and_words()}, "head.*"),
        "normed": ({"model": f"{MODEL}:normed", "norm_stats": "local"}, "head:1"),
    }
    trigger = "backdoor:fraction=0.2,size=2"
    for label, (model, share) in models.items():
        ways: dict[str, dict[str, object]] = {
            "share": {"topology": "ring", "share": share, "share_all_until": "1", "bits": 3},
            "server": {
                "algorithm": "fedavg:fraction=0.6,stragglers=0.3", "attack": trigger, "bits": 6,
                "share": share,
            },
            "faults": {
                "topology": "one_peer_exponential", "bits": 4, "attack": "alie",
                "faults": "link_loss:p=0.3+outage:p=0.2,length=2",
            },
            "rule": {
                "topology": "regular:k=4", "aggregator": "trimmed_mean:f=1", "attack": trigger,
                "engine": "batched",
            },
            "memory": {
                "algorithm": "gradient_tracking", "topology": "ring", "attack": "label_flip",
                "partition": "quantity:alpha=1",
            },
        }  # fmt: skip
        for k, (way, values) in enumerate(ways.items()):
            yield name("workload", label, way), setting(k, eval_examples=20, **model, **values)


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


def few(count: int = 8) -> list[tuple[str, dfl.Run]]:
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


def methods() -> list[tuple[str, dfl.Run]]:
    """Return the last run of every method, with a compressor where it compresses, and a run of each
    workload.

    Those with models of two kinds have fewer peers than 16 ranks.
    """
    works = [pair for pair in workloads() if pair[0].endswith("-rule")]
    others = {label: run for label, run in runs() if not label.startswith("workload")}
    last = {str(run.algorithm).partition(":")[0]: (label, run) for label, run in others.items()}
    return [*(pair for name, pair in last.items() if name in ALGORITHMS), *works]


PARTS: dict[str, Callable[[], Iterable[tuple[str, dfl.Run]]]] = {
    "all": runs,
    "even": lambda: islice(runs(), 0, None, 2),
    "odd": lambda: islice(runs(), 1, None, 2),
    "few": few,
    "methods": methods,
    "workloads": workloads,
}


def _pairs(run: dfl.Run) -> set[object]:
    """Return the pairs of settings of a run, without the options of components."""
    values = {field.name: getattr(run, field.name) for field in fields(run)}
    shown = [(key, str(value).partition(":")[0]) for key, value in values.items()]
    return set(combinations(shown, 2))


def name(*parts: str) -> str:
    """Return the name of a run's folder."""
    return "-".join(part.replace(":", "_").replace(",", "_") for part in parts)


def shuffled(matrices: Sequence[csr_array], peers: int, ranks: int) -> Layout:
    """Return a layout whose ranks host peers at random."""
    cuts = Layout(peers, ranks).starts[1:-1]
    parts = np.split(np.random.default_rng(peers).permutation(peers), cuts)
    order = np.concatenate([np.sort(part) for part in parts])
    return Layout(peers, ranks, order if ranks > 1 else None)


def main(folder: Path, part: str) -> None:
    """Run the combinations of a part, each to its own folder. On three ranks all peers lie on the
    ranks at random, on other numbers of ranks those of every second combination.
    """
    for k, (label, run) in enumerate(PARTS[part]()):
        given = replace(run, dataset=shaded()) if run.fairness_adversary != "none" else run
        with pytest.MonkeyPatch.context() as patch:
            if k % 2 or connect().size == 3:
                patch.setattr(prepare, "placed", shuffled)
            for _ in dfl.simulate(replace(given, out=folder / label)):
                pass


if __name__ == "__main__":
    # They are drawn from tables that are compared, and each rank would import matplotlib.
    Figures.finish = lambda self, outcome: None  # type: ignore[method-assign]
    os.fsync = lambda fd: None  # as in tests/conftest.py
    main(Path(sys.argv[1]), sys.argv[2])
    if sys.argv[3:]:
        plugins = ["--with-mpi", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
        place = f"--basetemp={sys.argv[1]}-tests-{connect().rank}"
        tests = str(Path(__file__).parent)
        if code := pytest.main([*plugins, place, "--override-ini=addopts=-q", tests]):
            sys.exit(code)
    if sys.argv[4:]:
        from tests.mpi.estimates import estimate

        for table in map(Path, sys.argv[4:]):
            estimate(table, Path(f"{sys.argv[1]}-estimates") / table.stem)
