"""The baselines: their environments, command lines and results."""

import ast
import json
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import dfl
from experiments.speed import benchmark_peers as peers
from experiments.speed import gpu
from experiments.speed.baselines import install, job, run
from experiments.speed.stopwatch import WORK, examples
from tests.support.stub_baselines import MISSING, environment

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
DRIVERS = [
    ROOT / "experiments/speed/baselines" / f"drive_{baseline}.py" for baseline in install.BASELINES
]
THEIRS = [
    *DRIVERS,
    ROOT / "experiments/speed/baselines/client_flower.py",
    ROOT / "experiments/speed/baselines/job.py",
]
"""What runs in the environments of the baselines."""
JOB = job.Job(
    peers=3,
    examples=20,
    shape=(4,),
    network="perceptron",
    hidden=(5,),
    batch_size=10,
    rounds=2,
    warm_up=1,
    processes=1,
    threads=1,
)
NUMBERS = {"peers": 3, "examples": 20, "shape": 4, "batch-size": 10, "rounds": 2, "warm-up": 1}
ARGUMENTS = [
    f"--{name}={number}" for name, number in {**NUMBERS, "processes": 1, "threads": 1}.items()
]

# What runs elsewhere


@pytest.mark.parametrize("file", THEIRS, ids=lambda file: file.name)
def test_what_runs_elsewhere_stands_alone(file: Path) -> None:
    tree = ast.parse(file.read_text())
    compile(tree, str(file), "exec")
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    plain = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    roots = {
        name.partition(".")[0]
        for name in plain | {node.module or "" for node in froms if not node.level}
    }
    assert not roots & {"dfl", "experiments", "topologies"}
    near = {node.module or alias.name for node in froms if node.level for alias in node.names}
    assert near <= {"job", "client_flower"}


@pytest.mark.parametrize("file", DRIVERS, ids=lambda file: file.name)
def test_a_driver_documents_its_interface_and_reports(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert len((ast.get_docstring(tree) or "").splitlines()) >= 5
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert {"jobs.read", "jobs.report", "jobs.loss", "torch.set_num_threads"} <= calls


def test_nothing_of_ours_imports_a_driver() -> None:
    for file in (*(ROOT / "dfl").rglob("*.py"), *(ROOT / "experiments").rglob("*.py")):
        assert "baselines.drive" not in file.read_text().replace('"baselines.drive_', "")


def test_the_work_is_the_stopwatch_s() -> None:
    assert set(run.NETWORKS) == {work.model for work in WORK.values()}
    of_gpu = {each.network for _, each in gpu.WORKS.values()}
    assert {network for network, _ in run.NETWORKS.values()} | of_gpu == set(job.NETWORKS)
    inputs, labels = job.data(JOB)
    np.testing.assert_array_equal(inputs.reshape(60, 4), examples((4,), 60).train_inputs)
    np.testing.assert_array_equal(labels.reshape(60), examples((4,), 60).train_labels)
    assert inputs.dtype == np.float32
    assert labels.shape == (3, 20)
    assert set(peers.TITLES) == set(WORK)


def test_a_command_line_becomes_a_job() -> None:
    assert job.read([*ARGUMENTS, "--hidden", "5"]) == JOB
    assert job.read([*ARGUMENTS, "--style", "tutorial"]).style == "tutorial"
    assert job.read([*ARGUMENTS, "--hidden"]).hidden == ()
    with pytest.raises(SystemExit):
        job.read(ARGUMENTS[1:])


def test_models_begin_alike_and_have_the_stated_size() -> None:
    net, again = job.network(JOB), job.network(JOB)
    for a, b in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert net(torch.zeros(2, 4)).shape == (2, job.CLASSES)
    for name, work in WORK.items():
        network = run.NETWORKS[work.model]
        own_job = job.Job(work.peers, 1, work.shape, *network, 1, 1, 0, 1, 1)
        assert job.network(own_job)(torch.zeros(2, *work.shape)).shape == (2, job.CLASSES)
        size = sum(weight.numel() for weight in job.network(own_job).parameters())
        assert peers.TITLES[name] == f"{work.peers:,} peers, {size:,} parameters"


def test_the_loss_is_that_of_some_users_or_of_all() -> None:
    net = job.network(JOB)
    inputs, labels = (torch.from_numpy(each) for each in job.data(JOB))
    for users in (1, 3):
        by_hand = torch.nn.functional.cross_entropy(
            net(inputs[:users].flatten(0, 1)), labels[:users].flatten()
        )
        assert job.loss(net, JOB, slice(users)) == pytest.approx(by_hand.item(), rel=1e-6)
    assert job.loss(net, JOB) == job.loss(net, JOB, slice(3))


def watched(*ends: float) -> job.Watch:
    """Return a watch with these times."""
    watch = job.Watch(JOB)
    watch.ends += ends
    return watch


def test_models_are_tested_at_every_recorded_time_and_copies_take_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models answer one class each; the clock runs a second per look, two looks per copy."""
    net = torch.nn.Linear(2, 3)
    file = tmp_path / "examples.npz"
    np.savez(file, test_inputs=np.ones((4, 2), np.float32), test_labels=[0, 0, 0, 1])
    tested = replace(JOB, data=file)
    seconds = iter(np.arange(100.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(seconds))

    def answering(*classes: int) -> list[dict[str, torch.Tensor]]:
        return [{"weight": torch.zeros(3, 2), "bias": torch.eye(3)[answer]} for answer in classes]

    watch = job.Watch(tested)
    for models in (answering(0), answering(1, 2), answering(0, 1)):
        watch.end(partial(list, models))
    assert watch.ends == [0.0, 1.0, 2.0]
    assert watch.accuracies(tested, net) == [0.75, 0.125, 0.5]
    untested = job.Watch(JOB)
    untested.end(lambda: pytest.fail("models were copied that are not tested"))
    assert untested.accuracies(JOB, net) == []


def test_an_answer_is_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    job.report(JOB, "numpy", watched(1.0, 5.0, 5.5, 5.75), (2.3, 2.2))
    text = json.loads(capsys.readouterr().out)
    assert text["seconds"] == [0.5, 0.25]
    assert text["version"] == np.__version__
    assert text["torch"] == torch.__version__
    assert (text["peers"], text["processes"], text["threads"]) == (3, 1, 1)


@pytest.mark.parametrize(
    ("ends", "losses", "complaint"),
    [
        ([1.0, 2.0, 3.0], (2.3, 2.2), "ran 2 rounds, not 3"),
        ([1.0, 2.0, 3.0, 4.0], (2.3, 2.3), "did not train"),
        ([1.0, 2.0, 3.0, 4.0], (2.3, float("nan")), "did not train"),
    ],
)
def test_an_answer_that_proves_nothing_is_refused(
    ends: list[float], losses: tuple[float, float], complaint: str
) -> None:
    with pytest.raises(SystemExit, match=complaint):
        job.report(JOB, "numpy", watched(*ends), losses)


# The environments


def test_installing_makes_what_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[tuple[str, ...]] = []

    def pretend(*command: str) -> str:
        commands.append(command)
        (tmp_path / "gossipy").mkdir(exist_ok=True)
        return f"{tmp_path}\n"

    monkeypatch.setattr(install, "_run", pretend)
    assert not install.ready(tmp_path, "gossipy")
    install.install(envs=tmp_path, only=("gossipy",))
    assert install.ready(tmp_path, "gossipy")
    assert commands[0] == (sys.executable, "-m", "venv", str(tmp_path / "gossipy"))
    assert {"gossipy-dfl==0.0.1", "torch==2.13.0"} <= set(commands[1])
    compile((tmp_path / "torchvision.py").read_text(), "torchvision", "exec")
    before = len(commands)
    install.install(envs=tmp_path, only=("gossipy",))
    assert len(commands) == before
    assert capsys.readouterr().out.count(f"gossipy: {tmp_path}/gossipy/bin/python") == 2


def test_other_versions_are_installed_anew(tmp_path: Path) -> None:
    environment(tmp_path, "pfl")
    assert install.ready(tmp_path, "pfl")
    (tmp_path / "pfl/installed.txt").write_text("pfl==0.1\n")
    assert not install.ready(tmp_path, "pfl")


def test_every_version_is_pinned() -> None:
    for wanted in (*install.BASELINES.values(), install.COMMON):
        assert all("==" in requirement for requirement in wanted)
    assert set(install.COMMON) <= set((ROOT / "constraints.txt").read_text().splitlines())


def test_a_failed_installation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        dfl.InputError,
        match=r"--only must be among pfl, gossipy, flower, blazefl, fedjax, torch, not fedml",
    ):
        install.install(envs=tmp_path, only=("fedml",))
    with pytest.raises(dfl.InputError, match=r"-c raise SystemExit\('no wheel'\): no wheel"):
        install._run(sys.executable, "-c", "raise SystemExit('no wheel')")


def test_a_baseline_may_need_another_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[tuple[str, ...]] = []
    monkeypatch.setattr(install, "_note", lambda envs, baseline: tmp_path / "note")

    def pretend(*command: str) -> None:
        commands.append(command)

    monkeypatch.setattr(install, "_run", pretend)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(dfl.InputError, match=r"^blazefl needs python3\.12 on the path$"):
        install.install(envs=tmp_path, only=("blazefl",))
    assert not commands
    program = tmp_path / "python3.12"
    program.touch(0o755)
    install.install(envs=tmp_path, only=("blazefl",))
    assert commands[0] == (str(program), "-m", "venv", str(tmp_path / "blazefl"))


# The launches


def test_a_baseline_runs_in_its_own_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    terms = run.Terms(environment(tmp_path, "gossipy"), rounds=2, warm_up=1)
    text = run.answer(run.Setup("gossipy", 1, 2, "tutorial"), "A", terms)
    assert text["seconds"] == [0.5, 0.25]
    assert text["version"] == "2"  # its threads, and no path of ours
    arguments = text["arguments"].split()
    assert arguments[:2] == ["-m", "baselines.drive_gossipy"]
    own_job = job.read(arguments[2:])
    perceptron = ((784,), "perceptron", (200, 200))
    assert own_job == job.Job(16, 600, *perceptron, 50, 2, 1, 1, 2, "tutorial")


@pytest.mark.parametrize(
    ("work", "network"),
    [("D", ((3, 32, 32), "lenet", ())), ("E", ((6, 20), "lstm", (32,)))],
)
def test_a_loop_of_torch_has_the_works_of_other_layers(
    tmp_path: Path, work: str, network: tuple[tuple[int, ...], str, tuple[int, ...]]
) -> None:
    terms = run.Terms(environment(tmp_path, "torch"), rounds=2, warm_up=1)
    arguments = run.answer(run.Setup("torch", 1, 1), work, terms)["arguments"].split()
    assert arguments[:2] == ["-m", "baselines.drive_torch"]
    it = WORK[work]
    own_job = job.Job(it.peers, it.examples, *network, it.batch_size, 2, 1, 1, 1)
    assert job.read(arguments[2:]) == own_job


def test_several_processes_of_pfl_are_torchrun_s(tmp_path: Path) -> None:
    terms = run.Terms(environment(tmp_path, "pfl"), rounds=2, warm_up=1, prefix=("env", "A=1"))
    arguments = run.answer(run.Setup("pfl", 2, 1), "C", terms)["arguments"].split()
    assert arguments[:6] == [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
    ]
    own_job = job.read(arguments[7:])
    assert (own_job.peers, own_job.hidden, own_job.processes) == (1000, (), 2)


@pytest.mark.parametrize(
    ("script", "complaint"),
    [(MISSING, "No module named baselines$"), ("#!/bin/sh\necho nothing", "did not time 2 rounds")],
)
def test_a_baseline_that_fails_is_an_error(tmp_path: Path, script: str, complaint: str) -> None:
    terms = run.Terms(environment(tmp_path, "flower", script), rounds=2, warm_up=1)
    with pytest.raises(dfl.InputError, match=complaint):
        run.answer(run.Setup("flower", 2, 1), "B", terms)


def test_our_rounds_are_timed_by_the_stopwatch(tmp_path: Path) -> None:
    text = run.answer(run.Setup("dfl", 1, 1), "B", run.Terms(tmp_path, rounds=3, warm_up=1))
    assert len(text["seconds"]) == 3
    assert text["version"] == dfl.__version__
    assert text["ranks"] == 1
    assert all(seconds > 0 for seconds in text["seconds"])


def test_two_ranks_need_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(dfl.InputError, match="mpirun"):
        run.check(run.Terms(tmp_path, 1, 1), ["dfl"])


def test_set_ups_use_at_most_two_cores() -> None:
    assert len(set(run.SETUPS)) == len(run.SETUPS)
    assert {setup.system for setup in run.SETUPS} == {"dfl", *install.BASELINES}
    assert all(setup.processes * setup.threads <= 2 for setup in run.SETUPS)


@pytest.mark.skipif(
    "DFL_BASELINES" not in os.environ, reason="DFL_BASELINES names no folder of installed baselines"
)
@pytest.mark.parametrize("baseline", install.BASELINES)
def test_the_baselines_themselves_train(baseline: str) -> None:
    terms = run.Terms(Path(os.environ["DFL_BASELINES"]), rounds=2, warm_up=1)
    run.check(terms, [baseline])
    for setup in (setup for setup in run.SETUPS if setup.system == baseline):
        text = run.answer(setup, "B", terms)
        assert text["losses"][1] < text["losses"][0]
        assert text["peers"] == WORK["B"].peers
