"""What users see: `fit`, its result, and the command on several ranks."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

import dfl.inference
from dfl.core.errors import InputError
from dfl.inference.plots import forest
from tests.support.hospitals import command_line, frame
from tests.support.mpirun import mpirun

ARGUMENTS: dict[str, Any] = {"outcome": "y", "covariates": ["age", "dose"], "site": "hospital"}


@pytest.mark.slow
def test_a_pooled_fit_is_that_of_statsmodels() -> None:
    sm = pytest.importorskip("statsmodels.api")
    table = frame()
    found = dfl.inference.fit(table, **ARGUMENTS, estimator="pooled")
    design = pd.concat(
        [table[["age", "dose"]], pd.get_dummies(table["hospital"], dtype=float)], axis=1
    )
    fitted = sm.Logit(table["y"], design).fit(disp=0, tol=1e-12)
    names = ["age", "dose"]
    np.testing.assert_allclose(found.params[names], fitted.params[names], atol=1e-8)
    np.testing.assert_allclose(found.bse[names], fitted.bse[names], rtol=1e-6)
    np.testing.assert_allclose(found.zvalues[names], fitted.tvalues[names], rtol=1e-6)
    np.testing.assert_allclose(found.pvalues[names], fitted.pvalues[names], rtol=1e-5)
    for alpha in (0.05, 0.2):
        np.testing.assert_allclose(
            found.conf_int(alpha), fitted.conf_int(alpha).loc[names], atol=1e-7
        )
    restrictions = np.eye(6)[:2]
    test = fitted.wald_test(restrictions, use_f=False, scalar=True)
    np.testing.assert_allclose(found.wald_test().statistic, test.statistic, rtol=1e-5)
    np.testing.assert_allclose(found.wald_test().pvalue, test.pvalue, rtol=1e-4)
    shown = found.summary()
    for name in names:
        assert f"{fitted.params[name]:.4f}" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_result_refuses_what_it_lacks() -> None:
    found = dfl.inference.fit(frame(), **ARGUMENTS, estimator="meta")
    with pytest.raises(InputError, match="alpha"):
        found.conf_int(1.5)
    with pytest.raises(InputError, match="alpha"):
        found.conf_int("0.05")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="'agee'"):
        found.wald_test(["agee"])
    for given in ("age", [], ["age", "age"]):
        with pytest.raises(InputError, match="covariates must be a list of different ones"):
            found.wald_test(given)


def test_the_summary_has_digits_of_numbers_of_every_size() -> None:
    """As of a covariate in units of a billion, or of a ten-millionth."""
    scales = {"age": 1e9, "dose": 1e-7}
    table = frame().assign(**{name: frame()[name] * size for name, size in scales.items()})
    plain = dfl.inference.fit(frame(), **ARGUMENTS, estimator="meta")
    found = dfl.inference.fit(table, **ARGUMENTS, estimator="meta")
    lines = {line.split()[0]: line.split() for line in found.summary().splitlines() if line}
    for name, size in scales.items():
        low, high = plain.conf_int().loc[name] / size
        expected = [plain.params[name] / size, plain.bse[name] / size, plain.zvalues[name]]
        shown = np.array(lines[name][1:], float)[[0, 1, 2, 4, 5]]
        np.testing.assert_allclose(shown, np.array([*expected, low, high], float), rtol=5e-3)


def test_the_result_states_what_was_revealed_and_the_sites() -> None:
    found = dfl.inference.fit(frame(), **ARGUMENTS, estimator="meta", links="broadband")
    (row,) = found.revealed.to_dict("records")
    assert (row["numbers"], row["times"], row["rounds"], row["bytes"]) == (5, 1, 1, 4 * 5 * 8)
    assert found.traffic["sent"].tolist() == [40] * 4
    assert found.sites["n"].sum() == 313
    assert found.seconds > 0
    weights = 1 / found.sites["age standard error"] ** 2  # β̂_age nearly without correlation
    near = (weights * found.sites["age"]).sum() / weights.sum()
    assert abs(near - found.params["age"]) < 0.05
    assert len(forest([found, found]).axes) == 2


def test_bits_and_lost_messages_are_those_of_the_network() -> None:
    exact = dfl.inference.fit(frame(), **ARGUMENTS)
    lossy = dfl.inference.fit(frame(), **ARGUMENTS, faults="link_loss:p=0.3")
    few = dfl.inference.fit(frame(), **ARGUMENTS, bits=8)
    assert lossy.params.equals(exact.params)
    assert lossy.lost > 0
    assert lossy.traffic["sent"].sum() > exact.traffic["sent"].sum()
    assert few.traffic["sent"].sum() < exact.traffic["sent"].sum() / 2
    assert not few.params.equals(exact.params)
    assert (few.params - exact.params).abs().max() < 0.05


def test_over_a_graph_the_estimate_is_near_and_rounds_are_counted() -> None:
    pooled = dfl.inference.fit(frame(), **ARGUMENTS, estimator="pooled")
    found = dfl.inference.fit(frame(), **ARGUMENTS, estimator="tilted_score_graph", topology="ring")
    assert (found.params - pooled.params).abs().max() < 0.01
    assert found.gap < 1e-12
    short = dfl.inference.fit(
        frame(), **ARGUMENTS, estimator="meta", topology="ring", gossip_rounds=2
    )
    assert short.gap > 1e-3
    assert short.revealed["rounds"].tolist() == [2]
    assert "not agreed" in short.summary()


def test_a_graph_drawn_anew_in_every_round_gives_the_estimate() -> None:
    ring = dfl.inference.fit(frame(), **ARGUMENTS, estimator="meta", topology="ring")
    drawn = dfl.inference.fit(frame(), **ARGUMENTS, estimator="meta", topology="random_matching")
    assert (drawn.params - ring.params).abs().max() < 1e-6


@pytest.mark.slow
def test_an_own_log_density_is_a_model() -> None:
    def log_density(y: Tensor, x: Tensor, beta: Tensor, gamma: Tensor) -> Tensor:
        eta = x @ beta + gamma[0]
        return y * eta - torch.nn.functional.softplus(eta)

    own = dfl.inference.Density(log_density_of=log_density, own=1)
    found, built_in = (
        dfl.inference.fit(frame(), **ARGUMENTS, model=model, intercept=model != own)
        for model in (own, "logistic")
    )
    np.testing.assert_allclose(found.params, built_in.params, atol=1e-9)


def test_coefficients_of_a_sites_own_are_not_common() -> None:
    found = dfl.inference.fit(
        frame(), outcome="y", covariates=["age"], site="hospital", own_covariates=["dose"]
    )
    assert list(found.params.index) == ["age"]


def test_site_coefficients_of_hazards_are_those_of_interactions_with_strata() -> None:
    phreg = pytest.importorskip("statsmodels.duration.hazard_regression").PHReg
    table = frame().assign(time=lambda f: 3 + f["age"].round(1).abs(), event=lambda f: f["y"])
    table["time"] += table["dose"].abs().round(1)
    found = dfl.inference.fit(
        table, outcome="time", covariates=["age"], site="hospital", own_covariates=["dose"],
        event="event", model="cox", estimator="pooled",
    )  # fmt: skip
    own = pd.get_dummies(table["hospital"], dtype=float).mul(table["dose"], axis=0)
    fitted = phreg(
        table["time"], pd.concat([table["age"], own], axis=1), table["event"],
        strata=table["hospital"], ties="breslow",
    ).fit(tol=1e-12)  # fmt: skip
    np.testing.assert_allclose(found.params["age"], fitted.params[0], atol=1e-6)
    np.testing.assert_allclose(found.bse["age"], fitted.bse[0], rtol=1e-5)


@pytest.mark.parametrize("given", [{"own_covariates": ["dose"]}, {"offset": "dose"}])
def test_a_model_without_predictor_refuses_what_it_would_ignore(given: dict[str, Any]) -> None:
    model = dfl.inference.Density(log_density_of=lambda y, x, beta, gamma: -((y - x @ beta) ** 2))
    arguments = ARGUMENTS | {"covariates": ["age"]} | given
    with pytest.raises(InputError) as refused:
        dfl.inference.fit(frame(), **arguments, model=model, estimator="meta")
    assert f"--{next(iter(given)).replace('_', '-')} dose" in str(refused.value)


def test_numbered_sites_are_in_the_order_of_their_numbers() -> None:
    table = frame().assign(hospital=lambda f: f["hospital"].map({f"H{k}": 9 + k for k in range(4)}))
    numbered = dfl.inference.fit(table, **ARGUMENTS)
    assert numbered.sites["site"].tolist() == ["9", "10", "11", "12"]
    assert numbered.params.equals(dfl.inference.fit(frame(), **ARGUMENTS).params)


@pytest.mark.parametrize("estimator", ["tilted_score_graph", "gradient_tracking:rounds=5"])
def test_a_site_without_estimate_is_named_over_a_graph(estimator: str) -> None:
    table = frame()
    alone = table["hospital"] == "H2"
    table.loc[alone, "y"] = (table["age"][alone] > 0).astype(int)
    for bits in (None, 8):
        with pytest.raises(InputError, match="site H2: age separates"):
            dfl.inference.fit(table, **ARGUMENTS, estimator=estimator, topology="ring", bits=bits)


@pytest.mark.parametrize(
    ("estimator", "tolerance"),
    [("tilted_score", 1e-8), ("pooled", 1e-8), ("tilted_score_graph", 0.01)],
)
def test_sites_without_coefficients_of_their_own_agree_over_a_graph(
    estimator: str, tolerance: float
) -> None:
    """`tilted_score_graph` solves another equation than `tilted_score`, with a close solution."""
    found = dfl.inference.fit(
        frame(), **ARGUMENTS, estimator=estimator, topology="ring", intercept=False
    )
    kind = estimator.removesuffix("_graph")
    centre = dfl.inference.fit(frame(), **ARGUMENTS, estimator=kind, intercept=False)
    assert np.allclose(found.params, centre.params, rtol=0, atol=tolerance)


def test_pooled_states_how_far_it_is_from_convergence_where_messages_have_few_bits() -> None:
    exact, few = (
        dfl.inference.fit(frame(), **ARGUMENTS, estimator="pooled", bits=bits) for bits in (None, 4)
    )
    assert exact.step < 1e-6 < 0.01 < few.step
    assert "converged" not in exact.summary()
    assert f"{few.step:.1e} standard errors" in few.summary().replace("\n", " ")
    assert max(map(len, few.summary().splitlines())) <= 80
    away = (few.params - exact.params).abs() / exact.bse
    assert few.step / 10 < away.max() < 10 * few.step


def test_pooled_refuses_outcomes_that_a_covariate_separates_at_all_sites() -> None:
    table = frame().assign(y=lambda f: (f["age"] > 0).astype(int))
    with pytest.raises(InputError, match="age separates"):
        dfl.inference.fit(table, **ARGUMENTS, estimator="pooled")


def test_pooled_blames_no_site_for_what_all_sites_together_separate() -> None:
    table = frame().assign(level=lambda f: f["hospital"].str[1:].astype(float) * 10)
    table["age"] += table["level"]
    table["y"] = (table["age"] > table["level"]).astype(int)
    with pytest.raises(InputError, match="all sites: age separates") as refused:
        dfl.inference.fit(table, **ARGUMENTS, estimator="pooled")
    assert "pooled" not in str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        {"bits": 1},
        {"bits": 3},
        {"compressor": "top_k:share=0.95"},
        {"compressor": "random_k:share=0.5"},
        {"compressor": "quantize:bits=4,rounding=nearest"},
    ],
)
def test_messages_to_a_centre_that_lose_small_numbers_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="messages to a centre lose small numbers beside large"):
        dfl.inference.fit(frame(), **ARGUMENTS, estimator="meta", **given)


@pytest.mark.parametrize(
    "spec", ["quantize:bits=16,rounding=nearest", "top_k:share=1", "low_rank:rank=1"]
)
def test_messages_to_a_centre_that_are_biased_a_little_are_taken(spec: str) -> None:
    exact = dfl.inference.fit(frame(), **ARGUMENTS, estimator="meta")
    found = dfl.inference.fit(frame(), **ARGUMENTS, estimator="meta", compressor=spec)
    assert (found.params - exact.params).abs().max() < 1e-3


def test_a_site_that_leaves_a_graph_needs_a_number_of_rounds() -> None:
    given: dict[str, Any] = {"topology": "ring", "faults": "leave:peers=1,at=2"}
    with pytest.raises(InputError, match=r"--faults leave.*: give --gossip-rounds"):
        dfl.inference.fit(frame(), **ARGUMENTS, estimator="meta", **given)
    dfl.inference.fit(frame(), **ARGUMENTS, estimator="meta", **given, gossip_rounds=5)


def test_a_result_says_that_messages_to_a_centre_were_rounded() -> None:
    ring = {"topology": "ring", "gossip_rounds": 60, "bits": 8}
    for given, rounded in (({"bits": 8}, True), ({}, False), (ring, False)):
        found = dfl.inference.fit(frame(), **ARGUMENTS, estimator="meta", **given)
        assert ("do not contain the rounding of messages" in found.summary()) is rounded


def test_the_default_needs_no_parameters_of_sites_own() -> None:
    found = dfl.inference.fit(frame(), **ARGUMENTS, intercept=False)
    pooled = dfl.inference.fit(frame(), **ARGUMENTS, intercept=False, estimator="pooled")
    assert (found.params - pooled.params).abs().max() < pooled.bse.max()


def test_a_surrogate_whose_root_is_a_saddle_is_refused() -> None:
    """Newton's method from the start comes to (4, 1.8) with site 2 as lead, where the corrected
    likelihood falls in some directions and rises in others.
    """
    rng = np.random.default_rng(28)
    parts = []
    for k, n in enumerate((60, 80, 50)):
        x = rng.normal(size=(n, 2)) + 0.3 * k
        y = x @ [0.8, -0.5] + rng.uniform(-1, 1) + rng.normal(size=n) * (0.5 + 0.2 * k)
        parts.append(pd.DataFrame({"site": k, "a": x[:, 0], "b": x[:, 1], "y": y}))
    columns: dict[str, Any] = {"outcome": "y", "covariates": ["a", "b"], "site": "site"}

    def fit(lead: int) -> Any:
        spec = f"surrogate:second_order=true,leads={lead}"
        return dfl.inference.fit(pd.concat(parts), **columns, model="linear", estimator=spec)

    assert abs(fit(0).params["a"] - 0.8) < 0.5
    with pytest.raises(InputError, match=r"leads=2,.*: its equation has no solution"):
        fit(2)


def test_a_long_name_has_a_line_of_its_own() -> None:
    names = ["systolic_pressure_left", "systolic_pressure_right"]
    table = frame().rename(columns=dict(zip(["age", "dose"], names, strict=True)))
    lines = dfl.inference.fit(table, **ARGUMENTS | {"covariates": names}).summary().splitlines()
    assert all(name in lines for name in names)
    assert max(map(len, lines)) <= 80


def test_a_long_spec_has_a_line_of_its_own() -> None:
    spec = "tilted_score:covariance=sandwich,iterations=3,leads=0+1"
    lines = dfl.inference.fit(frame(), **ARGUMENTS, estimator=spec).summary().splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line == f"Estimator:  {spec}" for line in lines)


@pytest.mark.parametrize("name", ["numbers", "age"])
def test_offsets_and_counts(name: str) -> None:
    table = frame().assign(numbers=lambda f: f["y"] + 1, exposure=0.5)
    model = "poisson" if name == "numbers" else "linear"
    covariates = ["age", "dose"] if name == "numbers" else ["dose"]
    plain, moved = (
        dfl.inference.fit(
            table, outcome=name, covariates=covariates, site="hospital", model=model, offset=offset
        )
        for offset in (None, "exposure")
    )
    np.testing.assert_allclose(plain.params, moved.params, atol=1e-6)  # an intercept takes it up


def test_large_counts_have_an_estimate() -> None:
    rng = np.random.default_rng(0)
    table = frame().assign(cells=lambda f: rng.poisson(1e7 * np.exp(0.3 * f["age"])))
    arguments = ARGUMENTS | {"outcome": "cells", "covariates": ["age"]}
    found = dfl.inference.fit(table, **arguments, model="poisson")
    assert abs(found.params["age"] - 0.3) < 5 * found.bse["age"] < 1e-3


def test_exposures_are_those_of_statsmodels() -> None:
    sm = pytest.importorskip("statsmodels.api")
    rng = np.random.default_rng(1)
    table = frame().assign(exposure=lambda f: rng.uniform(0, 2, len(f)))
    chance = np.exp(table["age"] / 2 + table["exposure"] - 1)
    table["numbers"] = rng.poisson(chance)
    arguments = ARGUMENTS | {"outcome": "numbers", "covariates": ["age"], "offset": "exposure"}
    found = dfl.inference.fit(table, **arguments, model="poisson", estimator="pooled")
    design = pd.concat([table["age"], pd.get_dummies(table["hospital"], dtype=float)], axis=1)
    fitted = sm.Poisson(table["numbers"], design, offset=table["exposure"]).fit(disp=0, tol=1e-12)
    np.testing.assert_allclose(found.params["age"], fitted.params["age"], atol=1e-8)
    np.testing.assert_allclose(found.bse["age"], fitted.bse["age"], rtol=1e-6)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "table.csv"
    frame(5).to_csv(path, index=False)
    return path


@pytest.mark.slow
def test_the_command_writes_tables_and_a_plot(table: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(table, "--estimator", "meta+tilted_score:leads=0+1", "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in out.iterdir()} >= {
        "estimates.csv", "sites.csv", "revealed.csv", "traffic.csv", "summary.txt", "forest.png",
    }  # fmt: skip
    estimates = pd.read_csv(out / "estimates.csv")
    assert estimates["estimator"].tolist() == ["meta"] * 2 + ["tilted_score:leads=0+1"] * 2
    *_, last = done.stdout.splitlines()
    assert last == f"look at    {out}/forest.png"
    assert f"{(out / 'summary.txt').read_text()}{last}\n" == done.stdout
    quiet = run(table, "--out", str(out), "--quiet")
    assert (quiet.returncode, quiet.stdout) == (0, f"{last}\n")
    assert "--quiet needs --out" in run(table, "--quiet").stderr
    refused = run(table, "--estimator", "metta")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("dfl: --estimator: unknown 'metta' (did you mean meta?)")
    assert refused.stderr.count("\n") == 1
    examples = table.read_bytes()
    (out / "sites.csv").write_bytes(examples)
    within = run(out / "sites.csv", "--out", str(out))
    assert (within.returncode, (out / "sites.csv").read_bytes()) == (2, examples)
    assert "would overwrite the examples" in within.stderr
    missing = run(tmp_path / "missing.csv", "--out", str(tmp_path / "new"))
    assert (missing.returncode, (tmp_path / "new").exists()) == (2, False)


def run(table: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dfl.inference", *command_line(table, *arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.mpi
def test_a_refusal_is_printed_once_by_several_ranks(table: Path) -> None:
    text = table.read_text().replace("H2,1", "H2,0")
    table.write_text(text)
    done = mpirun(2, "-m", "dfl.inference", *command_line(table))
    assert done.returncode == 2
    assert done.stderr.count("dfl: site H2: y is 0 in every row") == 1
