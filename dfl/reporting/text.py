"""A run in words: the lines before and after it, its figures, bytes and times."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from rich.filesize import decimal

from dfl.config import Run
from dfl.evaluation.fairness import ADVERSARY, ODDS, PARITY
from dfl.reporting.distribution import ends, span
from dfl.store.callbacks import Peers, Row, RunInfo

Line = tuple[str, str]
"""The name of a line, and its text."""


def header(info: RunInfo) -> list[Line]:
    """Return the lines before a run: names, peers, graph, model, training, messages."""
    run = info.run
    per_rank = info.layout.counts
    hosted = ends(min(per_rank), max(per_rank))
    part = f", of which {info.shared:,} are shared" if info.shared < info.parameters else ""
    part += f", besides {info.frozen:,} frozen ones" if info.frozen else ""
    lines = [
        (
            "run",
            f"{run.algorithm} on {run.dataset} ({run.partition}), model {run.model}, "
            f"seed {run.seed}",
        ),
        (
            "peers",
            f"{info.layout.peers:,} on {_many(info.layout.ranks, 'rank')}, {hosted} per rank, "
            f"{_many(run.threads, 'thread')} each",
        ),
        *_graph(info),
        ("model", f"{info.parameters:,} parameters of {info.dtype}{part}"),
        (
            "training",
            f"{run.rounds:,} rounds, local steps per round {span(info.local_steps)}, "
            f"batch size {info.batch_size or 'all'}, lr {run.lr:g} ({run.lr_schedule}), "
            f"momentum {run.momentum:g}",
        ),
        *_objective(run),
    ]
    if run.eval_examples is not None:
        own = f"at most {_many(info.evaluated_train, 'training example')} of each peer"
        lines.append(("evaluation", f"on {_many(run.eval_examples, 'test example')} and {own}"))
    form = "uncompressed" if run.compressor == "none" else run.compressor
    sends = info.payload_whole or info.payload_shared
    lines.append(("messages", f"{form}: {_payload(info)}" if sends else "none"))
    if info.resumed:
        t, path = info.resumed
        lines.append(("resumed", f"after round {t:,}, from {path}"))
    if len(info.attackers):
        count = f"{_many(len(info.attackers), 'peer')} of {info.layout.peers:,}"
        lines.append(("attack", f"{run.attack}: {count}"))
    if run.faults != "none":
        lines.append(("faults", str(run.faults)))
    if run.links != "none":
        lines.append(("links", str(run.links)))
    return lines


def needs(info: RunInfo) -> list[Line]:
    """Return what a method needs whose peers have neighbours: memory, messages, assumptions."""
    if info.graph is None:
        return []
    method = info.method
    rows = "1 row" if method.rows == 1 else f"{round(method.rows, 2):g} rows"
    lines = [
        (
            "method",
            f"{rows} of memory per peer, "
            f"{_many(method.messages, 'message')} to each neighbour per round"
            f"{', 1 more within a cluster' if method.within_clusters else ''}",
        )
    ]
    return [*lines, ("assumes", ", ".join(method.assumes))] if method.assumes else lines


def _objective(run: Run) -> list[Line]:
    """Return the augmentation and the further losses of training."""
    given = {
        "augment": run.augment,
        "auxiliary": run.auxiliary,
        "adversary": run.fairness_adversary,
    }
    return [(name, str(spec)) for name, spec in given.items() if spec != "none"]


def _payload(info: RunInfo) -> str:
    """Return the bytes of a round, and of all rounds if it is known when sharing all ends."""
    run, whole, shared = info.run, info.payload_whole, info.payload_shared
    if not isinstance(run.share_all_goal, int):
        until = f"per round until {run.share_all_until}"
        return f"{size(whole)} {until}, {size(shared)} from then on"
    first = min(run.share_all_goal, run.rounds)
    opening = f"{size(whole)} per round for {_many(first, 'round')}, then " if first else ""
    total = whole * first + shared * (run.rounds - first)
    return f"{opening}{size(shared)} per round, {size(total)} in all"


def _graph(info: RunInfo) -> list[Line]:
    """Return the graph and its mixing matrix, or the server; and the aggregation rule."""
    run, graph = info.run, info.graph
    rule = [("aggregator", str(run.aggregator))] if run.aggregator != "mean" else []
    if graph is None:
        sent = f"sends {_many(info.broadcasts, 'model')} per round"
        return [("server", sent if info.has_server else "none: no messages"), *rule]
    kind = "directed edges" if graph.directed else "edges"
    weights = "its own weights" if graph.own_weights else run.mixing
    name = f"{run.topology} ({weights}){', drawn anew every round' if graph.endless else ''}"
    period = 1 if graph.endless else len(graph.weights)
    pace = _pace(graph.half_rounds, period)
    return [
        (
            "graph",
            f"{name}: {graph.edges:,} {kind}, degree {span(graph.degrees)}",
        ),
        ("mixing", f"spectral gap {graph.gap:.4g}, {pace}, lambda_min {graph.smallest:.4g}"),
        *rule,
    ]


def summary(peers: Peers, row: Row) -> list[Line]:
    """Return the lines after a run: spread of the peers, mean model, consensus distance, cost.

    Args:
        peers: every peer's figures (P,), by name.
        row: the last row of metrics.csv.
    """
    lines = [("loss", f"{row['train_loss']:.4g} mean on the peers' training examples")]
    if not np.isnan(peers["accuracy"]).all():
        lines += _quality(peers, row)
    if "test_loss_mean" in row and not np.isnan(row["test_loss_mean"]):
        if _one(row):
            spread = "of the server's model"
        else:
            spread = f"mean, {row['test_loss_max']:.4g} of the worst peer"
        lines += [("test loss", f"{row['test_loss_mean']:.4g} {spread}")]
    if "perplexity_mean" in row:
        whose = "of the server's model" if _one(row) else "mean"
        lines += [("perplexity", f"{row['perplexity_mean']:.4g} {whose}, of a token")]
    lines += _fairness(row)
    if "backdoor_success_mean" in row:
        lines += [
            (
                "backdoor",
                f"{row['backdoor_success_mean']:.4f} of the examples with a trigger get its label",
            )
        ]
    if "trust" in peers:
        attacker = peers["is_attacker"] == 1
        trust = {"honest peers": peers["trust"][~attacker], "attackers": peers["trust"][attacker]}
        means = [
            f"{np.nanmean(values):.3f} in {group}"
            for group, values in trust.items()
            if not np.isnan(values).all()
        ]
        lines += [("trust", ", ".join(means))] if means else []
    payload = f"{size(row['payload_bytes'])} sent by the peers"
    if "upload_bytes" in row:
        upload, download = size(row["upload_bytes"]), size(row["download_bytes"])
        payload = f"{upload} up to the server, {download} down"
    if not _one(row):
        lines += [
            ("consensus", f"{row['consensus_distance']:.4g} distance of the peers from their mean")
        ]
    return [
        *lines,
        ("payload", payload),
        ("wire", f"{size(row['wire_bytes'])} moved between ranks"),
        ("time", clock(row["seconds"]) + _simulated(row)),
    ]


def _quality(peers: Peers, row: Row) -> list[Line]:
    """Return accuracies over honest peers: of one model for all, or their spread."""
    accuracy = np.where(peers["is_attacker"] == 0, peers["accuracy"], np.nan)
    local = [
        (
            "  local",
            f"{row['local_accuracy_mean']:.4f} mean, each on the peer's own part of the test set",
        )
    ]
    if "validation_accuracy_mean" in row:
        mean = row["validation_accuracy_mean"]
        local += [("  held out", f"{mean:.4f} mean, each on the peer's own validation examples")]
    if "accuracy_ensemble" in row:
        mean, vote = row["accuracy_ensemble"], row["accuracy_vote"]
        local = [("  ensemble", f"{mean:.4f} by mean output, {vote:.4f} by vote"), *local]
    if _one(row):
        return [("accuracy", f"{row['accuracy_mean']:.4f} of the server's model"), *local]
    best, worst = int(np.nanargmax(accuracy)), int(np.nanargmin(accuracy))
    mean = row["accuracy_mean_model"]  # NaN for models of several kinds
    return [
        (
            "accuracy",
            f"{row['accuracy_mean']:.4f} mean, {row['accuracy_std']:.4f} std over the peers",
        ),
        ("  best", f"{accuracy[best]:.4f} peer {best}"),
        ("  worst", f"{accuracy[worst]:.4f} peer {worst}"),
        *([] if np.isnan(mean) else [("  of mean", f"{mean:.4f} the mean of all models")]),
        *local,
    ]


def _fairness(row: Row) -> list[Line]:
    """Return the gaps between groups, and the AUC of the adversary, where there are any."""
    names = {PARITY: "parity gap", ODDS: "odds gap", ADVERSARY: "adversary AUC"}
    values = {text: row.get(f"{name}_mean", np.nan) for name, text in names.items()}
    whose = "of the server's model" if _one(row) else "means over the peers"
    parts = [f"{text} {value:.4f}" for text, value in values.items() if not np.isnan(value)]
    return [("fairness", f"{', '.join(parts)}, {whose}")] if parts else []


def memory(info: RunInfo) -> list[Line]:
    """Return the estimated memory of the rank that needs most."""
    models, examples, test = info.memory
    parts = f"{size(models)} models and work, {size(examples)} examples, {size(test)} test set"
    total = size(models + examples + test)
    return [("memory", f"about {total} on the fullest rank, besides the programs: {parts}")]


def size(count: float) -> str:
    """Return a number of bytes as text: 1234567 -> 1.23 MB."""
    return decimal(round(count), precision=2)


def _one(row: Row) -> bool:
    """Return whether all peers have the server's model."""
    return (
        "upload_bytes" in row and row["consensus_distance"] == 0 and not row["accuracy_std"] > 1e-9
    )


def figures(row: Row) -> list[str]:
    """Return the main figures of an evaluation."""
    accuracy, least = row["accuracy_mean"], row["accuracy_min"]
    spread = "" if _one(row) else f" (min {least:.3f})"
    how_well = (
        f"loss {row['train_loss']:.4g}"
        if np.isnan(accuracy)
        else f"accuracy {accuracy:.3f}{spread}"
    )
    distance = [] if _one(row) else [f"consensus distance {row['consensus_distance']:.3g}"]
    return [how_well, *distance, size(row["payload_bytes"])]


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def _pace(half_rounds: float, period: int) -> str:
    if np.isnan(half_rounds):
        return "its pace not computed"
    if half_rounds == 0:
        return f"agreement after {_many(period, 'round')}"
    return (
        f"disagreement halves in {half_rounds:,.1f} rounds"
        if np.isfinite(half_rounds)
        else "no agreement ever"
    )


def _simulated(row: Row) -> str:
    """Return the simulated time, where links are simulated."""
    if "sim_seconds" not in row:
        return ""
    seconds = row["sim_seconds"]
    return f", {f'{seconds:.3g} s' if seconds < 60 else clock(seconds)} on the simulated links"


def clock(seconds: float) -> str:
    """Return a time as text: 3.2 -> 3.2 s, 4000 -> 1:06:40."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def no_contraction(row: Mapping[str, float]) -> str:
    """Return a warning where a message is no nearer to its numbers than zeros are; else ""."""
    ratio = row.get("relative_squared_error", 0.0)
    if not ratio >= 1:
        return ""
    return (
        f"messages do not contract: ||Q(x) - x||^2 is {ratio:.3g} times ||x||^2 at some peer in "
        f"round {int(row['round'])}, so the consensus distance may grow (more bits or smaller "
        "blocks help)"
    )


def title_of(measure: str) -> str:
    """Return a column as a title has it: accuracy_mean -> Accuracy."""
    return measure.removesuffix("_mean").replace("_", " ").capitalize()
