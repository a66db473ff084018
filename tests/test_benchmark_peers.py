"""Does the page that measures dfl beside its rivals read, compare and show what was measured?"""

import ast
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import dfl
from experiments import benchmark_peers as peers
from experiments.rivals import install, job, run
from experiments.stopwatch import WORK, examples

ROOT = Path(__file__).parents[1]
DRIVERS = [ROOT / "experiments/rivals" / f"drive_{rival}.py" for rival in install.RIVALS]
THEIRS = [*DRIVERS, ROOT / "experiments/rivals/client_flower.py", ROOT / "experiments/rivals/job.py"]
"""What runs in the environments of the rivals."""
JOB = job.Job(peers=3, examples=20, features=4, hidden=(5,), batch_size=10, rounds=2, warm_up=1, processes=1, threads=1)
NUMBERS = {"peers": 3, "examples": 20, "features": 4, "batch-size": 10, "rounds": 2, "warm-up": 1}
WORDS = [f"--{name}={number}" for name, number in {**NUMBERS, "processes": 1, "threads": 1}.items()]
STUB = """#!/bin/sh
echo "a line that a rival prints"
echo "{\\"version\\": \\"$PYTHONPATH$OMP_NUM_THREADS\\", \\"words\\": \\"$*\\", \\"seconds\\": [0.5, 0.25]}"
echo "another"
"""
MISSING = """#!/bin/sh
echo "first line" >&2
echo "No module named rivals" >&2
exit 1
"""


def environment(envs: Path, rival: str, script: str = STUB) -> Path:
    """An environment that looks installed, whose python is a script of ours."""
    python = install.python(envs, rival)
    python.parent.mkdir(parents=True)
    python.write_text(script)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    (envs / rival / "installed.txt").write_text("\n".join([*install.RIVALS[rival], *install.COMMON]) + "\n")
    return envs


def rounds(work: str, setup: run.Setup, *launches: list[float]) -> list[dict[str, object]]:
    labels = {
        "work": work, "system": setup.system, "processes": setup.processes, "threads": setup.threads,
        "style": setup.style, "version": "1.0",
    }  # fmt: skip
    return [
        {**labels, "repetition": number, "round": t, "seconds": seconds}
        for number, launch in enumerate(launches)
        for t, seconds in enumerate(launch)
    ]


@pytest.fixture
def measured() -> pd.DataFrame:
    """Rounds of two works: on A dfl has two set-ups and pfl two; gossipy is on both."""
    return pd.DataFrame(
        [
            *rounds("A", run.Setup("dfl", 2, 1), [0.1, 0.1, 0.1], [0.1, 0.2, 0.1]),
            *rounds("A", run.Setup("dfl", 1, 1), [0.3, 0.3, 0.3], [0.3, 0.3, 0.3]),
            *rounds("A", run.Setup("pfl", 1, 1), [0.5, 0.6, 0.5], [0.5, 0.5, 0.5]),
            *rounds("A", run.Setup("pfl", 2, 1), [0.2, 0.2, 0.2], [0.3, 0.3, 0.3]),
            *rounds("A", run.Setup("gossipy", 1, 1), [0.4, 0.4, 0.4], [0.4, 0.4, 0.4]),
            *rounds("C", run.Setup("dfl", 1, 1), [0.02, 0.02, 0.02], [0.02, 0.02, 0.02]),
            *rounds("C", run.Setup("gossipy", 1, 1), [2.0, 2.0, 2.0], [1.0, 1.0, 1.0]),
        ]
    )


# What runs elsewhere


@pytest.mark.parametrize("file", THEIRS, ids=lambda file: file.name)
def test_what_runs_elsewhere_stands_alone(file: Path) -> None:
    tree = ast.parse(file.read_text())
    compile(tree, str(file), "exec")
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    roots = {name.partition(".")[0] for name in plain | {node.module or "" for node in froms if not node.level}}
    assert not roots & {"dfl", "experiments", "topologies"}
    near = {node.module or alias.name for node in froms if node.level for alias in node.names}
    assert near <= {"job", "client_flower"}


@pytest.mark.parametrize("file", DRIVERS, ids=lambda file: file.name)
def test_a_driver_says_which_interface_it_takes_and_answers(file: Path) -> None:
    tree = ast.parse(file.read_text())
    assert len((ast.get_docstring(tree) or "").splitlines()) >= 5
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert {"jobs.read", "jobs.tell", "jobs.loss", "torch.set_num_threads"} <= calls


def test_nothing_of_ours_imports_a_driver() -> None:
    for file in (*(ROOT / "dfl").rglob("*.py"), *(ROOT / "experiments").glob("*.py")):
        assert "rivals.drive" not in file.read_text().replace('"rivals.drive_', "")


def test_the_work_is_the_stopwatch_s() -> None:
    assert set(run.HIDDEN) == {work.model for work in WORK.values()}
    inputs, labels = job.data(JOB)
    np.testing.assert_array_equal(inputs.reshape(60, 4), examples((4,), 60).train_inputs)
    np.testing.assert_array_equal(labels.reshape(60), examples((4,), 60).train_labels)
    assert inputs.dtype == np.float32
    assert labels.shape == (3, 20)
    assert set(peers.TITLES) == set(WORK)


def test_a_command_line_becomes_a_job() -> None:
    assert job.read([*WORDS, "--hidden", "5"]) == JOB
    assert job.read([*WORDS, "--style", "tutorial"]).style == "tutorial"
    assert job.read([*WORDS, "--hidden"]).hidden == ()
    with pytest.raises(SystemExit):
        job.read(WORDS[1:])


def test_models_begin_alike_and_have_the_stated_size() -> None:
    net, again = job.network(JOB), job.network(JOB)
    for a, b in zip(net.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert net(torch.zeros(2, 4)).shape == (2, job.CLASSES)
    for name, work in WORK.items():
        asked = job.Job(work.peers, 1, work.features, run.HIDDEN[work.model], 1, 1, 0, 1, 1)
        size = sum(weight.numel() for weight in job.network(asked).parameters())
        assert peers.TITLES[name] == f"{work.peers:,} peers, {size:,} parameters"


def test_the_loss_is_that_of_some_users_or_of_all() -> None:
    net = job.network(JOB)
    inputs, labels = (torch.from_numpy(each) for each in job.data(JOB))
    for users in (1, 3):
        by_hand = torch.nn.functional.cross_entropy(net(inputs[:users].flatten(0, 1)), labels[:users].flatten())
        assert job.loss(net, JOB, users) == pytest.approx(by_hand.item(), rel=1e-6)
    assert job.loss(net, JOB) == job.loss(net, JOB, 3)


def test_an_answer_is_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    job.tell(JOB, "numpy", [1.0, 5.0, 5.5, 5.75], (2.3, 2.2))
    said = json.loads(capsys.readouterr().out)
    assert said["seconds"] == [0.5, 0.25]
    assert said["version"] == np.__version__
    assert said["torch"] == torch.__version__
    assert (said["peers"], said["processes"], said["threads"]) == (3, 1, 1)


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
        job.tell(JOB, "numpy", ends, losses)


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
    for wanted in (*install.RIVALS.values(), install.COMMON):
        assert all("==" in requirement for requirement in wanted)
    assert set(install.COMMON) <= set((ROOT / "constraints.txt").read_text().splitlines())


def test_installing_says_what_went_wrong(tmp_path: Path) -> None:
    with pytest.raises(dfl.InputError, match=r"--only must be among pfl, gossipy, flower, not fedml"):
        install.install(envs=tmp_path, only=("fedml",))
    with pytest.raises(dfl.InputError, match=r"-c raise SystemExit\('no wheel'\): no wheel"):
        install._run(sys.executable, "-c", "raise SystemExit('no wheel')")


# The launches


def test_a_rival_is_asked_in_its_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    terms = run.Terms(environment(tmp_path, "gossipy"), rounds=2, warm_up=1)
    said = run.answer(run.Setup("gossipy", 1, 2, "tutorial"), "A", terms)
    assert said["seconds"] == [0.5, 0.25]
    assert said["version"] == "2"  # its threads, and no path of ours
    words = said["words"].split()
    assert words[:2] == ["-m", "rivals.drive_gossipy"]
    asked = job.read(words[2:])
    assert asked == job.Job(16, 600, 784, (200, 200), 50, 2, 1, 1, 2, "tutorial")


def test_several_processes_of_pfl_are_torchrun_s(tmp_path: Path) -> None:
    terms = run.Terms(environment(tmp_path, "pfl"), rounds=2, warm_up=1, prefix=("env", "A=1"))
    words = run.answer(run.Setup("pfl", 2, 1), "C", terms)["words"].split()
    assert words[:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    asked = job.read(words[7:])
    assert (asked.peers, asked.hidden, asked.processes) == (1000, (), 2)


@pytest.mark.parametrize(
    ("script", "complaint"),
    [(MISSING, "No module named rivals$"), ("#!/bin/sh\necho nothing", "did not time 2 rounds")],
)
def test_a_rival_that_fails_is_an_error(tmp_path: Path, script: str, complaint: str) -> None:
    terms = run.Terms(environment(tmp_path, "flower", script), rounds=2, warm_up=1)
    with pytest.raises(dfl.InputError, match=complaint):
        run.answer(run.Setup("flower", 2, 1), "B", terms)


def test_our_rounds_are_timed_by_the_stopwatch(tmp_path: Path) -> None:
    said = run.answer(run.Setup("dfl", 1, 1), "B", run.Terms(tmp_path, rounds=3, warm_up=1))
    assert len(said["seconds"]) == 3
    assert said["version"] == dfl.__version__
    assert said["ranks"] == 1
    assert all(0 < seconds < 60 for seconds in said["seconds"])


def test_two_ranks_need_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.rivals.run.shutil.which", lambda *_, **__: None)
    with pytest.raises(dfl.InputError, match="mpirun"):
        run.check(run.Terms(tmp_path, 1, 1), ["dfl"])


def test_set_ups_use_at_most_two_cores() -> None:
    assert len(set(run.SETUPS)) == len(run.SETUPS)
    assert {setup.system for setup in run.SETUPS} == {"dfl", *install.RIVALS}
    assert all(setup.processes * setup.threads <= 2 for setup in run.SETUPS)


# The page


def test_the_table_compares_with_our_fastest(measured: pd.DataFrame) -> None:
    table = peers.tabulate(measured)
    rows = {(row["work"], row["system"], row["processes"]): row for row in table.to_dict("records")}
    assert len(rows) == 7
    assert {key for key, row in rows.items() if row["fastest"] == "yes"} == {
        ("A", "dfl", 2), ("A", "pfl", 2), ("A", "gossipy", 1), ("C", "dfl", 1), ("C", "gossipy", 1),
    }  # fmt: skip
    assert rows["A", "dfl", 2]["ms"] == 100
    assert rows["A", "dfl", 2]["ratio"] == 1
    pfl = rows["A", "pfl", 2]
    assert (pfl["ms"], pfl["ms_q1"], pfl["ms_q3"]) == (250, 200, 300)
    assert (pfl["ratio"], pfl["ratio_min"], pfl["ratio_max"]) == (2.5, 2, 3)
    gossipy = rows["C", "gossipy", 1]
    assert (gossipy["ratio"], gossipy["ratio_min"], gossipy["ratio_max"]) == (75, 50, 100)


def test_the_finding_is_computed(measured: pd.DataFrame) -> None:
    said = peers.finding(peers.tabulate(measured), measured)
    assert said.startswith("median of 6 rounds in 2 launches")
    assert "A: dfl 100 ms a round, pfl 250 ms, 2.5 times that (2 to 3), gossipy 400 ms, 4 times that (4 to 4)" in said
    assert "C: dfl 20 ms a round, gossipy 1,500 ms, 75 times that (50 to 100)." in said
    alone = measured[measured["system"] == "dfl"]
    assert "nothing beside it" in peers.finding(peers.tabulate(alone), alone)


def test_the_figure_has_a_panel_per_work(measured: pd.DataFrame) -> None:
    table = peers.tabulate(measured)
    panels = peers.draw(table).axes
    assert [axes.get_title()[0] for axes in panels] == ["A", "C"]
    assert all(axes.get_xscale() == "log" for axes in panels)
    dots = [line for line in panels[0].lines if line.get_marker() == "o"]
    assert [float(np.asarray(dot.get_xdata()).item()) for dot in dots] == [100, 300, 500, 250, 400]
    filled = [dot.get_markerfacecolor() != "white" for dot in dots]
    assert filled == [True, False, False, True, True]
    assert [text.get_text() for text in panels[1].texts] == ["20 ms", "1,500 ms, 75 times"]


def test_a_page_from_launch_to_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setups = (run.Setup("dfl", 1, 1), run.Setup("pfl", 1, 1), run.Setup("pfl", 2, 1), run.Setup("gossipy", 1, 1))
    monkeypatch.setattr(run, "SETUPS", setups)
    envs, out = environment(tmp_path / "envs", "pfl"), tmp_path / "out"
    peers.page(peers.Options(out=out, envs=envs, works=("B",), rivals=("pfl",), rounds=2, warm_up=1, repetitions=2))
    printed = capsys.readouterr()
    table, rows = pd.read_csv(out / "table.csv"), pd.read_csv(out / "rounds.csv")
    assert list(table["system"]) == ["dfl", "pfl", "pfl"]  # no gossipy: it was not asked for
    assert len(rows) == 2 * 2 * 3
    assert table["ms"].iloc[1] == 375
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert printed.out.strip() == (out / "table.md").read_text().strip()
    assert "Finding: median of 4 rounds in 2 launches" in printed.out
    assert printed.err.count("0 B ") == 3


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--works", "D"], "--works must be among A, B, C, not D"),
        (["--rivals", "pfl", "fedml"], "--rivals must be among pfl, gossipy, flower, not pfl, fedml"),
        (["--rivals", "gossipy"], "gossipy is not installed"),
    ],
)
def test_bad_input_is_a_line_and_code_2(tmp_path: Path, words: list[str], complaint: str) -> None:
    command = [sys.executable, "-m", "experiments.benchmark_peers", "--envs", str(tmp_path), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert complaint in done.stderr
    if "installed" in complaint:
        assert f"python -m experiments.rivals.install --envs {tmp_path}" in done.stderr


@pytest.mark.skipif("DFL_RIVALS" not in os.environ, reason="DFL_RIVALS names no folder of installed rivals")
@pytest.mark.parametrize("rival", install.RIVALS)
def test_the_rivals_themselves_train(rival: str) -> None:
    terms = run.Terms(Path(os.environ["DFL_RIVALS"]), rounds=2, warm_up=1)
    run.check(terms, [rival])
    for setup in (setup for setup in run.SETUPS if setup.system == rival):
        said = run.answer(setup, "B", terms)
        assert said["losses"][1] < said["losses"][0]
        assert said["peers"] == WORK["B"].peers
