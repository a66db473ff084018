"""FedJAX: federated averaging with all clients, by its own algorithm.

`algorithms.fed_avg.federated_averaging` with the SGD of FedJAX, with momentum for clients and with
learning rate 1 for the server, so the new model is the mean. Clients are `ClientDataset`s that are
made once and shuffle their examples in every round. Its default backend compiles a local step and
calls it for each batch, one client after the other; with more than one device, which its
documentation recommends, `pmap` trains as many clients at once, and every device is a core here.
The networks are functions of parameters that are named and shaped as torch's, and start from the
same values as those of the other baselines. The time of a round ends when its model is computed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from . import job as jobs

Values = Mapping[str, Any]


def perceptron(values: Values, x: Any) -> Any:
    """Return the scores of the dense layers of `job.perceptron`."""
    import jax

    last = max(int(name.partition(".")[0]) for name in values)
    for k in range(0, last + 1, 2):
        x = x @ values[f"{k}.weight"].T + values[f"{k}.bias"]
        x = x if k == last else jax.nn.relu(x)
    return x


def lenet(values: Values, x: Any) -> Any:
    """Return the scores of `job.lenet`."""
    import jax
    from jax import lax

    for k in (0, 3):
        x = lax.conv_general_dilated(x, values[f"{k}.weight"], (1, 1), "VALID")
        x = jax.nn.relu(x + values[f"{k}.bias"][:, None, None])
        x = lax.reduce_window(x, -np.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = x.reshape(len(x), -1)
    for k in (7, 9, 11):
        x = x @ values[f"{k}.weight"].T + values[f"{k}.bias"]
        x = x if k == 11 else jax.nn.relu(x)
    return x


def lstm(values: Values, x: Any) -> Any:
    """Return the scores of `job.LastState`."""
    import jax
    from jax import lax
    from jax import numpy as jnp

    own = {name: values[f"lstm.{name}_l0"] for name in ("weight_hh", "bias_ih", "bias_hh")}
    inputs = jnp.transpose(x, (2, 0, 1)) @ values["lstm.weight_ih_l0"].T

    def step(state: Any, at: Any) -> Any:
        h, c = state
        gates = at + own["bias_ih"] + h @ own["weight_hh"].T + own["bias_hh"]
        i, f, g, o = jnp.split(gates, 4, axis=1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    zero = jnp.zeros((len(x), own["weight_hh"].shape[1]))
    (h, _), _ = lax.scan(step, (zero, zero), inputs)
    return h @ values["last.weight"].T + values["last.bias"]


NETWORKS: dict[str, Callable[[Values, Any], Any]] = {
    "perceptron": perceptron,
    "lenet": lenet,
    "lstm": lstm,
}
"""Networks by name, as in `job`."""


def drive(job: jobs.Job) -> tuple[jobs.Watch, tuple[float, float]]:
    """Run the rounds; return their times, and the losses before and after."""
    import fedjax
    import jax
    from fedjax.algorithms import fed_avg

    scores = NETWORKS[job.network]

    def loss(values: Values, batch: Mapping[str, Any], rng: Any) -> Any:
        found = jax.nn.log_softmax(scores(values, batch["x"]))
        return -jax.numpy.take_along_axis(found, batch["y"][:, None], 1)[:, 0]

    net = jobs.network(job)
    before = jobs.loss(net, job)
    inputs, labels = jobs.data(job)
    clients = [
        fedjax.ClientDataset({"x": inputs[k], "y": labels[k].astype(np.int32)})
        for k in range(job.peers)
    ]
    with fedjax.for_each_client_backend("pmap" if job.processes > 1 else "jit"):
        algorithm = fed_avg.federated_averaging(
            fedjax.grad(loss),
            fedjax.optimizers.sgd(jobs.LR, momentum=jobs.MOMENTUM),
            fedjax.optimizers.sgd(1.0),
            fedjax.ShuffleRepeatBatchHParams(batch_size=job.batch_size, num_epochs=1),
        )
    state = algorithm.init(
        {name: jax.numpy.asarray(value.numpy()) for name, value in net.state_dict().items()}
    )

    def models() -> list[dict[str, torch.Tensor]]:
        return [
            {
                name: torch.from_numpy(np.asarray(value).copy())
                for name, value in state.params.items()
            }
        ]

    watch = jobs.Watch(job)
    watch.end(models)
    for t in range(job.warm_up + job.rounds):
        keys = jax.random.split(jax.random.PRNGKey(t), job.peers)
        state, _ = algorithm.apply(
            state, [(k, client, keys[k]) for k, client in enumerate(clients)]
        )
        jax.block_until_ready(state.params)
        watch.end(models)
    net.load_state_dict(models()[0])
    return watch, (before, jobs.loss(net, job))


def main() -> None:
    """Run the job of the command line."""
    job = jobs.read()
    flags = [f"--xla_force_host_platform_device_count={job.processes}"]
    if job.threads == 1:
        flags.append("--xla_cpu_multi_thread_eigen=false")
    os.environ["XLA_FLAGS"] = " ".join(flags)  # read when jax is imported
    torch.set_num_threads(job.threads)
    watch, losses = drive(job)
    jobs.report(job, "fedjax", watch, losses)


if __name__ == "__main__":
    main()
