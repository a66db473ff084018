"""The experiment on attackers among neighbours: its grid, rules, table, finding and figure."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import dfl
from experiments.servers_and_robustness import robust_gossip as page_of
from experiments.servers_and_robustness.robust_gossip import ALONE, ATTACKS, DATA, Options
from tests.support.launched import run_experiment

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, pd.DataFrame, str]:
    """The experiment on a torus for one round: its folder, its table and its output."""
    out = tmp_path_factory.mktemp("gossip")
    done = run_experiment(
        "servers_and_robustness.robust_gossip",
        out,
        "--rounds",
        "1",
        "--seeds",
        "1",
        "--graphs",
        "torus",
    )
    assert done.returncode == 0, done.stderr
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert done.stdout.strip() == (out / "table.md").read_text().strip()
    return out, pd.read_csv(out / "table.csv"), done.stdout


def rows_of(
    accuracy: dict[tuple[str, str], float], rounds: int = 40, seeds: int = 1
) -> pd.DataFrame:
    """Hand-made last rows of rules on a ring: (rule, attack) -> accuracy, 0.8 where not named; 0.7
    alone.
    """
    cells = [(ALONE, ALONE, "none", 0.7)]
    cells += [
        ("ring", rule, a, accuracy.get((rule, a), 0.8))
        for rule in ("mean", "median")
        for a in ATTACKS
    ]
    return pd.DataFrame(
        [
            {
                "data": data,
                "graph": graph,
                "rule": rule,
                "attack": attack,
                "seed": seed,
                "round": rounds,
            }
            | {
                "accuracy_mean": value,
                "accuracy_min": value - 0.1,
                "consensus_distance": 10 * value,
            }
            for data in DATA
            for graph, rule, attack, value in cells
            for seed in range(seeds)
        ]
    )


OPTIONS = Options(seeds=1, graphs=("ring",))


def table_of(
    accuracy: dict[tuple[str, str], float], rounds: int = 40, seeds: int = 1
) -> pd.DataFrame:
    """The table of such rows."""
    return page_of.tabulate(page_of.by_seed(rows_of(accuracy, rounds, seeds), OPTIONS), OPTIONS)


def test_a_row_per_graph_and_rule(experiment: tuple[Path, pd.DataFrame, str]) -> None:
    _, table, printed = experiment
    assert table["data"].unique().tolist() == list(DATA)
    for _, own in table.groupby("data"):
        assert own["rule"].tolist() == [
            ALONE,
            "mean",
            "median",
            "trimmed_mean",
            "clipping",
            "krum",
            "fltrust",
        ]
    on_graphs = table[table["graph"] == "torus"]
    assert all(on_graphs[attack].between(0, 1).all() for attack in ATTACKS)
    assert (on_graphs["attacker_share"] == 0.2).all()  # one of five messages
    assert "\nFinding: over 1 seeds, attackers" in printed
    assert "torus (20% of the messages are attackers' at worst)" in printed


def test_numbers_are_those_of_the_runs(experiment: tuple[Path, pd.DataFrame, str]) -> None:
    out, table, _ = experiment
    for row in table[table["graph"] == "torus"].to_dict("records"):
        name = f"data={row['data']},graph=torus,rule={row['rule']}"
        folders = {attack: out / "cells" / f"{name},attack={attack},seed=0" for attack in ATTACKS}
        ends = {attack: dfl.load(folder).rows.iloc[-1] for attack, folder in folders.items()}
        for attack, end in ends.items():
            assert row[attack] == pytest.approx(end["accuracy_mean"], rel=1e-5)
        assert row["worst_peer"] == pytest.approx(
            min(end["accuracy_min"] for end in ends.values()), rel=1e-5
        )
        assert row["consensus_distance"] == pytest.approx(
            max(end["consensus_distance"] for end in ends.values()), rel=1e-5
        )


def test_attacks_change_the_accuracy(experiment: tuple[Path, pd.DataFrame, str]) -> None:
    table = experiment[1]
    mean = table[(table["graph"] == "torus") & (table["rule"] == "mean")]
    for attack in ("label_flip", "sign_flip", "dissensus"):
        assert (mean[attack] != mean["none"]).all()


def test_every_graph_has_all_seeds() -> None:
    options = Options(seeds=3, graphs=("ring", "torus"))
    cells = [cell.values for cell in page_of.grid(options)]
    seeds = {
        g: {labels["seed"] for labels in cells if labels["graph"] == g}
        for g in ("ring", "torus", ALONE)
    }
    assert seeds == {graph: {0, 1, 2} for graph in ("ring", "torus", ALONE)}
    assert len({tuple(labels.values()) for labels in cells}) == len(cells)


def test_attackers_are_those_that_are_named() -> None:
    options = Options(attackers=(3, 5))
    assert page_of.attack_spec(options, "none") == "none"
    assert page_of.attack_spec(options, "sign_flip") == "sign_flip:peers=3+5"
    assert page_of.attack_spec(options, "alie") == "alie:z=1.5,peers=3+5"
    cells = page_of.grid(options)
    runs = {cell.run.attack for cell in cells if cell.values["attack"] == "dissensus"}
    assert runs == {"dissensus:peers=3+5"}


def test_a_graph_has_the_rules_it_has_room_for() -> None:
    options = Options()
    assert "krum" not in page_of.rules(options, "ring")
    assert page_of.rules(options, "torus")["krum"] == "krum:f=1"
    assert page_of.rules(options, "complete")["trimmed_mean"] == "trimmed_mean:f=2"
    assert page_of.rules(options, "complete")["median"] == "median"


def test_the_share_of_attackers() -> None:
    assert page_of.attacker_share("ring", Options()) == pytest.approx(1 / 3)
    assert page_of.attacker_share("ring", Options(attackers=(0, 2))) == pytest.approx(
        2 / 3
    )  # peer 1 sits between them
    assert page_of.attacker_share("complete", Options()) == pytest.approx(2 / 16)
    assert np.isnan(page_of.attacker_share(ALONE, Options()))


def test_the_table_takes_the_worst() -> None:
    table = table_of({("mean", "alie"): 0.3, ("mean", "none"): 0.9})
    row = table[(table["rule"] == "mean") & (table["data"] == "alike")].iloc[0]
    assert (row["none"], row["alie"], row["sign_flip"]) == (0.9, 0.3, 0.8)
    assert row["worst_peer"] == pytest.approx(0.2)
    assert row["consensus_distance"] == pytest.approx(9)
    assert row["seeds"] == 1


def test_lost_models_guess() -> None:
    table = table_of({}, rounds=7)
    assert (table["none"] == page_of.GUESS).all()
    assert (table["worst_peer"] == 0).all()
    assert np.isinf(table["consensus_distance"]).all()


def test_the_finding_counts_the_rules_that_are_better_than_alone() -> None:
    table = table_of({("mean", "dissensus"): 0.4, ("median", "alie"): 0.75})
    text = page_of.finding(table, OPTIONS)
    assert text.startswith(
        "over 1 seeds, attackers 0 and 10 of 16; alike: a peer alone learns 0.700"
    )
    assert (
        "median stays above that under every attack, "
        "best median with 0.750 at worst (alie), 0.800 unattacked" in text
    )
    none = table_of({(rule, "alie"): 0.2 for rule in ("mean", "median")})
    assert "no rule stays above that" in page_of.finding(none, OPTIONS)


def test_the_figure_has_a_panel_per_kind_of_data() -> None:
    figure = page_of.draw(table_of({("mean", "alie"): 0.33}), OPTIONS)
    alike, shards, _ = figure.axes
    assert [axes.get_title() for axes in (alike, shards)] == [
        "alike: iid",
        "two shards: shards:per_peer=2",
    ]
    assert [text.get_text() for text in alike.texts].count("0.33") == 1
    assert [text.get_text() for text in alike.get_yticklabels()] == ["ring  mean", "ring  median"]
