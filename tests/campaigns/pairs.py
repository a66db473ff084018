"""Random combinations of method, aggregation rule, graph, weights, faults and compressor stay
bounded, or a warning names the cause.

    python -m tests.campaigns.pairs 400 [FIRST]

Every combination without an attacker trains a small model for 200 rounds. A run that ends with exit
code 0 is bounded if, over the last tenth of its rounds, the consensus distance is at most
`MAX_DISTANCE_GROWTH` times its maximum over the first fifth, and the training loss is at most
`MAX_LOSS_GROWTH` times the one before round 0. A run that is not bounded must have printed one of
the warnings in `CAUSES` before round 0. The command ends with 1 if one has not.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from typing import Any

import numpy as np

from dfl import DivergedError, InputError, Run, simulate

ROUNDS = 200
MAX_DISTANCE_GROWTH = 10.0
MAX_LOSS_GROWTH = 10.0
CAUSES = (
    "the consensus distance grows",
    "never settles",
    "hardly shrinks",
    "so old",
    "overshoot",
    "do not contract",
    "are biased",
)
"""Parts of the warnings that name a cause of growth."""

GRAPHS = (
    "ring",
    "chain",
    "star",
    "complete",
    "regular:k=3",
    "erdos_renyi:p=0.6",
    "small_world:k=4,p=0.3",
    "barabasi_albert:m=2",
    "exponential",
    "one_peer_exponential",
    "hypercube",
    "torus",
)
MIXINGS = ("metropolis", "max_degree", "lazy", "uniform", "neighbors")
RULES = (
    "mean",
    "median",
    "trimmed_mean:f=1",
    "krum:f=0",
    "multi_krum:f=0",
    "geometric_median",
    "clipping:f=1",
    "clipping:tau=1",
    "clipping:tau=0.05",
    "fltrust",
)
FAULTS = (
    "link_loss:p=0",
    "link_loss:p=0.1",
    "link_loss:p=0.3",
    "link_loss:p=0.6",
    "link_loss:p=0.9",
    "burst:p=0.2,length=10",
    "burst:p=0.5,length=4",
    "outage:p=0.05,length=4",
    "outage:p=0.3,length=2",
    "leave:fraction=0.3,at=20",
    "join:fraction=0.3,at=20",
    "stragglers:work=0.5",
)


def drawn(number: int) -> dict[str, Any]:
    """The settings of one combination."""
    rng = np.random.default_rng(number)

    def one(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    faults = {spec.partition(":")[0]: spec for spec in rng.choice(FAULTS, int(rng.integers(0, 3)))}
    settings: dict[str, Any] = {
        "peers": one(4, 8, 8, 9, 16),
        "faults": "+".join(faults.values()) or "none",
        "partition": one("iid", "shards:per_peer=2", "dirichlet:alpha=0.3"),
        "momentum": one(0.0, 0.9),
        "lr": one(0.01, 0.05),
        "init": one("common", "common", "common", "independent"),
        "share": one("all", "all", "all", "head:1"),
        "seed": int(rng.integers(100)),
    }
    bits = f"quantize:bits={one(1, 2, 3, 4, 8, 16)}"
    kind = one("gossip", "copies", "copies", "copies", "paper", "server", "server")
    if kind == "server":
        beta = one(0.0, 0.5, 0.9)
        rate = one(1.0, 0.5)
        method = one("fedavg", "fedavg", "fedprox", "fedsgd", "fltrust")
        options = f"server_momentum={beta},server_lr={rate},fraction={one(1.0, 0.5)}"
        settings |= {"algorithm": f"{method}:{options}", "init": "common"}
        settings |= {"compressor": bits} if one(0, 1) else {}
        return settings | ({"aggregator": one(*RULES)} if method != "fltrust" else {})
    settings |= {"topology": one(*GRAPHS), "mixing": one(*MIXINGS)}
    if kind == "gossip":
        return settings | {"algorithm": "dfedavgm", "aggregator": one(*RULES)}
    option = (
        f"gamma={one(1.0, 1.0, 0.5, 0.2)}"
        if kind == "copies"
        else f"exchange=paper,alpha={one(1.0, 0.5, 2.0)}"
    )
    block = one("", "", ",block=0", ",block=64")
    rounding = one("", "", ",rounding=stochastic", ",rounding=nearest")
    compressor = one("none", bits, bits + block + rounding)
    return settings | {"algorithm": f"qdfedavgm:{option}", "compressor": compressor}


def outcome(settings: dict[str, Any], rounds: int = ROUNDS) -> tuple[str, str]:
    """Run a combination; return its outcome and a description.

    The outcome is bounded, warned (unbounded, and a warning named the cause), unbounded, refused,
    or diverged (exit code 3).
    """
    few: dict[str, Any] = {
        "model": "mlp:hidden=8",
        "examples_per_peer": 24,
        "local_steps": 2,
        "eval_every": 5,
    }
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            rows = list(simulate(Run(**{**few, **settings}, rounds=rounds, eval_examples=50)))
        except InputError as error:
            return "refused", str(error)
        except DivergedError as error:
            named = any(cause in str(each.message) for each in caught for cause in CAUSES)
            return "diverged", ("warned: " if named else "not warned: ") + str(error)
    first, last = rows[1 : 1 + len(rows) // 5], rows[-(len(rows) // 10) :]
    distance = [max(row.get("consensus_distance", 0.0) for row in part) for part in (first, last)]
    loss = [rows[0]["train_loss"], max(row["train_loss"] for row in last)]
    text = (
        f"consensus distance {distance[0]:.3g} to {distance[1]:.3g}, "
        f"loss {loss[0]:.3g} to {loss[1]:.3g}"
    )
    small_distance = distance[1] <= MAX_DISTANCE_GROWTH * distance[0] + 1e-6
    if small_distance and loss[1] <= MAX_LOSS_GROWTH * loss[0]:
        return "bounded", text
    notes = [str(each.message) for each in caught]
    return (
        "warned" if any(cause in note for note in notes for cause in CAUSES) else "unbounded"
    ), f"{text}; {notes}"


def main(count: int, first: int = 0) -> int:
    """Run `count` combinations, from number `first` on."""
    ended: Counter[str] = Counter()
    for number in range(first, first + count):
        settings = drawn(number)
        how, text = outcome(settings)
        ended[how] += 1
        if how in ("unbounded", "diverged", "warned"):
            print(f"{number} {how}: {text}\n    {settings}", flush=True)
    print(f"{count} combinations from {first}: {dict(ended)}")
    return int(bool(ended["unbounded"]))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
