"""Every model maps a batch of examples to one output per class."""

import pytest
import torch

from dfl.models.zoo import MODELS

SHAPES = [(1, 28, 28), (3, 32, 32), (1, 17, 23)]


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("shape", SHAPES)
def test_a_model_has_one_output_per_class(name: str, shape: tuple[int, ...]) -> None:
    outputs = MODELS[name](shape, 7)(torch.ones(2, *shape))
    assert outputs.shape == (2, 7)
    assert outputs.isfinite().all()
    assert (outputs[0] == outputs[1]).all()
