"""Published numbers beside ours: writes docs/reproduction.md.

Command, a second:

    python -m experiments.reproduction

`reproduction.csv` has the published numbers and where ours are, `claims.csv` the claims without a
number. Ours are read from `experiments/results`, and every verdict is computed.

Columns of reproduction.csv: `value` as it is printed, with its `std` over `runs` where the source
has them. `relation` is = for a number, <= or >= for a bound. `better` is higher or lower where a
difference can be an improvement. `tolerance` is a number or a share, as 10%. `confidence` is that
of the source: V-src read in it, V-calc recomputed from it, 2nd from a second source, mem from
memory. Ours is `column` of the row `select` (COLUMN=VALUE;COLUMN=VALUE) of the file `results`, or
the mean over its rows where they have seeds, less that of `minus`. `spread` is the column of the
std over `seeds` runs (their number, or its column), of the standard error where it ends in _se, or
LOW..HIGH, the columns of a 95 % interval. `setting` is equal, or what differs; `note` is the
reason where there is no result.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import ascii_lowercase

import pandas as pd
from scipy import stats

from experiments.common import start
from experiments.findings import finding

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/reproduction.md"
RESULTS = HERE / "results"
MEMORY = "from memory: not compared"
NOT_RUN = "not run"
OTHER = "other setting"
EQUAL = "equal"
TOP = """# Reproduction of published results

The numbers of the papers that dfl was built after, beside ours. The page is written by
`python -m experiments.reproduction` from `experiments/reproduction.csv` and the tables of
`experiments/results`.

{counts}

Numbers that a formula gives and no experiment measures, as counts of parameters and eigenvalues of
rings, are compared in `tests/`.

Ours is the mean over seeds ± its standard error, and in brackets the number of seeds. The column
*allowed* is the largest of two standard errors of the difference (of ours and of theirs; where a
source gives its runs and no std, or ours is a single run, the other std is taken for it), the
tolerance, and half a unit of the last digit that is printed. Tolerances are 0.5 points of an
accuracy or AUC, 10 % of a number of rounds, 0.5 % of a count, 3 % of an excess risk, 20 % of a
distance that depends on one draw and 0.002 of a growth. A number is

- *reproduced* if ours was measured at the published setting and differs by no more than is allowed,
- *exceeded* if it differs by more, and is better,
- *not reproduced* if it differs by more otherwise,
- of an *other setting* if ours was measured at another one, which the note states. *Within*,
  *better* and *worse* give the difference by the same rule; such a number is not counted as
  reproduced,
- *not run* if there is none, for the reason in the note,
- *from memory* if it was not found in a copy of its source; such a number is not compared.

Numbers marked *recomputed* are not printed in their source: they are computed from its formulas or
programs. Those marked *second source* are from notes on it.
"""
MARKS = {"V-src": "", "V-calc": "recomputed", "2nd": "second source", "mem": ""}
KINDS = {
    "numbers that their source prints": ("V-src", "mem"),
    "numbers from notes on their source": ("2nd",),
    "recomputed numbers": ("V-calc",),
}
"""What the counts at the head of the page are of, and their confidences."""


@dataclass(frozen=True)
class Number:
    """A published number, and where ours is: the columns of reproduction.csv."""

    source: str
    table: str
    row: str
    quantity: str
    unit: str
    value: str
    std: str
    runs: str
    relation: str
    better: str
    tolerance: str
    confidence: str
    results: str
    select: str
    minus: str
    column: str
    spread: str
    seeds: str
    setting: str
    note: str


@dataclass(frozen=True)
class Measured:
    """Our number, its standard error (NaN where unknown) and its seeds (0 where unknown)."""

    value: float
    error: float = math.nan
    seeds: int = 0


def page() -> None:
    """Write the page."""
    PAGE.write_text(text(numbers()))


def numbers() -> list[Number]:
    """Return the published numbers, in the order of their file."""
    with (HERE / "reproduction.csv").open(newline="") as file:
        return [Number(**row) for row in csv.DictReader(file)]


def text(published: list[Number]) -> str:
    """Return the page."""
    tables: dict[tuple[str, str], list[Number]] = {}
    for one in published:
        tables.setdefault((one.source, one.table), []).append(one)
    verdicts = {one: verdict(one, ours(one)) for one in published}
    counts = [
        summary(kind, [verdicts[one] for one in published if one.confidence in confidences])
        for kind, confidences in KINDS.items()
    ]
    top = TOP.format(counts="\n\n".join([f"**{counts[0]}**", *counts[1:]]))
    failed = [one for one in published if verdicts[one] == "not reproduced"]
    lines = [top, "## Not reproduced\n", *map(item, failed)]
    lines += ["\n## By table\n", "| source | table | numbers | verdicts |", "|---|---|---|---|"]
    for (source, table), rows in tables.items():
        of_table = Counter(verdicts[one] for one in rows)
        listed = "; ".join(f"{n} {each}" for each, n in of_table.items())
        lines.append(f"| {source} | {table} | {len(rows)} | {listed} |")
    for (source, table), rows in tables.items():
        lines += [f"\n## {source}: {table}\n", *section(rows)]
    return "\n".join([*lines, *claims()]) + "\n"


def item(one: Number) -> str:
    """Return the item of a list for a number, and ours."""
    return (
        f"- {one.source}, {one.table}, {one.row}, {one.quantity}: {printed(one)} "
        f"{MARKS[one.confidence] or 'published'}, {shown(ours(one))} here"
    )


def section(rows: list[Number]) -> list[str]:
    """Return the lines of a table, and its notes below it."""
    notes = list(dict.fromkeys(filter(None, map(remark, rows))))
    names = dict(zip(notes, ascii_lowercase, strict=False))
    return [
        "| case | quantity | published | ours | allowed | verdict | note |",
        "|---|---|---|---|---|---|---|",
        *(line(one, names.get(remark(one), "")) for one in rows),
        "",
        *(f"- {name}: {note}" for note, name in names.items()),
    ]


def remark(one: Number) -> str:
    """Return what differs from the published setting, and the note."""
    return "; ".join(filter(None, ("" if one.setting == EQUAL else one.setting, one.note)))


def summary(what: str, verdicts: list[str]) -> str:
    """Return how many of how many numbers have which verdict."""
    count = Counter(verdicts)
    other = {each: n for each, n in sorted(count.items()) if each.startswith(OTHER)}
    listed = ", ".join(f"{n} {each.partition(', ')[2]}" for each, n in other.items())
    compared = sum(count[each] for each in ("not reproduced", "exceeded", "reproduced"))
    parts = [
        f"Of {len(verdicts) - count[MEMORY]} {what} "
        + (
            f"{count['not reproduced']} are not reproduced, {count['exceeded']} exceeded and "
            f"{count['reproduced']} reproduced"
            if compared
            else "none was measured at the published setting"
        ),
        *(
            [f"{sum(other.values())} were measured at another setting only ({listed})"]
            * bool(other)
        ),
        f"{count[NOT_RUN]} were not run",
        *([f"{count[MEMORY]} more are from memory and not compared"] * bool(count[MEMORY])),
    ]
    return f"{'; '.join(parts)}."


def ours(one: Number) -> Measured | None:
    """Return our number; None where there is none."""
    if not one.results:
        return None
    found = measured(one, one.select)
    if not one.minus:
        return found
    other = measured(one, one.minus)
    return Measured(
        found.value - other.value,
        math.hypot(found.error, other.error),
        min(found.seeds, other.seeds),
    )


def measured(one: Number, select: str) -> Measured:
    """Return the number of the rows that are selected."""
    rows = selected(one.results, select)
    values = rows[one.column].replace("", "nan").astype(float)
    if "seed" in rows:
        mean, std = values.mean(skipna=False), values.std(skipna=False)
        return Measured(mean, std / math.sqrt(len(values)), len(values))
    if len(rows) != 1:
        raise ValueError(f"{len(rows)} rows of {one.results} are {select}")
    value, row = float(values.iloc[0]), rows.iloc[0]
    low, dots, high = one.spread.partition("..")
    seeds = int(one.seeds if one.seeds.isdigit() else row[one.seeds]) if one.seeds else 0
    if dots:
        width = float(row[high]) - float(row[low])
        return Measured(value, width / 2 / float(stats.t.ppf(0.975, seeds - 1)), seeds)
    spread = float(row[one.spread] or math.nan) if one.spread else math.nan
    runs = 1 if one.spread.endswith("_se") else max(1, seeds)
    return Measured(value, spread / math.sqrt(runs), seeds)


def selected(name: str, select: str) -> pd.DataFrame:
    """Return the rows of a file of results: "method=lg;C=0" are those with these cells."""
    rows = table(name)
    for condition in select.split(";"):
        column, _, value = condition.partition("=")
        rows = rows[rows[column] == value]
    if rows.empty:
        raise ValueError(f"no row of {name} is {select}")
    return rows


@cache
def table(name: str) -> pd.DataFrame:
    """Return a file of results, as text."""
    return pd.read_csv(RESULTS / name, dtype=str, keep_default_na=False)


def allowed(one: Number, found: Measured) -> float:
    """Return the largest difference that counts as agreement."""
    share = one.tolerance.removesuffix("%")
    tolerance = float(share or 0) * (abs(float(one.value)) / 100 if share != one.tolerance else 1)
    return max(2 * error_of_difference(one, found), tolerance, half_digit(one.value))


def error_of_difference(one: Number, found: Measured) -> float:
    """Return the standard error of ours less theirs; 0 where ours has none, as a count."""
    error = float(one.std) if found.seeds == 1 and one.std else found.error
    if math.isnan(error):
        return 0.0
    theirs = 0.0
    if one.std:
        theirs = float(one.std) / math.sqrt(float(one.runs))
    elif one.runs:
        theirs = error * math.sqrt(found.seeds / float(one.runs))
    return math.hypot(error, theirs)


def half_digit(value: str) -> float:
    """Return half a unit of the last digit of a number as it is printed."""
    digits, _, power = value.partition("e")
    return 0.5 * 10.0 ** (int(power or 0) - len(digits.partition(".")[2]))


def verdict(one: Number, found: Measured | None) -> str:
    """Return the verdict on a number, by the rule that the page states."""
    if one.confidence == "mem":
        return MEMORY
    if found is None:
        return NOT_RUN
    gap = found.value - float(one.value)
    limit = allowed(one, found)
    if one.relation == "=":
        within = abs(gap) <= limit
    else:
        within = (gap if one.relation == "<=" else -gap) <= limit
    ranked = one.relation == "=" and bool(one.better) and not math.isnan(gap)
    better = ranked and (gap > 0) == (one.better == "higher")
    if one.setting != EQUAL:
        return f"{OTHER}, {'within' if within else 'better' if better else 'worse'}"
    return "reproduced" if within else "exceeded" if better else "not reproduced"


def line(one: Number, note: str) -> str:
    """Return the row of a number, with the name of its note."""
    found = ours(one)
    spread = f" ± {one.std} ({one.runs})" if one.std else ""
    mark = f", {MARKS[one.confidence]}" if MARKS[one.confidence] else ""
    cells = (
        one.row,
        one.quantity,
        f"{printed(one)}{spread}{mark}",
        f"[{shown(found)}](_generated/lab-book/{Path(one.results).parent}.md)" if found else "",
        f"{allowed(one, found):.2g}" if found else "",
        verdict(one, found),
        note,
    )
    return f"| {' | '.join(cells)} |"


def printed(one: Number) -> str:
    """Return a published number with its unit, and what it bounds."""
    bound = {"=": "", "<=": "at most ", ">=": "at least "}[one.relation]
    return f"{bound}{one.value}{' %' if one.unit == '%' else ''}"


def shown(found: Measured | None) -> str:
    """Return a number with its standard error and its seeds."""
    if found is None or math.isnan(found.value):
        return "not reached"
    error = "" if math.isnan(found.error) else f" ± {found.error:.2g}"
    return f"{found.value:.4g}{error}{f' ({found.seeds})' if found.seeds else ''}"


def claims() -> list[str]:
    """Return the section of the claims that have no number."""
    lines = [
        "\n## Claims without a number\n",
        "What our experiments found of them, in the first sentence of each finding.\n",
        "| source | claim | finding | experiment |",
        "|---|---|---|---|",
    ]
    with (HERE / "claims.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            path = HERE / f"{row['experiment']}.py"
            name = path.stem
            if not (RESULTS / name).exists():
                name = f"{path.parent.name}_{name}"
            found = finding(path).replace("|", "\\|")
            link = f"[](_generated/lab-book/{name}.md)"
            lines.append(f"| {row['source']} | {row['claim']} | {found} | {link} |")
    return lines


if __name__ == "__main__":
    sys.exit(start(page, "reproduction"))
