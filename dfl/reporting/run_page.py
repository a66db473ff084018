"""The page of a run: what its directory holds, as text, charts and a graph."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from dfl.config import Run
from dfl.core.registry import flag, is_own
from dfl.reporting.page import (
    Line,
    X,
    chart,
    columns,
    decimals,
    floats,
    number,
    packed,
    pairs,
    render,
    spread,
)  # fmt: skip
from dfl.reporting.text import no_contraction, size
from dfl.store import manifest, tables
from dfl.store.callbacks import COLUMNS
from dfl.store.history import Evaluations, Start, read_evaluations, read_start

Record: TypeAlias = Mapping[str, Any]

EDGES = 30_000
"""The most edges that are drawn."""
PEERS = 2**16 - 1
"""The most peers that are drawn."""
SYMMETRIC, OTHER = 1200, 300
"""The most peers of a symmetric mixing matrix, and of another, whose eigenvalues are computed."""
HISTORY = 2_000_000
"""The most bytes of the history of the peers, before they are encoded."""
CELLS = 1_000_000
"""The most entries of a label distribution."""
SECTIONS = (
    ("summary", "Summary"), ("curves", "Curves"), ("graph", "Graph"), ("labels", "Labels"),
    ("spectrum", "Mixing matrix"), ("peers", "Peers"), ("adversity", "Attack and faults"),
    ("again", "Run it again"), ("environment", "Environment"),
)  # fmt: skip
"""Sections of the page."""
UNTOLD = ("out", "resume", "report", "tensorboard", "profile")
"""The settings that are no part of a command that repeats a run."""
CHARTED = (
    *X, "wire_bytes", "train_loss", "accuracy_mean", "accuracy_min", "accuracy_max",
    "accuracy_std", "accuracy_mean_model", "local_accuracy_mean", "consensus_distance",
    "accuracy_ensemble", "accuracy_vote", "backdoor_success_mean", "upload_bytes",
    "download_bytes", "parameters_k_plus_m", "test_loss_mean", "test_loss_max",
    "test_loss_mean_model",
)  # fmt: skip
"""The columns of metrics.csv that have a place on the page, or are an x axis."""
MAIN = COLUMNS[1:]
"""The columns that every metrics.csv has besides `round`, unless another program wrote it."""
OTHER_CHARTS = {
    "peers_up": ("Peers that are up", "number of peers", "peers up"),
    "messages_lost": ("Messages lost so far", "number of messages", "messages lost"),
    "relative_squared_error": (
        "Relative squared error of messages",
        "‖Q(x) - x‖² / ‖x‖², without a unit",
        "largest of the peers' last messages",
    ),
    "perplexity_mean": (
        "Perplexity", "exp of the mean cross-entropy of a test token", "mean over the peers"
    ),
    "parity_gap_mean": (
        "Gap in demographic parity", "share of test examples", "mean over the peers"
    ),
    "odds_gap_mean": ("Gap in equalized odds", "share of test examples", "mean over the peers"),
    "adversary_auc_mean": (
        "AUC of the adversary", "on the test examples; 0.5 is chance", "mean over the peers"
    ),
    "validation_accuracy_mean": (
        "Validation accuracy", "share of a peer's own validation examples", "mean over the peers"
    ),
    "trust_mean": ("Trust in honest peers", "score by the rule", "mean over the honest peers"),
    "trust_mean_attackers": ("Trust in attackers", "score by the rule", "mean over the attackers"),
}  # fmt: skip
"""Column of metrics.csv with a chart of its own -> title, unit and the name of the line."""
NAMES = {"payload_bytes": "payload_bytes_sent", "download_bytes": "payload_bytes_received"}
"""Names in peers.csv of figures that have another name in the history."""


@dataclass(frozen=True)
class Drawing:
    """What a page shows of a graph, which does not change during a run.

    Attributes:
        places: (P, 2), the positions of the peers, from -1 to 1.
        edges: (E, 2), receiver and sender of each edge; an edge both ways once.
        mutual: whether all edges are both ways.
        note: one line, where not all is drawn.
        eigenvalues: of the mixing matrix, from the largest; their moduli where it is not symmetric.
            Empty where they are not computed, and where rounds have different matrices.
        moduli: whether they are moduli.
    """

    places: NDArray[np.float64]
    edges: NDArray[np.int64]
    mutual: bool
    note: str
    eigenvalues: NDArray[np.float64]
    moduli: bool = False


def draw(start: Start) -> Drawing:
    """Return the drawing of a run's graph; without one the peers stand in rows."""
    peers, weights = len(start.ranks), start.weights
    none = np.zeros((0, 2), dtype=np.int64), True
    if weights is None:
        known = "graph" in start.facts
        note = f"{start.facts['graph']['edges']:,} edges, not drawn." if known else ""
        return Drawing(_rows(peers), *none, note, np.zeros(0))
    from dfl.reporting.layout import layout

    receives = csr_array(abs(weights))
    receives.setdiag(0)
    receives.eliminate_zeros()
    places = layout(receives)
    receivers, senders = (part.astype(np.int64) for part in receives.tocoo().coords)
    back = np.isin(senders * peers + receivers, receivers * peers + senders)
    kept = ~back | (receivers < senders)
    edges = np.stack([receivers, senders], 1)[kept]
    symmetric = bool(abs(weights - weights.T).max() < 1e-12)
    # The mean of the matrices of a sequence is one that no round averages by.
    static = start.facts["graph"]["matrices"] == 1 and not start.facts["graph"]["endless"]
    values = _eigenvalues(weights, symmetric) if static else np.zeros(0)
    if len(edges) > EDGES:
        note = f"{len(edges):,} edges, not drawn."
        return Drawing(places, *none, note, values, not symmetric)
    return Drawing(places, edges, bool(back.all()), "", values, not symmetric)


def run_page(folder: Path, record: Record, drawing: Drawing | None = None) -> str:
    """Return the page of a run.

    Args:
        folder: of the run.
        record: its run.json, with how it ended.
        drawing: of its graph, where it is known already.

    Raises:
        InputError: a file of the run is damaged.
    """
    start, evaluations = read_start(folder), read_evaluations(folder)
    found = tables.read(folder / "metrics.csv") if (folder / "metrics.csv").exists() else None
    rows = found.arrays if found and found.values else None
    if rows is not None:
        absent = np.full(len(rows["round"]), np.nan)
        rows |= {name: absent for name in MAIN if name not in rows}
    running = record.get("ending") == manifest.RUNNING
    data: dict[str, object] = {"live": running, "x": X, "tables": [], "charts": []}
    if rows is not None:
        data |= _curves(rows, record["run"])
    if start:
        drawing = drawing or draw(start)
        data |= _graph(start, drawing)
        if evaluations:
            data["peers"] = _peers(start, evaluations)
    last = {} if rows is None else {name: float(values[-1]) for name, values in rows.items()}
    content = _content(folder, record, start, last, drawing)
    content["points"] = [] if rows is None else _thinned(len(rows["round"]), evaluations, data)
    content["has"] = [name for name in ("graph", "peers", "labels", "spectrum") if data.get(name)]
    content["sections"] = [(name, title) for name, title in SECTIONS if _has(name, content)]
    return render("run.html", content, data)


def _content(
    folder: Path, record: Record, start: Start | None, last: Mapping[str, float], drawing: Any
) -> dict[str, Any]:
    """Return the variables of the template."""
    settings = record["run"]
    facts = start.facts if start else {}
    chosen = {name: value for name, value in settings.items() if _chosen(name, value)}
    notes = list(facts.get("notes", ()))
    if warning := no_contraction(last):
        notes.append(warning)
    attackers = start.attackers.tolist() if start else []
    return {
        "generator": "dfl.run",
        "kind": "Run",
        "title": _title(settings),
        "subtitle": f"{settings['dataset']} ({settings['partition']}), model {settings['model']}, "
        f"seed {settings['seed']}",
        "folder": str(folder),
        "status": _status(record, last),
        "cards": _cards(last),
        "notes": list(dict.fromkeys(notes)),
        "chosen": pairs(chosen),
        "settings": pairs(settings),
        "facts": pairs(_facts(facts)) if facts else [],
        "graph": _graph_text(settings, facts),
        "graph_note": drawing.note if drawing else "",
        "spectral": _spectral(facts),
        "attack": settings.get("attack", "none"),
        "attackers": ", ".join(map(str, attackers)),
        "attacker_count": len(attackers),
        "faults": settings.get("faults", "none"),
        "again": _again(record),
        "replay": "" if _has_objects(settings) else shlex.join(
            ["python", "-m", "dfl.run", "--config", str(folder / "run.json")]
        ),
        "environment": pairs(_environment(record)),
    }  # fmt: skip


def _has(section: str, content: Mapping[str, Any]) -> bool:
    """Return whether a run has a section."""
    there = {
        "graph": "peers" in content["has"],
        "labels": "labels" in content["has"],
        "spectrum": bool(content["spectral"]),
        "peers": "peers" in content["has"],
        "adversity": bool(content["attacker_count"]) or content["faults"] != "none",
    }
    return there.get(section, True)


def _title(settings: Record) -> str:
    graph = f" on {settings['topology']}" if settings.get("topology") else ""
    return f"{settings.get('algorithm')}{graph}, {settings.get('peers')} peers"


def _status(record: Record, last: Mapping[str, float]) -> dict[str, str]:
    """Return the state of a run in one word for its colour, and in text."""
    done = f"round {int(last['round']):,}" if last else "no evaluation yet"
    total = f"{done} of {record['run']['rounds']:,}" if last else done
    if record.get("ending") == manifest.RUNNING:
        return {"kind": "running", "text": f"running, {total}"}
    if record.get("exit") == 0:
        return {"kind": "finished", "text": f"finished, {total}"}
    return {"kind": "ended", "text": f"{record['ending']} ({total})"}


def _cards(last: Mapping[str, float]) -> list[dict[str, str]]:
    """Return the main figures of the last evaluation: name, value and a note."""
    if not last:
        return []
    cards = []
    if math.isfinite(last["accuracy_mean"]):
        spread_of = f"std {last['accuracy_std']:.4f} over the peers"
        cards.append(_card("accuracy", f"{last['accuracy_mean']:.4f}", spread_of))
        cards.append(_card("worst peer", f"{last['accuracy_min']:.4f}", "accuracy"))
    if math.isfinite(last.get("test_loss_mean", math.nan)):
        worst = f"{decimals(last['test_loss_max'])} of the worst peer"
        cards.append(_card("test loss", decimals(last["test_loss_mean"]), worst))
    cards.append(_card("training loss", decimals(last["train_loss"]), "mean over the peers"))
    cards.append(_card("consensus distance", decimals(last["consensus_distance"]), ""))
    wire = f"{_size(last['wire_bytes'])} between ranks"
    cards.append(_card("payload", _size(last["payload_bytes"]), wire))
    simulated = f"{last['sim_seconds']:.4g} s simulated" if "sim_seconds" in last else ""
    cards.append(_card("time", f"{decimals(last['seconds'], ',.1f')} s", simulated))
    return cards


def _size(count: float) -> str:
    """Return a number of bytes as text."""
    return size(count) if math.isfinite(count) else decimals(count)


def _card(name: str, value: str, note: str) -> dict[str, str]:
    return {"name": name, "value": value, "note": note}


def _curves(rows: Mapping[str, NDArray[np.float64]], settings: Record) -> dict[str, object]:
    """Return the table of metrics.csv and the charts of it."""
    known = {name for name, values in rows.items() if not np.isnan(values).all()}
    one = "upload_bytes" in rows and not (rows["accuracy_std"] > 1e-9).any()
    mean = (
        Line(0, "accuracy_mean", "server's model")
        if one
        else Line(0, "accuracy_mean", "mean, worst to best peer", "accuracy_min", "accuracy_max")
    )
    accuracy = [
        mean,
        *([] if one else [Line(0, "accuracy_mean_model", "mean model")]),
        Line(0, "local_accuracy_mean", "own test parts, mean"),
        Line(0, "accuracy_ensemble", "ensemble, mean output"),
        Line(0, "accuracy_vote", "ensemble, vote"),
        Line(0, "backdoor_success_mean", "success of the backdoor"),
    ]
    accuracy = [each for each in accuracy if each.y in known]
    charts = []
    if "accuracy_mean" in known:
        charts.append(chart("Accuracy", accuracy, unit="share of the test set"))
    if "test_loss_mean" in known:
        tested = [
            Line(0, "test_loss_mean", "mean over the peers"),
            Line(0, "test_loss_max", "worst peer"),
            Line(0, "test_loss_mean_model", "mean model"),
        ]
        tested = [each for each in tested if each.y in known]
        charts.append(chart("Test loss", tested, unit="on the common test set"))
    loss = Line(0, "train_loss", "mean over the peers")
    charts.append(chart("Training loss", [loss], unit="on a peer's own training examples"))
    if (rows["consensus_distance"] > 0).any():
        distance = Line(0, "consensus_distance", "distance of the peers from their mean")
        unit = "root mean square, in units of parameters"
        charts.append(chart("Consensus distance", [distance], unit=unit, log=True))
    unknown = [name for name in rows if name not in (*CHARTED, *OTHER_CHARTS)]
    named = {**OTHER_CHARTS, **{name: (name.replace("_", " "), "", name) for name in unknown}}
    for name, (title, unit, label) in named.items():
        if name in known:
            charts.append(chart(title, [Line(0, name, label)], unit=unit))
    return {"tables": [columns(rows, rows)], "charts": charts}


def _graph(start: Start, drawing: Drawing) -> dict[str, object]:
    """Return the graph, its spectrum and the label distribution."""
    peers = len(start.ranks)
    content: dict[str, object] = {}
    if peers <= PEERS:
        content["graph"] = {
            "places": packed(drawing.places.round(4)),
            "edges": packed(drawing.edges),
            "mutual": drawing.mutual,
        }
    if len(drawing.eigenvalues):
        index = list(range(1, len(drawing.eigenvalues) + 1))
        title = "Moduli of the eigenvalues" if drawing.moduli else "Eigenvalues"
        line = Line(0, "value", "modulus" if drawing.moduli else "eigenvalue")
        content["spectrum"] = {
            "table": {"index": index, "value": list(map(number, drawing.eigenvalues.tolist()))},
            "chart": chart(title, [line], x="index"),
        }
    counts = start.label_counts
    if counts.size and counts.size <= CELLS:
        content["labels"] = {"classes": counts.shape[1], "counts": packed(counts)}
    return content


def _peers(start: Start, evaluations: Evaluations) -> dict[str, object]:
    """Return the columns of the peers: those that stay, and those of every evaluation shown."""
    frames, named, peers = evaluations.values.shape
    chosen = spread(frames, max(2, HISTORY // (4 * named * peers)))
    values = np.array(evaluations.values[chosen])
    fixed = {"rank": start.ranks}
    if start.degrees is not None:
        fixed["degree"] = start.degrees
    fixed["n_train"] = start.sizes[:, 0]
    if start.label_counts.size:
        fixed["most_frequent_label"] = start.label_counts.argmax(1)
        fixed["different_labels"] = (start.label_counts > 0).sum(1)
    if len(start.attackers):
        fixed["is_attacker"] = np.isin(np.arange(peers), start.attackers).astype(np.int64)
    moving = {
        NAMES.get(name, name): values[:, k]
        for k, name in enumerate(evaluations.columns)
        if np.isfinite(values[:, k]).any()
        and (name != "download_bytes" or start.facts["has_server"])
    }
    return {
        "count": peers,
        "rounds": evaluations.rounds[chosen].tolist(),
        "attackers": start.attackers.tolist(),
        "fixed": {name: packed(value) for name, value in fixed.items()},
        "moving": {name: floats(value) for name, value in moving.items()},
    }


def _thinned(count: int, evaluations: Evaluations | None, data: Mapping[str, Any]) -> list[str]:
    """Return lines on what the page leaves out of long histories."""
    drawn = len(data["tables"][0]["round"])
    lines = [] if drawn == count else [f"The curves show {drawn:,} of {count:,} evaluations."]
    if evaluations and (shown := len(data["peers"]["rounds"])) < len(evaluations.rounds):
        lines.append(f"The slider has {shown:,} of {len(evaluations.rounds):,} evaluations.")
    return lines


def _facts(facts: Record) -> dict[str, object]:
    """Return what is worth knowing of a run before round 0."""
    low, high = facts["local_steps"]
    part = f", {facts['shared']:,} shared" if facts["shared"] < facts["parameters"] else ""
    part += f", {frozen:,} frozen" if (frozen := facts.get("frozen", 0)) else ""
    found: dict[str, object] = {
        "model": f"{facts['parameters']:,} parameters of {facts['dtype']}{part}",
        "local steps per round": f"{low:,}" if low == high else f"{low:,} to {high:,}",
        "batch size": facts["batch_size"] or "all",
        "common test set": f"{facts['n_test']:,} examples",
        "payload of a round": size(facts["payload_shared"]),
    }
    if facts["assumes"]:
        found["assumes"] = ", ".join(facts["assumes"])
    return found


def _graph_text(settings: Record, facts: Record) -> str:
    """Return the graph in one line."""
    if "graph" not in facts:
        return "Peers have no neighbours." if facts else ""
    graph = facts["graph"]
    kind = "directed edges" if graph["directed"] else "edges"
    weights = "its own weights" if graph["own_weights"] else settings["mixing"]
    several = f"; {graph['matrices']:,} matrices in turn" if graph["matrices"] > 1 else ""
    anew = ", drawn anew every round" if graph["endless"] else several
    return f"{settings['topology']}: {graph['edges']:,} {kind}, mixing {weights}{anew}."


def _spectral(facts: Record) -> str:
    """Return the figures of the spectrum in one line."""
    if "graph" not in facts:
        return ""
    graph = facts["graph"]
    half = graph["half_rounds"]
    pace = f", plain averaging halves disagreement in {half:,.3g} rounds" if half > 0 else ""
    return (
        f"Spectral gap {decimals(graph['gap'])}, smallest eigenvalue "
        f"{decimals(graph['smallest'])}{pace if math.isfinite(half) else ''}."
    )


def _chosen(name: str, value: object) -> bool:
    """Return whether a setting differs from the default."""
    default = Run.__dataclass_fields__[name].default if name in Run.__dataclass_fields__ else None
    return name not in UNTOLD and value != default


def _has_objects(settings: Record) -> bool:
    return any(map(is_own, settings.values()))


def _again(record: Record) -> str:
    """Return the command with all settings that differ from the default; empty for own objects."""
    settings, ranks = record["run"], record.get("ranks") or 1
    if _has_objects(settings):
        return ""
    tokens = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
    tokens += ["python", "-m", "dfl.run"]
    for name, value in settings.items():
        if _chosen(name, value):
            tokens += [flag(name)] if value is True else [flag(name), str(value)]
    return shlex.join(tokens)


def _environment(record: Record) -> dict[str, object]:
    """Return where and with what a run was launched."""
    git = record.get("git")
    commit = f"{git['commit']}{', changed' if git['dirty'] else ''}" if git else None
    plain = ("command", "started", "host", "platform", "ranks", "threads", "device")
    found = {name: record.get(name) for name in plain} | {"commit": commit}
    found |= record.get("versions") or {}
    for launch in record.get("resumed", ()):
        found[f"resumed after round {launch['round']}"] = launch["command"]
    return {name: json.dumps(v) if isinstance(v, dict) else v for name, v in found.items()}


def _rows(peers: int) -> NDArray[np.float64]:
    """Return positions (P, 2) in rows and columns, from -1 to 1."""
    wide = math.ceil(math.sqrt(peers))
    row, column = np.divmod(np.arange(peers), wide)
    high = max(1, (peers - 1) // wide)
    return np.stack([2 * column / max(1, wide - 1) - 1, 1 - 2 * row / high], 1)


def _eigenvalues(weights: csr_array, symmetric: bool) -> NDArray[np.float64]:
    """Return the eigenvalues of a mixing matrix, moduli where it is not symmetric, in order."""
    peers = weights.shape[0]
    if peers > (SYMMETRIC if symmetric else OTHER):
        return np.zeros(0)
    dense = weights.toarray().astype(np.float32)  # six digits are drawn
    values = np.linalg.eigvalsh(dense) if symmetric else np.sort(np.abs(np.linalg.eigvals(dense)))
    return values[::-1].astype(np.float64)
