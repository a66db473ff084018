"""`--resume`: a run continues with its own settings; another run is refused."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dfl
from dfl.comm.mpi import connect
from dfl.core.files import Lock
from dfl.store import checkpoint_files
from dfl.store.resume import FREE
from dfl.store.run_directory import claim
from tests.conftest import Command
from tests.support.small_run import FLAGS, small
from tests.support.stopping import crash, record, rewrite, same


@pytest.fixture
def cut(dfl_run: Command) -> Path:
    """The folder of a run that crashed after its fourth round."""
    crash(small(out=Path("cut"), bits=4), 4)
    return Path("cut")


@pytest.fixture
def whole(dfl_run: Command) -> Path:
    list(dfl.simulate(small(out=Path("whole"), bits=4)))
    return Path("whole")


def test_resume_needs_no_other_flag(dfl_run: Command, cut: Path, whole: Path) -> None:
    done = dfl_run("--resume", str(cut))
    assert done.code == 0, done
    assert f"resumed    after round 4, from {cut}/checkpoint/0000000004.json" in done.out
    same(cut, whole)
    assert record(cut)["run"] == record(whole)["run"] | {"out": "cut"}


def test_a_finished_run_is_reported_as_finished(dfl_run: Command, whole: Path) -> None:
    before = {file: file.read_bytes() for file in dfl_run.files() if file.is_file()}
    done = dfl_run("--resume", str(whole))
    assert (done.code, done.out, done.err) == (0, "dfl: whole is finished after 6 rounds\n", "")
    assert {file: file.read_bytes() for file in dfl_run.files() if file.is_file()} == before
    assert "--resume whole has done 6 rounds, more than --rounds 5" in dfl_run.refused(
        "--resume=whole", "--rounds=5"
    )


def test_a_finished_run_with_another_model_file_is_refused(dfl_run: Command) -> None:
    text = "from torch.nn import *\ndef make(shape, classes):\n    return Sequential(Flatten(), "
    Path("net.py").write_text(f"{text}Linear(64, classes))\n")
    list(dfl.simulate(small(out=Path("run"), model="net.py:make")))
    assert "run is finished after 6 rounds" in dfl_run("--resume=run").out
    Path("net.py").write_text(f"{text}Linear(64, classes, bias=False))\n")
    line = "--resume run: the file of --model net.py:make is not the one that the run began with"
    assert line in dfl_run.refused("--resume=run")
    Path("net.py").unlink()
    assert "run is finished after 6 rounds" in dfl_run("--resume=run").out


def test_a_finished_run_without_a_checkpoint_is_refused(dfl_run: Command) -> None:
    list(dfl.simulate(small(out=Path("run"), checkpoint_every=None)))
    before = {file: file.read_bytes() for file in dfl_run.files() if file.is_file()}
    assert "run is finished after 6 rounds" in dfl_run("--resume=run").out
    assert "--resume run is finished and has no checkpoint" in dfl_run.refused(
        "--resume=run", "--rounds=9"
    )
    after = {file: file.read_bytes() for file in dfl_run.files() if file.is_file()}
    assert {file: after[file] for file in before} == before


def test_rounds_and_intervals_may_change(dfl_run: Command, cut: Path) -> None:
    done = dfl_run("--resume", str(cut), "--rounds=9", "--eval-every=3", "--checkpoint-every=5")
    assert done.code == 0, done
    assert dfl.load(cut).rows["round"].tolist() == [0, 2, 6, 9]
    assert (record(cut)["run"]["rounds"], record(cut)["run"]["eval_every"]) == (9, 3)
    assert checkpoint_files.find(cut).round == 9  # type: ignore[union-attr]
    list(dfl.simulate(small(bits=4, rounds=9, out=Path("nine"))))
    assert (cut / "state.safetensors").read_bytes() == Path("nine/state.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lr=0.1"], "that run has --lr 0.05, not 0.1"),
        (["--bits=8"], "that run has --compressor quantize:bits=4, not quantize:bits=8"),
        (["--peers=5"], "that run has --peers 4, not 5"),
        (["--topology=complete"], "that run has --topology ring, not complete"),
        (["--rounds=3"], "has done 4 rounds, more than --rounds 3"),
        (["--out=elsewhere"], "--resume cut writes to that folder: leave --out elsewhere out"),
        (["--rounds=none"], "--rounds must be a whole number"),
    ],
)
def test_other_settings_may_not_change(
    dfl_run: Command, cut: Path, flags: list[str], message: str
) -> None:
    assert message in dfl_run.refused(f"--resume={cut}", *flags)
    assert record(cut)["ending"].startswith("Cut")


def test_settings_may_be_repeated(dfl_run: Command, cut: Path, whole: Path) -> None:
    assert (
        dfl_run(f"--resume={cut}", "--compressor=quantize:bits=4", "--data-dir=.", *FLAGS).code == 0
    )
    same(cut, whole)


def test_a_config_file_starts_a_run_or_resumes_it(dfl_run: Command, whole: Path) -> None:
    lines = ["bits = 4", *(flag[2:].replace("-", "_").replace("=", " = ") for flag in FLAGS)]
    Path("cell.toml").write_text("\n".join(lines).replace("softmax", '"softmax"') + "\n")
    flags = ("--config=cell.toml", "--resume=cell")
    assert dfl_run(*flags).code == 0
    same(Path("cell"), whole)
    assert "finished after 6 rounds" in dfl_run(*flags).out
    Path("cell.toml").write_text(Path("cell.toml").read_text() + "seed = 3\n")
    assert "that run has --seed 0, not 3" in dfl_run.refused(*flags)


def test_a_folder_without_a_run_is_refused(dfl_run: Command) -> None:
    assert (
        dfl_run.refused("--resume=nowhere")
        == "--resume nowhere holds no run: there is no run.json in it"
    )
    assert "holds no run" in dfl_run.refused("--resume=nowhere", "--rounds=3")
    claim(Path("broken"))
    for page in ("{", "{}", "[]", "null", '{"run": 3}', '{"run": {}}'):
        Path("broken/run.json").write_text(page)
        line = dfl_run.refused("--resume=broken")
        assert "run.json" in line
        assert "no checkpoint" in line


def test_a_run_that_reached_its_goal_is_finished(dfl_run: Command) -> None:
    assert (
        dfl_run(*FLAGS[:1], *FLAGS[2:], "--rounds=40", "--until=train_loss=9", "--out=early").code
        == 0
    )
    assert dfl_run("--resume=early").out == "dfl: early is finished after 2 rounds\n"
    assert "early has done 2 rounds, more than --rounds 1" in dfl_run.refused(
        "--resume=early", "--rounds=1"
    )


def test_a_run_that_another_program_writes_is_refused(dfl_run: Command, cut: Path) -> None:
    held = Lock(cut)
    assert "cut is being written to by another run" in dfl_run.refused(f"--resume={cut}")
    held.release()
    assert dfl_run(f"--resume={cut}").code == 0


def test_out_refuses_the_folder_of_another_run(dfl_run: Command, cut: Path) -> None:
    assert "give another folder, or --resume cut" in dfl_run.refused(f"--out={cut}", *FLAGS)


def test_a_damaged_checkpoint_gives_a_warning(dfl_run: Command, cut: Path, whole: Path) -> None:
    (cut / "checkpoint/0000000004.safetensors").write_bytes(b"x")
    done = dfl_run(f"--resume={cut}")
    assert "resumed    after round 2" in done.out
    assert (
        "warning: cut/checkpoint/0000000004.json is damaged (ValueError: the checksum of"
        in done.out
    )
    same(cut, whole)


def test_only_damaged_checkpoints_are_refused(dfl_run: Command, cut: Path) -> None:
    for page in (cut / "checkpoint").glob("*.json"):
        page.write_text(page.read_text()[:-30])
    assert "no other checkpoint is whole" in dfl_run.refused(f"--resume={cut}")


def test_the_checkpoint_of_another_run_is_refused(dfl_run: Command, cut: Path) -> None:
    crash(small(out=Path("other"), bits=4, seed=1), 4)
    for file in Path("other/checkpoint").iterdir():
        (cut / "checkpoint" / file.name).write_bytes(file.read_bytes())
    assert "0000000004.json is a checkpoint of another run than cut/run.json" in dfl_run.refused(
        f"--resume={cut}"
    )


def test_rounds_that_change_earlier_learning_rates_are_refused(dfl_run: Command) -> None:
    crash(small(out=Path("cut"), lr_schedule="cosine"), 4)
    line = dfl_run.refused("--resume=cut", "--rounds=9")
    assert "learning rates of the 4 rounds done (--lr-schedule cosine)" in line
    assert dfl_run("--resume=cut").code == 0


def test_a_callers_own_model_is_resumed_from_python_only(dfl_run: Command, cut: Path) -> None:
    rewrite(cut, run=record(cut)["run"] | {"model": "own"})
    assert "--model own" in dfl_run.refused(f"--resume={cut}")


def test_resumed_refuses_other_settings(cut: Path) -> None:
    with pytest.raises(dfl.InputError, match="cut: seed cannot change "):
        dfl.resumed(cut, seed=1)
    with pytest.raises(dfl.InputError, match=r"cut: unknown setting 'round' \(did you mean rounds"):
        dfl.resumed(cut, round=9)
    for read in (dfl.resumed, dfl.load):
        with pytest.raises(dfl.InputError, match=r"needs the folder of a run, not 3$"):
            read(3)  # type: ignore[arg-type]
        with pytest.raises(dfl.InputError, match=r"run\.json"):
            read("a\0b")
    assert all(f"`{name}`" in str(dfl.resumed.__doc__) for name in FREE)
    run = dfl.resumed(cut, rounds=9)
    assert (run.rounds, run.out, run.resume) == (9, cut, cut)
    with pytest.raises(dfl.InputError, match=r"that run has --lr 0.05, not 0.1"):
        list(dfl.simulate(replace(run, lr=0.1)))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_run_after_its_round(
    dfl_run: Command, whole: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    from dfl.algorithms.gossip.qdfedavgm import QDFedAvgM

    known, before = QDFedAvgM.round, signal.getsignal(number)

    def signalled(self: QDFedAvgM, state: Any, task: Any, net: Any) -> Any:
        if net.t == 2:
            os.kill(os.getpid(), number)
        return known(self, state, task, net)

    monkeypatch.setattr(QDFedAvgM, "round", signalled)
    done = dfl_run("--bits=4", "--out=stopped", *FLAGS[:-1])
    line = f"dfl: stopped by {number.name} after round 3 of 6: go on with --resume stopped\n"
    assert (done.code, done.err) == (75, line)
    assert record(Path("stopped"))["exit"] == 75
    assert checkpoint_files.find(Path("stopped")).round == 3  # type: ignore[union-attr]
    assert signal.getsignal(number) == before
    monkeypatch.setattr(QDFedAvgM, "round", known)
    assert dfl_run("--resume=stopped").code == 0
    same(Path("stopped"), whole)
    assert connect().stop_signal == 0


def test_a_signal_ends_a_run_without_a_folder() -> None:
    world = connect()
    try:
        world.stop_signal = signal.SIGTERM
        with pytest.raises(dfl.Suspended, match=r"after round 1 of 6: .* no folder"):
            list(dfl.simulate(small()))
    finally:
        world.stop_signal = 0


def test_resume_is_in_the_help(dfl_run: Command) -> None:
    text = dfl_run("--help").out
    assert re.search(r"--resume PATH\s+Directory of a run to resume", text)
    assert "--checkpoint-every" in text


def test_bits_may_be_repeated_for_any_algorithm(dfl_run: Command) -> None:
    crash(small(out=Path("cut"), bits=4, algorithm="choco"), 4)
    done = dfl_run("--resume=cut", "--bits=4")
    assert done.code == 0, done
    assert record(Path("cut"))["run"]["algorithm"] == "choco"


def test_bits_are_refused_for_a_run_without_them(dfl_run: Command) -> None:
    crash(small(out=Path("cut")), 4)
    line = dfl_run.refused("--resume=cut", "--bits=4")
    assert "that run has --algorithm dfedavgm, not qdfedavgm" in line
