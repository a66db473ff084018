"""The experiment on the cost of rules: its timing, and the fitted powers."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dfl.robust.aggregators import AGGREGATORS, Aggregate, Updates
from experiments.servers_and_robustness import robust_cost
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow


def rows_of(times: dict[str, list[float]], clients: tuple[int, ...]) -> pd.DataFrame:
    """Hand-made measurements; a rule that is not named takes a second."""
    return pd.DataFrame(
        [
            {"rule": rule, "clients": n, "seconds": times.get(rule, [1.0] * len(clients))[place]}
            for place, n in enumerate(clients)
            for rule in robust_cost.THEORY
        ]
    )


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> tuple[pd.DataFrame, str]:
    out = tmp_path_factory.mktemp("cost")
    done = run_experiment(
        "servers_and_robustness.robust_cost",
        out,
        "--clients",
        "10",
        "15",
        "30",
        "--parameters",
        "3000",
        "--repeats",
        "2",
    )
    assert done.returncode == 0, done.stderr
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.strip() == (out / "table.md").read_text().strip()
    return pd.read_csv(out / "table.csv"), done.stdout


def test_a_row_per_rule(experiment: tuple[pd.DataFrame, str]) -> None:
    table, printed = experiment
    assert table["rule"].tolist() == list(robust_cost.THEORY)
    assert (table[["ms_10", "ms_15", "ms_30"]] > 0).all().all()
    assert table["times_the_mean"][0] == 1
    assert "Finding: with 30 clients: mean" in printed


def test_every_rule_is_there() -> None:
    assert set(robust_cost.THEORY) == set(AGGREGATORS)
    assert set(robust_cost.rules(10)) == set(AGGREGATORS)


def test_rules_expect_a_fifth_of_attackers() -> None:
    updates = robust_cost.random_updates(10, 50)
    expected = AGGREGATORS["trimmed_mean"](updates, f=2).row
    assert np.array_equal(robust_cost.rules(10)["trimmed_mean"](updates).row, expected)
    assert not np.array_equal(robust_cost.rules(6)["trimmed_mean"](updates).row, expected)


def test_updates_are_like_those_of_honest_clients() -> None:
    updates = robust_cost.random_updates(20, 4000)
    assert updates.rows.shape == (20, 4000)
    assert updates.rows.dtype == np.float32
    assert updates.reference is not None
    scores = AGGREGATORS["fltrust"](updates).scores
    assert scores is not None
    assert scores.min() > 0.3  # all are used
    assert len(np.unique(updates.rows, axis=0)) == 20


def test_cached_values_of_updates_are_not_used() -> None:
    updates, seen = robust_cost.random_updates(8, 100), []

    def rule(given: Updates) -> Aggregate:
        seen.append("gram" in vars(given))
        _ = given.gram  # which updates cache
        return Aggregate(given.rows[0])

    for _ in range(3):
        assert robust_cost.seconds(rule, updates) >= 0
    assert seen == [False] * 3


def test_the_least_of_the_repeats_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([5.0] * 8 + [2.0] * 8 + [3.0] * 8 + [7.0] * 8 + [6.0] * 8 + [9.0] * 8)
    monkeypatch.setattr(robust_cost, "seconds", lambda rule, updates: next(clock))
    rows = robust_cost.measure(robust_cost.Options(clients=(10, 20), parameters=5, repeats=3))
    assert rows[rows["clients"] == 10]["seconds"].tolist() == [2.0] * 8
    assert rows[rows["clients"] == 20]["seconds"].tolist() == [6.0] * 8


def test_the_power_is_that_of_the_growth() -> None:
    clients = np.array([10, 20, 40])
    assert robust_cost.power(clients, 3e-4 * clients**2.0) == pytest.approx(2)
    assert robust_cost.power(clients, 7.0 * clients) == pytest.approx(1)
    assert robust_cost.power(clients, np.array([4.0, 4.0, 4.0])) == pytest.approx(0)


def test_the_table_compares_with_the_mean() -> None:
    table = robust_cost.tabulate(
        rows_of({"mean": [0.1, 0.2, 0.4], "krum": [0.2, 0.4, 1.6]}, (10, 20, 40))
    )
    by_rule = table.set_index("rule")
    assert by_rule.loc["krum", "ms_40"] == 1600
    assert by_rule.loc["krum", "times_the_mean"] == pytest.approx(4)
    assert by_rule.loc["mean", "power"] == pytest.approx(1)
    assert by_rule.loc["krum", "power"] == pytest.approx(1.5)
    assert by_rule.loc["krum", "power_at_the_end"] == pytest.approx(2)
    assert by_rule.loc["krum", "theory"] == 2
    assert by_rule.loc["fltrust", "theory"] == 1


def test_the_finding_is_read_off_the_table() -> None:
    table = robust_cost.tabulate(rows_of({"mean": [0.1, 0.4], "krum": [0.2, 1.6]}, (10, 40)))
    text = robust_cost.finding(table)
    assert text.startswith("with 40 clients: mean 400 ms, 1.0 times the mean, power 1.00")
    assert (
        "krum 1600 ms, 4.0 times the mean, power 1.50 (1.50 from the last but one, theory 2)"
        in text
    )


def test_the_figure_has_a_line_per_rule() -> None:
    figure = robust_cost.draw(robust_cost.tabulate(rows_of({"mean": [0.1, 0.4]}, (10, 40))))
    plain, relative = figure.axes
    assert len(plain.lines) == len(relative.lines) == len(robust_cost.THEORY)
    assert list(np.asarray(relative.lines[0].get_ydata())) == [1, 1]
    assert [line.get_linestyle() for line in plain.lines].count("--") == 3


def test_bad_input_is_refused_in_one_line(tmp_path: Path) -> None:
    done = run_experiment(
        "servers_and_robustness.robust_cost",
        tmp_path,
        "--clients",
        "2",
        "3",
        "--parameters",
        "10",
        "--repeats",
        "1",
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "robust_cost: --aggregator krum: f=0 needs more than 2 messages, there are 2"
    ]
