"""Local training with products in bfloat16."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dfl
from dfl.core.errors import InputError
from dfl.core.isolation import isolated
from dfl.simulation.initialization import start
from dfl.simulation.prepared import Prepared
from dfl.training.precision import products
from dfl.training.sgd import sgd
from tests.support.sequences import sequences
from tests.training.test_gradients import by_autograd, problem, stack, stepped

pytestmark = pytest.mark.usefixtures("no_figures")

ONE_STEP: dict[str, Any] = {"local_epochs": 1, "batch_size": 0, "momentum": 0.0}


def moved(setting: Prepared, models: Tensor) -> Tensor:
    """Return how far a round of training moved each model."""
    return models - start(setting.run, setting.task, False)


def rounded(values: Tensor) -> Tensor:
    return values.bfloat16().double()


def test_a_step_rounds_the_operands_and_the_results_of_products() -> None:
    """The oracle: one step of a stack of two layers in float64, rounded where bfloat16 is."""
    setting = problem(stack(6, 5, 2), precision="bf16", **ONE_STEP)
    task = setting.task
    before = start(setting.run, task, False)
    after = sgd(before, task, 1)
    for i in range(5):
        parameters = {
            name: value[0].double()
            for name, value in task.parameter_layout.views(before[i : i + 1]).items()
        }
        x, labels = task.examples.at(torch.arange(12 * i, 12 * (i + 1)))
        x, w, u = rounded(x), rounded(parameters["0.weight"]), rounded(parameters["2.weight"])
        h = rounded(x @ w.T + rounded(parameters["0.bias"])).relu()
        out = rounded(h @ u.T + rounded(parameters["2.bias"]))
        g = rounded((out.softmax(1) - nn.functional.one_hot(labels, 2)) * (-0.1 / 12))
        at_h = rounded(g @ u) * (h > 0)
        steps = {
            "0.weight": rounded(at_h.T @ x), "0.bias": at_h.sum(0),
            "2.weight": rounded(g.T @ h), "2.bias": g.sum(0),
        }  # fmt: skip
        found = task.parameter_layout.views(after[i : i + 1])
        for name, step in steps.items():
            expected = parameters[name] + step
            # Of two roundings in another order: a bfloat16 has an error of 2^-9 of its value.
            error = (found[name][0].double() - expected).abs().max()
            assert error <= 2**-8 * step.abs().max(), name


@pytest.mark.parametrize("batched", [True, False])
def test_products_agree_with_autocast(batched: bool) -> None:
    setting = problem(stack(6, 5, 2), precision="bf16", **ONE_STEP)
    ours, theirs = (
        moved(setting, models) for models in (stepped(setting), by_autograd(setting, batched))
    )
    exact = problem(stack(6, 5, 2), **ONE_STEP)
    full = moved(exact, stepped(exact))
    assert torch.linalg.norm(ours - theirs) <= 2**-7 * torch.linalg.norm(full)
    for found in (ours, theirs):
        distance = torch.linalg.norm(found - full) / torch.linalg.norm(full)
        assert 1e-4 < distance < 2e-2


def test_models_messages_and_evaluations_stay_float32() -> None:
    settings: dict[str, Any] = {"peers": 4, "dataset": "digits", "rounds": 3, "eval_every": 1}
    full = list(dfl.simulate(dfl.Run(**settings)))
    low = list(dfl.simulate(dfl.Run(**settings, precision="bf16")))
    assert low[0]["train_loss"] == full[0]["train_loss"]  # before training
    assert low[-1]["payload_bytes"] == full[-1]["payload_bytes"]
    assert low[-1]["train_loss"] != full[-1]["train_loss"]
    assert low[-1]["accuracy_mean"] == pytest.approx(full[-1]["accuracy_mean"], abs=0.02)
    setting = problem(stack(6, 5, 2), precision="bf16")
    assert stepped(setting).dtype == torch.float32


@pytest.mark.parametrize("callers", [True, False])
def test_only_products_of_training_may_be_tf32(
    callers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", callers)

    def settings() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    before = settings()
    with isolated(1):
        assert settings() == ("highest", False)
        with products("tf32", torch.device("cpu")):
            assert settings() == ("high", True)
        assert settings() == ("highest", False)
        with products("float32", torch.device("cpu")):
            assert settings() == ("highest", False)
    assert settings() == before


@pytest.mark.parametrize("callers", [True, False])
def test_cudnn_computes_alike_every_time(callers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "benchmark", callers)
    monkeypatch.setattr(cudnn, "deterministic", not callers)
    with isolated(1):
        assert (cudnn.benchmark, cudnn.deterministic) == (False, True)
    assert (cudnn.benchmark, cudnn.deterministic) == (callers, not callers)


@pytest.mark.parametrize(
    ("module", "precision", "line"),
    [
        (stack(6, 2), "tf32", "--precision tf32 needs a GPU: choose float32 or bf16"),
        (
            stack(6, 2).double(), "bf16",
            "--precision bf16 is that of products of float32 models, and these are of float64: "
            "choose float32",
        ),
    ],
)  # fmt: skip
def test_a_precision_that_does_not_apply_is_refused(
    module: nn.Module, precision: str, line: str
) -> None:
    with pytest.raises(InputError) as caught:
        problem(module, precision=precision, device="cpu")
    assert str(caught.value) == line


def test_recurrent_layers_are_refused() -> None:
    run = dfl.Run(
        peers=2, dataset=sequences(), model="char_lstm:hidden=6,embedding=3", precision="bf16"
    )
    with pytest.raises(InputError) as caught:
        list(dfl.simulate(run))
    assert str(caught.value) == (
        "--precision bf16 does not reach the products inside a LSTM: choose float32"
    )
