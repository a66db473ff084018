"""The callback that prints a run on the terminal: a header, progress and a summary.

Progress is a bar on a terminal, and lines where output is piped. All text is ASCII and unwrapped,
so that it can be piped, kept in a cluster's log and searched.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from dfl.config import Run
from dfl.evaluation.goals import reached
from dfl.reporting.callbacks.profile import table
from dfl.reporting.distribution import distribution, ends, span
from dfl.store.callbacks import Callback, Outcome, Peers, Row, RunInfo
from dfl.store.logs import LOG

NO_CONTRACTION = (
    "messages do not contract: ||Q(x) - x||^2 is {:.3g} times ||x||^2 at some peer in round {}, "
    "so the consensus distance may grow (more bits or smaller blocks help)"
)
"""Warning, printed once, if the measured relative error of messages is 1 or more."""

Line = tuple[str, str]


class Terminal(Callback):
    """Prints a run.

    Args:
        console: a terminal or a pipe; standard output where not given.
        quiet: whether to print warnings and the last line only.
        verbose: whether to print a line for each evaluation on a terminal, too.
    """

    def __init__(
        self, console: Console | None = None, *, quiet: bool = False, verbose: bool = False
    ) -> None:
        self.console = console or Console(highlight=False)
        self.quiet, self.verbose = quiet, verbose
        self.rounds = 0
        self.bar: Progress | None = None
        self.last = Row()
        self.run: Run
        self.warned = False

    def start(self, info: RunInfo) -> None:
        """Print the header, and start the bar on a terminal."""
        self.run = info.run
        self.rounds = info.run.rounds
        if not self.quiet:
            self._print(header(info))
        self._warn(info.notes)
        if self.console.is_terminal and not (self.quiet or self.verbose):
            columns = (
                TextColumn("round {task.completed}/{task.total}"),
                BarColumn(bar_width=None),
                _Figures("{task.description}", table_column=Column(no_wrap=False)),
                TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
            )
            self.bar = Progress(*columns, console=self.console, refresh_per_second=4, expand=True)
            self.bar.add_task("", total=self.rounds)
            self.bar.start()

    def round(self, t: int) -> None:
        """Show on the bar that t rounds are done."""
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=t)

    def row(self, row: Row) -> None:
        """Print an evaluation: beside the bar, or on a line of its own."""
        self.last = row
        t = int(row["round"])
        if row.get("relative_squared_error", 0) >= 1 and not self.warned:
            self.warned = True
            warning = NO_CONTRACTION.format(row["relative_squared_error"], t)
            self._warn([warning])
            LOG.warning(warning)
        figures = _figures(row)
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=t, description=", ".join(figures))
            return
        if self.quiet:
            return
        seconds = row["seconds"] / t * (self.rounds - t) if t else 0.0
        left = [f"{_clock(seconds)} left"] if seconds else []
        line = ", ".join([f"round {t}/{self.rounds}", *figures, *left])
        self.console.print(line, soft_wrap=True, markup=False)

    def finish(self, outcome: Outcome) -> None:
        """Print the results of the peers, the cost of the run, and its folder."""
        self._stop()
        run = self.run
        goal: list[Line] = []
        if run.until:
            met = reached(self.last, run.goal)
            goal.append(("until", f"{run.until} {'reached' if met else 'not reached'}"))
        lines = [*goal, *summary(outcome.peers, self.last), ("files", str(run.out or "none"))]
        self._print([] if self.quiet else lines)
        if outcome.profile is not None and not self.quiet:
            self.console.print(table(outcome.profile), soft_wrap=True, markup=False)
        self._print(_look_at(run.out))

    def close(self, error: BaseException | None) -> None:
        """Stop the bar; the error is printed by the caller."""
        self._stop()

    def dry_run(self, info: RunInfo) -> None:
        """Print the header, the memory, and the distribution of the training examples."""
        self._print([*header(info), *needs(info), *memory(info)])
        self._warn(info.notes)
        for line in distribution(info):
            self.console.print(line, soft_wrap=True, markup=False)

    def _print(self, lines: Iterable[Line]) -> None:
        for name, value in lines:
            self.console.print(Text.assemble((f"{name:<11}", "bold"), value), soft_wrap=True)

    def _warn(self, notes: Iterable[str]) -> None:
        for note in dict.fromkeys(notes):
            self.console.print(Text(f"warning: {note}", "yellow"), soft_wrap=True)

    def _stop(self) -> None:
        if self.bar:
            self.bar.stop()
            self.bar = None


class _Figures(TextColumn):
    """The figures beside the bar, on one line, which a narrow terminal cuts before other columns.

    rich narrows only columns that may wrap, and cuts all of them if there is none.
    """

    def render(self, task: Task) -> Text:
        """Return the text, which its column may not wrap."""
        text = super().render(task)
        text.no_wrap, text.overflow = True, "ellipsis"
        return text


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


def _look_at(out: Path | None) -> list[Line]:
    """Return the last line of a run: the file or the folder to open, the most telling there is."""
    if out is None:
        return []
    found = next((path for path in (out / "report.html", out / "figures") if path.exists()), out)
    return [("look at", str(found))]


def _objective(run: Run) -> list[Line]:
    """Return the augmentation and the further losses of training."""
    given = {
        "augment": run.augment,
        "auxiliary": run.auxiliary,
        "fairness_adversary": run.fairness_adversary,
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
    pace = _pace(graph.half_rounds, len(graph.weights))
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
    if "perplexity_mean" in row:
        whose = "of the server's model" if _one(row) else "mean"
        lines += [("perplexity", f"{row['perplexity_mean']:.4g} {whose}, of a token")]
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
        ("time", _clock(row["seconds"]) + _simulated(row)),
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


def _figures(row: Row) -> list[str]:
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


def _pace(half_rounds: float, graphs: int) -> str:
    if np.isnan(half_rounds):
        return "its pace not computed"
    if half_rounds == 0:
        return f"agreement after {_many(graphs, 'round')}"
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
    return f", {f'{seconds:.3g} s' if seconds < 60 else _clock(seconds)} on the simulated links"


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
