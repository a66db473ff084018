"""Augmentation agrees with torchvision, draws per example, and alters training examples only."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dfl
from dfl.comm.mpi import World
from dfl.core import randomness
from dfl.core.errors import InputError
from dfl.datasets.data import Data
from dfl.evaluation.metrics import own_loss_and_accuracy
from dfl.simulation.initialization import start
from dfl.simulation.prepare import prepare
from dfl.simulation.prepared import Prepared
from dfl.training.augmentation import NO_AUGMENTATION, CropFlip
from dfl.training.batch import Batch
from dfl.training.batches import batches, groups
from dfl.training.sgd import sgd
from tests.algorithms.test_identities import part
from tests.conftest import Command
from tests.support.quadratic import digits, final

CROP = "crop_flip:padding=2,flip=0.3"
ZERO = torch.zeros((), dtype=torch.uint8)


def some(a: int, b: int, seed: int = 0) -> Batch:
    return Batch(
        torch.zeros(a, b, dtype=torch.int64), torch.ones(1, b), seed, np.arange(a), 3, 1, a
    )


def images(a: int, b: int, *shape: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(1, 256, (a, b, *shape), np.uint8))


def cropped(
    image: np.ndarray[Any, Any], drawn: Tensor, padding: int, flip: float
) -> np.ndarray[Any, Any]:
    """Return one image (c, h, w) padded, cropped and mirrored as by torchvision."""
    _, height, width = image.shape
    top, left = (int(float(u) * (2 * padding + 1)) for u in drawn[:2])
    padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
    window = padded[:, top : top + height, left : left + width]
    return window[:, :, ::-1] if float(drawn[2]) < flip else window


@pytest.mark.parametrize(("padding", "flip"), [(4, 0.5), (0, 0.5), (2, 0.0), (3, 1.0), (0, 0.0)])
@pytest.mark.parametrize("shape", [(3, 6, 9), (1, 5, 5)])
def test_images_are_padded_cut_and_mirrored(
    padding: int, flip: float, shape: tuple[int, ...]
) -> None:
    before = images(3, 5, *shape)
    after = CropFlip(padding=padding, flip=flip)(before, some(3, 5, seed=7), ZERO)
    assert (after.dtype, after.shape) == (torch.uint8, before.shape)
    for i in range(3):
        drawn = randomness.uniform(7, "crop and flip", [i], 3, 1, n=15)[0].view(5, 3)
        for j in range(5):
            np.testing.assert_array_equal(
                after[i, j], cropped(before[i, j].numpy(), drawn[j], padding, flip)
            )
    assert torch.equal(after, before) == (padding == flip == 0)


def test_of_several_parts_all_images_are_changed_alike() -> None:
    image, words = images(2, 5, 3, 6, 6), images(2, 5, 7)
    batch, augment = some(2, 5), CropFlip(padding=2, flip=0.5)
    zeros = (ZERO, ZERO, ZERO)
    one, same, other = augment.of_parts((image, words, image + 1), batch, zeros)
    assert torch.equal(one, augment(image, batch, ZERO))
    assert torch.equal(same, words)
    assert torch.equal(other[one > 0], (one + 1)[one > 0])
    augment.check_parts(((3, 6, 6), (7,), (3, 6, 6)))
    for shape in (((7,), (2, 2)), ((3, 6, 6), (3, 6, 2))):
        with pytest.raises(InputError, match="--augment crop_flip"):
            augment.check_parts(shape)


def test_shifts_are_uniform_and_flips_have_their_probability() -> None:
    """The bright pixel in the middle measures an image's shift, the grey one beside it its flip."""
    before = torch.zeros(1, 20_000, 1, 7, 7, dtype=torch.uint8)
    before[..., 3, 3], before[..., 3, 4] = 200, 100
    after = CropFlip(padding=2, flip=0.25)(before, some(1, 20_000), ZERO)[0, :, 0]
    row, column = np.divmod((after == 200).flatten(1).int().argmax(1).numpy(), 7)
    counts = np.bincount((row - 1) * 5 + column - 1, minlength=25)
    assert counts.sum() == 20_000
    assert counts.min() > 800 - 5 * 28
    assert counts.max() < 800 + 5 * 28  # five standard deviations
    grey = (after == 100).flatten(1).int().argmax(1).numpy() % 7
    assert abs((grey < column).mean() - 0.25) < 0.016


def test_shifts_of_numbers_near_one_stay_within_the_padding() -> None:
    largest = torch.tensor(1 - 2.0**-24)
    for padding in range(1, 2000):
        assert CropFlip(padding=padding)._shift(largest) == padding
        assert CropFlip(padding=padding)._shift(largest * 0) == -padding


def shaded(kind: type, **more: Any) -> Prepared:
    """Return five peers with images of bytes or floats, which models see as x / 255 * 2 - 1."""
    rng = np.random.default_rng(1)
    inputs: Any = rng.integers(0, 256, (60, 1, 6, 6)).astype(kind)
    labels = rng.integers(0, 3, 60)
    data = Data(inputs, labels, inputs[:4], labels[:4], classes=3, scale=2 / 255, shift=-1.0)
    run = dfl.Run(**{"peers": 5, "batch_size": 4, "augment": CROP, "model": "softmax", **more})
    return prepare(replace(run, dataset=data), World())


def test_padding_is_zero_in_raw_pixels() -> None:
    """Padding is black, which is -1 for the model, for bytes and for floats normalized before."""
    seen = []
    for kind in (np.uint8, np.float32):
        task = shaded(kind, augment="crop_flip:padding=5").task
        batch = next(batches(task, 0, np.arange(5)))
        raw, _ = task.examples.at(batch.index)
        seen.append(task.inputs(task.augment(raw, batch, task.zero)))
    assert torch.allclose(seen[0], seen[1], rtol=0, atol=1e-6)
    assert float((seen[0] == -1).float().mean()) > 0.3


@pytest.mark.parametrize("engine", ["batched", "loop"])
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_a_round_is_sgd_on_augmented_images(engine: str, kind: type) -> None:
    """A round agrees with torch's layers, gradients and optimizer on images altered by numpy."""
    setting = shaded(kind, engine=engine, local_epochs=2, momentum=0.5)
    task = setting.task
    x = start(setting.run, task, False)
    ours = sgd(x, task, 2)
    for i in range(5):
        module = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
        nn.utils.vector_to_parameters(x[i].clone(), module.parameters())
        optimiser = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.5)
        group = next(each for each in groups(task) if i in each)
        for k, batch in enumerate(batches(task, 2, group)):
            index = batch.index[list(group).index(i)]
            raw, labels = task.examples.inputs[index], task.examples.labels[index]
            drawn = randomness.uniform(0, "crop and flip", [i], 2, k, n=12)[0].view(4, 3)
            pixels = ((raw + 1) / 2 * 255).round().numpy() if kind is np.float32 else raw.numpy()
            new = np.stack([cropped(one, u, 2, 0.3) for one, u in zip(pixels, drawn, strict=False)])
            optimiser.zero_grad()
            seen = torch.from_numpy(new).float() * (2 / 255) - 1
            nn.functional.cross_entropy(module(seen), labels).backward()
            optimiser.step()
        assert torch.allclose(
            ours[i], nn.utils.parameters_to_vector(module.parameters()).detach(), rtol=0, atol=1e-5
        )


@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_a_peers_bits_do_not_depend_on_its_group(engine: str) -> None:
    setting = digits(
        augment=CROP, engine=engine, partition="dirichlet:alpha=0.3", init="independent"
    )
    x = start(setting.run, setting.task, False)
    together = sgd(x, setting.task, 3)
    for first, stop in ((0, 1), (1, 3), (2, 6)):
        assert torch.equal(sgd(x[first:stop], part(setting, first, stop), 3), together[first:stop])


def test_engines_agree_and_none_changes_nothing() -> None:
    loop, batched, plain, none = (
        final(digits(**more), 3)
        for more in (
            {"augment": CROP, "engine": "loop"},
            {"augment": CROP, "engine": "batched"},
            {},
            {"augment": "none"},
        )
    )
    assert torch.allclose(loop, batched, rtol=0, atol=2e-6)
    assert not torch.allclose(batched, plain, atol=1e-3)
    assert torch.equal(plain, none)


def test_evaluation_uses_images_without_augmentation() -> None:
    setting = digits(augment=CROP)
    x = start(setting.run, setting.task, False)
    loss, _ = own_loss_and_accuracy(
        x, setting.task, setting.task.examples, setting.test_sets.longest
    )
    plain, _ = own_loss_and_accuracy(
        x,
        replace(setting.task, augment=NO_AUGMENTATION),
        setting.task.examples,
        setting.test_sets.longest,
    )
    np.testing.assert_array_equal(loss, plain)


@pytest.mark.parametrize("algorithm", ["fltrust:root=20", "pooled"])
def test_a_server_augments_its_own_examples(algorithm: str) -> None:
    task = digits(algorithm=algorithm, augment=CROP).task
    assert task.server is not None
    assert task.server.augment == CropFlip(padding=2, flip=0.3)
    x = torch.linspace(-1, 1, task.parameter_layout.d)[None]
    assert not torch.equal(
        sgd(x, task.server, 0), sgd(x, replace(task.server, augment=NO_AUGMENTATION), 0)
    )


def test_examples_that_cannot_be_augmented_are_refused(dfl_run: Command) -> None:
    line = dfl_run.refused(
        "--augment", "crop_flip", "--dataset", "gaussian:features=12", "--peers", "4"
    )
    assert line == "--augment crop_flip needs images, not inputs of 12"
    line = dfl_run.refused("--augment", "crop_flip:padding=8", "--peers", "4", "--dry-run")
    assert line == "--augment crop_flip: padding must be less than a side of the images, 8, not 8"
    for bad in ({"padding": -1}, {"flip": 1.5}, {"flip": float("nan")}):
        with pytest.raises(InputError, match=next(iter(bad))):
            CropFlip(**bad)
