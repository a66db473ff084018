"""A plain loop of torch: federated averaging with all peers, as one writes it by hand.

Each process trains its share of the peers, one after the other, with one model and torch's SGD with
momentum, which start anew from the average; a batch is a row of indices of tensors in memory. The
average and the sums of the processes are in shared memory. There is no framework around it, so the
loop is what torch itself takes for the work. The optimizer is torch's default; zeroing gradients
drops them, as torch does by default, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import get_context

from . import job as jobs

PATIENCE = 600.0
"""Maximum number of seconds that a process waits for the others."""


def drive(job: jobs.Job) -> tuple[jobs.Watch, tuple[float, float]]:
    """Run the rounds; return their times, and the losses before and after."""
    net = jobs.network(job)
    average = torch.nn.utils.parameters_to_vector(net.parameters()).detach().share_memory_()
    sums = torch.zeros(job.processes, len(average)).share_memory_()
    before = jobs.loss(net, job)
    context = get_context("spawn")
    barrier = context.Barrier(job.processes, timeout=PATIENCE)
    others = [
        context.Process(target=own_rounds, args=(job, k, average, sums, barrier), daemon=True)
        for k in range(1, job.processes)
    ]
    for other in others:
        other.start()
    watch = own_rounds(job, 0, average, sums, barrier)
    for other in others:
        other.join()
    torch.nn.utils.vector_to_parameters(average, net.parameters())
    return watch, (before, jobs.loss(net, job))


def own_rounds(
    job: jobs.Job, process: int, average: Tensor, sums: Tensor, barrier: Any
) -> jobs.Watch:
    """Run `rounds`; an error ends those of the other processes."""
    try:
        return rounds(job, process, average, sums, barrier)
    except BaseException:
        barrier.abort()
        raise


def rounds(job: jobs.Job, process: int, average: Tensor, sums: Tensor, barrier: Any) -> jobs.Watch:
    """Run the rounds of the peers of a process.

    Args:
        job: the job.
        process: the number of this process; process k has the peers k, k + processes, ....
        average: (d,), the model of all peers, in shared memory; overwritten by process 0.
        sums: (processes, d), the sum of the models of the peers of each, in shared memory.
        barrier: where processes wait for each other.

    Returns:
        The times of the start, after all have started, and of the end of each round.
    """
    torch.set_num_threads(job.threads)
    net = jobs.network(job)
    generator = torch.Generator().manual_seed(process)
    inputs, labels = (torch.from_numpy(each) for each in jobs.data(job))

    def averaged() -> list[dict[str, Tensor]]:
        torch.nn.utils.vector_to_parameters(average.clone(), net.parameters())
        return [net.state_dict()]

    watch = jobs.Watch(job)
    barrier.wait()
    watch.end(averaged)
    for _ in range(job.warm_up + job.rounds):
        total = torch.zeros_like(average)
        for peer in range(process, job.peers, job.processes):
            torch.nn.utils.vector_to_parameters(average.clone(), net.parameters())
            jobs.train(job, net, inputs[peer], labels[peer], generator)
            total += torch.nn.utils.parameters_to_vector(net.parameters()).detach()
        sums[process] = total
        barrier.wait()  # for the sums of all
        if process == 0:
            average.copy_(sums.sum(0) / job.peers)
        barrier.wait()  # for their average
        watch.end(averaged)
    return watch


def main() -> None:
    """Run the job of the command line."""
    job = jobs.read()
    torch.set_num_threads(job.threads)
    watch, losses = drive(job)
    jobs.report(job, "torch", watch, losses)


if __name__ == "__main__":
    main()
