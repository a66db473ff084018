"""The clients of the Flower driver, in a module that ray's workers can import."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from torch.utils.data import DataLoader, TensorDataset

from . import job as jobs


@lru_cache
def held(job: jobs.Job) -> tuple[torch.Tensor, torch.Tensor, torch.nn.Module]:
    """Return the inputs and labels of all clients, and a model to train; cached per process."""
    torch.set_num_threads(job.threads)
    inputs, labels = (torch.from_numpy(each) for each in jobs.data(job))
    return inputs, labels, jobs.network(job)


def batches(job: jobs.Job, inputs: torch.Tensor, labels: torch.Tensor) -> Iterable[Any]:
    """Return the batches of an epoch, in a random order: by a DataLoader as in the tutorial, or
    slices of the tensors.
    """
    if job.style == "tutorial":
        return DataLoader(TensorDataset(inputs, labels), batch_size=job.batch_size, shuffle=True)
    return (
        (inputs[batch], labels[batch])
        for batch in torch.randperm(job.examples).split(job.batch_size)
    )


def train(job: jobs.Job, message: Any, context: Any) -> Any:
    """Train a client for an epoch from the received weights, and return the message to send."""
    inputs, labels, model = held(job)
    user = int(context.node_config["partition-id"])
    if job.style == "tutorial":
        model = jobs.network(job)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), jobs.LR, momentum=jobs.MOMENTUM)
    for some, answers in batches(job, inputs[user], labels[user]):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(some), answers).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": job.examples})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
