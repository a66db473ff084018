"""The comparison with the limits of the machine: both sides do the same work."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from dfl.comm.mpi import World
from dfl.config import Run
from dfl.core.layout import Layout
from dfl.core.registry import choose
from dfl.models.zoo import MODELS
from dfl.simulation.prepare import prepare
from experiments.speed import benchmark_limits, codec, floors, limits, plain_loops, stopwatch
from experiments.speed.baselines import job
from tests.support.launched import run_experiment
from tests.support.mpirun import mpirun

pytestmark = pytest.mark.slow

Row = limits.Row


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> tuple[pd.DataFrame, str]:
    """The experiment on what is quickly measured, once: its table and its output."""
    out = tmp_path_factory.mktemp("limits")
    few = ["--repeats", "1", "--rounds", "1", "--ranks", "2", "--sizes", "4000", "200000"]
    done = run_experiment(
        "speed.benchmark_limits", out, "--questions", "training", "exchange", "start", *few
    )
    assert done.returncode == 0, done.stderr
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.strip() == (out / "table.md").read_text().strip()
    return pd.read_csv(out / "table.csv"), done.stdout


def test_every_question_is_answered(experiment: tuple[pd.DataFrame, str]) -> None:
    table, _ = experiment
    assert table["question"].tolist() == ["training", *["exchange"] * 4, "start"]
    assert table["case"].tolist()[1:] == [
        "1 peer a rank, 4 kB",
        "1 peer a rank, 200 kB",
        "8 peers a rank, 4 kB",
        "8 peers a rank, 200 kB",
        "2 ranks",
    ]
    assert (table["limit"] > 0).all()
    assert table["ratio"].to_numpy() == pytest.approx(
        (table["ours"] / table["limit"]).to_numpy(), rel=1e-4
    )


def test_no_time_is_below_its_limit(experiment: tuple[pd.DataFrame, str]) -> None:
    """A round cannot be faster than its operations, a share hardly than MPI, nor dfl than its
    imports; one round of each was timed, beside other tests.
    """
    ratios = experiment[0].groupby("question")["ratio"].min()
    assert (ratios[["training", "exchange", "start"]] > 0.5).all()


def test_bars_stand_where_they_were_set(experiment: tuple[pd.DataFrame, str]) -> None:
    bars = experiment[0].set_index("case")["at_most"]
    assert bars["work A, 2 ranks"] == pytest.approx(1 / 0.7, rel=1e-4)
    assert bars["1 peer a rank, 200 kB"] == bars["8 peers a rank, 200 kB"] == 1.3
    assert np.isnan(bars["1 peer a rank, 4 kB"])
    assert np.isnan(bars["2 ranks"])


def test_the_finding_counts_what_keeps_its_bar() -> None:
    rows = [{"case": f"{n}", "ratio": n, "at_most": 1.3} for n in (1.1, 1.4, 1.29)]
    free: list[dict[Any, Any]] = [{"case": "small", "ratio": 9.0, "at_most": float("nan")}]
    text = benchmark_limits._of_question("exchange", rows + free)
    assert text.endswith(
        "1.10 (1.1), 1.40 (1.4), 1.29 (1.29), 9.00 (small), 2 of 3 within their bounds"
    )
    assert benchmark_limits._of_question("codec", free).endswith("9.00 (small)")


def test_an_unknown_question_is_refused(tmp_path: Path) -> None:
    done = run_experiment("speed.benchmark_limits", tmp_path, "--questions", "speed")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "benchmark_limits: --questions are training, models, exchange, codec, strong scaling"
    )
    assert done.stderr.count("\n") == 1


def test_operations_of_a_round() -> None:
    """2NN: 784 x 200 + 200 x 200 + 200 x 10 weights and 410 biases."""
    assert limits.operations("A") == 6 * 199_210 * 16 * 600
    with pytest.raises(ValueError, match="softmax"):
        limits.operations("C")


def test_the_floor_is_operations_by_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    text = {
        "experiments.speed.floors": {"flops": 2e11},
        "experiments.speed.stopwatch": {"seconds": [0.5, 0.1, 0.2]},
    }
    monkeypatch.setattr(limits, "launch", lambda ranks, *arguments: text[arguments[1]])
    (row,) = limits.training(limits.Options(repeats=2))
    assert row["ours"] == 200
    assert row["limit"] == pytest.approx(1e3 * limits.operations("A") / 2e11)
    assert row["ratio"] == pytest.approx(row["ours"] / row["limit"])


def test_scaling_is_judged_by_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """On two cores, four peers take one second wherever they are."""
    calls: list[tuple[int, int | None]] = []

    def seconds(options: limits.Options, ranks: int, peers: int | None = None) -> float:
        calls.append((ranks, peers))
        return (peers or 16) / 4 / min(ranks, 2)

    monkeypatch.setattr(limits, "_round", seconds)
    monkeypatch.setattr(limits, "cores", lambda: 2)
    options = limits.Options(ranks=(1, 2, 16))
    strong, weak = limits.strong(options), limits.weak(options)
    assert [row["limit"] for row in strong] == [4000, 2000, 2000]
    assert [row["limit"] for row in weak] == [1000, 1000, 8000]
    assert [row["ratio"] for row in strong + weak] == [1] * 6
    assert calls == [(1, None), (2, None), (16, None), (1, 4), (2, 8), (16, 64)]


def test_cores_are_those_that_may_be_used() -> None:
    assert 1 <= limits.cores() <= 1024


def test_coding_is_compared_to_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "SHAPES", ((3, 4000),))
    rows = limits.coding(limits.Options(repeats=1))
    assert [row["case"] for row in rows] == [
        f"{verb} {bits} bits, 3 x 4,000" for verb in ("encode", "decode") for bits in (4, 8)
    ]
    assert all(row["unit"] == "ns/coordinate" and row["ratio"] > 0 for row in rows)
    assert [row["at_most"] * row["limit"] for row in rows] == pytest.approx([4, 4, 1, 1])
    assert len({row["limit"] for row in rows}) == 1


def test_start_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {"-m": iter([6.0, 8.0, 100.0]), "-c": iter([1.0, 2.0, 3.0])}
    monkeypatch.setattr(limits, "timed", lambda ranks, *arguments: ("", next(times[arguments[0]])))
    (row,) = limits.start(limits.Options(ranks=(4,), repeats=3))
    assert (row["case"], row["ours"], row["limit"], row["ratio"]) == ("4 ranks", 8, 2, 4)
    assert row["at_most"] is None
    times["-m"], times["-c"] = iter([6.0]), iter([1.0])
    (row,) = limits.start(limits.Options(ranks=(16,), repeats=1))
    assert row["at_most"] == 1.1


@pytest.mark.parametrize("name", plain_loops.WORKS)
def test_a_loop_of_torch_trains_the_same_model(name: str) -> None:
    """Same parameters up to names and order, and same outputs where those are copied."""
    work = plain_loops.WORKS[name]
    data = stopwatch.examples(work.job.shape, 4, job.CLASSES)
    mine = choose("--model", work.model, MODELS)(work.job.shape, job.CLASSES)
    theirs = work.network(work.job)
    own, other = list(mine.parameters()), list(theirs.parameters())
    assert [each.shape for each in own] == [each.shape for each in other]
    with torch.no_grad():
        for one, two in zip(own, other, strict=True):
            one.copy_(two)
        inputs = torch.from_numpy(data.train_inputs)
        torch.testing.assert_close(mine(inputs), theirs(inputs), rtol=1e-4, atol=1e-5)


def test_models_take_turns_with_a_loop_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def ours(work: plain_loops.Work, rounds: int) -> list[float]:
        calls.append(("ours", work.model, rounds))
        return [3.0, 1.0]

    def theirs(work: plain_loops.Work, rounds: int) -> list[float]:
        calls.append(("theirs", work.model, rounds))
        return [4.0, 8.0]

    monkeypatch.setattr(plain_loops, "ours", ours)
    monkeypatch.setattr(plain_loops, "theirs", theirs)
    rows = limits.models(limits.Options(repeats=2, rounds=3))
    assert [row["case"] for row in rows] == [*plain_loops.WORKS]
    assert all((row["ours"], row["limit"], row["ratio"]) == (2000, 6000, 1 / 3) for row in rows)
    assert calls[:4] == [(who, "cnn", 3) for who in ("ours", "theirs") * 2]


def test_both_sides_take_the_rounds_that_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    work = plain_loops.Work(
        plain_loops.job_of(2, 12, 5, (6, 5), (4,)), "har_lstm:layers=1,hidden=4", job.LastState, 1.0
    )
    steps = []
    plain = torch.optim.SGD.step

    def counted(self: torch.optim.SGD) -> None:
        steps.append(1)
        plain(self)

    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    assert len(plain_loops.theirs(work, 3)) == 3
    assert len(steps) == 5 * 2 * 3
    assert len(plain_loops.ours(work, 3)) == 3


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("topology", ["ring", "star", "exponential"])
def test_crossing_is_what_a_share_moves(ranks: int, topology: str) -> None:
    """The bare exchange moves the very rows that the plan of a share does."""
    setting = prepare(Run(peers=12, topology=topology, model="softmax", rounds=1), World())
    (weights,), layout = setting.network.schedule.weights, Layout(12, ranks)
    found = [floors.crossing(weights, layout, rank) for rank in range(ranks)]
    for rank, (sends, receives) in enumerate(found):
        assert rank not in sends
        assert sends == {other: into[rank] for other, (_, into) in enumerate(found) if rank in into}
        dense = weights.toarray() != 0
        for other, rows in receives.items():
            block = dense[np.ix_(layout.hosted(rank), layout.hosted(other))]
            assert rows == block.any(axis=0).sum() > 0


def test_floors_under_mpirun() -> None:
    done = mpirun(
        2,
        "-m",
        "experiments.speed.floors",
        "exchange",
        "--sizes",
        "400",
        "--hosted",
        "1",
        "3",
        "--repeats",
        "5",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(one["hosted"], one["bytes"]) for one in found] == [(1, 400), (3, 400)]
    assert all(0 < one["bare"] < 1 and 0 < one["share"] < 1 for one in found)


def test_every_question_has_a_description_and_a_default() -> None:
    assert list(limits.QUESTIONS) == list(benchmark_limits.WHAT) == list(limits.Options().questions)


def test_cases_of_the_exchange_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        {"hosted": hosted, "bytes": size, "share": 3e-3, "bare": 2e-3}
        for hosted in (1, 8)
        for size in (10_000, 10**6)
    ]
    calls: list[str] = []

    def launched(ranks: int, *arguments: str) -> dict[str, Any]:
        calls.extend([str(ranks), *arguments])
        return {"found": found}

    monkeypatch.setattr(limits, "launch", launched)
    rows = limits.exchange(limits.Options(sizes=(10_000, 10**6)))
    assert [row["case"] for row in rows] == [
        "1 peer a rank, 10 kB",
        "1 peer a rank, 1 MB",
        "8 peers a rank, 10 kB",
        "8 peers a rank, 1 MB",
    ]
    assert all((row["ours"], row["limit"], row["ratio"]) == (3, 2, 1.5) for row in rows)
    assert [row["at_most"] for row in rows] == [None, 1.3] * 2
    assert calls == [
        "2",
        "-m",
        "experiments.speed.floors",
        "exchange",
        "--sizes",
        "10000",
        "1000000",
    ]


def test_buffers_hold_what_is_sent() -> None:
    buffer, (counts, places) = floors._buffer({1: 2, 3: 1}, 100)
    assert buffer.tobytes() == b"\1" * 300
    assert (counts, places) == ([200, 100], [0, 200])
    empty, (counts, places) = floors._buffer({}, 100)
    assert (len(empty), counts, places) == (0, [], [])


BARE = """
import numpy as np
from dfl.comm.mpi import connect
from experiments.speed.floors import _bare
world = connect()
counts = {other: 1 for other in range(world.size) if other != world.rank}
send = _bare(world, counts, counts, 5)
buffers = [cell.cell_contents for cell in send.__closure__ if isinstance(cell.cell_contents, list)]
for one in buffers:
    one[0][:] = world.rank
send()
received = {int(n) for one in buffers for n in one[0]}
assert received == set(range(world.size)), received
"""


def test_the_bare_exchange_moves_bytes_and_ranks_meet() -> None:
    done = mpirun(3, "-c", BARE + limits.MEET)
    assert done.returncode == 0, done.stderr


def test_peak_is_that_of_a_product(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floors, "SIDE", 128)
    threads = torch.get_num_threads()
    floors.peak(repeats=3)
    torch.set_num_threads(threads)
    assert 1e8 < json.loads(capsys.readouterr().out)["flops"] < 1e13


def test_works_take_turns() -> None:
    seen: list[str] = []
    times = floors._in_turn(World(), [lambda: seen.append("a"), lambda: seen.append("b")], 3)
    assert times.shape == (3, 2)
    assert (times >= 0).all()
    assert seen == ["a", "b"] * 5


def test_the_figure_has_a_bar_per_case() -> None:
    rows: list[Row] = [
        {"question": name, "case": f"{name} {k}", "unit": "ms", "ours": 2.0 * k, "limit": 1.0,
         "ratio": 2.0 * k, "at_most": 1.3 if name == "exchange" else None}
        for name in benchmark_limits.WHAT for k in (0.4, 1, 2)
    ]  # fmt: skip
    figure = benchmark_limits.draw(pd.DataFrame(rows).astype({"at_most": float}))
    (axes,) = figure.axes
    assert len(axes.patches) == len(rows)
    assert [text.get_text() for text in axes.get_yticklabels()] == [row["case"] for row in rows]
    bars: list[Any] = list(axes.patches)
    ends = sorted(bar.get_x() + bar.get_width() for bar in bars)
    assert ends == pytest.approx(sorted(row["ratio"] for row in rows))
