"""Figures at the end of a run are means over the last tenth of its rounds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dfl
from dfl.sweep import Cell
from experiments import common
from experiments.messages_and_graphs import (
    bits,
    faults,
    graphs,
    local_steps,
    time_to_accuracy,
    update_mixing,
)
from experiments.personal_layers import device_variance, lg_depth, lg_table1
from experiments.servers_and_robustness import robust_fltrust2021, robust_gossip, server_or_peers
from tests.support.launched import here

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_figures")]

ROUNDS = 50
RESULTS = Path(__file__).parents[2] / "experiments/results"

COUNTED = (
    "round", "seconds", "payload_bytes", "wire_bytes", "upload_bytes", "download_bytes",
    "parameters_k_plus_m", "messages_lost", "sim_seconds",
)  # fmt: skip
"""Columns of metrics.csv that accumulate from the first round on."""


def spiking(**labels: Any) -> pd.DataFrame:
    """A run that is at 0.5 in its last tenth, at 0.2 before it, and at 1 in its last round."""
    t = np.arange(ROUNDS + 1)
    figure = np.where(t > 45, 0.5, 0.2)
    figure[-1] = 1.0
    counts = dict.fromkeys(COUNTED, 1000.0 * t)
    rows = pd.DataFrame({**dict.fromkeys(common.MEASURED, figure), **counts, "round": t})
    return rows.assign(
        **{
            "seed": 0,
            "total_MB": 1.0 * t,
            "busiest_MB": 1.0 * t,
            "phone": t,
            "datacenter": t,
            **labels,
        }
    )


TAIL = 0.6
"""Of the run: four rounds at 0.5 and one at 1."""


@pytest.mark.parametrize(
    ("rounds", "first"), [(1, 1), (4, 4), (10, 10), (11, 10), (50, 46), (100, 91), (30, 28)]
)
def test_the_tail_is_what_comes_after_nine_tenths(rounds: int, first: int) -> None:
    assert common.tail_rounds(rounds) == range(first, rounds + 1)
    assert [t for t in range(rounds + 1) if t > 0.9 * rounds] == list(common.tail_rounds(rounds))


def test_a_curve_that_spikes_at_the_end_does_not_end_at_its_spike() -> None:
    rows = spiking()
    assert common.tail_mean(rows, "accuracy_mean") == pytest.approx(TAIL)
    assert common.tail_mean(rows[rows["round"] <= 49], "accuracy_mean") == pytest.approx(
        (0.2 + 4 * 0.5) / 5
    )
    assert common.tail_mean(rows.iloc[::-1], "accuracy_mean") == pytest.approx(
        TAIL
    )  # in whatever order they come
    rows.loc[rows["round"] == 47, "accuracy_mean"] = np.nan
    assert common.tail_mean(rows, "accuracy_mean") == pytest.approx((3 * 0.5 + 1) / 4)


def test_columns_that_accumulate_are_those_of_the_last_round() -> None:
    rows = pd.concat([spiking(width="4"), spiking(width="8", accuracy_mean=0.7)])
    ends = common.ends(rows, ["width", "seed"]).set_index("width")
    assert ends["accuracy_mean"].tolist() == pytest.approx([TAIL, 0.7])
    assert ends["consensus_distance"].tolist() == pytest.approx([TAIL, TAIL])
    assert ends["payload_bytes"].tolist() == [50_000, 50_000]
    assert ends["round"].tolist() == [50, 50]


def of_many(**labels: list[Any]) -> pd.DataFrame:
    """Such runs for all combinations of labels."""
    cells = pd.MultiIndex.from_product(list(labels.values()), names=list(labels)).to_frame(
        index=False
    )
    return pd.concat(
        [spiking(**{str(k): v for k, v in cell.items()}) for cell in cells.to_dict("records")]
    )


def quadratic() -> pd.DataFrame:
    return pd.concat(
        [
            pd.DataFrame({"mixing": "lazy", "method": method, "distance": [1.0, 2.0]})
            for method in update_mixing.METHODS
        ]
    )


EXPERIMENTS: dict[str, tuple[Callable[[], pd.DataFrame], dict[str, float]]] = {
    "bits": (
        lambda: bits.tabulate(of_many(width=["float32", "4"])),
        {"accuracy": TAIL, "worst_peer": TAIL, "relative_squared_error": 1},
    ),
    "graphs": (
        lambda: graphs.tabulate(of_many(graph=["ring"], width=["4"])),
        {"accuracy": TAIL, "worst_peer": TAIL},
    ),
    "faults": (
        lambda: faults.tabulate(of_many(method=list(faults.METHODS), loss=["0"])),
        {"accuracy": TAIL, "consensus_distance": TAIL, "consensus_distance_max": 1},
    ),
    "local_steps": (
        lambda: local_steps.tabulate(local_steps.by_seed(of_many(partition=["iid"], steps=[1]))),
        {"accuracy": TAIL, "worst_peer": TAIL, "mean_model": TAIL, "consensus_distance": TAIL},
    ),
    "update_mixing": (
        lambda: update_mixing.tabulate(
            of_many(mixing=["lazy"], method=list(update_mixing.METHODS)), quadratic()
        ),
        {"accuracy": TAIL, "mean_model": TAIL, "consensus_distance": TAIL},
    ),
    "server_or_peers": (
        lambda: server_or_peers.tabulate(of_many(method=["ring"]), server_or_peers.Options()),
        {
            "accuracy": TAIL,
            "worst_peer": TAIL,
            "mean_model": TAIL,
            "total_MB": 50,
            "busiest_MB": 50,
        },
    ),
    "time_to_accuracy": (
        lambda: time_to_accuracy.tabulate(
            of_many(graph=["ring"], width=["4"]), time_to_accuracy.Options()
        ),
        {"accuracy": TAIL, "phone_round_s": 1},
    ),
    "device_variance": (
        lambda: device_variance.tabulate(of_many(labels=[2], method=["FedAvg"]), {2: 2.0}),
        {"local_test": 100 * TAIL, "new_test": 100 * TAIL, "new_alone": 100 * TAIL, "MB": 0.05},
    ),
    "lg_depth": (
        lambda: lg_depth.tabulate(lg_depth.by_seed(of_many(share=["all"]))).tail(1),
        {"local_test": 100 * TAIL, "new_test": 100 * TAIL, "new_alone": 100 * TAIL, "MB": 0.05},
    ),
    "lg_table1": (
        lambda: lg_table1.tabulate(
            lg_table1.by_seed(of_many(method=["lg"]), {0: spiking()}, "mnist"), "mnist"
        ),
        {
            "local_test": 100 * TAIL,
            "new_test": 100 * TAIL,
            "new_by_vote": 100 * TAIL,
            "rounds": 100,
            "parameters": 1e5,
        },
    ),
    "robust_fltrust2021": (
        lambda: robust_fltrust2021.tabulate(
            robust_fltrust2021.by_seed(
                of_many(attack=["backdoor"], rule=list(robust_fltrust2021.RULES)),
                ROUNDS,
                {"mean": 0.1},
            )
        ),
        {"error": 1 - TAIL, "backdoor_success": TAIL, "trust": TAIL, "trust_of_attackers": TAIL},
    ),
    "robust_gossip": (
        lambda: robust_gossip.tabulate(
            robust_gossip.by_seed(
                of_many(
                    data=["alike"],
                    graph=["ring"],
                    rule=["mean"],
                    attack=list(robust_gossip.ATTACKS),
                ),
                robust_gossip.Options(rounds=ROUNDS),
            ),
            robust_gossip.Options(),
        ),
        {"none": TAIL, "dissensus": TAIL, "worst_peer": TAIL, "consensus_distance": TAIL},
    ),
}
"""Experiments that report the end of runs: a table of such runs, and its figures."""


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiments_report_the_tail(experiment: str) -> None:
    tabulated, expected = EXPERIMENTS[experiment]
    for _, row in tabulated().iterrows():
        assert {name: row[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("experiment", "labels", "accuracy"),
    [
        ("bits", ["width"], "accuracy"),
        ("local_steps", local_steps.LABELS, "accuracy_mean"),
        ("update_mixing", update_mixing.LABELS, "accuracy_mean"),
    ],
)
def test_a_published_table_is_the_mean_of_its_seeds(
    experiment: str, labels: list[str], accuracy: str
) -> None:
    folder = RESULTS / experiment
    table, seeds = (
        pd.read_csv(folder / f"{name}.csv").set_index(labels) for name in ("table", "seeds")
    )
    means = seeds.groupby(labels)[accuracy].mean()
    assert table["accuracy"].to_dict() == pytest.approx(means.to_dict(), rel=1e-4)


def test_every_round_of_the_tail_is_evaluated_and_nothing_else_changes(tmp_path: Path) -> None:
    options = common.Options(dataset="digits", rounds=20)
    cell = Cell({"seed": 0}, common.standard(options, seed=0, eval_every=10))
    with here():
        rows = common.measure(tmp_path, [cell])
    assert rows["round"].tolist() == [0, 10, 19, 20]
    assert common.measure(tmp_path, [cell]).equals(rows)
    every = pd.DataFrame(dfl.simulate(common.standard(options, seed=0, eval_every=1)))
    columns = [name for name in every if name != "seconds"]
    alike = every[every["round"].isin(rows["round"])].reset_index(drop=True)
    pd.testing.assert_frame_equal(rows[columns], alike[columns], check_exact=True)
    assert {*rows.columns} - {"seed"} <= {*common.MEASURED, *COUNTED}


def test_a_run_that_diverges_has_the_rows_before(tmp_path: Path) -> None:
    options = common.Options(dataset="digits", rounds=20)
    run = common.standard(options, seed=0, eval_every=10, weight_decay=1e6)
    with here():
        rows = common.measure(tmp_path, [Cell({"seed": 0}, run)])
    assert rows["round"].max() < 18
    assert common.measure(tmp_path, [Cell({"seed": 0}, run)]).equals(rows)


def test_a_run_that_may_stop_earlier_has_no_tail() -> None:
    options = common.Options(dataset="digits", rounds=20)
    assert common.with_tail(common.standard(options, eval_every=10)).eval_last == 2
    for changes in ({"eval_every": 1}, {"eval_every": 10, "until": "accuracy=0.9"}):
        run = common.standard(options, **changes)
        assert common.with_tail(run) == run
