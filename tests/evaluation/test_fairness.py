"""Gaps between groups: by their formulas, by fairlearn, and as columns of a run."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fairlearn.metrics import demographic_parity_difference, equalized_odds_difference
from sklearn.metrics import roc_auc_score

import dfl
from dfl.config import Run
from dfl.evaluation.fairness import ADVERSARY, ODDS, PARITY, auc, cells, gaps


def of(labels: list[int], decisions: list[int], *groups: list[int]) -> tuple[float, float]:
    members = cells(np.array(labels), np.array(groups).T)
    found = gaps(np.array([decisions], float) @ members, members.sum(0))
    return float(found[PARITY][0]), float(found[ODDS][0])


def test_gaps_of_a_group_without_a_label_are_not_defined() -> None:
    labels, decisions = [0, 1, 0, 1], [0, 1, 1, 1]
    assert of(labels, decisions, [0, 0, 1, 1]) == (0.5, 1.0)
    parity, odds = of(labels, decisions, [0, 1, 0, 1])
    assert parity == 0.5
    assert np.isnan(odds)
    assert np.isnan(of(labels, decisions, [0, 0, 0, 0])).all()


def test_gaps_are_means_over_the_attributes() -> None:
    labels, decisions = [0, 1, 0, 1, 0, 1, 0, 1], [0, 1, 1, 1, 0, 1, 0, 0]
    first, second = [0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0, 1, 1]
    each = [of(labels, decisions, one) for one in (first, second)]
    assert of(labels, decisions, first, second) == pytest.approx(np.mean(each, axis=0))


@pytest.mark.parametrize("seed", range(5))
def test_gaps_are_those_of_fairlearn(seed: int) -> None:
    rng = np.random.default_rng(seed)
    labels, decisions, group = rng.integers(0, 2, (3, 50))
    given = {"y_true": labels, "y_pred": decisions, "sensitive_features": group}
    assert of(labels.tolist(), decisions.tolist(), group.tolist()) == pytest.approx(
        (demographic_parity_difference(**given), equalized_odds_difference(**given))
    )


def people(classes: int = 2) -> dfl.Data:
    """Examples with two protected attributes, of which the label depends on the first."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(200, 5)).astype(np.float32)
    protected = rng.integers(0, 2, (200, 2))
    labels = (inputs[:, 0] + protected[:, 0] > 0.5).astype(np.int64)
    labels[:classes] = range(classes)
    return dfl.Data(
        inputs[:120], labels[:120], inputs[120:], labels[120:], classes,
        train_protected=protected[:120], test_protected=protected[120:],
        protected=("first", "second"),
    )  # fmt: skip


def run_of(**changes: object) -> Run:
    settings = {"dataset": people(), "model": "softmax", "peers": 3, "rounds": 2, "batch_size": 10}
    return Run(**{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", ["dfedavgm", "fedavg"])
@pytest.mark.parametrize("eval_examples", [None, 40])
def test_columns_are_those_of_the_models(
    algorithm: str, eval_examples: int | None, tmp_path: Path
) -> None:
    """Of the decisions of every peer's model on the common test set."""
    rows = list(
        dfl.simulate(run_of(algorithm=algorithm, out=tmp_path, eval_examples=eval_examples))
    )
    found = dfl.load(tmp_path)
    for name in (PARITY, ODDS):
        assert rows[-1][f"{name}_mean"] == pytest.approx(found.peers[name].mean())
        assert (pd.Series([row[f"{name}_mean"] for row in rows]).dropna() <= 1).all()
    if eval_examples is None:
        data = people()
        for peer in range(3):
            with torch.no_grad():
                out = found.model(peer)(torch.from_numpy(np.asarray(data.test_inputs)))
            members = cells(data.test_labels, np.asarray(data.test_protected))
            expected = gaps(out.argmax(1).double().numpy()[None] @ members, members.sum(0))
            for name in (PARITY, ODDS):
                assert found.peers[name][peer] == pytest.approx(float(expected[name][0]), abs=1e-6)


@pytest.mark.parametrize(
    "dataset", [people(3), "digits"], ids=["three labels", "no protected attributes"]
)
def test_other_data_have_no_such_columns(dataset: object) -> None:
    *_, last = dfl.simulate(run_of(dataset=dataset, rounds=1))
    assert not {f"{name}_mean" for name in (PARITY, ODDS)} & {*last}


def test_the_area_is_that_of_sklearn_and_of_pairs() -> None:
    rng = np.random.default_rng(1)
    scores, truth = rng.integers(0, 5, (2, 40, 3)).astype(float), rng.integers(0, 2, (40, 3))
    found = auc(scores, truth)
    for model, column in np.ndindex(2, 3):
        expected = roc_auc_score(truth[:, column], scores[model, :, column])
        assert found[model, column] == pytest.approx(expected)
    assert auc(np.array([[1.0], [2.0], [2.0]]), np.array([[0], [0], [1]])) == pytest.approx(0.75)
    assert np.isnan(auc(np.ones((3, 1)), np.ones((3, 1), np.int64))).all()


@pytest.mark.parametrize("algorithm", ["dfedavgm", "fedavg"])
def test_the_adversary_of_a_run_has_its_area(algorithm: str, tmp_path: Path) -> None:
    adversary = "adversary:hidden=4,head_layers=1,lambda_global=0.1"
    run = run_of(
        algorithm=algorithm, out=tmp_path, model="mlp:hidden=6", fairness_adversary=adversary
    )
    *_, last = dfl.simulate(run)
    found = dfl.load(tmp_path)
    assert last[f"{ADVERSARY}_mean"] == pytest.approx(found.peers[ADVERSARY].mean())
    data = people()
    for peer in range(3):
        model = found.model(peer)
        assert isinstance(model, torch.nn.Sequential)
        rows = {name: each[min(peer, len(each) - 1)] for name, each in found.state.items()}
        with torch.no_grad():
            h = model[:-1](torch.from_numpy(np.asarray(data.test_inputs)))
            for layer in (1, 3):
                weight, bias = (rows[f"adversary.{layer}.{part}"] for part in ("weight", "bias"))
                h = torch.nn.functional.linear(h.relu() if layer > 1 else h, weight, bias)
        areas = auc(h.double().numpy(), np.asarray(data.test_protected))
        assert found.peers[ADVERSARY][peer] == pytest.approx(areas.mean(), abs=1e-6)


def test_the_adversaries_of_several_kinds_of_model_have_their_own_area(tmp_path: Path) -> None:
    """Peers that train alone have the figures that they have where all have one kind of model."""

    def areas(model: str) -> list[float]:
        out = tmp_path / model.replace("+", "-").replace(":", "-")
        run = run_of(
            algorithm="local_only", share="nothing", out=out, model=model,
            fairness_adversary="adversary:hidden=4,head_layers=1,lambda_global=0.1",
        )  # fmt: skip
        list(dfl.simulate(run))
        return list(dfl.load(out).peers[ADVERSARY])

    small, large = areas("mlp:hidden=6"), areas("mlp:hidden=12")
    assert areas("mlp:hidden=6+mlp:hidden=12") == [small[0], large[1], small[2]]
    assert small != large


def test_a_rank_without_peers_has_no_gaps() -> None:
    found = gaps(np.zeros((0, 8)), np.ones(8))
    assert {name: each.shape for name, each in found.items()} == {PARITY: (0,), ODDS: (0,)}
