"""Methods that are mathematically equal give equal results, bit for bit where possible."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dfl.comm.exchange import Net
from dfl.comm.mpi import World
from dfl.config import Run
from dfl.core import rows
from dfl.datasets.data import Data
from dfl.simulation.initialization import start
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from dfl.simulation.run_state import begin
from tests.support.quadratic import digits, final, quadratic, spread


def models(**settings: Any) -> Tensor:
    """The models (P, d) after four rounds on digits."""
    return final(digits(**settings), 4)


def test_without_compression_the_replicas_are_dfedavgm() -> None:
    """With Q the identity and gamma = 1 the replica form is DFedAvgM exactly; floats round
    differently.
    """
    assert torch.allclose(
        models(algorithm="qdfedavgm"), models(algorithm="dfedavgm"), rtol=0, atol=2e-6
    )
    doubles: dict[str, Any] = {"peers": 8, "topology": "small_world:k=4"}
    x, y = (final(quadratic(algorithm=a, **doubles), 20) for a in ("qdfedavgm", "dfedavgm"))
    assert torch.allclose(x, y, rtol=0, atol=1e-12)


def test_one_step_without_momentum_is_dpsgd() -> None:
    """D-PSGD (Lian et al. 2017), adapt then combine: x_i <- sum_j w_ij (x_j - lr grad f_j(x_j))."""
    setting = digits(local_steps=1, momentum=0.0, batch_size=0)
    net, task = setting.network, setting.task
    x = start(setting.run, task, False)
    weights = torch.from_numpy(net.schedule.weights[0].toarray()).float()
    module = torch.nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    for _ in range(4):
        x = weights @ torch.stack(
            [x[i] - 0.05 * gradient(module, x[i], setting, i) for i in range(6)]
        )
    assert torch.allclose(models(local_steps=1, momentum=0.0, batch_size=0), x, rtol=0, atol=2e-6)


def gradient(module: nn.Module, row: Tensor, setting: Prepared, i: int) -> Tensor:
    """torch's own gradient of peer i's mean loss at `row`, by its modules and autograd."""
    torch.nn.utils.vector_to_parameters(row, module.parameters())
    first, n = int(setting.task.examples.starts[i]), int(setting.task.examples.sizes[i])
    inputs = setting.task.inputs(setting.task.examples.inputs[first : first + n])
    loss = nn.functional.cross_entropy(
        module(inputs), setting.task.examples.labels[first : first + n]
    )
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


@pytest.mark.parametrize("engine", ["batched", "loop"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_heavy_ball_is_torch_sgd_with_a_new_buffer(engine: str, decay: float) -> None:
    setting = digits(peers=1, local_steps=7, batch_size=0, weight_decay=decay, engine=engine)
    module = torch.nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))
    torch.nn.utils.vector_to_parameters(
        start(setting.run, setting.task, False)[0].clone(), module.parameters()
    )
    for _ in range(4):
        walk(
            module,
            torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, weight_decay=decay),
            setting,
        )
    reached = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
    assert torch.allclose(final(setting, 4)[0], reached, rtol=0, atol=2e-6)


def walk(module: nn.Module, optimiser: torch.optim.Optimizer, setting: Prepared) -> None:
    """Seven steps on all examples of the only peer, as torch takes them."""
    train = setting.task.examples
    for _ in range(7):
        optimiser.zero_grad()
        nn.functional.cross_entropy(
            module(setting.task.inputs(train.inputs)), train.labels
        ).backward()
        optimiser.step()


@pytest.mark.parametrize("few", [1, 3])
@pytest.mark.parametrize("algorithm", ["qdfedavgm", "choco"])
def test_mixing_by_slices_is_mixing_at_once(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, few: int
) -> None:
    whole = models(algorithm=algorithm, peers=8, bits=4)
    monkeypatch.setattr(rows, "COORDINATES", few * whole.shape[1])
    assert torch.equal(models(algorithm=algorithm, peers=8, bits=4), whole)


def test_on_a_complete_graph_all_peers_have_the_mean() -> None:
    """DFedAvgM with uniform weights on a complete graph is federated averaging with everyone."""
    x = models(topology="complete", mixing="uniform")
    assert spread(x) < 1e-6
    y = final(quadratic(topology="complete", mixing="uniform"), 10)
    assert spread(y) < 1e-14


@pytest.mark.parametrize("partition", ["iid", "dirichlet:alpha=0.3"])
@pytest.mark.parametrize("steps", [{"local_epochs": 2}, {"local_steps": 5}])
def test_both_engines_agree(partition: str, steps: dict[str, int]) -> None:
    loop, batched = (models(engine=e, partition=partition, **steps) for e in ("loop", "batched"))
    assert torch.allclose(loop, batched, rtol=0, atol=2e-6)


@pytest.mark.parametrize("engine", ["batched", "loop"])
@pytest.mark.parametrize("partition", ["iid", "dirichlet:alpha=0.3"])
def test_training_does_not_depend_on_the_other_peers(engine: str, partition: str) -> None:
    """A peer's steps are the same bits alone, in a pair, or among all."""
    from dfl.training.sgd import sgd

    setting = digits(engine=engine, partition=partition, init="independent", weight_decay=0.01)
    x = start(setting.run, setting.task, False)
    together = sgd(x, setting.task, 3)
    for first, stop in ((0, 1), (1, 3), (2, 6), (5, 6)):
        assert torch.equal(sgd(x[first:stop], part(setting, first, stop), 3), together[first:stop])


def part(setting: Prepared, first: int, stop: int) -> Any:
    """The task as a rank with the peers first..stop-1 sees it."""
    from dataclasses import replace

    from dfl.training.examples import Examples

    train = setting.task.examples
    begin, end = int(train.starts[first]), int((train.starts + train.sizes)[stop - 1])
    own = Examples.of(train.inputs[begin:end], train.labels[begin:end], train.sizes[first:stop])
    return replace(
        setting.task,
        peers=np.arange(first, stop),
        examples=own,
        padded=setting.task.padded[first:stop],
    )


def test_one_peer_trains_without_messages() -> None:
    from dfl.training.sgd import sgd

    setting = digits(peers=1)
    x = start(setting.run, setting.task, False)
    for t in range(4):
        x = sgd(x, setting.task, t)
    assert torch.equal(models(peers=1), x)


def test_a_round_does_not_change_the_state_before_it() -> None:
    for algorithm in ("dfedavgm", "qdfedavgm", "qdfedavgm:exchange=paper", "choco"):
        setting = digits(algorithm=algorithm)
        state = begin(setting).state
        before = {name: value.clone() for name, value in vars(state).items()}
        once, twice = (
            setting.algorithm.round(state, setting.task, Net(setting.network, 0)).x
            for _ in range(2)
        )
        for name, value in vars(state).items():
            torch.testing.assert_close(value, before[name], rtol=0, atol=0, equal_nan=True)
        assert torch.equal(once, twice)


def test_tensors_and_module_of_the_caller_are_the_initial_model() -> None:
    inputs = np.random.default_rng(1).normal(size=(40, 3)).astype(np.float32)
    labels = (inputs[:, 0] > 0).astype(np.int64)
    module = nn.Linear(3, 2)
    setting = prepare(
        Run(peers=4, model=module, dataset=Data(inputs, labels, inputs, labels, 2)), World()
    )
    x = start(setting.run, setting.task, setting.own_module)
    assert torch.equal(
        x, torch.nn.utils.parameters_to_vector(module.parameters()).detach().expand(4, -1)
    )
