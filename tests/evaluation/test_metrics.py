"""The metrics of a run agree with scikit-learn and plain numpy."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss
from torch import Tensor, nn

import dfl
from dfl.comm.mpi import World
from dfl.core.layout import Layout
from dfl.datasets.data import Data
from dfl.evaluation import metrics
from dfl.models.parameter_layout import ParameterLayout, draw
from dfl.models.zoo import MODELS
from dfl.simulation.measure import measure, traffic
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from dfl.store.callbacks import COLUMNS
from tests.support.quadratic import run_states

ENGINES = ("batched", "loop")


def trained(**settings: Any) -> tuple[Prepared, Any]:
    run = dfl.Run(
        **{
            "peers": 5,
            "partition": "dirichlet:alpha=0.3",
            "validation": 0.2,
            "model": "softmax",
            **settings,
        }
    )
    setting = prepare(run, World())
    *_, last = run_states(setting, 3)
    return setting, last


def probabilities(row: Tensor, setting: Prepared, inputs: Tensor) -> np.ndarray[Any, Any]:
    """Return the outputs of softmax regression, by hand: a row is 10x64 weights, then 10 biases."""
    x = (inputs.flatten(1).double() * setting.task.scale + setting.task.shift).double()
    logits = x @ row[:640].view(10, 64).double().T + row[640:].double()
    return torch.softmax(logits, 1).numpy()


def accuracy_of(x: Tensor, setting: Prepared) -> metrics.Floats:
    return metrics.common_figures(x, setting.task, setting.test_sets)["accuracy"]


def own(setting: Prepared, examples: Any, i: int) -> tuple[Tensor, Tensor]:
    first = int(examples.starts[i])
    part = slice(first, first + int(examples.sizes[i]))
    return examples.inputs[part], examples.labels[part]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_peer_is_evaluated_on_its_own_examples(engine: str) -> None:
    setting, last = trained(engine=engine)
    peers = measure(last, setting)
    assert peers is not None
    test_sets = setting.test_sets
    all_labels = np.arange(10)
    for i, row in enumerate(last.models):
        predicted = probabilities(row, setting, test_sets.inputs).argmax(1)
        assert peers["accuracy"][i] == accuracy_score(test_sets.labels, predicted)
        inputs, labels = own(setting, setting.task.examples, i)
        loss = log_loss(labels, probabilities(row, setting, inputs), labels=all_labels)
        assert peers["train_loss"][i] == pytest.approx(loss, rel=1e-4)
        for name, examples in (
            ("local_accuracy", test_sets.local),
            ("validation_accuracy", test_sets.held_out),
        ):
            inputs, labels = own(setting, examples, i)
            predicted = probabilities(row, setting, inputs).argmax(1)
            assert peers[name][i] == (
                accuracy_score(labels, predicted)
                if len(labels)
                else pytest.approx(np.nan, nan_ok=True)
            )


def test_the_row_summarizes_the_peers() -> None:
    setting, last = trained(bits=4)
    peers = measure(last, setting)
    assert peers is not None
    row = metrics.summary(peers, setting.algorithm.columns)
    accuracy = peers["accuracy"]
    for name in ("mean", "min", "max", "std"):
        assert row[f"accuracy_{name}"] == getattr(accuracy, name)()
    assert row["relative_squared_error"] == float(last.state.error.max())
    assert traffic(peers, None) == {"payload_bytes": setting.network.traffic.payload.sum()}


def test_consensus_distance_and_mean_model_agree_with_numpy() -> None:
    x = torch.randn(7, 10_000, generator=torch.Generator().manual_seed(0))
    distance, mean = metrics.consensus_distance(x, World(), Layout(7, 1))
    wide = x.double().numpy()
    assert mean is not None
    np.testing.assert_allclose(mean.numpy(), wide.mean(0), atol=1e-6)
    assert distance == pytest.approx(np.sqrt(((wide - wide.mean(0)) ** 2).sum(1).mean()), rel=1e-12)


def test_consensus_distance_of_some_coordinates_and_the_whole_mean() -> None:
    x = torch.randn(7, 10_000, generator=torch.Generator().manual_seed(0))
    counted = np.arange(10_000) % 3 > 0
    counted[:4100] = True
    distance, mean = metrics.consensus_distance(x, World(), Layout(7, 1), counted=counted)
    few, _ = metrics.consensus_distance(x[:, torch.from_numpy(counted)], World(), Layout(7, 1))
    assert distance == pytest.approx(few, rel=1e-12)
    assert mean is not None
    np.testing.assert_allclose(mean.numpy(), x.double().mean(0).numpy(), atol=1e-6)


def test_equal_models_have_the_accuracy_of_one_alone() -> None:
    setting, last = trained()
    same = last.models[:1].expand(5, -1)
    assert len(set(accuracy_of(same, setting))) == 1
    accuracies = accuracy_of(last.models, setting)
    assert accuracy_of(same, setting)[0] == accuracies[0]


def test_metrics_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    setting, last = trained()
    whole = measure(last, setting)
    monkeypatch.setattr(metrics, "CHUNK", 37)
    monkeypatch.setattr(metrics, "MODELS", 2)
    parts = measure(last, setting)
    assert whole is not None
    assert parts is not None
    for name in whole:
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-6)


def test_a_subset_for_evaluation_is_fixed() -> None:
    setting, _ = trained(eval_examples=50)
    again, _ = trained(eval_examples=50)
    other, _ = trained(eval_examples=50, seed=1)
    assert len(setting.test_sets.labels) == 50
    assert torch.equal(setting.test_sets.inputs, again.test_sets.inputs)
    assert not torch.equal(setting.test_sets.inputs, other.test_sets.inputs)
    assert len(setting.test_sets.local.labels) == 359  # the local test sets are complete


def test_a_subset_bounds_the_training_examples_too() -> None:
    """A peer keeps ceil(N / P) examples, or all if it has fewer; the seed chooses them."""
    setting, last = trained(eval_examples=203)
    again, _ = trained(eval_examples=203)
    other, _ = trained(eval_examples=203, seed=1)
    peers = measure(last, setting)
    assert peers is not None
    everything, chosen = setting.task.examples, setting.test_sets.train
    np.testing.assert_array_equal(chosen.sizes, np.minimum(everything.sizes, 41))
    assert chosen.sizes.max() == setting.test_sets.longest_train == 41
    for i, row in enumerate(last.models):
        inputs, labels = own(setting, chosen, i)
        whole, _ = own(setting, everything, i)
        assert {each.numpy().tobytes() for each in inputs} <= {
            each.numpy().tobytes() for each in whole
        }
        loss = log_loss(labels, probabilities(row, setting, inputs), labels=np.arange(10))
        assert peers["train_loss"][i] == pytest.approx(loss, rel=1e-4)
    assert torch.equal(chosen.inputs, again.test_sets.train.inputs)
    assert not torch.equal(chosen.inputs, other.test_sets.train.inputs)


def test_without_a_subset_all_training_examples_count() -> None:
    setting, _ = trained()
    assert setting.test_sets.train is setting.task.examples
    assert setting.test_sets.longest_train == setting.test_sets.longest


def test_rows_are_at_the_start_every_interval_and_the_end() -> None:
    rows = list(dfl.simulate(dfl.Run(peers=3, rounds=5, eval_every=2, model="softmax")))
    assert [row["round"] for row in rows] == [0, 2, 4, 5]
    assert all(tuple(row) == COLUMNS for row in rows)
    assert rows[0]["consensus_distance"] == 0
    assert rows[-1]["accuracy_mean"] > rows[0]["accuracy_mean"] + 0.3


def test_regression_has_no_accuracy() -> None:
    inputs = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)
    targets = inputs @ np.array([[1.0], [2.0], [3.0]], np.float32)
    data = Data(inputs, targets, inputs, targets, classes=0)
    run = dfl.Run(peers=4, rounds=150, eval_every=150, momentum=0.0)
    first, last = dfl.simulate(
        replace(
            run,
            model=nn.Linear(3, 1),
            dataset=data,
            loss="squared_error",
        )
    )
    assert last["train_loss"] < 0.01 * first["train_loss"]
    assert np.isnan(last["accuracy_mean"])


def predictions(outputs: int) -> tuple[Data, nn.Module]:
    """Return a data set of regression, whose test set takes several chunks, and a linear model."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(1240, 3)).astype(np.float32)
    targets = (inputs @ rng.normal(size=(3, outputs)) + 1).astype(np.float32)
    data = Data(inputs[:40], targets[:40], inputs[40:], targets[40:], classes=0)
    torch.manual_seed(0)
    return data, nn.Linear(3, outputs)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_test_loss_of_regression_agrees_with_numpy(
    engine: Any, outputs: int, tmp_path: Path, without_figures: None
) -> None:
    data, model = predictions(outputs)
    run = dfl.Run(
        model=model, dataset=data, loss="squared_error", peers=5, rounds=3, eval_every=3,
        attack="sign_flip:peers=2", engine=engine, out=tmp_path / "run",
    )  # fmt: skip
    first, last = dfl.simulate(run)
    result = dfl.load(tmp_path / "run")
    weight, bias = (result.state[name].double().numpy() for name in ("weight", "bias"))
    honest = "is_attacker" not in result.peers or result.peers["is_attacker"] == 0

    def loss(w: Any, b: Any) -> Any:
        out = data.test_inputs.astype(np.float64) @ w.T + b
        return ((out - data.test_labels) ** 2).sum(1).mean()

    found = np.array([loss(w, b) for w, b in zip(weight, bias, strict=True)])
    np.testing.assert_allclose(result.peers["test_loss"], found, rtol=1e-5)
    assert last["test_loss_mean"] == pytest.approx(found[honest].mean(), rel=1e-5)
    assert last["test_loss_max"] == pytest.approx(found[honest].max(), rel=1e-5)
    of_mean = loss(weight[honest].mean(0), bias[honest].mean(0))
    assert last["test_loss_mean_model"] == pytest.approx(of_mean, rel=1e-5)
    assert first["test_loss_mean"] == first["test_loss_mean_model"] == first["test_loss_max"]
    assert result.rounds_to(last["test_loss_mean"], "test_loss_mean") == 3


def test_the_test_loss_of_a_server_is_that_of_its_model() -> None:
    data, model = predictions(1)
    run = dfl.Run(
        model=model, dataset=data, loss="squared_error", peers=4, rounds=2, algorithm="fedavg"
    )
    *_, last = dfl.simulate(run)
    assert last["test_loss_mean"] == last["test_loss_max"] == last["test_loss_mean_model"]
    assert np.isfinite(last["test_loss_mean"])


def test_the_test_loss_is_there_for_regression_only() -> None:
    data, model = predictions(1)
    run = dfl.Run(peers=4, rounds=1, model=model, dataset=data, loss="squared_error")
    mixed = [nn.Sequential(nn.Linear(3, k), nn.Linear(k, 1)) for k in (2, 4)]
    *_, of_kinds = dfl.simulate(replace(run, model=mixed, share="1.bias"))
    *_, classified = dfl.simulate(dfl.Run(peers=4, rounds=1))
    assert np.isfinite(of_kinds["test_loss_mean"])
    assert np.isnan(of_kinds["test_loss_mean_model"])
    assert [name for name in classified if name.startswith("test_loss")] == []


def test_a_test_loss_that_is_not_finite_names_its_peer() -> None:
    peers = {
        "train_loss": np.ones(3),
        "test_loss": np.array([np.inf, 1.0, np.nan]),
        "is_attacker": np.array([1.0, 0.0, 0.0]),
    }
    sizes = np.array([[4, 0, 2]] * 3)
    for own_test in (0, 1):  # parts by indices have none
        sized = sizes * [1, 1, own_test]
        assert metrics.not_finite(peers, sized, 6, 0) == "test_loss of peer 2 is nan"
    assert metrics.not_finite(peers, sizes, 0, 0) == ""


@pytest.mark.parametrize(
    ("name", "shape", "d"),
    [
        ("2nn", (1, 28, 28), 199_210),
        ("cnn", (1, 28, 28), 1_663_370),
        ("lenet", (3, 32, 32), 64_102),
        ("softmax", (1, 8, 8), 650),
        ("har_cnn", (9, 128), 275_338),
        ("resnet20", (3, 32, 32), 269_722),
        ("vgg11", (3, 32, 32), 9_225_610),
        ("char_lstm", (80,), 819_920),
        ("mlp", (1, 8, 8), 4_810),
    ],
)
def test_models_have_the_published_numbers_of_parameters(
    name: str, shape: tuple[int, ...], d: int
) -> None:
    classes = 80 if name == "char_lstm" else 10
    assert ParameterLayout.of(MODELS[name](shape, classes)).d == d


def test_a_drawn_model_is_distributed_as_torch_draws_it() -> None:
    module = MODELS["2nn"]((1, 28, 28), 10)
    spec = ParameterLayout.of(module)
    rows = draw(module, spec, seed=0, peers=range(3))
    by_torch = spec.views(spec.row(module))
    for name, drawn in spec.views(rows).items():
        bound = 1 / np.sqrt({"1": 784, "3": 200, "5": 200}[name[0]])
        assert float(drawn.abs().max()) <= bound
        assert float(drawn[0].std()) == pytest.approx(bound / np.sqrt(3), rel=0.3)
        assert float(by_torch[name].abs().max()) <= bound
    assert not torch.equal(rows[0], rows[1])
    assert torch.equal(draw(module, spec, seed=0, peers=[2])[0], rows[2])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_figures_that_are_not_finite_are_named(value: float) -> None:
    sizes = np.array([[5, 0, 2], [0, 0, 0], [5, 1, 2]])
    peers = {
        "train_loss": np.array([1.0, np.nan, 1.0]),
        "accuracy": np.array([0.5, 0.5, 0.5]),
        "validation_accuracy": np.array([np.nan, np.nan, 0.5]),
        "local_accuracy": np.array([0.5, np.nan, 0.5]),
        "is_attacker": np.zeros(3),
    }
    assert metrics.not_finite(peers, sizes, 6, 10) == ""
    for name in list(peers)[:4]:
        wrong = peers | {name: np.array([*peers[name][:2], value])}
        assert metrics.not_finite(wrong, sizes, 6, 10) == f"{name} of peer 2 is {value}"
        assert (metrics.not_finite(wrong, sizes, 0, 0) == "") == (name != "train_loss")
        assert metrics.not_finite(wrong | {"is_attacker": np.array([0, 0, 1])}, sizes, 6, 10) == ""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shared", [False, True])
def test_a_model_that_returns_nan_has_no_accuracy(engine: str, shared: bool) -> None:
    """Outputs with a NaN have no largest one, so the accuracy is NaN."""
    setting, last = trained(engine=engine)
    x = last.models[:1].clone() if shared else last.models.clone()
    x[0, 645] = np.nan  # the bias of one label
    own = accuracy_of(x, setting)
    assert np.isnan(own[0])
    assert np.isfinite(own[1:]).all()
    loss, right = metrics.own_loss_and_accuracy(
        x, setting.task, setting.test_sets.local, setting.test_sets.longest, shared
    )
    assert np.isnan([loss[0], right[0]]).all()
    assert shared or np.isfinite([loss[1:], right[1:]]).all()
