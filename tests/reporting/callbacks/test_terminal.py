"""The terminal shows lines in a pipe, a bar on a terminal, and each warning once."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

import dfl
from dfl.comm.mpi import World
from dfl.reporting.callbacks.terminal import Terminal
from dfl.reporting.text import size
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from dfl.store.callbacks import COLUMNS
from tests.reporting.callbacks.test_report import small
from tests.support.quadratic import info
from tests.support.sequences import sequences


def screen(tty: bool = False, width: int = 100) -> tuple[Terminal, io.StringIO]:
    """Return a `Terminal` that writes to a terminal or a pipe, and the text written to it."""
    text = io.StringIO()
    return Terminal(Console(file=text, force_terminal=tty, width=width, highlight=False)), text


def shown(run: dfl.Run, tty: bool = False) -> str:
    """Return what a run prints."""
    terminal, text = screen(tty)
    for _ in dfl.simulate(run, callbacks=[terminal]):
        pass
    return text.getvalue()


def dry(run: dfl.Run) -> str:
    terminal, text = screen()
    terminal.dry_run(info(prepare(run, World())))
    return text.getvalue()


@pytest.fixture
def setting() -> Prepared:
    return prepare(small(), World())


def test_a_pipe_gets_plain_lines(tmp_path: Path) -> None:
    text = shown(small(out=tmp_path / "run"))
    assert text.isascii()
    assert "\x1b" not in text
    assert "\r" not in text
    lines = text.splitlines()
    assert [line.split(",")[0] for line in lines if line.startswith("round")] == [
        "round 0/3",
        "round 2/3",
        "round 3/3",
    ]
    assert lines[-2].split() == ["files", str(tmp_path / "run")]
    assert lines[-1].split() == ["look", "at", str(tmp_path / "run/report.html")]
    for expected in (
        "4 on 1 rank",
        "4 edges, degree 2",
        "spectral gap 0.6667",
        "385 parameters",
        "12.32 kB per round",
    ):
        assert expected in text


def test_models_of_several_kinds_have_no_mean() -> None:
    kinds = small(model="mlp:hidden=6+4+mlp:hidden=8+4", share="head:1")
    assert "of mean" in shown(small())
    text = shown(kinds)
    assert "of mean" not in text
    assert "nan" not in text


def test_a_terminal_gets_a_bar() -> None:
    text = shown(small(), tty=True)
    assert "3/3" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is shown again


@pytest.mark.parametrize("width", [40, 80])
def test_a_narrow_terminal_cuts_the_figures_beside_the_bar(setting: Prepared, width: int) -> None:
    terminal, text = screen(tty=True, width=width)
    terminal.start(info(setting))
    row = {**dict.fromkeys(COLUMNS, 0.0), "round": 2, "accuracy_mean": 0.5, "accuracy_max": 1.0}
    terminal.row(dfl.Row({**row, "consensus_distance": 0.0123, "payload_bytes": 12_345_678}))
    terminal.close(None)
    line = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text.getvalue()).split("\r")[-1].rstrip("\n")
    assert re.fullmatch("round 2/3 ━.* accuracy 0.*… [0-9:-]+", line)
    assert len(line) == width


def test_bar_is_closed_by_an_error(setting: Prepared) -> None:
    terminal, text = screen(tty=True)
    terminal.start(info(setting))
    terminal.round(1)
    terminal.close(ValueError("oh"))
    assert text.getvalue().endswith("\n\x1b[?25h")
    assert "oh" not in text.getvalue()


def test_messages_that_do_not_contract_are_warned_of_once(setting: Prepared) -> None:
    terminal, text = screen()
    terminal.start(info(setting))
    row = dict.fromkeys(COLUMNS, 0.0)
    for t, error in enumerate((0.0, 0.5, 1.0, 2.0)):
        terminal.row(dfl.Row(row | {"round": t, "relative_squared_error": error}))
    assert text.getvalue().count("do not contract") == 1


def test_notes_are_printed_as_warnings() -> None:
    assert (
        shown(small(algorithm="qdfedavgm:exchange=paper")).count("\nwarning: exchange=paper") == 1
    )


def test_regression_shows_its_loss() -> None:
    terminal, text = screen()
    nothing = dict.fromkeys(COLUMNS, float("nan"))
    terminal.row(
        dfl.Row(nothing | {"round": 0, "train_loss": 0.25, "payload_bytes": 0, "seconds": 1.0})
    )
    assert text.getvalue().startswith("round 0/0, loss 0.25")


def test_text_shows_its_perplexity() -> None:
    run = dfl.Run(model="char_lstm:hidden=4", dataset=sequences(), peers=3, rounds=1)
    *_, last = dfl.simulate(run)
    (line,) = (line for line in shown(run).splitlines() if "perplexity" in line)
    assert line.split()[:3] == ["perplexity", f"{last['perplexity_mean']:.4g}", "mean,"]


def test_a_dry_run_of_few_peers_shows_their_labels() -> None:
    text = dry(small(partition="shards:per_peer=2"))
    assert "local steps per round 2" in text
    assert "peer / label" in text
    assert "memory" in text
    assert text.isascii()


def test_a_dry_run_counts_frozen_parameters_and_their_memory_once() -> None:
    def lines(model: str) -> dict[str, str]:
        run = dfl.Run(dataset=sequences(), peers=40, model=model, share="*.lora_*")
        return dict(line.split(maxsplit=1) for line in dry(run).splitlines() if " " in line)

    base = "transformer:width=384,depth=1,heads=1"
    found = lines(f"{base},lora=1")
    assert found["model"] == "1,536 parameters of float32, besides 1,781,381 frozen ones"
    assert 4 * (1_781_381 + 3 * 40 * 1536) == 7_862_804  # one row of the state, two of work
    assert "7.86 MB models" in found["memory"]
    assert "of which 1,536 are shared" in (own := lines(f"{base},lora=1,base=trained"))["model"]
    assert "frozen" not in own["model"]


def test_a_dry_run_of_many_peers_is_short() -> None:
    text = dry(small(peers=300, examples_per_peer=None, partition="dirichlet:alpha=0.5"))
    assert "training examples: peers" in text
    assert "different labels" in text
    assert len(text.splitlines()) < 30


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1234567, "1.23 MB"), (2.5e12, "2.50 TB")],
)
def test_sizes_have_decimal_units(count: float, text: str) -> None:
    assert size(count) == text
