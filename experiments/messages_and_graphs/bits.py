"""Accuracy by the number of bits of a message.

Command, 40 runs, twenty minutes on two idle cores:

    python -m experiments.messages_and_graphs.bits --data-dir DIR

Finding: at 4 bits with one scale a message the quantization error exceeds the message itself in
round 1 and in single later rounds, yet down to 1 bit the five seeds show no loss of accuracy. Over
rounds 46 to 50 float32 has an accuracy of 0.564 (std 0.035), 1 bit 0.575, 2 and 3 bits 0.568, 4
bits 0.563 with one scale and with a scale per 256 coordinates, 8 and 16 bits 0.564. Most of the
gain at 1 bit, and all of it at 2 and 3 bits, comes from seed 4, at which float32 falls from 0.577
in round 44 to 0.523 in round 50 and they do not: in round 50 alone they were 0.066 to 0.084 above
it, in the last tenth 0.021 to 0.039. Over the other four seeds they differ by +0.004, 0.000 and
-0.001 in the mean. 1 bit learns more slowly at first (0.34 against 0.39 after 10 rounds) and sends
3.5 % of the bytes. At 4 bits, the narrowest unbiased grid with one scale per message, the largest
relative squared error of a peer is 4.6 to 6.3 in round 1 at every seed; it is 1 or more in seven
later rounds of seed 4, and in one of seeds 1, 2 and 3. With a scale per 256 it is 0.07 at most, for
3 % more bytes. It did not reduce accuracy here: 4 bits differ from float32 by -0.006 at most at one
seed.

Grid: float32 and 1, 2, 3, 4, 8 and 16 bits (`--widths` takes any from 1 to 16, and 4_per_256 for
a scale per 256), five seeds, every round evaluated, in the standard setting: MNIST, 16 peers on a
ring with Metropolis weights, two label shards of 300 examples each, 2NN (199,210 parameters),
learning rate 0.01, momentum 0.9, batches of 50, one local epoch, 50 rounds. A width b is `--bits
b` with its default options. Widths are compared at the same seed, since the accuracy of float32
varies by several points between seeds.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from cyclopts import Parameter
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dfl.config import Run
from dfl.core.errors import InputError
from dfl.sweep import Cell
from experiments import common

FLOAT = "float32"


@dataclass(frozen=True, kw_only=True)
class Options(common.SweepOptions):
    """The options of this experiment."""

    out: Path = Path("results/bits")
    widths: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (
        FLOAT, "1", "2", "3", "4", "4_per_256", "8", "16",
    )  # fmt: skip
    """Bits per coordinate, 1 to 16, followed by `_per_256` for a scale per 256 coordinates; or
    float32, which must be among them.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if FLOAT not in self.widths:
            raise InputError(f"--widths must have {FLOAT} among them, not {', '.join(self.widths)}")


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure accuracy by rounds and bytes for every width of a message."""
    if options.only is not None:
        return common.rerun(options.out, options.only, grid(options))
    rows = common.measure(options.out, grid(options), jobs=options.jobs)
    table, seeds = tabulate(rows), compared(rows)
    common.publish(
        options, table, draw(rows, table, options), finding(table, seeds, options), seeds
    )


def grid(options: Options) -> list[Cell]:
    """Return a cell for every width and seed."""
    return [
        Cell({"width": width, "seed": seed}, run(options, width, seed))
        for seed in range(options.seeds)
        for width in options.widths
    ]


def run(options: Options, width: str, seed: int) -> Run:
    """Return the standard setting with messages of one width."""
    bits, _, block = width.partition("_per_")
    spec = "none" if width == FLOAT else f"quantize:bits={bits}{f',block={block}' * bool(block)}"
    algorithm = "dfedavgm" if width == FLOAT else "qdfedavgm"
    return common.standard(options, seed=seed, algorithm=algorithm, compressor=spec, eval_every=1)


def tabulate(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per width: means over the seeds, and the largest error of a message."""
    seeds = compared(rows)
    each = seeds.groupby("width", sort=False)
    end = common.ends(rows, ["width", "seed"]).groupby("width", sort=False)
    table = common.summary(rows, ["width"])
    table["minus_float32"] = each["minus_float32"].mean()
    table["minus_float32_std"] = each["minus_float32"].std()
    table["most_at_a_seed"] = each["minus_float32"].agg(
        lambda differences: max(differences, key=abs)
    )
    table["minus_float32_last_round"] = each["minus_float32_last_round"].mean()
    table["bytes_per_message"] = (
        end["payload_bytes"].max() / end["round"].max() / (2 * common.PEERS)
    ).astype(int)
    table["share_of_float32"] = table["MB_per_peer"] / table["MB_per_peer"][FLOAT]
    table["relative_squared_error"] = each["relative_squared_error"].max()
    return table.reset_index()


def compared(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per run: its accuracy, its difference to float32 at the same seed, and its
    largest relative squared error.

    Accuracies are those of the last tenth of the rounds and those of the last round alone.
    """
    table = pd.DataFrame([_of_run(own) for _, own in common.groups(rows, ["width", "seed"])])
    exact = table[table["width"] == FLOAT].set_index("seed")
    for after in ("", "_last_round"):
        table[f"minus_float32{after}"] = table[f"accuracy{after}"] - table["seed"].map(
            exact[f"accuracy{after}"]
        )
    return table


def _of_run(rows: pd.DataFrame) -> dict[str, Any]:
    """Return the row of one run. No message is sent before round 1."""
    errors = (
        rows[rows["round"] > 0]
        .set_index("round")
        .get("relative_squared_error", pd.Series(dtype=float))
        .dropna()
    )
    return {
        "width": rows["width"].iloc[0],
        "seed": rows["seed"].iloc[0],
        "accuracy": common.tail_mean(rows, "accuracy_mean"),
        "accuracy_last_round": rows["accuracy_mean"].iloc[-1],
        "relative_squared_error": errors.max(),
        "error_round": errors.idxmax() if len(errors) else float("nan"),
    }


def finding(table: pd.DataFrame, seeds: pd.DataFrame, options: Options) -> str:
    """Return the finding, read off the table."""
    widths = common.by_label(table, ["width"])
    exact = widths.pop(FLOAT)
    differences = {width: row["minus_float32"] for width, row in widths.items()}
    worst = min(differences, key=differences.__getitem__)
    best = max(differences, key=differences.__getitem__)
    tail = common.tail_rounds(options.rounds)
    return (
        f"over {options.seeds} seeds and rounds {tail[0]} to {tail[-1]} float32 is at "
        f"{exact['accuracy']:.3f} ± {exact['std_over_seeds']:.3f}; the others differ from it at "
        f"the same seed by {differences[worst]:+.3f} ({label_of(worst)}) to "
        f"{differences[best]:+.3f} ({label_of(best)}) in the mean, by "
        f"{max(table['most_at_a_seed'], key=abs):+.3f} at most at one seed; the "
        f"shortest message has {table['share_of_float32'].min():.1%} of the bytes."
        f"{_warning(seeds)}"
    )


def _warning(seeds: pd.DataFrame) -> str:
    """Return the widths with a round in which the relative squared error was 1 or more."""
    coarse = seeds[seeds["relative_squared_error"] >= 1]
    listed = [
        f"{label_of(width)} ({own['relative_squared_error'].max():.2f} at most, {len(own)} of "
        f"{seeds['seed'].nunique()} seeds)"
        for width, own in common.groups(coarse, ["width"])
    ]
    return (
        f" A relative squared error of 1 or more was seen at {', '.join(listed)}." if listed else ""
    )


def label_of(width: str) -> str:
    """Return a width for a legend: "1 bit", "4 bits, a scale per 256" or "float32"."""
    bits, _, block = width.partition("_per_")
    return common.in_bits(bits) + f", a scale per {block}" * bool(block)


def draw(rows: pd.DataFrame, table: pd.DataFrame, options: Options) -> Figure:
    """Draw accuracy by round and by bytes, the difference to float32, and the error by round."""
    figure = Figure(figsize=(13, 8.6), layout="constrained")
    (by_round, by_bytes), (difference, error) = figure.subplots(2, 2)
    for place, width in enumerate(options.widths):
        colour = (
            "black" if width == FLOAT else colormaps["plasma"](0.9 * place / len(options.widths))
        )
        style: dict[str, Any] = {"color": colour, "label": label_of(width)}
        style |= {
            "linestyle": "--" if "_per_" in width else "-",
            "linewidth": 3 if width == FLOAT else 1.5,
        }
        own = rows[rows["width"] == width].assign(
            megabytes=rows["payload_bytes"] / common.PEERS / 1e6
        )
        common.curve(by_round, own, ("round", "accuracy_mean"), **style)
        common.curve(by_bytes, own[own["round"] > 0], ("megabytes", "accuracy_mean"), **style)
        if width != FLOAT:
            most = own[own["round"] > 0].groupby("round")["relative_squared_error"].max()
            error.plot(most.index, most, **style)
    by_round.axvspan(
        common.tail_rounds(options.rounds)[0] - 0.5, options.rounds + 0.5, color="0.92", zorder=0
    )
    by_round.set(title="Accuracy by round (grey: what counts)", xlabel="round")
    by_round.set_ylabel("accuracy, mean over peers and seeds")
    by_bytes.set(title="Accuracy by bytes", xlabel="payload sent by a peer (MB)", xscale="log")
    by_bytes.xaxis.set_major_formatter("{x:g}")
    error.axhline(1, color="0.5", linestyle=":")
    error.set(
        title="Largest relative squared error of a seed, by round", xlabel="round", yscale="log"
    )
    error.set_ylabel("||Q(x) - x||² / ||x||²")
    by_round.legend(title="message")
    _differences(difference, compared(rows), table)
    figure.suptitle(
        f"Width of a message: {options.dataset}, 16 peers on a ring, two label shards each, "
        f"{options.seeds} seeds"
    )
    return figure


def _differences(axes: Axes, seeds: pd.DataFrame, table: pd.DataFrame) -> None:
    """Draw the difference of every run to float32 at its seed, and the means over the seeds."""
    widths = [width for width in table["width"] if width != FLOAT]
    other = table[table["width"] != FLOAT]
    place = seeds[seeds["width"] != FLOAT]
    at = place["width"].map(widths.index)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.plot(
        at + 0.15,
        place["minus_float32_last_round"],
        "x",
        color="0.6",
        label="a seed, last round alone",
    )
    axes.plot(at, place["minus_float32"], ".", color="#56B4E9", label="a seed, last tenth")
    axes.plot(
        range(len(widths)),
        other["minus_float32"],
        "D",
        color="#D55E00",
        label="mean over seeds, last tenth",
    )
    axes.set_xticks(range(len(widths)), [width.replace("_per_", "\nper ") for width in widths])
    axes.set(title="Difference to float32 at the same seed", xlabel="bits per coordinate")
    axes.set_ylabel("difference in accuracy")
    axes.legend()


if __name__ == "__main__":
    sys.exit(common.start(experiment, "messages_and_graphs.bits"))
