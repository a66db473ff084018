"""Every model maps a batch of examples to one output per class."""

import pytest
import torch

from dfl.models.zoo import MODELS

IMAGES: list[tuple[int, ...]] = [(1, 28, 28), (3, 32, 32), (1, 17, 23)]
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "char_lstm": [(80,), (1,)],
    "har_cnn": [(9, 128), (1, 5)],
    "vgg11": [(3, 32, 32), (1, 40, 64)],
}
"""The shapes of the inputs of models that do not take all these images."""


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in sorted(MODELS) for shape in SHAPES.get(name, IMAGES)],
)
def test_a_model_has_one_output_per_class(name: str, shape: tuple[int, ...]) -> None:
    outputs = MODELS[name](shape, 7)(torch.ones(2, *shape))
    assert outputs.shape == (2, 7)
    assert outputs.isfinite().all()
    assert (outputs[0] == outputs[1]).all()
