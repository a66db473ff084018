"""Figures of sweeps show means over seeds, and any number of lines with distinct styles."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from dfl.reporting.lines import COLOURS, DASHES, Styles, draw, over_seeds, shades
from dfl.sweep.plots import figures, map_axes, map_note, panels, possible_names
from tests.support.swept import swept

GRAPHS = ("ring", "torus", "complete")
PLAIN: dict[str, Sequence[Any]] = {"topology": GRAPHS, "bits": ("none", 4), "seed": (0, 1, 2)}


def drawn(lists: Mapping[str, Sequence[Any]]) -> dict[str, Figure]:
    """Render the figures of a sweep, and return them by name."""
    found = figures(*swept(lists), [name for name in lists if name != "seed"], "mine")
    for figure in found.values():
        figure.savefig(io.BytesIO(), format="png", dpi=40)
    return found


def used(figure: Figure) -> list[Axes]:
    return [axes for axes in figure.axes if axes.get_visible()]


@pytest.mark.parametrize(
    ("lists", "more"),
    [
        ({"seed": (0, 1)}, []),
        ({"topology": GRAPHS}, []),
        ({"lr": (0.1, 0.01), "seed": (0, 1)}, []),
        (PLAIN, ["map_topology_by_bits"]),
        ({"bits": ("none", 4), "lr": (0.1, 0.01), "topology": GRAPHS}, ["map_topology_by_bits"]),
        ({"lr": (0.1, 0.01), "momentum": (0, 0.9)}, ["map_lr_by_momentum"]),
    ],
)
def test_figures_of_a_grid_depend_on_its_lists(
    lists: Mapping[str, Sequence[Any]], more: list[str]
) -> None:
    found = drawn(lists)
    assert list(found) == ["accuracy_by_round", "accuracy_by_bytes", *more]
    assert set(found) <= possible_names([name for name in lists if name != "seed"])
    for figure in found.values():
        first = used(figure)[0]
        heading = figure.get_suptitle() or first.get_title(loc="left")
        assert heading.startswith("Accuracy ")
        assert "mine" in heading + "".join(text.get_text() for text in first.texts)
        assert all(axes.get_ylabel() for axes in used(figure)[:1])


def test_a_line_is_the_mean_and_its_band_the_deviation() -> None:
    rows, _ = swept({"seed": (0, 1, 2)})
    mean = over_seeds(rows, "accuracy_mean")
    each = rows.pivot(index="round", columns="cell", values="accuracy_mean").to_numpy()
    np.testing.assert_allclose(mean["mean"], each.mean(1))
    payloads = rows.pivot(index="round", columns="cell", values="payload_bytes").to_numpy()
    np.testing.assert_allclose(mean["payload_bytes"], payloads.mean(1))
    np.testing.assert_allclose(mean["high"] - mean["mean"], each.std(1, ddof=1))
    axes = drawn({"seed": (0, 1, 2)})["accuracy_by_round"].axes[0]
    (line,) = axes.lines
    np.testing.assert_allclose(np.asarray(line.get_ydata()), mean["mean"])
    assert len([each for each in axes.collections if isinstance(each, PolyCollection)]) == 1


def test_bands_stay_between_0_and_1_and_one_seed_has_none() -> None:
    rows = pd.DataFrame(
        {"round": [0, 0], "payload_bytes": [0, 0], "accuracy_mean": [0.0, 1.0], "cell": ["a", "b"]}
    )
    mean = over_seeds(rows, "accuracy_mean")
    assert mean[["mean", "low", "high"]].to_numpy().tolist() == [[0.5, 0.0, 1.0]]
    assert not drawn({"topology": GRAPHS})["accuracy_by_round"].axes[0].collections


@pytest.mark.parametrize(
    ("lost", "many"),
    [([], "2"), (["lr=1,seed=2", "lr=2,seed=2"], "2"), (["lr=1,seed=2"], "2 to 3")],
)
def test_the_subtitle_has_the_number_of_seeds(lost: Sequence[str], many: str) -> None:
    rows, found = swept({"lr": (1, 2), "seed": (0, 1, 2) if lost else (0, 1)})
    made = figures(rows[~rows["cell"].isin(lost)], found, ["lr"], "mine")
    (text,) = made["accuracy_by_round"].axes[0].texts
    assert text.get_text() == f"mine, mean and standard deviation over {many} seeds"


def test_means_end_where_the_first_seed_ends() -> None:
    """A mean over fewer seeds than before is left out, since it would jump."""
    rows, _ = swept({"seed": (0, 1)})
    early = rows[(rows["seed"] == "0") | (rows["round"] <= 20)]
    assert over_seeds(early, "accuracy_mean")["round"].max() == 20


@pytest.mark.parametrize("graphs", [("ring",), GRAPHS])
def test_lines_that_end_before_some_runs_are_noted(graphs: Sequence[str]) -> None:
    rows, found = swept({"topology": graphs, "lr": (1, 2), "seed": (0, 1)})
    note = "lines end where the first run of a group ends"

    def subtitles(rows: pd.DataFrame) -> dict[str, str]:
        made = figures(rows, found, ["topology", "lr"], "x")
        return {name: made[name].axes[0].texts[-1].get_text() for name in made}

    assert not any(note in text for text in subtitles(rows).values())
    whole = rows[(rows["topology"] == "ring") | (rows["round"] <= 20)]  # groups end, not seeds
    assert not any(note in text for text in subtitles(whole).values())
    early = rows[(rows["seed"] == "0") | (rows["round"] <= 20)]
    noted = [name for name, text in subtitles(early).items() if note in text]
    assert noted == ["accuracy_by_round", "accuracy_by_bytes"]


def pixels(figure: Figure, colour: str) -> np.ndarray:
    """Return where a figure has a colour, (rows, columns)."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="raw", dpi=100)
    high, wide = round(figure.bbox.height), round(figure.bbox.width)
    image = np.frombuffer(buffer.getvalue(), np.uint8).reshape(high, wide, 4)[..., :3]
    found: np.ndarray = np.all(image == [int(colour[k : k + 2], 16) for k in (1, 3, 5)], axis=2)
    return found


@pytest.mark.parametrize("count", [1, 2])
def test_a_single_point_is_a_dot_with_an_error_bar(count: int) -> None:
    figure = Figure(dpi=100)
    axes = figure.subplots()
    rows = pd.DataFrame({"mean": [np.nan, 0.5], "low": [np.nan, 0.4], "high": [np.nan, 0.7]})
    rows["round"] = 5, 10
    draw(axes, rows.tail(count), "round", {"color": COLOURS[0], "marker": ""})
    found = pixels(figure, COLOURS[0])
    assert found.sum() > 10
    places = axes.transData.transform([(10, 0.5)])[0]
    row, column = np.argwhere(found).mean(axis=0)
    assert (column, len(found) - row) == pytest.approx(places, abs=1.5)
    (bars,) = axes.collections
    assert isinstance(bars, LineCollection)
    np.testing.assert_allclose(bars.get_segments()[-1], [[10, 0.4], [10, 0.7]])


def test_bytes_are_on_a_logarithmic_axis_from_the_first_message() -> None:
    axes = drawn(PLAIN)["accuracy_by_bytes"].axes[0]
    assert axes.get_xscale() == "log"
    assert axes.get_xlabel() == "payload of all peers together (bytes)"
    assert min(np.asarray(line.get_xdata()).min() for line in axes.lines) > 0
    labels = [label.get_text() for label in axes.get_xticklabels(which="both")]
    assert any(label.endswith("B") for label in labels)


def test_without_messages_there_is_no_figure_by_bytes() -> None:
    rows, found = swept({"topology": GRAPHS})
    assert list(figures(rows.assign(payload_bytes=0), found, ["topology"], "x")) == [
        "accuracy_by_round"
    ]


@pytest.mark.parametrize(
    ("more", "column", "label"),
    [
        ({}, "train_loss", "training loss (mean)"),
        ({"test_loss_mean": 2.0}, "test_loss_mean", "loss on the test set\n(mean over the peers)"),
    ],
)
def test_without_accuracy_a_loss_is_drawn(more: dict[str, float], column: str, label: str) -> None:
    rows, found = swept({"topology": GRAPHS, "lr": (1, 2)})
    rows = rows.assign(accuracy_mean=np.nan, **more)
    found = found.rename(columns=lambda name: name.replace("accuracy_mean", column))
    made = figures(rows, found, ["topology", "lr"], "x")
    stem = column.removesuffix("_mean")
    assert list(made) == [f"{stem}_by_round", f"{stem}_by_bytes", "map_topology_by_lr"]
    assert used(made[f"{stem}_by_round"])[0].get_ylabel() == label


def test_without_finished_cells_there_are_no_figures() -> None:
    assert figures(pd.DataFrame(), pd.DataFrame(), ["topology"], "x") == {}


def test_lines_differ_and_the_legend_explains_them() -> None:
    figure = drawn(PLAIN)["accuracy_by_round"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "topology",
        *GRAPHS,
        "bits",
        "none",
        "4",
    ]
    assert [text.get_fontweight() for text in legend.get_texts()][:2] == ["bold", "normal"]
    lines: list[Any] = list(figure.axes[0].lines)
    looks = {(to_hex(line.get_color()), str(line._dash_pattern)) for line in lines}
    assert len(looks) == len(lines) == 6


@pytest.mark.parametrize(
    "lists", [{"a": range(3), "b": range(25)}, {"a": range(20)}, {"a": "xyz", "b": "uv", "c": "wz"}]
)
def test_styles_are_distinct(lists: Mapping[str, Sequence[Any]]) -> None:
    rows, _ = swept(lists, rounds=1, every=1)
    styles = Styles.of(rows, list(lists))
    values = rows[list(lists)].drop_duplicates().to_numpy().tolist()
    assert len({str(styles.style(tuple(each))) for each in values}) == len(values)
    assert len(DASHES) == len({str(dash) for dash in DASHES})


def test_few_colours_suit_colour_blind_readers() -> None:
    assert shades(7) == list(COLOURS)
    assert len(set(shades(30))) == 30


@pytest.mark.slow
def test_crowded_lines_are_split_over_panels() -> None:
    many = {"topology": list("abcd"), "bits": ("none", 16, 8, 4), "seed": (0, 1)}
    rows, _ = swept(many)
    assert panels(rows, ["topology", "bits"]) == (["topology"], ["bits"])
    figure = drawn(many)["accuracy_by_bytes"]
    assert [axes.get_title(loc="left") for axes in used(figure)] == [
        f"topology {name}" for name in "abcd"
    ]
    assert {len(axes.lines) for axes in used(figure)} == {4}
    assert panels(swept(PLAIN)[0], ["topology", "bits"]) == ([], ["topology", "bits"])
    assert panels(swept({"lr": range(40)})[0], ["lr"]) == ([], ["lr"])


@pytest.mark.parametrize("count", [4, 5, 6])
@pytest.mark.parametrize("x", ["round", "bytes"])
def test_the_lowest_panel_of_a_column_has_the_numbers_of_the_x_axis(x: str, count: int) -> None:
    lists = {"topology": "abcdef"[:count], "bits": (2, 4, 8, 16), "lr": (1, 2, 3)}
    figure = figures(*swept(lists), list(lists), "x")[f"accuracy_by_{x}"]
    figure.savefig(io.BytesIO(), format="png", dpi=40)
    numbered = [
        bool(axes.get_xlabel()) and any(tick.label1.get_visible() for tick in axes.xaxis.majorTicks)
        for axes in used(figure)
    ]
    assert numbered == [k + 3 >= count for k in range(count)]
    assert [bool(axes.get_ylabel()) for axes in used(figure)] == [k % 3 == 0 for k in range(count)]


def test_a_map_shows_the_result_of_every_group() -> None:
    rows, found = swept(PLAIN)
    figure = figures(rows, found, ["topology", "bits"], "x")["map_topology_by_bits"]
    axes = figure.axes[0]
    written = {tuple(text.get_position()): text.get_text() for text in axes.texts}
    assert [label.get_text() for label in axes.get_yticklabels()] == list(GRAPHS)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["none", "4"]
    one = found[(found["topology"] == "complete") & (found["bits"] == "4")].iloc[0]
    assert written[1, 2] == f"{one['accuracy_mean']:.3f}\n± {one['accuracy_mean_deviation']:.3f}"


def test_a_map_marks_groups_without_finished_cells() -> None:
    rows, found = swept(PLAIN)
    found.loc[0, ["accuracy_mean", "accuracy_mean_deviation"]] = np.nan
    figure = figures(rows, found, ["topology", "bits"], "x")["map_topology_by_bits"]
    assert figure.axes[0].texts[0].get_text() == "none\nfinished"


def test_a_map_prefers_graph_and_bits_as_axes() -> None:
    _, found = swept({"lr": (1, 2), "bits": (2, 4), "topology": GRAPHS})
    assert map_axes(found, ["lr", "bits", "topology"]) == ("topology", "bits")
    assert map_axes(found, ["lr", "bits"]) == ("bits", "lr")
    assert map_axes(found, ["lr"]) is None
    _, found = swept({"lr": range(10), "bits": (2, 4), "topology": GRAPHS})
    assert map_axes(found, ["lr", "bits", "topology"]) is None  # ten maps would be too many
    assert map_note(found, ["lr", "bits", "topology"]) == (
        "no map of topology by bits: there would be 10, and at most 9 are drawn"
    )
    assert map_note(found, ["lr", "bits"]) == map_note(found, ["lr"]) == ""


@pytest.mark.slow
def test_pyplot_is_not_imported() -> None:
    code = "import sys, dfl.sweep.plots; sys.exit('matplotlib.pyplot' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
