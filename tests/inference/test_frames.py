"""Damaged tables are refused in one line that names column, and row or site."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dfl.core.errors import InputError
from dfl.inference.fitting import fit
from dfl.inference.frames import Columns, examples_of, read_csv
from dfl.inference.models import MODELS, Density

ROWS = [
    "a,1,0.5,-0.2,3", "a,0,-0.3,0.8,1", "a,1,1.2,0.1,2", "a,0,0.4,-0.9,5", "a,1,-0.8,0.6,1",
    "a,0,0.9,1.4,2", "a,0,-1.1,-0.5,3", "a,1,0.2,0.7,4", "b,0,0.1,0.9,2", "b,1,-0.6,0.3,6",
    "b,0,0.8,-1.0,1", "b,1,0.3,0.2,3", "b,0,-0.2,-0.4,2", "b,1,1.1,0.5,1", "b,1,-0.9,1.3,5",
    "b,0,0.6,-0.7,2",
]  # fmt: skip
HEADER = "site,y,x,w,t"
GOOD = "\n".join([HEADER, *ROWS])


def changed(line: int, text: str) -> str:
    """Return the table with another line, counted from 1."""
    lines = GOOD.split("\n")
    lines[line - 1] = text
    return "\n".join(lines)


def cell(column: int, value: str, line: int = 4) -> str:
    """Return the table with another value in a line."""
    values = GOOD.split("\n")[line - 1].split(",")
    values[column] = value
    return changed(line, ",".join(values))


def column(number: int, values: list[str]) -> str:
    """Return the table with other values in a column."""
    split = [row.split(",") for row in ROWS]
    for row, value in zip(split, values, strict=True):
        row[number] = value
    return "\n".join([HEADER, *(",".join(row) for row in split)])


def values_of(number: int) -> list[str]:
    return [row.split(",")[number] for row in ROWS]


DAMAGED: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "empty": ("", ("line 1",)),
    "blank header": ("\n" + "\n".join(ROWS), ("line 1",)),
    "only commas": (",,,,\n" + ROWS[0], ("line 1",)),
    "no rows": (HEADER, ("no rows",)),
    "no rows but a newline": (HEADER + "\n", ("no rows",)),
    "too few values": (changed(5, "a,0,0.4"), ("line 5", "3", "5")),
    "too many values": (changed(5, ROWS[3] + ",9"), ("line 5", "6", "5")),
    "an empty line": (changed(5, ""), ("line 5",)),
    "a last line cut off": (GOOD[:-4], ("line 17",)),
    "an open quote": (cell(0, '"a'), ("line",)),
    "a quote inside": (cell(2, '"0.5"x'), ("line 4",)),
    "semicolons": (GOOD.replace(",", ";"), ("--covariates", "'x'")),
    "tabs": (GOOD.replace(",", "\t"), ("--covariates", "'x'")),
    "a byte 0": (cell(2, "0\0"), ("byte 0",)),
    "latin-1": (cell(0, "M\u00fcnchen").encode("latin-1"), ("byte",)),
    "utf-16": (GOOD.encode("utf-16"), ("byte",)),
    "an archive": (b"PK\x03\x04\x14\x00\x00\x00\x08\x00\xff\xfe", ("byte",)),
    "two columns of a name": (GOOD.replace(HEADER, "site,y,x,x,t"), ("'x'",)),
    "no outcome": (GOOD.replace(HEADER, "site,q,x,w,t"), ("--outcome", "'y'")),
    "no covariate": (GOOD.replace(HEADER, "site,y,X,w,t"), ("--covariates", "'x'")),
    "no site column": (GOOD.replace(HEADER, "place,y,x,w,t"), ("--sites", "'site'")),
    "no header": ("\n".join(ROWS), ("--covariates", "'x'")),
    "a quoted header": (GOOD.replace(HEADER, '"site,y,x,w,t"'), ("line 2", "5", "1")),
    "a missing covariate": (cell(2, ""), ("column x", "line 4")),
    "a missing outcome": (cell(1, ""), ("column y", "line 4")),
    "a missing site": (cell(0, ""), ("--sites site", "line 4")),
    "a blank site": (cell(0, '"  "'), ("--sites site", "line 4")),
    "NA": (cell(2, "NA"), ("column x", "line 4", "missing")),
    "nan": (cell(2, "nan"), ("column x", "line 4", "missing")),
    "NULL": (cell(3, "NULL"), ("column w", "line 4", "missing")),
    "a dot": (cell(3, "."), ("column w", "line 4", "missing")),
    "a question mark": (cell(3, "?", 9), ("column w", "line 9", "missing")),
    "n/a": (cell(3, "n/a", 17), ("column w", "line 17", "missing")),
    "a word": (cell(2, "high"), ("column x", "line 4", "'high'")),
    "a decimal comma": (cell(2, '"0,5"'), ("column x", "line 4", "'0,5'")),
    "a unit": (cell(2, "0.5mg"), ("column x", "line 4", "'0.5mg'")),
    "a date": (cell(2, "2026-11-22"), ("column x", "line 4", "'2026-11-22'")),
    "a percentage": (cell(2, "50%"), ("column x", "line 4", "'50%'")),
    "a thousands separator": (cell(2, "1_000"), ("column x", "line 4", "'1_000'")),
    "a hexadecimal number": (cell(2, "0x1F"), ("column x", "line 4", "'0x1F'")),
    "a formula error": (cell(2, "#DIV/0!"), ("column x", "line 4", "'#DIV/0!'")),
    "two minus signs": (cell(2, "--0.5"), ("column x", "line 4", "'--0.5'")),
    "infinity": (cell(2, "inf"), ("column x", "line 4", "'inf'")),
    "minus infinity": (cell(3, "-Infinity"), ("column w", "line 4", "'-Infinity'")),
    "too large a number": (cell(2, "1e300"), ("column x", "line 4", "'1e300'")),
    "an overflow": (cell(2, "1e999"), ("column x", "line 4", "'1e999'")),
    "an outcome of 2": (cell(1, "2"), ("--outcome y", "line 4", "0 or 1")),
    "an outcome of -1": (cell(1, "-1"), ("--outcome y", "line 4", "0 or 1")),
    "an outcome of 0.5": (cell(1, "0.5"), ("--outcome y", "line 4", "0 or 1")),
    "outcomes of yes and no": (
        column(1, ["yes" if y == "1" else "no" for y in values_of(1)]),
        ("column y", "line 2", "'yes'"),
    ),
    "one outcome only": (column(1, ["1"] * 8 + values_of(1)[8:]), ("site a", "y", "1")),
    "a constant covariate": (column(3, ["2"] * 8 + values_of(3)[8:]), ("site a", "column w")),
    "a covariate twice": (column(3, values_of(2)), ("site a", "column w")),
    "a sum of others": (
        column(3, [str(2 * float(x) - 1) for x in values_of(2)]),
        ("site a", "column w"),
    ),
    "a covariate of 0": (column(2, ["0"] * 16), ("site a", "column x")),
    "too small a site": (column(0, ["a"] * 14 + ["c"] * 2), ("site c", "2 rows", "3")),
    "a site of one row": (column(0, ["a"] * 15 + ["c"]), ("site c", "y")),
    "separable outcomes": (
        column(1, [str(int(float(x) > 0.25)) for x in values_of(2)]),
        ("site a", "x", "separates"),
    ),
}


def test_there_are_fifty_kinds_of_damage() -> None:
    assert len(DAMAGED) >= 50


def _fit_file(path: Path) -> None:
    frame, site = read_csv([path], "site")
    fit(frame, outcome="y", covariates=["x", "w"], site=site, estimator="meta")


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    content, named = DAMAGED[kind]
    path = tmp_path / "table.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as refused:
        _fit_file(path)
    line = str(refused.value)
    assert "\n" not in line
    assert len(line) < 400
    for name in named:
        assert name in line


def frame_of(text: str = GOOD) -> pd.DataFrame:
    split = [row.split(",") for row in text.split("\n")]
    numbers = pd.DataFrame(split[1:], columns=split[0])
    return numbers.assign(**{name: numbers[name].astype(float) for name in ("y", "x", "w", "t")})


def test_the_undamaged_file_is_accepted_and_is_the_frame(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text("\ufeff" + GOOD.replace("\n", "\r\n") + "\r\n")
    frame, site = read_csv([path], "site")
    results = [
        fit(each, outcome="y", covariates=["x", "w"], site=site, estimator="meta")
        for each in (frame, frame_of())
    ]
    assert results[0].params.equals(results[1].params)


def test_files_of_sites_are_the_table_with_a_column(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.csv" for name in "ab"]
    for path in paths:
        own = [row[2:] for row in ROWS if row.startswith(path.stem)]
        path.write_text("\n".join([HEADER[5:], *own]))
    frame, site = read_csv(paths, None)
    one = fit(frame, outcome="y", covariates=["x", "w"], site=site, estimator="meta")
    other = fit(frame_of(), outcome="y", covariates=["x", "w"], site="site", estimator="meta")
    assert one.params.equals(other.params)
    paths[1].write_text(GOOD)
    with pytest.raises(InputError, match=r"b\.csv"):
        read_csv(paths, None)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda f: f.assign(x=f["x"].mask(f.index == 3)), "column x: row 3"),
        (lambda f: f.assign(x=f["x"].astype(object).where(f.index != 3, None)), "column x: row 3"),
        (lambda f: f.assign(x=pd.Timestamp("2026-11-22")), "column x"),
        (lambda f: f.assign(x=f["x"] * 1j), "column x"),
        (lambda f: f.assign(x=pd.Categorical(["low", "high"] * 8)), "column x"),
        (lambda f: f.assign(x=[[1]] * 16), "column x"),
        (lambda f: f.assign(site=f["site"].mask(f.index == 2)), "--sites site: row 2"),
        (lambda f: pd.concat([f, f[["x"]]], axis=1), "two columns 'x'"),
        (lambda f: f.iloc[:0], "no rows"),
        (lambda f: f.to_numpy(), "DataFrame"),
        (lambda f: f.set_index(f["site"]).drop(columns="site"), "--sites"),
    ],
)
def test_a_frame_that_cannot_be_used_is_refused(change: object, named: str) -> None:
    columns = Columns(outcome="y", covariates=("x", "w"), site="site")
    with pytest.raises(InputError) as refused:
        examples_of(change(frame_of()), columns, MODELS["logistic"](), fitted_parts=1)  # type: ignore[operator]
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"covariates": []}, ["--covariates"]),
        ({"covariates": "x"}, ["--covariates", "'x'"]),
        ({"covariates": None}, ["--covariates", "None"]),
        ({"own_covariates": 5}, ["--own-covariates", "5"]),
        ({"covariates": ["x", "x"]}, ["--covariates", "'x'"]),
        ({"covariates": ["x", "y"]}, ["'y'"]),
        ({"covariates": ["x", "v"]}, ["--covariates", "'v'"]),
        ({"model": "logit"}, ["--model", "'logit'", "logistic"]),
        ({"estimator": "tilted"}, ["--estimator", "'tilted'", "tilted_score"]),
        ({"estimator": "tilted_score:leads=5"}, ["leads", "5", "1"]),
        ({"estimator": "tilted_score_graph"}, ["tilted_score_graph", "--topology"]),
        ({"model": "cox", "outcome": "t"}, ["tilted_score", "cox", "meta"]),
        ({"model": "cox", "outcome": "t", "estimator": "meta"}, ["--event"]),
        ({"event": "w"}, ["--event"]),
        ({"topology": "circle"}, ["--topology", "'circle'", "ring"]),
        ({"topology": "ring", "mixing": "receive"}, ["--mixing", "receive"]),
        ({"topology": "ring", "gossip_rounds": 0}, ["--gossip-rounds", "0"]),
        ({"topology": "ring", "gossip_rounds": "3"}, ["--gossip-rounds", "'3'"]),
        ({"gossip_rounds": 3}, ["--gossip-rounds", "3", "--topology"]),
        ({"bits": 40}, ["bits", "40", "16"]),
        ({"bits": 8, "compressor": "none"}, ["--bits", "8", "--compressor"]),
        ({"faults": "link_loss:p=2"}, ["--faults", "2"]),
        (
            {"faults": "link_loss:p=0.1+stragglers:fraction=0.5"},
            ["--faults stragglers:fraction=0.5"],
        ),
        ({"links": "carrier_pigeon"}, ["--links", "'carrier_pigeon'"]),
        ({"outcome": None}, ["--outcome", "None"]),
        ({"site": None}, ["--sites", "None"]),
        ({"intercept": "no"}, ["--intercept", "'no'"]),
        ({"topology": 5}, ["--topology", "5"]),
        ({"topology": "ring", "mixing": None}, ["--mixing", "None"]),
        ({"faults": None}, ["--faults", "None"]),
        ({"seed": 1.5}, ["--seed", "1.5"]),
        ({"mixing": "uniform"}, ["--mixing", "uniform", "--topology"]),
    ],
)
def test_a_bad_argument_is_refused_by_its_flag(given: dict[str, object], named: list[str]) -> None:
    arguments = {"outcome": "y", "covariates": ["x", "w"], "site": "site"} | given
    with pytest.raises(InputError) as refused:
        fit(frame_of(), **arguments)  # type: ignore[arg-type]
    for name in named:
        assert name in str(refused.value)


def test_pooled_needs_no_estimate_of_every_site() -> None:
    """A covariate may be constant at a site, where all sites together determine its coefficient."""
    frame = frame_of(column(3, ["2"] * 8 + values_of(3)[8:]))
    found = fit(frame, outcome="y", covariates=["x", "w"], site="site", estimator="pooled")
    assert np.isfinite(found.params).all()
    with pytest.raises(InputError, match="column w"):
        fit(
            frame.assign(w=(frame["site"] == "a") * 1.0),
            outcome="y", covariates=["x", "w"], site="site", estimator="pooled",
        )  # fmt: skip


def test_a_column_of_another_kind_than_its_text_is_not_known() -> None:
    with pytest.raises(InputError, match="--covariates: no column '0'"):
        fit(frame_of().rename(columns={"x": 0}), outcome="y", covariates=["0"], site="site")


@pytest.mark.parametrize("name", ["n", "x standard error"])
def test_a_covariate_named_like_a_column_of_the_sites_is_refused(name: str) -> None:
    frame = frame_of().rename(columns={"w": name})
    with pytest.raises(InputError, match=f"--covariates '{name}'"):
        fit(frame, outcome="y", covariates=["x", name], site="site", estimator="meta")


@pytest.mark.parametrize(
    "names", [("-10", "9"), ("9.0", "10.0"), ("1e-3", "0.5"), ("-1.5", "-1")], ids="<".join
)
def test_sites_that_are_numbers_are_in_their_order(names: tuple[str, str]) -> None:
    frame = frame_of().replace({"site": {"a": names[1], "b": names[0]}})
    columns = Columns(outcome="y", covariates=("x",), site="site")
    assert examples_of(frame, columns, MODELS["logistic"](), 1).names == names


@pytest.mark.parametrize("own", [-1, "1", 1.5, True, None])
def test_a_density_takes_a_number_of_parameters(own: object) -> None:
    with pytest.raises(InputError, match="Density: own must be a whole number from 0, not"):
        Density(log_density_of=lambda y, x, beta, own: y, own=own)  # type: ignore[arg-type]


def test_a_density_is_a_function_to_a_number() -> None:
    with pytest.raises(InputError, match=r"log_density_of must be a function .* not 'normal'"):
        Density(log_density_of="normal")  # type: ignore[arg-type]
    arguments = {"outcome": "y", "covariates": ["x", "w"], "site": "site", "estimator": "meta"}
    for function, given in (
        (lambda y, x, b, g: x * b, r"shape \(2,\)"),
        (lambda *_: 1.0, "no tensor"),
    ):
        with pytest.raises(InputError, match=f"must return a tensor of shape .*, not {given}"):
            fit(frame_of(), **arguments, model=Density(log_density_of=function))  # type: ignore[arg-type]


def test_sites_of_many_digits_are_in_the_order_of_their_numbers() -> None:
    large = "9" * 5000
    frame = frame_of().replace({"site": {"a": large, "b": "010"}})
    found = examples_of(
        frame, Columns(outcome="y", covariates=("x",), site="site"), MODELS["logistic"](), 1
    )
    assert found.names == ("010", large)


@pytest.mark.parametrize("model", ["linear", "logistic"])
def test_pooled_takes_a_covariate_that_is_0_at_a_site(model: str) -> None:
    frame = frame_of()
    frame["x"] = pd.to_numeric(frame["x"]).where(frame["site"] == "b", 0.0)
    found = fit(
        frame, outcome="y", covariates=["x", "w"], site="site", model=model, estimator="pooled"
    )
    assert np.isfinite(found.params).all()


def test_a_half_without_an_estimate_is_named() -> None:
    arguments = {"outcome": "y", "covariates": ["x", "w"], "site": "site", "estimator": "debiased"}
    frame = frame_of()
    few = frame.drop(frame.index[:3])
    with pytest.raises(InputError, match=r"site a \(part 1 of 2\): 3 rows for 3 parameters"):
        fit(few, **arguments)  # type: ignore[arg-type]
    one = frame.assign(y=frame["y"].where(np.arange(16) % 2 == 0, 1))
    with pytest.raises(InputError, match=r"site a \(part 2 of 2\): y is 1"):
        fit(one, **arguments)  # type: ignore[arg-type]
