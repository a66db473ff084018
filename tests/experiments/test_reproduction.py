"""The page of published numbers: its rule, its data, and that it is up to date."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import reproduction
from experiments.inference import coverage
from experiments.personal_layers import lg_fair, lg_rotated, lg_table1
from experiments.reproduction import Measured, Number, numbers, ours, remark, text, verdict
from experiments.servers_and_robustness import fedavg_mcmahan2017

ONE = Number(
    source="A", table="T", row="r", quantity="q", unit="%", value="98.0", std="", runs="",
    relation="=", better="higher", tolerance="", confidence="V-src", results="f/table.csv",
    select="method=a", minus="", column="x", spread="x_std", seeds="4", setting="equal", note="",
)  # fmt: skip


def test_the_page_is_that_of_the_tables() -> None:
    assert reproduction.PAGE.read_text() == text(numbers()), "python -m experiments.reproduction"


@pytest.mark.parametrize(
    ("changes", "value", "expected"),
    [
        ({}, 98.15, "reproduced"),
        ({}, 97.85, "reproduced"),
        ({}, 98.25, "exceeded"),
        ({}, 97.75, "not reproduced"),
        ({"better": "lower"}, 98.25, "not reproduced"),
        ({"better": ""}, 98.25, "not reproduced"),
        ({"tolerance": "0.5"}, 97.55, "reproduced"),
        ({"tolerance": "1%"}, 97.05, "reproduced"),
        ({"tolerance": "1%"}, 96.95, "not reproduced"),
        ({"setting": "fewer rounds"}, 98.0, "other setting, within"),
        ({"setting": "fewer rounds"}, 99.0, "other setting, better"),
        ({"setting": "fewer rounds"}, 97.0, "other setting, worse"),
        ({"relation": "<="}, 10.0, "reproduced"),
        ({"relation": "<="}, 98.3, "not reproduced"),
        ({"relation": ">="}, 99.0, "reproduced"),
        ({"relation": ">="}, 97.0, "not reproduced"),
        ({"confidence": "mem"}, 98.0, "from memory: not compared"),
        ({}, math.nan, "not reproduced"),
        ({"better": "lower"}, math.nan, "not reproduced"),
        ({"better": "lower", "setting": "fewer rounds"}, math.nan, "other setting, worse"),
    ],
)
def test_the_verdict_is_that_of_the_rule(
    changes: dict[str, str], value: float, expected: str
) -> None:
    assert verdict(replace(ONE, **changes), Measured(value, 0.1, 4)) == expected


def test_a_number_without_ours_is_not_run() -> None:
    assert verdict(replace(ONE, results=""), None) == "not run"


def test_a_number_with_a_std_in_its_table_has_an_error() -> None:
    for one in numbers():
        if one.results and f"{one.column}_std" in reproduction.table(one.results):
            assert one.spread == f"{one.column}_std", one


def test_what_is_not_reproduced_comes_before_the_tables() -> None:
    page = text(numbers())
    listed = page.partition("## Not reproduced")[2].partition("## By table")[0]
    failed = [one for one in numbers() if verdict(one, ours(one)) == "not reproduced"]
    assert listed.count("\n- ") == len(failed) > 0
    assert all(f"{one.table}, {one.row}, {one.quantity}: " in listed for one in failed)
    assert page.index("## By table") < page.index("## Liang et al. 2020: Table 1")


def test_the_errors_of_both_count() -> None:
    found = Measured(98.0, 0.3, 4)
    assert reproduction.error_of_difference(ONE, found) == pytest.approx(0.3)
    both = replace(ONE, std="0.4", runs="1")
    assert reproduction.error_of_difference(both, found) == pytest.approx(0.5)
    assert reproduction.error_of_difference(replace(ONE, runs="4"), found) == pytest.approx(
        0.3 * math.sqrt(2)
    )
    single = Measured(98.0, seeds=1)  # whose std is theirs
    assert reproduction.error_of_difference(both, single) == pytest.approx(0.4 * math.sqrt(2))
    assert reproduction.error_of_difference(both, Measured(98.0, seeds=4)) == 0
    assert reproduction.allowed(ONE, Measured(98.0)) == pytest.approx(0.05)  # the digit printed


@pytest.mark.parametrize(
    ("value", "half"), [("98.15", 0.005), ("725", 0.5), ("5.05e10", 5e7), ("-0.005", 0.0005)]
)
def test_half_a_unit_of_the_last_digit(value: str, half: float) -> None:
    assert reproduction.half_digit(value) == pytest.approx(half)


def test_every_number_stands_once_and_is_compared_or_says_why_not() -> None:
    published = numbers()
    keys = [(one.source, one.table, one.row, one.quantity) for one in published]
    assert len(set(keys)) == len(keys) > 250
    for one in published:
        assert one.confidence in reproduction.MARKS, one
        assert one.confidence == "mem" or bool(one.results) == bool(one.setting), one
        assert one.results or one.note or one.confidence == "mem", one
        assert (ours(one) is None) == (not one.results)


def test_ours_is_read_from_seeds_and_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    (folder / "table.csv").write_text("method,x,x_std,x_se,l,h\na,3,0.4,0.1,2,4\nb,1,0.3,,,\n")
    (folder / "seeds.csv").write_text("method,seed,x\na,0,1\na,1,3\nb,0,9\n")
    monkeypatch.setattr(reproduction, "RESULTS", tmp_path)
    reproduction.table.cache_clear()
    for changes, expected in (
        ({}, (3.0, 0.2, 4)),
        ({"spread": "x_se"}, (3.0, 0.1, 4)),
        ({"spread": "l..h", "seeds": "2"}, (3.0, 1 / 12.7062, 2)),
        ({"minus": "method=b"}, (2.0, 0.25, 4)),
        ({"results": "f/seeds.csv"}, (2.0, 1.0, 2)),
    ):
        found = ours(replace(ONE, **changes))
        assert found is not None
        assert (found.value, found.error, found.seeds) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ValueError, match=r"no row of f/table\.csv is method=c"):
        ours(replace(ONE, select="method=c"))
    reproduction.table.cache_clear()


def test_a_note_is_what_differs_and_why() -> None:
    assert remark(ONE) == ""
    assert remark(replace(ONE, setting="fewer rounds", note="by hand")) == "fewer rounds; by hand"
    assert remark(replace(ONE, setting="an inequality")) == "an inequality"


def of_paper(source: str, table: str) -> dict[tuple[str, str], float]:
    """The published numbers of a table, by row and quantity."""
    return {
        (one.row, one.quantity): float(one.value)
        for one in numbers()
        if (one.source, one.table) == (source, table)
    }


def test_experiments_have_the_same_published_numbers() -> None:
    """Those that stand in an experiment, beside its own figures, are those of reproduction.csv."""
    table1 = of_paper("Liang et al. 2020", "Table 1")
    for (data, method), known in lg_table1.PUBLISHED.items():
        row = f"{ {'mnist': 'MNIST', 'cifar10': 'CIFAR-10'}[data] }, {lg_table1.NAMES[method]}"
        quantities = ("local test", "new test", "parameters sent")
        for quantity, value in zip(quantities, known, strict=True):
            assert table1.get((row, quantity), 0.0) == value, (row, quantity)
    table3 = of_paper("Liang et al. 2020", "Table 3")
    for (method, c), figures in lg_rotated.PUBLISHED.items():
        name = lg_rotated.LG if method == lg_rotated.BOTH else method
        rows = [f"{data}, {name}, C = {c:g}" for data in ("IID", "non-IID")]
        cells = [(row, f"{kind} digits") for row in rows for kind in ("normal", "rotated")]
        assert [table3[cell] for cell in cells] == list(figures), method
    table4 = of_paper("Liang et al. 2020", "Table 4")
    names = {
        "fedavg": "FedAvg",
        "lg": "LG-FedAvg without adversary",
        "lg_adv": "LG-FedAvg with adversary",
    }
    for (partition, method), printed in lg_fair.PUBLISHED.items():
        row = f"{ {'iid': 'IID', 'non_iid': 'non-IID'}[partition] }, {names[method]}"
        columns = ("accuracy", "AUC", "AUC of the adversary")
        assert [table4[row, column] for column in columns] == list(printed), row


def test_the_experiment_on_fedavg_has_the_same_published_rounds() -> None:
    tables = {name: of_paper("McMahan et al. 2017", name) for name in ("Table 1", "Table 4")}
    for case in fedavg_mcmahan2017.CASES.values():
        model, data, batch, epochs, *_ = case.title.split(", ")
        batch, epochs = batch.replace("=", " = "), epochs.replace("=", " = ")
        goal = f"rounds to {case.target:.0%}".replace("%", " %")
        if case.source == fedavg_mcmahan2017.MEMORY:
            row, table = f"{model}, {data}, {epochs}, {batch}", tables["Table 4"]
        else:
            row, table = f"{model}, {data}, {batch}, {epochs}, C = 0.1", tables["Table 1"]
        assert table[row, goal] == case.published, case.title


def test_the_experiment_on_coverage_has_the_same_numbers() -> None:
    found = of_paper("Duan, Ning, Chen 2022", "an independent computation of its estimators")
    quantities = ("bias of the first coefficient", "relative efficiency", "coverage")
    for study, estimators in coverage.INDEPENDENT.items():
        for name, known in estimators.items():
            for quantity, value in zip(quantities, known, strict=True):
                own = found.get((f"{study}, {name}", quantity), 1.0)  # of the pooled one by itself
                assert own == value, (study, name, quantity)
