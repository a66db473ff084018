"""What does the user see while a run goes on? A header, a bar, a table; lines where there is no terminal.

All text is ASCII and unwrapped, so that it may be piped, kept in a cluster's log and searched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from dfl.reporting.shares import shares, span
from dfl.simulation.cost import memory_of_state, payload_per_round
from dfl.simulation.watch import reached
from dfl.store.logs import LOG

if TYPE_CHECKING:
    from typing import Any

    from dfl.config import Run
    from dfl.reporting.report import Peers
    from dfl.simulation.loop import Setting
    from dfl.simulation.setup import RunInfo

WORK_ROWS = 2
"""Rows per peer that a round needs besides the state: what a peer trained to, and the state to come."""

NO_CONTRACTION = (
    "messages do not contract: ||Q(x) - x||^2 is {:.3g} times ||x||^2 at some peer in round {}, so the peers may drift "
    "apart (more bits or smaller blocks help)"
)
"""What is said, once, when the measured error of the messages is 1 or more."""

Line = tuple[str, str]


class Terminal:
    """Shows a run on a terminal, or in lines where output is piped. On rank 0 only."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.rounds = 0
        self.bar: Progress | None = None
        self.last: Mapping[str, float] = {}
        self.setting: Setting
        self.warned = False

    def start(self, setting: Setting) -> None:
        """Print the header, and start the bar if this is a terminal."""
        self.setting, self.rounds = setting, setting.run.rounds
        self._print(header(setting))
        self._warn(_run_info(setting).notes)
        if self.console.is_terminal:
            figures, left = TextColumn("{task.description}"), TimeRemainingColumn(compact=True)
            columns = (
                TextColumn("round"),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                figures,
                left,
            )
            self.bar = Progress(*columns, console=self.console, refresh_per_second=4, expand=True)
            self.bar.add_task("", total=self.rounds)
            self.bar.start()

    def tick(self, t: int) -> None:
        """Move the bar to t rounds done."""
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=t)

    def row(self, row: Mapping[str, float]) -> None:
        """Show an evaluation: beside the bar, or as a line of its own."""
        self.last, t = row, int(row["round"])
        if row.get("quantization_error", 0) >= 1 and not self.warned:
            self.warned = True
            self._warn([said := NO_CONTRACTION.format(row["quantization_error"], t)])
            LOG.warning(said)
        figures = _figures(row)
        if self.bar:
            self.bar.update(self.bar.task_ids[0], completed=t, description=", ".join(figures))
            return
        left = row["seconds"] / t * (self.rounds - t) if t else 0.0
        ahead = [f"{_clock(left)} left"] if left else []
        self.console.print(
            ", ".join([f"round {t}/{self.rounds}", *figures, *ahead]), soft_wrap=True, markup=False
        )

    def finish(self, peers: Peers, models: NDArray[Any]) -> None:
        """Print how the peers did, what it cost, and where the files are."""
        self._stop()
        run = self.setting.run
        goal = (
            [
                (
                    "until",
                    f"{run.until} {'reached' if reached(self.last, run.goal) else 'not reached'}",
                )
            ]
            if run.until
            else []
        )
        self._print([*goal, *outcome(peers, self.last), ("files", str(run.out or "none"))])

    def close(self, error: BaseException | None) -> None:
        """Leave the terminal tidy; whoever catches the error prints it."""
        self._stop()

    def dry_run(self, setting: Setting) -> None:
        """Print what a run would be: header, memory, and who has how much of what."""
        run_info = _run_info(setting)
        self._print([*header(setting), *memory(setting)])
        self._warn(run_info.notes)
        for line in shares(run_info):
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


def header(setting: Setting) -> list[Line]:
    """What is about to run: names, peers, graph, model, messages, training."""
    run, starts, attackers = (
        setting.run,
        setting.layout.starts,
        setting.network.threat_model.attackers,
    )
    hosted, steps = span(np.diff(starts)), local_steps(setting)
    batch, layout = setting.task.solver.batch_size or "all", setting.task.parameter_layout
    part = f", {layout.shared:,} of them shared" if layout.shared < layout.d else ""
    return [
        ("run", f"{run.algorithm} on {run.dataset} ({run.partition}), model {run.model}, seed {run.seed}"),
        ("peers", f"{setting.layout.peers:,} on {_many(setting.layout.ranks, 'rank')}, {hosted} per rank, "
                  f"{_many(run.threads, 'thread')} each"),
        *_company(setting),
        ("model", f"{layout.d:,} parameters of {str(setting.task.scale.dtype).removeprefix('torch.')}{part}"),
        ("training", f"{run.rounds:,} rounds, local steps per round {span(steps)}, batch size {batch}, "
                     f"lr {run.lr:g} ({run.lr_schedule}), momentum {run.momentum:g}"),
        *_learning(run),
        *_evaluated(setting),
        ("messages", f"{run.compressor}: {_messages(setting)}"),
        *_begun(setting),
        *([("attack", f"{run.attack}: {_many(len(attackers), 'peer')} of {setting.layout.peers:,}")] if len(attackers) else []),
        *([("faults", run.faults)] if setting.network.threat_model.faults else []),
        *([("links", run.links)] if setting.network.clock else []),
    ]  # fmt: skip


def _begun(setting: Setting) -> list[Line]:
    """Where a run goes on, if it does."""
    found = _run_info(setting).begun.found
    return [("resumed", f"after round {found.round:,}, from {found.path}")] if found else []


def _learning(run: Run) -> list[Line]:
    """What a step does besides descending the loss of the examples as they are."""
    asked = {
        "augment": run.augment,
        "auxiliary": run.auxiliary,
        "fairness_adversary": run.fairness_adversary,
    }
    return [(name, spec) for name, spec in asked.items() if spec != "none"]


def _evaluated(setting: Setting) -> list[Line]:
    """What peers are evaluated on, if that is a part."""
    run, test_sets = setting.run, setting.test_sets
    if run.eval_examples is None:
        return []
    own = f"at most {_many(test_sets.longest_train, 'training example')} of each peer"
    return [("evaluation", f"on {_many(run.eval_examples, 'test example')} and {own}")]


def _messages(setting: Setting) -> str:
    """Bytes of a round, and of all rounds where it is known how long everything is shared."""
    run, once = setting.run, setting.payload_per_round
    whole = payload_per_round(
        setting.algorithm,
        setting.network,
        setting.task.parameter_layout.d,
        setting.task.scale.dtype,
    )
    if not isinstance(run.opening, int):
        return f"{size(whole)} per round until {run.share_all_until}, {size(once)} from then on"
    first = min(run.opening, run.rounds)
    opening = f"{size(whole)} per round for {_many(first, 'round')}, then " if first else ""
    return f"{opening}{size(once)} per round, {size(whole * first + once * (run.rounds - first))} in all"


def _company(setting: Setting) -> list[Line]:
    """Who talks to whom: the graph, or the server; and what is made of what is said."""
    run, run_info = setting.run, _run_info(setting)
    rule = [("aggregator", str(run.aggregator))] if run.aggregator != "mean" else []
    if run_info.graph is None:
        return [("server", f"told {_many(setting.algorithm.traffic(setting.layout.peers, 0)[1], 'model')} per round"
                           if setting.algorithm.serves else "none: peers are alone"), *rule]  # fmt: skip
    spectrum, kind = run_info.spectrum, "directed edges" if run_info.graph.directed else "edges"
    pace = _pace(spectrum.half_rounds, len(setting.network.weights))
    return [
        (
            "graph",
            f"{run.topology} ({run.mixing}): {run_info.graph.edges:,} {kind}, degree {span(run_info.graph.degrees)}",
        ),
        ("mixing", f"spectral gap {spectrum.gap:.4g}, {pace}, lambda_min {spectrum.smallest:.4g}"),
        *rule,
    ]


def outcome(peers: Peers, row: Mapping[str, float]) -> list[Line]:
    """How a run ended: the spread of the peers, the mean model, the distance between them, and the cost.

    Args:
        peers: every peer's figures (P,), by name.
        row: the last row of metrics.csv.
    """
    lines = [("loss", f"{row['train_loss']:.4g} mean on the peers' training examples")]
    if not np.isnan(peers["accuracy"]).all():
        lines += _quality(peers, row)
    if "backdoor_success_mean" in row:
        lines += [
            (
                "backdoor",
                f"{row['backdoor_success_mean']:.4f} of the examples with a trigger go where it says",
            )
        ]
    if "trust" in peers:
        of = {
            whom: peers["trust"][peers["is_attacker"] == lies]
            for lies, whom in enumerate(("the honest", "liars"))
        }
        said = [
            f"{np.nanmean(trust):.3f} in {whom}"
            for whom, trust in of.items()
            if not np.isnan(trust).all()
        ]
        lines += [("trust", ", ".join(said))] if said else []
    payload = f"{size(row['payload_bytes'])} said by the peers"
    if "upload_bytes" in row:
        payload = (
            f"{size(row['upload_bytes'])} up to the server, {size(row['download_bytes'])} down"
        )
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


def _quality(peers: Peers, row: Mapping[str, float]) -> list[Line]:
    """Accuracies over the honest: of one model for all, or their spread."""
    accuracy = np.where(peers["is_attacker"] == 0, peers["accuracy"], np.nan)
    local = [
        (
            "  local",
            f"{row['local_accuracy_mean']:.4f} mean, each on the peer's own part of the test set",
        )
    ]
    if "accuracy_ensemble" in row:
        said = f"{row['accuracy_ensemble']:.4f} the mean output of all models, {row['accuracy_vote']:.4f} their vote"
        local = [("  together", said), *local]
    if _one(row):
        return [("accuracy", f"{row['accuracy_mean']:.4f} of the server's model"), *local]
    best, worst = int(np.nanargmax(accuracy)), int(np.nanargmin(accuracy))
    return [
        (
            "accuracy",
            f"{row['accuracy_mean']:.4f} mean, {row['accuracy_std']:.4f} std over the peers",
        ),
        ("  best", f"{accuracy[best]:.4f} peer {best}"),
        ("  worst", f"{accuracy[worst]:.4f} peer {worst}"),
        ("  of mean", f"{row['accuracy_mean_model']:.4f} the mean of all models"),
        *local,
    ]


def memory(setting: Setting) -> list[Line]:
    """An estimate of what the fullest rank needs: models, its peers' examples, the test set."""
    task, run_info, starts = setting.task, _run_info(setting), np.asarray(setting.layout.starts)
    hosted, widest = max(1, len(task.peers)), int(np.diff(starts).max())
    state = memory_of_state(
        setting.algorithm,
        setting.network,
        (len(task.peers), task.parameter_layout),
        task.scale.dtype,
    )
    work = WORK_ROWS * hosted * task.parameter_layout.d * task.scale.element_size()
    models = (state + work) / hosted * widest
    ends = np.concatenate([[0], np.cumsum(run_info.sizes.sum(1))])
    inputs = setting.test_sets.inputs
    example = (
        inputs.element_size() * int(np.prod(run_info.shape))
        + setting.test_sets.labels.element_size()
    )
    data, test = int(np.diff(ends[starts]).max()) * example, run_info.n_test * example
    parts = f"{size(models)} models and work, {size(data)} examples, {size(test)} test set"
    return [
        (
            "memory",
            f"about {size(models + data + test)} on the fullest rank, besides the programs: {parts}",
        )
    ]


def local_steps(setting: Setting) -> NDArray[np.int64]:
    """Local steps of every peer in a round, (P,)."""
    return setting.task.solver.steps_for(_run_info(setting).sizes[:, 0])


def size(count: float) -> str:
    """A number of bytes for people: 1234567 -> 1.23 MB."""
    return decimal(round(count), precision=2)


def _run_info(setting: Setting) -> RunInfo:
    assert setting.run_info is not None, "facts are on rank 0"
    return setting.run_info


def _one(row: Mapping[str, float]) -> bool:
    """Whether all peers have the server's model."""
    return (
        "upload_bytes" in row and row["consensus_distance"] == 0 and not row["accuracy_std"] > 1e-9
    )


def _figures(row: Mapping[str, float]) -> list[str]:
    accuracy, least = row["accuracy_mean"], row["accuracy_min"]
    spread = "" if _one(row) else f" (min {least:.3f})"
    how_well = (
        f"loss {row['train_loss']:.4g}"
        if np.isnan(accuracy)
        else f"accuracy {accuracy:.3f}{spread}"
    )
    apart = [] if _one(row) else [f"apart {row['consensus_distance']:.3g}"]
    return [how_well, *apart, size(row["payload_bytes"])]


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


def _simulated(row: Mapping[str, float]) -> str:
    """What it would have taken on the network that was asked for."""
    if "sim_seconds" not in row:
        return ""
    seconds = row["sim_seconds"]
    return f", {f'{seconds:.3g} s' if seconds < 60 else _clock(seconds)} on the simulated network"


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
