"""The drivers of the baselines, each with small stand-ins that train."""

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from experiments.speed.baselines import job
from tests.support import fake_baselines, fake_blazefl, fake_fedjax, fake_pfl

pytestmark = pytest.mark.slow

FAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "pfl": fake_pfl.fake_pfl,
    "gossipy": fake_baselines.fake_gossipy,
    "flower": fake_baselines.fake_flower,
    "blazefl": fake_blazefl.fake_blazefl,
    "fedjax": fake_fedjax.fake_fedjax,
    "torch": lambda _: None,
}
PACKAGES = {
    "pfl": "pfl", "gossipy": "gossipy-dfl", "flower": "flwr", "blazefl": "blazefl",
    "fedjax": "fedjax", "torch": "torch",
}  # fmt: skip
NUMBERS = {"peers": 4, "examples": 20, "shape": 6, "batch-size": 10, "rounds": 3, "warm-up": 1}
ARGUMENTS = [
    f"--{name}={number}" for name, number in {**NUMBERS, "processes": 1, "threads": 1}.items()
]
Load = Callable[[str], ModuleType]


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Import a driver where a stand-in takes the baseline's place."""

    def driver(baseline: str) -> ModuleType:
        FAKES[baseline](monkeypatch)
        return import_module(f"experiments.speed.baselines.drive_{baseline}")

    monkeypatch.setattr(job, "version", lambda package: f"version of {package}")
    before = set(sys.modules)
    yield driver
    for name in set(sys.modules) - before:
        if (
            name.startswith("experiments.speed.baselines.drive_")
            or name == "experiments.speed.baselines.client_flower"
        ):
            del sys.modules[name]


@pytest.mark.parametrize(
    "arguments",
    [
        "--style=lean --hidden",
        "--style=tutorial --hidden 5 4",
        "--hidden 5",
        "--network=lenet --shape 3 16 16",
        "--network=lstm --shape 6 4 --hidden 5",
    ],
)
@pytest.mark.parametrize("baseline", PACKAGES)
def test_a_driver_answers(
    load: Load,
    baseline: str,
    arguments: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["driver", *ARGUMENTS, *arguments.split()])
    load(baseline).main()
    text = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert text["version"] == f"version of {PACKAGES[baseline]}"
    assert len(text["seconds"]) == 3
    assert all(seconds > 0 for seconds in text["seconds"])
    assert text["losses"][1] < text["losses"][0]


def test_other_processes_of_pfl_are_silent(
    load: Load, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["driver", *ARGUMENTS])
    monkeypatch.setenv("RANK", "1")
    load("pfl").main()
    assert capsys.readouterr().out == ""


def test_pfl_has_everyone_in_every_round(load: Load) -> None:
    driver = load("pfl")
    watch, losses = driver.drive(job.read(ARGUMENTS))
    assert len(watch.ends) == 5
    assert losses[1] < losses[0]
    assert fake_pfl.FederatedAveraging.seen == [["0", "1", "2", "3"]] * 4


@pytest.mark.parametrize(("processes", "backend"), [(1, "jit"), (2, "pmap")])
def test_fedjax_trains_everyone_in_every_round(load: Load, processes: int, backend: str) -> None:
    driver = load("fedjax")
    watch, losses = driver.drive(job.read([*ARGUMENTS, f"--processes={processes}"]))
    assert len(watch.ends) == 5
    assert losses[1] < losses[0]
    assert fake_fedjax.FederatedAveraging.backend == backend
    assert fake_fedjax.FederatedAveraging.seen == [[0, 1, 2, 3]] * 4


@pytest.mark.parametrize(
    "network",
    ["perceptron --shape 6 --hidden 5 4", "lenet --shape 3 16 16", "lstm --shape 6 4 --hidden 5"],
)
def test_networks_of_fedjax_are_those_of_torch(load: Load, network: str) -> None:
    driver = load("fedjax")
    own_job = job.read([*ARGUMENTS, "--network", *network.split()])
    net = job.network(own_job)
    inputs = torch.from_numpy(job.data(own_job)[0][0])
    with torch.no_grad():
        scores = driver.NETWORKS[own_job.network](net.state_dict(), inputs)
        assert torch.allclose(scores, net(inputs), rtol=1e-5, atol=1e-6)


def test_pfl_s_mean_is_federated_averaging(load: Load) -> None:
    """The stand-in averages as pfl does; the driver's model then is the mean of what each user
    makes of it.
    """
    own_job = job.read([*ARGUMENTS[:4], "--rounds=1", "--warm-up=0", *ARGUMENTS[6:]])
    _, (before, after) = load("pfl").drive(own_job)
    net = job.network(own_job)
    assert before == pytest.approx(job.loss(net, own_job))
    start = {name: value.clone() for name, value in net.state_dict().items()}
    inputs, labels = (torch.from_numpy(each) for each in job.data(own_job))
    ends = []
    for user in range(own_job.peers):
        net.load_state_dict(start)
        optimizer = torch.optim.SGD(net.parameters(), job.LR, momentum=job.MOMENTUM)
        for batch in torch.arange(own_job.examples).split(own_job.batch_size):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(
                net(inputs[user][batch]), labels[user][batch]
            ).backward()
            optimizer.step()
        ends.append({name: value.clone() for name, value in net.state_dict().items()})
    net.load_state_dict(fake_baselines.mean(ends))
    assert after == pytest.approx(job.loss(net, own_job), rel=1e-6)


@pytest.mark.parametrize(
    ("baseline", "workers"),
    [
        *(("torch", f"--processes={n}") for n in (1, 2, 3)),
        *(("blazefl", workers) for workers in ("--threads=1", "--threads=2", "--processes=2")),
    ],
)
def test_a_driver_averages_what_each_peer_makes_of_the_model(
    load: Load, baseline: str, workers: str
) -> None:
    """With batches of all examples, whose order does not count."""
    own_job = job.read([*ARGUMENTS, "--batch-size=20", "--rounds=1", "--warm-up=0", workers])
    watch, losses = load(baseline).drive(own_job)
    net = job.network(own_job)
    inputs, labels = (torch.from_numpy(each) for each in job.data(own_job))
    losses_of_peers = [
        torch.nn.functional.cross_entropy(net(own), answers)
        for own, answers in zip(inputs, labels, strict=True)
    ]
    steps = torch.autograd.grad(torch.stack(losses_of_peers).mean(), list(net.parameters()))
    with torch.no_grad():
        for weight, step in zip(net.parameters(), steps, strict=True):
            weight.sub_(job.LR * step)
    assert len(watch.ends) == 2
    assert losses[1] == pytest.approx(job.loss(net, own_job), rel=1e-6)


@pytest.mark.parametrize("peers", [3, 4, 10])
def test_gossipy_s_ring_is_a_ring(load: Load, peers: int) -> None:
    ring = load("gossipy").ring(peers)
    np.testing.assert_array_equal(ring, ring.T)
    assert set(ring.sum(axis=0)) == {2}
    assert ring.diagonal().sum() == 0
    assert ring[0, 1] == ring[0, peers - 1] == 1


def test_gossipy_s_rounds_are_as_long_as_its_scripts_or_one_step(load: Load) -> None:
    driver = load("gossipy")
    for style, steps in (("tutorial", 100), ("lean", 1)):
        own_job = job.read([*ARGUMENTS, "--style", style])
        made = driver.simulator(own_job)
        assert made.delta == made.nodes[0].round_len == steps
        times = driver.RoundTimes(own_job, made)
        for t in range(3 * steps):
            times.update_timestep(t)
        times.update_message(False)
        times.update_end()
        assert len(times.watch.ends) == 3


@pytest.mark.parametrize("baseline", PACKAGES)
def test_a_driver_tests_the_model_of_every_round(
    load: Load,
    baseline: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """On the examples of a file, whose labels can be learned from the first feature."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((4, 100, 6)).astype(np.float32)
    tests = rng.standard_normal((50, 6)).astype(np.float32)
    labels = (inputs[..., 0] > 0).astype(np.int64)
    np.savez(
        tmp_path / "data.npz",
        inputs=inputs, labels=labels, test_inputs=tests,
        test_labels=(tests[:, 0] > 0).astype(np.int64),
    )  # fmt: skip
    monkeypatch.setattr(job, "LR", 0.1)
    flags = ["--examples=100", "--rounds=5", "--warm-up=0", f"--data={tmp_path / 'data.npz'}"]
    monkeypatch.setattr(sys, "argv", ["driver", *ARGUMENTS, *flags])
    load(baseline).main()
    found = json.loads(capsys.readouterr().out.strip().splitlines()[-1])["accuracies"]
    assert len(found) == 6
    assert found[-1] > max(0.85, found[0])
    if baseline != "gossipy":  # which trains an epoch before, in models of its own
        net = job.network(job.read([*ARGUMENTS, *flags]))
        right = net(torch.from_numpy(tests)).argmax(1).numpy() == (tests[:, 0] > 0)
        assert found[0] == pytest.approx(right.mean())


def test_flower_s_clients_keep_one_model_only_where_they_are_lean(load: Load) -> None:
    load("flower")
    client = import_module("experiments.speed.baselines.client_flower")
    for style, kept in (("lean", True), ("tutorial", False)):
        own_job = job.read([*ARGUMENTS, "--style", style])
        inputs, labels, model = client.held(own_job)
        before = [weight.clone() for weight in model.parameters()]
        context = SimpleNamespace(node_config={"partition-id": 2})
        weights = fake_baselines.Arrays(job.network(own_job).state_dict())
        reply = client.train(own_job, fake_baselines.Message({"arrays": weights}), context)
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert moved == kept
        assert reply.content["metrics"] == {"num-examples": 20}
        assert (inputs.shape, labels.shape) == ((4, 20, 6), (4, 20))


@pytest.mark.parametrize("style", ["lean", "tutorial"])
def test_flower_s_batches_are_a_pass_over_the_examples(load: Load, style: str) -> None:
    load("flower")
    client = import_module("experiments.speed.baselines.client_flower")
    own_job = job.read([*ARGUMENTS, "--style", style])
    inputs, labels = torch.arange(20.0)[:, None], torch.arange(20)
    batches = list(client.batches(own_job, inputs, labels))
    assert [len(some) for some, _ in batches] == [10, 10]
    assert sorted(torch.cat([some for some, _ in batches]).flatten().tolist()) == list(range(20))
    for some, answers in batches:
        assert torch.equal(some.flatten(), answers.float())
