"""Tables of examples as sites: what a user's frame or CSV files hold, checked.

Whatever cannot be used is refused in one line that names the column, and the row or the site.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dfl.core.errors import InputError
from dfl.core.parse import nearest, shown
from dfl.core.reading import read_text
from dfl.inference.models import Model, Site

if TYPE_CHECKING:
    import pandas as pd
    import torch
else:
    from dfl.core.lazy import torch

MOST_BYTES = 2**30
"""The most bytes of a CSV file."""
MISSING = ("", ".", "?", "na", "n/a", "nan", "null", "none")
"""Texts that stand for a missing value, in any case."""
DEPENDENT = 1e-9
"""A column whose part outside the span of those before it is shorter, relatively, is collinear."""
LARGEST = 1e100
"""The largest value of a column."""
INTERCEPT = "intercept"

Floats = NDArray[np.float64]
Arrays = dict[str, NDArray[Any]]


def error_column(covariate: str) -> str:
    """Return the column of a coefficient's standard errors in the table of sites."""
    return f"{covariate} standard error"


@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a frame that are used.

    Attributes:
        outcome: y, or the times.
        covariates: those whose coefficients are common to all sites.
        site: the column with the name of the site.
        own: covariates whose coefficients are each site's own, besides the intercept.
        intercept: whether each site has an intercept of its own.
        event: for times, 1 where they are those of events.
        offset: a known part of the linear predictor.
    """

    outcome: str
    covariates: tuple[str, ...]
    site: str
    own: tuple[str, ...] = ()
    intercept: bool = True
    event: str | None = None
    offset: str | None = None

    def __post_init__(self) -> None:
        if not self.covariates:
            raise InputError("--covariates is missing: give the columns of one or more covariates")
        seen: set[str] = set()
        for flag, name in [("--outcome", self.outcome), ("--sites", self.site), *self.roles]:
            if not isinstance(name, str):
                raise InputError(f"{flag} must be the name of a column, not {shown(name)}")
        for flag, name in self.roles:
            if name in seen:
                raise InputError(f"{flag} {shown(name)} has a part already: use a column once")
            seen.add(name)
        taken = ["site", "n", *map(error_column, self.covariates)]
        for name in self.covariates:
            if name in taken:
                raise InputError(
                    f"--covariates {shown(name)}: the table of sites has another column of that "
                    "name: rename it"
                )

    @property
    def roles(self) -> list[tuple[str, str]]:
        """The flag and the name of every column."""
        several = [("--covariates", name) for name in self.covariates]
        several += [("--own-covariates", name) for name in self.own]
        single = {
            "--sites": self.site, "--outcome": self.outcome, "--event": self.event,
            "--offset": self.offset,
        }  # fmt: skip
        return several + [(flag, name) for flag, name in single.items() if name is not None]

    @property
    def own_names(self) -> list[str]:
        """The names of the coefficients that are each site's own."""
        return [INTERCEPT] * self.intercept + list(self.own)


@dataclass(frozen=True)
class Examples:
    """The examples of all sites, on rank 0.

    Attributes:
        names: the sites, sorted: by value where all are finite numbers. Their numbers, as those of
            leads, are in this order.
        sites: the arrays of each, by the fields of `Site`.
        columns: what they are.
    """

    names: tuple[str, ...]
    sites: Sequence[Arrays]
    columns: Columns


def read_csv(files: Sequence[Path], site: str | None) -> tuple[pd.DataFrame, str]:
    """Return the rows of CSV files, whose labels name the file and the line, and the site column.

    Args:
        files: one file with a site column, or a file per site.
        site: the site column; None where each file is a site, named like the file.

    Raises:
        InputError: a file cannot be read, or is no table.
    """
    import pandas as pd

    if not files:
        raise InputError("FILE is missing: give a CSV file, or one per site")
    if site is None and len(files) == 1:
        raise InputError("--sites is missing: name the column of sites, or give a file per site")
    frames = [_read(path) for path in files]
    if site is None:
        site = "site"
        stems = [path.stem for path in files]
        for path, frame in zip(files, frames, strict=True):
            if stems.count(path.stem) > 1:
                raise InputError(f"{path}: another file is named {path.stem} too")
            if site in frame:
                raise InputError(f"{path}: has a column site: name it with --sites site")
            frame[site] = path.stem
    for path, frame in zip(files, frames, strict=True):
        if different := set(map(str, frame)) ^ set(map(str, frames[0])):
            raise InputError(f"{path}: has other columns than {files[0]}: {min(different)!r}")
    return pd.concat(frames), site


def _read(path: Path) -> pd.DataFrame:
    import pandas as pd

    try:
        text = read_text(path, MOST_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: no UTF-8 text at byte {error.start}") from None
    if "\0" in text:
        raise InputError(f"{path}: holds a byte 0, so it is no CSV file")
    header, rows = _rows(path, text)
    twice = [name for name in header if name and header.count(name) > 1]
    if twice:
        raise InputError(f"{path}: has two columns {shown(twice[0])}")
    if not rows:
        raise InputError(f"{path}: has no rows")
    named = [k for k, name in enumerate(header) if name]
    values = {header[k]: [row[k].strip() for row in rows.values()] for k in named}
    return pd.DataFrame(values, index=pd.Index(list(rows)), dtype=object)


def _rows(path: Path, text: str) -> tuple[list[str], dict[str, list[str]]]:
    """Return the header of a CSV file, and its rows by what they are called."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    rows: dict[str, list[str]] = {}
    try:
        header = [name.strip() for name in next(reader, [])]
        if not any(header):
            raise InputError(f"{path}: line 1 is empty, expected the names of columns")
        for row in reader:
            where = f"{path} line {reader.line_num}"
            if len(row) != len(header):
                raise InputError(f"{where} has {len(row)} values, the header has {len(header)}")
            rows[where] = row
    except csv.Error as error:
        raise InputError(f"{path} line {reader.line_num}: {error}") from None
    return header, rows


def examples_of(frame: Any, columns: Columns, model: Model, fitted_parts: int) -> Examples:
    """Return the sites of a frame.

    Args:
        frame: a pandas DataFrame, a row per example.
        columns: the columns to use.
        model: the model.
        fitted_parts: the parts of a site's examples that must have an estimate each; 0 for none.

    Raises:
        InputError: a missing column or value, a value of another kind, or a site that cannot be
            used.
    """
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise InputError(f"the examples must be a pandas DataFrame, not {shown(frame)}")
    known = [name for name in frame.columns if isinstance(name, str)]
    for flag, name in columns.roles:
        if name not in known:
            raise InputError(f"{flag}: no column {shown(name)}{nearest(name, known)}")
        if known.count(name) > 1:
            raise InputError(f"{flag}: the table has two columns {shown(name)}")
    if not len(frame):
        raise InputError("the table has no rows")
    if (columns.event is None) == model.timed:
        raise InputError(
            f"--event {columns.event}: " + ("the model has no events: leave it out")
            if columns.event
            else "--event is missing: name the column with 1 for events and 0 for censored times"
        )
    taken = {"--own-covariates": ", ".join(columns.own), "--offset": columns.offset}
    for flag, given in taken.items():
        if given and not model.has_predictor:
            raise InputError(f"{flag} {given}: the model has no linear predictor: leave it out")
    label, names = _labels(frame, columns.site)
    values = {name: _numbers(frame, name) for _, name in columns.roles if name != columns.site}
    _check_outcomes(frame, columns, values, model)
    arrays = _arrays(columns, values)
    order = np.argsort(label, kind="stable")
    ends = np.searchsorted(label[order], np.arange(len(names) + 1))
    parts = [order[a:b] for a, b in pairwise(ends)]
    sites = [{name: array[part] for name, array in arrays.items()} for part in parts]
    found = Examples(tuple(names), sites, columns)
    _check_sites(found, model, fitted_parts)
    return found


def _labels(frame: pd.DataFrame, column: str) -> tuple[NDArray[np.int64], list[str]]:
    """Return the number of the site of every row, and the names of the sites."""
    values = frame[column]
    missing = values.isna().to_numpy()
    texts = np.array([str(value).strip() for value in values], dtype=object)
    missing = missing | np.array([text == "" for text in texts])
    if missing.any():
        raise InputError(f"--sites {column}: {_row(frame, missing)} names no site")
    names, label = np.unique(texts.astype(str), return_inverse=True)
    order = np.arange(len(names))
    numbers = _decimals(names.tolist())
    if numbers is not None:
        order = np.array(sorted(order, key=numbers.__getitem__))
    return np.argsort(order)[label].astype(np.int64), [str(name) for name in names[order]]


def _decimals(texts: Sequence[str]) -> list[Decimal] | None:
    """Return texts as numbers; None where one of them is no finite number."""
    try:
        numbers = [Decimal(text) for text in texts]
    except InvalidOperation:
        return None
    return numbers if all(number.is_finite() for number in numbers) else None


def _numbers(frame: pd.DataFrame, column: str) -> Floats:
    """Return a column as numbers."""
    import pandas as pd

    values = frame[column]
    texts = values.map(lambda value: isinstance(value, str)).to_numpy(bool)
    blank = values.map(lambda value: isinstance(value, str) and value.strip().lower() in MISSING)
    missing = values.isna().to_numpy() | blank.to_numpy(bool)
    if missing.any():
        raise InputError(f"column {column}: {_row(frame, missing)} is missing")
    plain = pd.api.types.is_numeric_dtype(values.dtype) or values.dtype == object or texts.all()
    if not plain or pd.api.types.is_complex_dtype(values.dtype):
        raise InputError(f"column {column}: holds {values.dtype}, not numbers")
    numbers = pd.to_numeric(values, errors="coerce").to_numpy(np.float64, copy=True)
    bad = ~(np.abs(numbers) <= LARGEST)
    if bad.any():
        value = values.iloc[int(np.flatnonzero(bad)[0])]
        raise InputError(
            f"column {column}: {_row(frame, bad)} is {shown(value)}, not a number"
            f"{' up to 1e100' if isinstance(value, float) else ''}"
        )
    return numbers


def _row(frame: pd.DataFrame, which: NDArray[np.bool_]) -> str:
    """Return what the first of some rows is called."""
    label = frame.index[int(np.flatnonzero(which)[0])]
    return label if isinstance(label, str) else f"row {label}"


def _check_outcomes(
    frame: pd.DataFrame, columns: Columns, values: Mapping[str, Floats], model: Model
) -> None:
    """Refuse outcomes that the model cannot have."""
    y = values[columns.outcome]
    bad = ~model.takes(torch.from_numpy(y)).numpy()
    if bad.any():
        raise InputError(
            f"--outcome {columns.outcome}: {_row(frame, bad)} is {y[bad][0]:g}, and the model "
            f"takes {model.outcomes}"
        )
    if columns.event is not None:
        event = values[columns.event]
        if (bad := (event != 0) & (event != 1)).any():
            raise InputError(
                f"--event {columns.event}: {_row(frame, bad)} is {event[bad][0]:g}, not 0 or 1"
            )


def _arrays(columns: Columns, values: Mapping[str, Floats]) -> Arrays:
    n = len(values[columns.outcome])
    own = [np.ones(n)] * columns.intercept + [values[name] for name in columns.own]
    arrays: Arrays = {
        "y": values[columns.outcome],
        "x": np.stack([values[name] for name in columns.covariates], 1),
        "z": np.stack(own, 1) if own else np.zeros((n, 0)),
        "offset": values[columns.offset] if columns.offset else np.zeros(n),
    }
    return arrays | ({"event": values[columns.event]} if columns.event else {})


def _check_sites(examples: Examples, model: Model, fitted_parts: int) -> None:
    """Refuse sites whose examples do not determine their parameters.

    Args:
        examples: all sites.
        model: the model.
        fitted_parts: the parts of a site's examples that must have an estimate each; where there
            are none, γ_j must have one given β.
    """
    columns, fitted = examples.columns, fitted_parts > 0
    for where, arrays in parts_of(examples, max(1, fitted_parts)):
        if not len(arrays["y"]):
            raise InputError(f"{where}: no rows")
        if model.undetermined(arrays["y"]):
            raise InputError(f"{where}: {columns.outcome} is {arrays['y'][0]:g} in every row")
        parts = [(columns.own_names, arrays["z"])]
        if fitted:
            parts.append((list(columns.covariates), arrays["x"]))
        names = [each for part, _ in parts for each in part]
        design = np.concatenate([array for _, array in parts], 1)
        rows = len(design) if "event" not in arrays else int(arrays["event"].sum())
        needed = len(names) + model.nuisances(site_of(arrays)) - arrays["z"].shape[1]
        if rows <= needed and (fitted or rows < needed):
            kind = "rows" if "event" not in arrays else "events"
            raise InputError(f"{where}: {rows} {kind} for {needed} parameters")
        _check_rank(where, design, names, centred=model.timed)
    if not fitted:
        inside = [_outside(each["x"], each["z"]) for each in examples.sites]
        _check_rank("all sites", np.concatenate(inside), list(columns.covariates))


def parts_of(examples: Examples, parts: int) -> Iterator[tuple[str, Arrays]]:
    """Yield the parts of every site, every `parts`-th row each, and what they are called."""
    for name, arrays in zip(examples.names, examples.sites, strict=True):
        for start in range(parts):
            part = f" (part {start + 1} of {parts})" if parts > 1 else ""
            yield f"site {name}{part}", {key: a[start::parts] for key, a in arrays.items()}


def all_sites(examples: Examples) -> tuple[Arrays, list[str]]:
    """Return the examples of all sites, with columns z of every site's own and the number of the
    site as `stratum`, and all columns.
    """
    own = [each["z"] for each in examples.sites]
    ends = np.cumsum([0, *(len(z) for z in own)])
    q = own[0].shape[1]
    z = np.zeros((ends[-1], q * len(own)))
    for k, each in enumerate(own):
        z[ends[k] : ends[k + 1], q * k : q * (k + 1)] = each
    kept = examples.sites[0].keys() - {"z", "offset"}
    arrays: Arrays = {name: np.concatenate([e[name] for e in examples.sites]) for name in kept}
    arrays["stratum"] = np.repeat(np.arange(len(own)), [len(z) for z in own])
    columns = examples.columns
    names = [f"{each} of site {name}" for name in examples.names for each in columns.own_names]
    return arrays | {"z": z}, [*columns.covariates, *names]


def site_of(arrays: Mapping[str, NDArray[Any]]) -> Site:
    """Return the site of some arrays."""
    return Site(**{name: torch.from_numpy(array) for name, array in arrays.items()})


def _outside(x: Floats, z: Floats) -> Floats:
    """Return the part of x that z does not explain."""
    if not z.shape[1]:
        centred: Floats = x - x.mean(0)
        return centred
    rest: Floats = x - z @ np.linalg.lstsq(z, x, rcond=None)[0]
    return rest


def _check_rank(where: str, design: Floats, names: Sequence[str], centred: bool = False) -> None:
    """Refuse a design in which a column depends linearly on those before it."""
    design = design - design.mean(0) if centred else design
    size = np.abs(design).max(0, initial=0)
    scaled = design / np.where(size > 0, size, 1)
    length = np.linalg.norm(scaled, axis=0)
    left = np.abs(np.diagonal(np.linalg.qr(scaled, mode="r")))
    for k, name in enumerate(names):
        if k >= len(left) or not left[k] > DEPENDENT * length[k]:
            constant = np.ptp(design[:, k]) == 0
            what = "is constant" if constant else "depends linearly on other columns"
            raise InputError(f"{where}: column {name} {what}")
