"""Models that `Run` takes as objects: modules that a run cannot train are refused."""

from __future__ import annotations

import numpy as np
import pytest
from torch import Tensor, nn

import dfl
from tests.support.given import X, last, refused, small


class InPlace(nn.Module):
    """Doubles its inputs without a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x.mul_(2))
        return y


@pytest.mark.parametrize("engine", ["auto", "loop"])
def test_a_model_that_changes_its_inputs_is_refused(engine: str) -> None:
    """Every evaluation would change the test set again."""
    line = refused(lambda: small(model=InPlace(), engine=engine))
    assert "the model InPlace changes its inputs in place" in line


class Tokens(nn.Module):
    """Looks up a row for each of six tokens."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(rows, 2), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.table(x.long()).flatten(1))
        return y


@pytest.mark.parametrize("engine", ["auto", "batched", "loop"])
@pytest.mark.parametrize("half", [0, 1])
def test_a_token_without_a_row_is_refused(engine: str, half: int) -> None:
    """With several models torch.func.vmap reads a row of another model in its place."""
    tokens = np.random.default_rng(0).integers(0, 9, (120, 6))
    tokens[[50, 110][half], 3] = 9
    labels = tokens.sum(1) % 4
    data = dfl.Data(tokens[:96], labels[:96], tokens[96:], labels[96:], classes=4)
    assert last(small(model=Tokens(10), dataset=data, engine=engine))["train_loss"] < 2
    line = refused(lambda: small(model=Tokens(9), dataset=data, engine=engine))
    assert "the model Tokens fails" in line
    assert "index out of range" in line


@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize(
    ("label", "shown"),
    [
        ([0.5, -0.25, 0.75], r"\(0.5, -0.25, 0.75\)"),
        ([0.25, 0.25, 0.25], r"\(0.25, 0.25, 0.25\)"),
        ([0.5, 0.5, 0, 1], r"\(0.5, 0.5, 0, \.\.\.\)"),
    ],
)
def test_labels_of_several_numbers_that_are_no_probabilities_need_another_loss(
    label: list[float], shown: str, half: int
) -> None:
    """Cross entropy would fall without bound."""
    soft = np.full((120, len(label)), 1 / len(label), np.float32)
    wrong = soft.copy()
    wrong[[7, 100][half]] = label
    given = ((X[:96], wrong[:96]), (X[96:], wrong[96:]))
    model = nn.Linear(6, len(label))
    which = ("training example 7", "test example 4")[half]
    with pytest.raises(dfl.InputError, match=rf"--loss cross_entropy .* {which} is {shown}"):
        last(small(model=model, dataset=given))
    last(small(model=model, dataset=given, loss="squared_error"))
    last(small(model=model, dataset=((X[:96], soft[:96]), (X[96:], soft[96:]))))


def test_outputs_of_a_regression_may_have_no_axis() -> None:
    numbers = ((X[:96], X[:96, 0]), (X[96:], X[96:, 0]))
    scalar, column = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)), nn.Linear(6, 1)
    column.load_state_dict(scalar[0].state_dict())
    rows = [
        last(small(model=model, dataset=numbers, loss="squared_error"))
        for model in (scalar, column)
    ]
    assert rows[0]["train_loss"] == rows[1]["train_loss"] < 1
