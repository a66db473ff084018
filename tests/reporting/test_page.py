"""A page shows text as text and numbers as they are, and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dfl.reporting.collection import LINES
from dfl.reporting.page import MISSING, floats, number, packed, render, spread, write

HOSTILE = (
    "<script>alert(1)</script>", "</script><script>alert(2)</script>", "<!--<script>", "' \" `",
    "{{ 7 * 7 }}", "${x}", "\N{PILE OF POO}\u2028\u202e", "x" * 10_000, "&lt;", "\x00\x1b[31m",
    "\udcff", "]]>", "javascript:alert(3)",
)  # fmt: skip


def unpacked(given: dict[str, Any]) -> np.ndarray:
    """The inverse of `packed` and of `floats`, as page.js has it."""
    if "floats" in given:
        return np.frombuffer(base64.b64decode(given["floats"]), dtype="<f4").astype(np.float64)
    codes = np.frombuffer(base64.b64decode(given["codes"]), dtype="<u2")
    return np.where(codes == MISSING, np.nan, given["low"] + given["step"] * codes)


@given(arrays(np.float64, st.integers(0, 30), elements=st.floats(-1e6, 1e6, width=32)))
def test_packed_numbers_are_off_by_half_a_step_at_most(values: np.ndarray) -> None:
    given = packed(values)
    step: Any = given["step"]
    np.testing.assert_allclose(unpacked(given), values, rtol=0, atol=0.5001 * step)


@given(arrays(np.int64, st.integers(1, 30), elements=st.integers(-30_000, 30_000)))
def test_packed_whole_numbers_are_exact(values: np.ndarray) -> None:
    np.testing.assert_array_equal(unpacked(packed(values)), values)


def test_packed_numbers_may_be_missing() -> None:
    np.testing.assert_array_equal(unpacked(packed([np.nan, 2.0, np.inf])), [np.nan, 2, np.nan])
    assert np.isnan(unpacked(packed([np.nan]))).all()


def test_floats_keep_small_numbers_beside_large_ones() -> None:
    values = np.array([913.8, 7e19, np.inf, -2e-30], dtype=np.float32)
    np.testing.assert_array_equal(unpacked(floats(values)), np.where(values < 1e30, values, np.nan))


@given(st.integers(1, 5000), st.integers(2, 100))
def test_a_history_is_thinned_evenly(count: int, most: int) -> None:
    chosen = spread(count, most)
    assert len(chosen) == min(count, most)
    assert (chosen[0], chosen[-1]) == (0, count - 1)
    steps = np.diff(chosen)
    assert len(steps) == 0 or steps.max() - steps.min() <= 1


def test_numbers_of_a_page_are_those_of_json() -> None:
    assert [number(x) for x in (float("nan"), float("inf"), 3.0, 1 / 3, 123456789.0)] == [
        None, None, 3, 0.333333, 123456789,
    ]  # fmt: skip


class Seen(HTMLParser):
    """Keeps scripts, text, tables by section, and what a browser would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[dict[str, str | None]] = []
        self.sources: list[str] = []
        self.text = ""
        self.section = ""
        self.tables: dict[str, list[list[str]]] = {}
        self.in_cell = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.scripts.append(dict(attrs))
        elif tag == "section":
            self.section = dict(attrs).get("id") or ""
        elif tag == "tr":
            self.rows(self.section).append([])
        elif tag in ("td", "th"):
            self.rows(self.section)[-1].append("")
            self.in_cell = True
        named = [value for name, value in attrs if name in ("src", "href", "srcset", "action")]
        self.sources += [value or "" for value in named]

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.in_cell = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.in_cell:
            self.rows(self.section)[-1][-1] += data.strip()

    def rows(self, section: str) -> list[list[str]]:
        """Return the texts of the cells of the tables of a section."""
        return self.tables.setdefault(section, [])


def page_of(text: str) -> str:
    pairs = [(text, text)]
    content = {
        "generator": "dfl.run", "kind": "Run", "title": text, "subtitle": text, "folder": text,
        "status": {"kind": "ended", "text": text}, "sections": [("summary", text)],
        "cards": [{"name": text, "value": text, "note": text}], "notes": [text], "chosen": pairs,
        "settings": pairs, "facts": pairs, "points": [text], "has": ["peers", "labels"],
        "graph": text, "graph_note": text, "spectral": text, "attack": text, "attackers": text,
        "attacker_count": 2, "faults": text, "again": text, "replay": text, "environment": pairs,
    }  # fmt: skip
    return render("run.html", content, {"names": [text], text: 1})


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:20]))
def test_names_are_text(tmp_path: Path, text: str) -> None:
    page = write(tmp_path, page_of(text)).read_text()
    seen = Seen(page)
    assert [each.get("type") for each in seen.scripts] == ["application/json", None]
    held = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert held is not None
    assert json.loads(held[1])["names"] == [text]
    assert "<" not in held[1]
    written = text.encode(errors="backslashreplace").decode()
    assert seen.text.count(written) > 20


def test_as_many_lines_look_different_as_a_chart_may_have() -> None:
    script, sheet = (
        files("dfl.reporting").joinpath("templates", name).read_text()
        for name in ("page.js", "page.css")
    )
    (colours,) = re.findall(r"COLOURS = (\d+);", script)
    (dashes,) = re.findall(r"DASHES = (\[.*\]);", script)
    assert len(set(re.findall(r"--s\d+", sheet))) == int(colours)
    count = len(set(json.loads(dashes)))
    looks = {(k % int(colours), k % count) for k in range(LINES)}
    assert len(looks) == LINES


def test_nothing_is_loaded() -> None:
    page = page_of("plain")
    assert all(source.startswith("#") for source in Seen(page).sources)
    assert "@import" not in page
    assert "url(" not in page
    assert re.search(r"https?://", page.replace("http://www.w3.org/2000/svg", "")) is None
    assert "default-src 'none'" in page


def test_the_script_is_the_one_that_is_admitted() -> None:
    page = page_of("plain")
    script = page.rsplit("<script>", 1)[1].split("</script>", 1)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page
    assert "eval(" not in script
    assert "innerHTML" not in script
