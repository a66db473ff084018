"""Numbers of README and docs are those of the tables that they come from."""

from __future__ import annotations

import re

import pandas as pd
import pytest

from tests.support.pages import PAGES, ROOT


def tables() -> list[tuple[str, pd.DataFrame]]:
    """Markdown tables that name the file they came from: <!-- FILE.csv [where COLUMN=VALUE] -->."""
    text = "\n".join(page.read_text() for page in PAGES)
    found = re.findall(r"<!-- (\S+\.csv(?: where \w+=\w+)?) -->\n((?:\|.*\n)+)", text)
    rows = [
        (name, [[c.strip() for c in li.strip("|\n").split("|")] for li in text.splitlines()])
        for name, text in found
    ]
    return [(name, pd.DataFrame(lines[2:], columns=lines[0])) for name, lines in rows]


@pytest.mark.parametrize(("name", "table"), tables(), ids=[name for name, _ in tables()])
def test_numbers_are_those_of_their_files(name: str, table: pd.DataFrame) -> None:
    """Every row of a table is one row of the file, to the digits that it shows."""
    file, _, chosen = name.partition(" where ")
    source = pd.read_csv(ROOT / file, dtype=str, keep_default_na=False)
    if chosen:
        column, _, value = chosen.partition("=")
        source = source[source[column] == value]
    assert len(table) == len(source)
    for _, row in table.iterrows():
        alike = [
            all(agree(str(row[c]), str(exact[c])) for c in table.columns)
            for _, exact in source.iterrows()
        ]
        assert sum(alike) == 1, dict(row)


def agree(shown: str, exact: str) -> bool:
    """Return whether a cell is the value of the file, rounded to the digits that it shows."""
    if shown == exact:
        return True
    numbers = re.compile(r"-?\d+(\.\d+)?(e-?\d+)?")
    if not (numbers.fullmatch(shown) and numbers.fullmatch(exact)):
        return False
    return abs(float(shown) - float(exact)) <= 0.5001 * 10.0 ** -len(shown.partition(".")[2])


def test_agreement_is_to_the_digits_shown() -> None:
    assert agree("0.56", "0.563726")
    assert agree("0.564", "0.563726")
    assert not agree("0.565", "0.563726")
    assert not agree("0.57", "0.563726")
    assert agree("ring", "ring")
    assert not agree("ring", "torus")
    assert agree("", "")
    assert not agree("", "0.5")


def test_some_numbers_are_checked() -> None:
    assert len(tables()) >= 3


def test_no_table_of_results_is_unchecked() -> None:
    """A comment that names a file of results is followed by its table."""
    text = "\n".join(page.read_text() for page in PAGES)
    assert len(re.findall(r"<!-- experiments/results/", text)) == len(tables())
