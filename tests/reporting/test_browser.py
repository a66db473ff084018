"""Pages work in a browser: headless Chromium of the system, driven by Selenium."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dfl
from dfl import compare
from dfl.reporting.console import make_console
from dfl.reporting.page import Line, chart, render, write
from tests.reporting.test_page import HOSTILE, page_of
from tests.support.small_run import small

pytestmark = pytest.mark.slow

selenium = pytest.importorskip("selenium")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
WIDTHS = (1280, 768, 390)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if not (CHROMIUM and DRIVER):
        pytest.skip("chromium or chromedriver is missing")
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, no_figures: None) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "ring"
    run = small(
        out=folder, peers=12, topology="grid", attack="sign_flip:peers=2", rounds=8,
        partition="shards:per_peer=2", faults="link_loss:p=0.2", links="broadband",
    )  # fmt: skip
    list(dfl.simulate(run))
    return folder


@pytest.fixture
def page(browser: Any, folder: Path) -> Iterator[Any]:
    shown(browser, folder / "report.html")
    yield browser
    assert errors(browser) == []


def errors(browser: Any) -> list[Any]:
    """Return the messages of the console; not those on how tests read a canvas."""
    return [line for line in browser.get_log("browser") if line["source"] != "rendering"]


def shown(browser: Any, path: Path, width: int = 1280) -> None:
    """Open a page afresh."""
    browser.get("about:blank")
    browser.set_window_size(width, 1000)
    browser.get_log("browser")
    browser.get(path.resolve().as_uri())
    browser.execute_script("sessionStorage.clear()")
    browser.refresh()  # which waits until the page is there again, as a script cannot


def element(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def elements(browser: Any, selector: str) -> list[Any]:
    found: list[Any] = browser.find_elements("css selector", selector)
    return found


def pixels(browser: Any, canvas: str) -> str:
    found: str = browser.execute_script(f"return document.getElementById('{canvas}').toDataURL()")
    return found


def charted(folder: Path, tables: list[Any], charts: list[Any]) -> Path:
    """Write a page with charts and nothing else, and return its path."""
    content = {
        "generator": "dfl.sweep", "kind": "Sweep", "title": "t", "subtitle": "", "folder": "",
        "status": None, "sections": [], "maps": [], "points": [], "map_note": "",
        "tables": [{"id": "cells", "title": "Cells", "note": "", "head": [], "rows": []}],
    }  # fmt: skip
    data = {"live": False, "x": {"round": "round"}, "tables": tables, "charts": charts}
    return write(folder, render("runs.html", content, data))


def slide(browser: Any, frame: int) -> float:
    """Move the slider and return the milliseconds that it took."""
    took: float = browser.execute_script(
        "const slider = document.getElementById('frame'); const begun = performance.now();"
        "slider.value = arguments[0]; slider.dispatchEvent(new Event('input'));"
        "document.getElementById('drawing').getContext('2d').getImageData(0, 0, 1, 1);"
        "return performance.now() - begun",
        frame,
    )
    return took


def seconds_to_open(browser: Any, page: Path) -> float:
    """Return the seconds until a page of many peers shows its first 50 rows."""
    begun = time.perf_counter()
    browser.get(page.as_uri())
    assert len(cells(browser, 0)) == 50
    return time.perf_counter() - begun


def cells(browser: Any, column: int) -> list[str]:
    found: list[str] = browser.execute_script(
        "return [...document.querySelectorAll('#peer-table tbody tr')]"
        ".map((row) => row.cells[arguments[0]].textContent)",
        column,
    )
    return found


def hover(browser: Any, target: Any, x: float = 0, y: float = 0) -> str:
    """Move the pointer to a place beside the middle of an element; return the text that shows."""
    from selenium.webdriver import ActionChains

    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", target)
    ActionChains(browser).move_to_element_with_offset(target, round(x), round(y)).perform()
    tip: str = element(browser, "#tip").text
    return tip


def test_the_slider_moves_the_colours(page: Any) -> None:
    last = pixels(page, "drawing")
    slide(page, 0)
    assert pixels(page, "drawing") != last
    assert element(page, "#frame-round").text == "round 0"
    slide(page, 4)
    assert pixels(page, "drawing") == last
    assert element(page, "#frame-round").text == "round 8"


def test_colours_can_span_one_evaluation(page: Any, folder: Path) -> None:
    accuracy = dfl.load(folder).peers["accuracy"]
    assert float(element(page, "#scale-low").text) == pytest.approx(accuracy.min(), abs=1e-4)
    assert float(element(page, "#scale-high").text) == pytest.approx(accuracy.max(), abs=1e-4)
    before = pixels(page, "drawing")
    element(page, "#own-range").click()
    assert pixels(page, "drawing") != before
    assert float(element(page, "#scale-low").text) < accuracy.min()


def test_every_column_colours_the_peers(page: Any) -> None:
    from selenium.webdriver.support.ui import Select

    select = Select(element(page, "#colour"))
    names = [option.text for option in select.options]
    assert {"peer", "degree", "n_train", "accuracy", "train_loss", "is_attacker"} <= set(names)
    seen = set()
    for name in ("peer", "accuracy", "is_attacker"):
        select.select_by_visible_text(name)
        seen.add(pixels(page, "drawing"))
    assert len(seen) == 3


def test_peers_are_sorted_and_filtered(page: Any, folder: Path) -> None:
    accuracy = [float(x) for x in cells(page, names(page).index("accuracy"))]
    assert accuracy == sorted(accuracy)  # the worst come first
    element(page, "th[data-name=n_train] button").click()
    trained = [float(x) for x in cells(page, names(page).index("n_train"))]
    assert trained == sorted(trained)
    element(page, "th[data-name=n_train] button").click()
    assert element(page, "th[data-name=n_train]").get_attribute("aria-sort") == "descending"
    element(page, "#filter").send_keys("is_attacker = 1")
    assert cells(page, 0) == ["2"]
    element(page, "#filter").clear()
    element(page, "#filter").send_keys("degree > 3")
    degrees = dfl.load(folder).peers["degree"]
    assert len(cells(page, 0)) == (degrees > 3).sum()
    element(page, "#filter").clear()
    element(page, "#filter").send_keys("<script>")
    assert cells(page, 0) == []
    assert element(page, "#shown-peers").text == "no filter"


def test_a_filter_finds_what_the_table_shows(page: Any) -> None:
    def found(text: str) -> tuple[list[str], str]:
        element(page, "#filter").clear()
        element(page, "#filter").send_keys(text)
        return cells(page, 0), element(page, "#shown-peers").text

    losses = dict(zip(cells(page, 0), cells(page, names(page).index("train_loss")), strict=True))
    for name, sign in (("train_loss", "="), ("Train_Loss", ">="), ("train loss", "<=")):
        assert "7" in found(f"{name} {sign} {losses['7']}")[0]
    assert "7" not in found(f"train_loss < {losses['7']}")[0]
    assert found("7")[0] == ["7"]
    assert found("0,7")[0] == ["7"]
    assert page.execute_script(
        "return [shown(7284, 'peer'), shown(1234.5), shown(1235), shown(0.999996), shown(1e9),"
        " rounded(1234.5, '') === rounded(1235, ''), rounded(123456.7, '') === 123000,"
        " tickTexts([999990, 1000010], 1e6), tickTexts([5e-4, 2e-3], 1e6), tickTexts([1e6], 1e9),"
        " logTicks(1.5e-7, 6e-7), tickTexts([1e-6, 1], 1e6, true)]"
    ) == [
        "7284", "1,235", "1,235", "1", "1.00e+9", True, True, ["9.9999e+5", "1.00001e+6"],
        ["0.0005", "0.002"], ["1,000,000"], [2e-7, 3e-7, 4e-7, 5e-7, 6e-7], ["1e-6", "1"],
    ]  # fmt: skip
    assert found("acuracy < 1") == ([], "no column acuracy")
    assert found("99") == ([], "0 to 0 of 0 peers")


def test_numbers_are_shown_at_any_size(browser: Any, tmp_path: Path) -> None:
    large = {"round": [0, 1, 2], "loss": [1.0, 3e32, 2.115533729725098e33], "bytes": [0, 1, 2]}
    flat = {"round": [0, 1_000_000, 2_000_000], "loss": [2.33371, 2.33375, 2.33379]}
    band = {"round": [0, 1, 2], "loss": [1.0, 0.1, 0.01], "low": [-1.0, 0.01, 0.001]}
    band["high"] = [3.0, 0.2, 0.02]
    lines = [{"table": i, "y": "loss", "name": "loss", "low": "", "high": ""} for i in range(3)]
    lines[2] |= {"low": "low", "high": "high"}
    charts = [
        {"title": f"t{i}", "unit": "", "log": i == 2, "x": "", "lines": [line]}
        for i, line in enumerate(lines)
    ]
    shown(browser, charted(tmp_path, [large, flat, band], charts))
    texts = [
        [each.get_attribute("textContent") for each in svg.find_elements("css selector", "text")]
        for svg in elements(browser, "#charts figure > svg")
    ]
    assert texts[0][:5] == ["0", "5e+32", "1e+33", "1.5e+33", "2e+33"]
    assert {"2.33374", "2,000,000"} <= set(texts[1])
    assert len(set(texts[1])) == len(texts[1])
    first = elements(browser, "#charts figure > svg")[0]
    assert "2.12e+33" in hover(browser, first, first.size["width"] / 2 - 16)
    area = element(browser, "#charts .band").get_attribute("d")
    assert area.count(" ") == 6  # above and below each of the three points


@pytest.mark.parametrize("x", ["round", "index"])
def test_rounds_have_no_fractions(browser: Any, tmp_path: Path, x: str) -> None:
    every = range(1, 12)
    tables = [{x: [0, last], "y": [0.5, 0.5]} for last in every]
    charts = [chart(f"{k}", [Line(k, "y", "y")], x=x) for k in range(len(every))]
    shown(browser, charted(tmp_path, tables, charts))
    for last, svg in zip(every, elements(browser, "#charts figure > svg"), strict=True):
        texts = svg.find_elements("css selector", "text:not([text-anchor=end])")
        *numbers, label = [each.get_attribute("textContent") for each in texts]
        assert label == x
        assert numbers[0] == "0"
        assert all(number.isdecimal() for number in numbers)
        assert len(numbers) <= last + 1


def test_lines_keep_their_looks_where_others_join(browser: Any, tmp_path: Path) -> None:
    """A hidden one stays hidden."""

    def write_page(*styles: int) -> Path:
        tables = [{"round": [0, 1], "y": [0.1, 0.2]}]
        lines = [Line(0, "y", f"line {style}", style=style) for style in styles]
        return charted(tmp_path, tables, [chart("t", lines)])

    def drawn() -> list[str]:
        return [
            each.get_attribute("style") for each in elements(browser, "#charts figure > svg .line")
        ]

    shown(browser, write_page(1, 2))
    one, two = drawn()
    assert one != two
    legend(browser)[0].click()
    write_page(0, 1, 2)
    browser.refresh()
    pressed = {each.text: each.get_attribute("aria-pressed") for each in legend(browser)}
    assert pressed == {"line 0": "true", "line 1": "false", "line 2": "true"}
    first, second = drawn()
    assert first not in (one, two)
    assert second == two
    samples = elements(browser, ".legend .line")
    assert [each.get_attribute("style") for each in samples] == [first, one, two]


def names(page: Any) -> list[str]:
    found: list[str] = page.execute_script(
        "return [...document.querySelectorAll('#peer-table th')].map((h) => h.dataset.name)"
    )
    return found


def test_the_pointer_reads_values(page: Any, folder: Path) -> None:
    chart = element(page, "#charts figure:first-child svg")
    tip = hover(page, chart, chart.size["width"] / 2 - 16)
    rows = dfl.load(folder).rows
    assert tip.startswith("round 8\n")
    assert f"{rows['accuracy_mean'].iloc[-1]:.4g}" in tip
    canvas = element(page, "#drawing")
    side = canvas.size["width"] / 2
    places = page.execute_script(
        "const places = unpacked(data.graph.places); return [places[0], places[1]]"
    )
    tip = hover(page, canvas, places[0] * (side - 16), -places[1] * (side - 16))
    assert tip.startswith("peer 0\n")
    assert "accuracy 0." in tip
    assert hover(page, element(page, "#label-map")).startswith("peer ")


def test_the_x_axis_can_be_switched_and_lines_hidden(page: Any) -> None:
    from selenium.webdriver.support.ui import Select

    select = Select(element(page, "#x-axis"))
    assert [option.get_attribute("value") for option in select.options] == [
        "round", "payload_bytes", "sim_seconds", "seconds",
    ]  # fmt: skip
    lines = page.execute_script("return document.querySelectorAll('#charts path.line').length")
    select.select_by_value("payload_bytes")
    assert "bytes sent" in element(page, "#charts figure svg").get_attribute("textContent")
    element(page, "#charts figure:first-child .legend button").click()
    drawn = page.execute_script("return document.querySelectorAll('#charts path.line').length")
    assert drawn == lines - 1
    kept = []
    for _ in range(3):  # Chromium may lose what was stored just before a reload
        Select(element(page, "#x-axis")).select_by_value("payload_bytes")
        page.refresh()
        selected = Select(element(page, "#x-axis")).first_selected_option
        kept.append(selected.get_attribute("value"))
    assert "payload_bytes" in kept


def test_the_keyboard_suffices(page: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    chart = element(page, "#charts figure:first-child svg")
    page.execute_script("arguments[0].focus()", chart)
    page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert element(page, "#charts .readout").text.startswith("round 2,")
    page.execute_script("document.getElementById('drawing').focus()")
    page.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert element(page, "#chosen-peer").text.startswith("peer 0")
    page.execute_script("document.getElementById('frame').focus()")
    page.switch_to.active_element.send_keys(Keys.HOME)
    assert element(page, "#frame-round").text == "round 0"


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: ascii(text[:20]))
def test_hostile_names_are_shown_as_text(browser: Any, tmp_path: Path, text: str) -> None:
    shown(browser, write(tmp_path, page_of(text)))
    assert len(elements(browser, "script")) == 2
    seen = element(browser, "h1").get_attribute("textContent")
    if text.isprintable():
        assert seen == text
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= 1280
    blocked = [line for line in browser.get_log("browser") if "alert" in str(line)]
    assert blocked == []


def test_hostile_lines_are_shown_as_text(browser: Any, tmp_path: Path) -> None:
    table = {"round": [0, 1, 2], "accuracy_mean": [0.1, 0.2, 0.3]}
    sent = [text for text in HOSTILE if text != "\udcff"]  # which the driver cannot
    lines = [
        {"table": 0, "y": "accuracy_mean", "name": text, "low": "", "high": ""} for text in sent
    ]
    charts = [{"title": HOSTILE[0], "unit": HOSTILE[1], "log": False, "x": "", "lines": lines}]
    shown(browser, charted(tmp_path, [table], charts))
    assert [each.get_attribute("textContent") for each in legend(browser)] == sent
    assert hover(browser, element(browser, "#charts svg")).startswith("round 1\n<script>alert")
    assert errors(browser) == []


def legend(browser: Any) -> list[Any]:
    return elements(browser, ".legend button")


@pytest.mark.parametrize("width", WIDTHS)
def test_a_page_fits_its_window(browser: Any, folder: Path, width: int) -> None:
    shown(browser, folder / "report.html", width)
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    try:
        wide = browser.execute_script("return document.documentElement.scrollWidth")
        assert wide <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", ["run", "comparison"])
def test_no_accessibility_fault_is_serious(
    browser: Any, folder: Path, tmp_path: Path, kind: str, scheme: str
) -> None:
    axe = pytest.importorskip("axe_core_python.selenium")
    if kind == "comparison":
        compare.compare([folder], tmp_path / "compared", make_console())
    path = folder if kind == "run" else tmp_path / "compared"
    shown(browser, path / "report.html")
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    found = axe.Axe().run(browser)
    serious = [
        (each["id"], [node["html"][:200] for node in each["nodes"]])
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]
    assert serious == []


def test_a_thousand_peers_open_and_move_at_once(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dfl.reporting.plots.figures", lambda *given: {})
    rng = np.random.default_rng(0)
    data = rng.normal(size=(3000, 8)).astype(np.float32), rng.integers(0, 10, 3000)
    opened, moved = {}, {}
    for peers, radius in ((100, 0.2), (1000, 0.06)):
        folder = tmp_path / f"{peers}"
        run = dfl.Run(
            peers=peers, topology=f"geometric:radius={radius}", model="softmax", dataset=data,
            rounds=4, eval_every=1, local_steps=1, out=folder,
        )  # fmt: skip
        list(dfl.simulate(run))
        opened[peers] = min(seconds_to_open(browser, folder / "report.html") for _ in range(3))
        moved[peers] = min(slide(browser, frame) for frame in (0, 3, 2, 1))

    assert opened[1000] < 10 * opened[100]
    assert moved[1000] < 10 * moved[100]
