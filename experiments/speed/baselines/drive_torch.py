"""A plain loop of torch: federated averaging with all peers, as one writes it by hand.

One model and torch's SGD with momentum, which every peer in turn starts anew from the average; a
batch is a row of indices of tensors in memory. There is no framework around it, so the loop is
what torch itself takes for the work. The optimizer is torch's default; zeroing gradients drops
them, as torch does by default, too.
"""

from __future__ import annotations

import time

import torch

from . import job as jobs


def train(
    job: jobs.Job,
    net: torch.nn.Module,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    generator: torch.Generator,
) -> None:
    """Train a model for an epoch on the examples of a peer, in a random order."""
    optimizer = torch.optim.SGD(net.parameters(), jobs.LR, momentum=jobs.MOMENTUM)
    for batch in torch.randperm(job.examples, generator=generator).split(job.batch_size):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(inputs[batch]), labels[batch]).backward()
        optimizer.step()


def drive(job: jobs.Job) -> tuple[list[float], tuple[float, float]]:
    """Run the rounds; return the times of their ends, and the losses before and after."""
    net = jobs.network(job)
    generator = torch.Generator().manual_seed(0)
    inputs, labels = (torch.from_numpy(each) for each in jobs.data(job))
    before = jobs.loss(net, job)
    ends = [time.perf_counter()]
    for _ in range(job.warm_up + job.rounds):
        start = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
        total = torch.zeros_like(start)
        for peer in range(job.peers):
            torch.nn.utils.vector_to_parameters(start.clone(), net.parameters())
            train(job, net, inputs[peer], labels[peer], generator)
            total += torch.nn.utils.parameters_to_vector(net.parameters()).detach()
        torch.nn.utils.vector_to_parameters(total / job.peers, net.parameters())
        ends.append(time.perf_counter())
    return ends, (before, jobs.loss(net, job))


def main() -> None:
    """Run the job of the command line."""
    job = jobs.read()
    torch.set_num_threads(job.threads)
    ends, losses = drive(job)
    jobs.report(job, "torch", ends, losses)


if __name__ == "__main__":
    main()
