"""Every model maps a batch of examples to one output per class."""

import pytest
import torch

from dfl.core.errors import InputError
from dfl.core.parts import Shape
from dfl.core.registry import choose
from dfl.models.zoo import MODELS

IMAGES: list[Shape] = [(1, 28, 28), (3, 32, 32), (1, 17, 23)]
SHAPES: dict[str, list[Shape]] = {
    "char_lstm": [(80,), (1,)],
    "word_lstm": [(10,), (1,)],
    "transformer": [(10,), (1,)],
    "har_cnn": [(9, 128), (1, 5)],
    "har_lstm": [(9, 128), (1, 5)],
    "vgg11": [(3, 32, 32), (1, 40, 64)],
    "vqa": [((3, 64, 64), (26,)), ((2048,), (1000,))],
}
"""The shapes of the inputs of models that do not take all these images."""


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in sorted(MODELS) for shape in SHAPES.get(name, IMAGES)],
)
def test_a_model_has_one_output_per_class(name: str, shape: Shape) -> None:
    several = isinstance(shape[0], tuple)
    inputs = [torch.ones(2, *each) for each in (shape if several else (shape,))]
    outputs = MODELS[name](shape, 7)(*inputs)
    assert outputs.shape == (2, 7)
    assert outputs.isfinite().all()
    assert (outputs[0] == outputs[1]).all()


def test_a_cnn_has_the_given_layers() -> None:
    """Cao et al. 2021: 30 and 50 kernels of 3 x 3 without padding, under 100 units."""
    spec = "cnn:channels=30+50,kernel=3,padding=0,hidden=100"
    module = choose("--model", spec, MODELS)((1, 28, 28), 10)
    assert [tuple(value.shape) for value in module.parameters()] == [
        (30, 1, 3, 3), (30,), (50, 30, 3, 3), (50,), (100, 50 * 5 * 5), (100,), (10, 100), (10,),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "smallest"),
    [
        ("kernel=5", 4),
        ("kernel=3,padding=0", 10),
        ("channels=4+4+4,kernel=3,padding=0", 22),
        ("channels=4,kernel=5,padding=1", 4),
        ("kernel=1,padding=3", 1),
    ],
)
def test_a_cnn_takes_every_image_that_its_layers_leave_a_pixel_of(
    options: str, smallest: int
) -> None:
    build = choose("--model", f"cnn:{options}", MODELS)
    for height, width in ((smallest, smallest + 1), (smallest + 3, smallest)):
        assert build((2, height, width), 7)(torch.ones(3, 2, height, width)).shape == (3, 7)
    if smallest > 1:
        with pytest.raises(InputError, match=rf"at least {smallest}x{smallest}, channels"):
            build((2, smallest + 5, smallest - 1), 7)
