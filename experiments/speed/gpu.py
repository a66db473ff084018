"""Milliseconds of a round on a GPU: dfl, pfl and a plain loop of torch, beside the GPU's own limit.

Command, some nine minutes on a machine with one GPU:

    python -m experiments.speed.gpu --pfl $(which python) --rounds 3 --warm-up 1

`--pfl` is a Python that has pfl 0.6.0 and a torch with CUDA. `--keep` measures in portions: what an
earlier run left in `--out` is reused.

Finding: dfl is far from the limit of the GPU, 12 % of it for 16 ResNet-20s in float32, 5 % for
1,000 LeNets and 3 % for 16 perceptrons, and at most 3 % in TF32 and bfloat16, on one H200 with
torch 2.11. TF32 does not help the LeNets. pfl and the loop of torch take longer: in float32 a round
takes dfl 134 ms with the LeNets, 162 with the ResNet-20s and 6.3 with the perceptrons; pfl takes
40, 9 and 50 times as long, and the loop 36, 9 and 38 times. In bfloat16 pfl takes 109, 16 and 82
times as long. dfl without captured steps takes 1.1 to 4.2 times as long. These ratios depend on the
processor, which starts the operations of pfl, of the loop and of single steps: on two other
machines of the same kind, with earlier code, a round of the ResNet-20s in float32 took 958 ms in
pfl and 159 in dfl, 6 times as long. There dfl took 4.0 ms with the perceptrons; the cause of the
difference is not known. In a profile of float32 two fifths of the GPU's time go into copies, mostly
of the pixels under kernels, and a third (LeNets) or a quarter (ResNet-20s) into products, of few
rows or columns.

Grid: 1,000 peers with a LeNet and 100 images of 3 x 32 x 32, batches of 50; 16 peers with a
ResNet-20 with GroupNorm and 256 images, batches of 32; and work A of `benchmark_peers`, 16
perceptrons 784-200-200-10 with 600 examples, batches of 50. Numbers are normal, labels random; an
epoch of heavy-ball steps (momentum 0.9) a round; nothing is evaluated in a timed round. dfl mixes
float32 models on a ring, on one rank; pfl averages all models; the loop trains one model after the
other and mixes nothing. Products are in float32, TF32 or bfloat16 in all three (torch's autocast
in the loop, `amp_dtype` in pfl). `step by step` is dfl without captured steps. The limit is the
time that the products of all steps, forward and backward, take at the rate of a product of 8192 x
8192 matrices in the same precision, measured in the same run: the share is that time over a
round's. `peak_gib` is of the whole program: dfl evaluates before the first and after the last
round, pfl takes the loss of all examples there, and the loop does neither.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from cyclopts import Parameter
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

import dfl
from dfl.config import Run
from dfl.training import capture
from experiments import common
from experiments.speed.baselines import job as jobs
from experiments.speed.baselines.install import ENVS, python
from experiments.speed.plain_loops import COLOUR, job_of
from experiments.speed.stopwatch import examples, seconds

WORKS = {
    "1,000 LeNets": ("lenet", replace(job_of(1000, 100, 50, COLOUR), network="lenet")),
    "16 ResNet-20s": ("resnet20", replace(job_of(16, 256, 32, COLOUR), network="resnet20")),
    "16 perceptrons": (
        "2nn",
        replace(job_of(16, 600, 50, (784,), (200, 200)), network="perceptron"),
    ),
}
"""Name -> the model as --model, and the work."""
PRECISIONS = ("float32", "tf32", "bf16")
SYSTEMS = ("dfl", "dfl, step by step", "pfl", "torch")
PFL = python(ENVS, "pfl")
DIGITS = {"ms": 2, "ms_min": 2, "ms_max": 2, "peak_gib": 2, "limit_ms": 3, "share": 5}
"""After the point in the table, by column."""
SIDE = 8192
"""Of the matrices whose product gives the limit of the GPU."""
Texts = Annotated[tuple[str, ...], Parameter(consume_multiple=True)]


@dataclass(frozen=True, kw_only=True)
class Options(common.Place):
    """The options of this experiment."""

    out: Path = Path("results/gpu")
    pfl: Path = PFL
    """A Python that has pfl."""
    works: Texts = tuple(WORKS)
    """Kinds of work."""
    systems: Texts = SYSTEMS
    """Systems."""
    precisions: Texts = PRECISIONS
    """Precisions of products."""
    rounds: int = 5
    """Rounds to time."""
    warm_up: int = 2
    """Rounds before them."""
    device: str = "cuda"
    """The device; cpu to try the experiment."""
    peers: int | None = None
    """Number of peers in place of that of each work."""
    side: int = SIDE
    """Of the matrices whose product gives the limit."""
    keep: bool = False
    """Reuse what an earlier run left in `--out`."""


def experiment(options: Annotated[Options, Parameter(name="*")] = Options()) -> None:
    """Measure milliseconds of a round by work, system and precision."""
    common.among("works", options.works, WORKS)
    common.among("systems", options.systems, SYSTEMS)
    common.among("precisions", options.precisions, PRECISIONS)
    table = pd.DataFrame(list(measured(options))).round(DIGITS)
    common.publish(options, table, draw(table), finding(table))


def measured(options: Options) -> Iterator[dict[str, Any]]:
    """Yield a row for every work, precision and system; it is kept in `cells`."""
    cells = {
        options.out / "cells" / f"{', '.join(each)}.json": each
        for each in product(options.works, options.precisions, options.systems)
    }
    missing = [path for path in cells if not (options.keep and path.exists())]
    if missing and options.device == "cuda" and not torch.cuda.is_available():
        raise dfl.InputError("--device cuda: there is no GPU; cpu tries the experiment")
    (options.out / "cells").mkdir(parents=True, exist_ok=True)
    for path, each in cells.items():
        if path in missing:
            path.write_text(json.dumps(measure(options, *each)))
            print(path.read_text(), file=sys.stderr, flush=True)
        yield json.loads(path.read_text())


def measure(options: Options, work: str, precision: str, system: str) -> dict[str, Any]:
    """Return the times of the rounds of a system, and the limit of the GPU for the work."""
    model, job = WORKS[work]
    job = replace(
        job, rounds=options.rounds, warm_up=options.warm_up, device=options.device,
        peers=options.peers or job.peers, precision=precision,
    )  # fmt: skip
    steps = job.peers * (job.examples // job.batch_size)
    limit = 1000 * steps * operations(job) / rate(precision, options.side, options.device)
    if options.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if system == "pfl":
        times, memory = _pfl(job, options.pfl)
    else:
        times = _loop(job) if system == "torch" else _ours(job, model, captured=system == "dfl")
        memory = torch.cuda.max_memory_allocated() if options.device == "cuda" else np.nan
    ms = 1000 * float(np.median(times))
    return {
        "work": work, "precision": precision, "system": system, "ms": ms,
        "ms_min": 1000 * min(times), "ms_max": 1000 * max(times), "peak_gib": memory / 2**30,
        "limit_ms": limit, "share": limit / ms,
    }  # fmt: skip


def rate(precision: str, side: int, device: str) -> float:
    """Return the operations of a second of a matrix product, two for each product of numbers."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = torch.randn(2, side, side, device=device).to(dtype)
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        times = []
        for _ in range(13):
            _wait(device)
            begun = perf_counter()
            a @ b
            _wait(device)
            times.append(perf_counter() - begun)
    finally:
        torch.set_float32_matmul_precision("highest")
    return 2 * float(side) ** 3 / float(np.median(times[3:]))


def operations(job: jobs.Job) -> int:
    """Return the operations of the products of a step of a peer, forward and backward."""
    net = jobs.network(job)
    with FlopCounterMode(display=False) as counter:
        net(torch.zeros(job.batch_size, *job.shape)).sum().backward()
    return int(counter.get_total_flops())


_examples = lru_cache(maxsize=1)(examples)
_data = lru_cache(maxsize=1)(jobs.data)
"""Examples take longer to draw than a GPU to learn from them: the last ones are kept, those of the
loop for all precisions.
"""


def _ours(job: jobs.Job, model: str, *, captured: bool) -> list[float]:
    last = job.warm_up + job.rounds + 1
    run = Run(
        peers=job.peers, model=model, batch_size=job.batch_size, lr=jobs.LR,
        momentum=jobs.MOMENTUM, rounds=last, eval_every=last, device=job.device,
        precision=job.precision,  # type: ignore[arg-type]  # one of PRECISIONS
    )  # fmt: skip
    one_by_one = patch.object(capture, "_capture", lambda *given, **more: None)
    how: AbstractContextManager[object] = nullcontext() if captured else one_by_one
    with how:
        return seconds(run, _examples(job.shape, job.peers * job.examples), job.warm_up)


def _loop(job: jobs.Job) -> list[float]:
    """Return the seconds of rounds in which the peers train for an epoch, one after another."""
    inputs, labels = (
        torch.from_numpy(each).to(job.device) for each in _data(replace(job, precision="any"))
    )
    jobs.set_precision(job)
    nets = [jobs.network(job).to(job.device) for _ in range(job.peers)]
    generator = torch.Generator(job.device).manual_seed(0)
    times = []
    for _ in range(job.warm_up + job.rounds):
        _wait(job.device)
        begun = perf_counter()
        for net, own, answers in zip(nets, inputs, labels, strict=True):
            jobs.train(job, net, own, answers, generator)
        _wait(job.device)
        times.append(perf_counter() - begun)
    return times[job.warm_up :]


def _pfl(job: jobs.Job, program: Path) -> tuple[list[float], float]:
    """Return the seconds of the rounds of pfl, and the most memory that it held."""
    flags = {
        "peers": job.peers, "examples": job.examples, "batch-size": job.batch_size,
        "rounds": job.rounds, "warm-up": job.warm_up, "processes": 1, "threads": 1,
        "device": job.device, "precision": job.precision, "network": job.network,
    }  # fmt: skip
    command = [str(program), "-m", "baselines.drive_pfl"]
    for name, value in flags.items():
        command += [f"--{name}", str(value)]
    for name, values in (("shape", job.shape), ("hidden", job.hidden)):
        command += [f"--{name}", *map(str, values)] if values else []
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    if done.returncode:
        raise dfl.InputError(f"pfl: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    answer = json.loads(lines[-1])
    return answer["seconds"], answer.get("peak_memory", np.nan)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def finding(table: pd.DataFrame) -> str:
    """Return what each system takes for each work."""
    parts = []
    for (work, precision), own in common.groups(table, ["work", "precision"]):
        fastest = float(own["ms"].min())
        each = [
            f"{row['system']} {row['ms']:.3g} ms ({row['ms'] / fastest:.3g} times the least, "
            f"{100 * row['share']:.2g} % of the limit)"
            for row in own.to_dict("records")
        ]
        parts.append(f"{work}, {precision}: {', '.join(each)}")
    return "; ".join(parts) + "."


def draw(table: pd.DataFrame) -> Figure:
    """Draw the milliseconds of a round by precision, a panel per work and a colour per system."""
    works = list(table["work"].unique())
    figure = Figure(figsize=(4.2 * len(works), 4.0), layout="constrained")
    panels = figure.subplots(1, len(works), squeeze=False).flat
    handles = {}
    for work, axes in zip(works, panels, strict=True):
        own = table[table["work"] == work]
        precisions = list(own["precision"].unique())
        limits = own.drop_duplicates("precision")
        for k, system in enumerate(SYSTEMS):
            rows = own[own["system"] == system]
            places = [precisions.index(each) for each in rows["precision"]]
            colour = common.COLOURS[k]
            (handles[system],) = axes.plot(places, rows["ms"], "o", color=colour, label=system)
            for place, ms in zip(places, rows["ms"], strict=True):
                left = system in ("dfl", "pfl")
                axes.annotate(
                    f"{round(ms) if ms > 10 else round(ms, 1):,}", (place, ms),
                    (-7 if left else 7, 0), textcoords="offset points", va="center",
                    ha="right" if left else "left", color=colour, fontsize="small",
                )  # fmt: skip
        (handles["limit"],) = axes.plot(
            [precisions.index(each) for each in limits["precision"]], limits["limit_ms"], "_",
            color="black", markersize=24, label="limit of the products",
        )  # fmt: skip
        axes.set_yscale("log")
        axes.set_xticks(range(len(precisions)), precisions)
        axes.set_xlim(-0.5, len(precisions) - 0.5)
        axes.set_title(work, fontsize="medium")
        axes.grid(axis="y", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    figure.supylabel("milliseconds per round, logarithmic", fontsize="medium")
    figure.legend(
        handles=list(handles.values()), loc="outside lower center", ncols=5, frameon=False
    )
    return figure


if __name__ == "__main__":
    sys.exit(common.start(experiment, "speed.gpu"))
