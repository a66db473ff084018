"""Local training of convolutional and recurrent models, and the loop of torch that a user would
write for it.

The networks of the loops are of torch's own layers. `limits` compares both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import process_time

import torch
from torch import nn

from dfl.config import Run
from experiments.speed.baselines import job as jobs
from experiments.speed.stopwatch import examples, seconds

WARM_UP = 2
"""Rounds before those that are timed."""


@dataclass(frozen=True)
class Work:
    """What both sides train: a model, and its network of torch's own layers.

    Attributes:
        job: the work of the loop.
        model: as --model.
        network: the same model of torch's own layers.
        at_most: the bound on our time over that of the loop.
    """

    job: jobs.Job
    model: str
    network: Callable[[jobs.Job], nn.Module]
    at_most: float


def cnn(job: jobs.Job) -> nn.Module:
    """Return the CNN that dfl has, for square images."""
    channels, side, _ = job.shape
    return nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * (side // 4) ** 2, 512), nn.ReLU(),
        nn.Linear(512, jobs.CLASSES),
    )  # fmt: skip


def job_of(
    peers: int, n: int, batch: int, shape: tuple[int, ...], hidden: tuple[int, ...] = ()
) -> jobs.Job:
    """Return the job of peers with n examples of a shape each, in one process of one thread. It
    names no network; `Work` has that.
    """
    return jobs.Job(
        peers=peers, examples=n, shape=shape, network="", hidden=hidden, batch_size=batch,
        rounds=0, warm_up=0, processes=1, threads=1,
    )  # fmt: skip


def _lstm(peers: int, batch: int, steps: int, hidden: int, at_most: float) -> Work:
    job = job_of(peers, 2 * batch, batch, (6, steps), (hidden,))
    return Work(job, f"har_lstm:layers=1,hidden={hidden}", jobs.LastState, at_most)


GREY, COLOUR = (1, 28, 28), (3, 32, 32)
WIDE, NARROW = 1 / 0.95, 1 / 2
"""Our time over that of a loop of torch, at most."""
WORKS = {
    "CNN, batches of 10": Work(job_of(2, 100, 10, GREY), "cnn", cnn, WIDE),
    "CNN, batches of 50": Work(job_of(2, 200, 50, GREY), "cnn", cnn, WIDE),
    "LeNet, batches of 10": Work(job_of(8, 50, 10, COLOUR), "lenet", jobs.lenet, NARROW),
    "LeNet, batches of 50": Work(job_of(8, 200, 50, COLOUR), "lenet", jobs.lenet, NARROW),
    "ResNet-20, batches of 32": Work(job_of(2, 64, 32, COLOUR), "resnet20", jobs.resnet20, WIDE),
    "LSTM of 256, 40 steps": _lstm(4, 10, 40, 256, WIDE),
    "LSTM of 32, 20 steps": _lstm(100, 10, 20, 32, NARROW),
}


def ours(work: Work, rounds: int) -> list[float]:
    """Return the seconds of the processor of some rounds of dfl, a single rank, one thread."""
    job, last = work.job, WARM_UP + rounds + 1
    run = Run(
        peers=job.peers, model=work.model, batch_size=job.batch_size, lr=jobs.LR,
        momentum=jobs.MOMENTUM, rounds=last, eval_every=last,
    )  # fmt: skip
    data = examples(job.shape, job.peers * job.examples, jobs.CLASSES)
    return seconds(run, data, WARM_UP, process_time)


def theirs(work: Work, rounds: int) -> list[float]:
    """Return the seconds of the processor of some rounds of the loop of torch, one thread: every
    peer in turn trains its network for an epoch, from its parameters on.
    """
    job = work.job
    torch.set_num_threads(job.threads)
    inputs, labels = (torch.from_numpy(each) for each in jobs.data(job))
    nets = [work.network(job) for _ in range(job.peers)]
    generator = torch.Generator().manual_seed(0)
    times = []
    for _ in range(WARM_UP + rounds):
        begun = process_time()
        for net, own, answers in zip(nets, inputs, labels, strict=True):
            jobs.train(job, net, own, answers, generator)
        times.append(process_time() - begun)
    return times[WARM_UP:]
