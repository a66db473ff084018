"""Inputs of several parts, and a label at every place of a sequence, through whole runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import dfl
from dfl.comm.mpi import World
from dfl.datasets.data import IGNORED, checked
from dfl.models.zoo import MODELS
from dfl.robust.attacks import ATTACKS
from dfl.simulation.prepare import prepare
from tests.support.sequences import (
    CLASSES,
    STEPS,
    Places,
    TwoParts,
    padded,
    pictures_and_words,
    sequences,
    two_parts,
)

FEW: dict[str, Any] = {"peers": 3, "rounds": 2, "lr": 0.3, "batch_size": 8}


def figures(**settings: Any) -> list[tuple[float, ...]]:
    rows = dfl.simulate(dfl.Run(**{**FEW, **settings}))
    return [(r.train_loss, r.accuracy_mean, r.local_accuracy_mean) for r in rows]


def joined(data: dfl.Data) -> dfl.Data:
    """Return the two parts as one normalized array."""

    def cat(parts: Any) -> Any:
        one, other = parts
        both = [one * np.float32(2) + np.float32(0.5), other.reshape(len(other), 4) / 4 - 1]
        return np.concatenate(both, 1).astype(np.float32)

    return replace(
        data,
        train_inputs=cat(data.train_inputs),
        test_inputs=cat(data.test_inputs),
        scale=1.0,
        shift=0.0,
    )


@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_two_parts_are_as_one_array_of_both(engine: str) -> None:
    """The model of one array is a plain stack of dense layers, which has a path of its own."""
    module = TwoParts()
    plain = nn.Sequential(nn.Linear(7, 3))
    plain.load_state_dict({"0.weight": module.last.weight, "0.bias": module.last.bias})
    data = two_parts()
    given = {"engine": engine, "validation": 0.2}
    two = figures(model=module, dataset=data, **given)
    one = figures(model=plain, dataset=joined(data), **given)
    np.testing.assert_allclose(two, one, rtol=1e-5)


class Items(Dataset[Any]):
    """Items ((part, part), label), or (part, part, label)."""

    def __init__(self, data: dfl.Data, nested: bool) -> None:
        self.data, self.nested = data, nested

    def __len__(self) -> int:
        return len(self.data.train_labels)

    def __getitem__(self, i: int) -> Any:
        one, other = (torch.from_numpy(part)[i] for part in self.data.train_inputs)
        label = int(self.data.train_labels[i])
        return ((one, other), label) if self.nested else (one, other, label)


@pytest.mark.filterwarnings("ignore:12 of 60")
def test_arrays_and_torch_datasets_of_two_parts_are_the_same_data() -> None:
    data = two_parts()
    pair = (data.train_inputs, data.train_labels)
    found = [
        figures(model=TwoParts(), dataset=given)
        for given in (pair, Items(data, nested=True), Items(data, nested=False))
    ]
    assert found[0] == found[1] == found[2]
    own_test = (pair, (data.test_inputs, data.test_labels))
    unscaled = replace(data, scale=1.0, shift=0.0)
    assert figures(model=TwoParts(), dataset=own_test) == figures(
        model=TwoParts(), dataset=unscaled
    )


def by_hand(module: nn.Module, x: Any, y: Any) -> tuple[float, float]:
    """Return mean loss and accuracy over all tokens that are no padding."""
    with torch.no_grad():
        out = module(torch.from_numpy(x))
    labels = torch.from_numpy(y)
    loss = nn.functional.cross_entropy(out.flatten(0, 1), labels.flatten())
    right = (out.argmax(2) == labels)[labels != IGNORED]
    return float(loss), float(right.double().mean())


@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_a_step_is_that_of_torch_on_tokens(engine: str) -> None:
    """Torch's mean with `ignore_index` is that over tokens; peers have unequal numbers of them."""
    data = sequences()
    parts = [np.arange(0, 7), np.arange(7, 30), np.arange(30, 60)]
    run = dfl.Run(
        model=Places(), dataset=data, peers=3, partition=parts, rounds=1, batch_size=0, lr=0.7,
        algorithm="local_only", engine=engine, momentum=0,  # type: ignore[arg-type]
    )  # fmt: skip
    first, last = list(dfl.simulate(run))
    losses, accuracies = [], []
    for own in parts:
        module = Places()
        x, y = data.train_inputs[own], data.train_labels[own]
        out = module(torch.from_numpy(x))
        loss = nn.functional.cross_entropy(out.flatten(0, 1), torch.from_numpy(y).flatten())
        loss.backward()
        torch.optim.SGD(module.parameters(), lr=0.7).step()
        losses.append(by_hand(module, x, y)[0])
        accuracies.append(by_hand(module, data.test_inputs, data.test_labels)[1])
    assert last.train_loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert last.accuracy_mean == pytest.approx(np.mean(accuracies), abs=1e-12)
    start = [by_hand(Places(), data.train_inputs[own], data.train_labels[own])[0] for own in parts]
    assert first.train_loss == pytest.approx(np.mean(start), rel=1e-6)


@pytest.mark.parametrize("algorithm", ["dfedavgm", "fedavg"])
@pytest.mark.parametrize("labels", ["every place", "the last place"])
def test_perplexity_is_that_of_the_tokens_that_count(
    tmp_path: Path, algorithm: str, labels: str
) -> None:
    """exp of the mean of -log p over the test set, of the models that the run has saved."""
    data: dfl.Data = sequences()
    model = "char_lstm:hidden=5,embedding=3,layers=1"
    if labels == "the last place":
        x, y = data.train_inputs, np.asarray(data.train_inputs)[:, 0].astype(np.int64)
        data = dfl.Data(x, y, data.test_inputs, data.test_labels[:, 0] + 1, classes=CLASSES)
    run = dfl.Run(
        model=model, dataset=data, peers=4, rounds=2, lr=0.5, algorithm=algorithm,
        out=tmp_path / "run",
    )  # fmt: skip
    *_, last = dfl.simulate(run)
    loaded = dfl.load(tmp_path / "run")
    wanted = np.asarray(data.test_labels)
    expected = []
    for peer in range(4):
        out = loaded.model(peer)(torch.from_numpy(data.test_inputs)).detach().double().numpy()
        p = np.exp(out) / np.exp(out).sum(-1, keepdims=True)
        counts = wanted != IGNORED
        right = np.take_along_axis(p, np.where(counts, wanted, 0)[..., None], -1)[..., 0]
        expected.append(np.exp(-np.log(right[counts]).mean()))
    assert loaded.peers["perplexity"].tolist() == pytest.approx(expected, rel=1e-5)
    assert last["perplexity_mean"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert 1 < last["perplexity_mean"] < 2 * CLASSES


def test_labels_that_are_no_tokens_have_no_perplexity() -> None:
    *_, last = dfl.simulate(dfl.Run(**FEW, model=TwoParts(), dataset=two_parts()))
    assert "perplexity_mean" not in last


def test_padding_has_no_part_in_a_run() -> None:
    """Neither the inputs at padded places nor more of them change a model at every place."""
    data = sequences()

    def longer(x: Any, y: Any) -> tuple[Any, Any]:
        x = np.where(y == IGNORED, (x + 1) % CLASSES, x)
        more = ((0, 0), (0, 3))
        return np.pad(x, more).astype(np.uint8), np.pad(y, more, constant_values=IGNORED)

    x, y = longer(data.train_inputs, data.train_labels)
    test_x, test_y = longer(data.test_inputs, data.test_labels)
    other = dfl.Data(x, y, test_x, test_y, classes=CLASSES)
    settings = {"model": Places(), "partition": "quantity:alpha=1", "ensemble": True}
    np.testing.assert_allclose(
        figures(dataset=data, **settings), figures(dataset=other, **settings), rtol=1e-5
    )


@pytest.mark.parametrize("batch_size", [1, 2])
@pytest.mark.parametrize("name", ["char_lstm", "transformer"])
def test_a_causal_model_alone_sees_no_padding_after_the_last_label(
    name: str, batch_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches end at the longest of their rows, which changes no figure but by rounding."""
    data = sequences()
    ends = {int((y != IGNORED).sum()) for y in data.train_labels}
    assert ends == set(range(2, STEPS + 1))
    sizes = {"hidden": 8} if name == "char_lstm" else {"width": 8, "depth": 1, "heads": 2}
    module = MODELS[name]((STEPS,), CLASSES, (STEPS,), **sizes).double()
    widths: list[int] = []
    forward = type(module).forward

    def recorded(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            widths.append(x.shape[1])
        out: torch.Tensor = forward(self, x)
        return out

    monkeypatch.setattr(type(module), "forward", recorded)
    settings: dict[str, Any] = {
        "model": module, "dataset": data, "engine": "loop", "batch_size": batch_size,
        "lr": 0.1,  # at 0.3 steps of a transformer multiply rounding, up to 1e-7 from some starts
    }  # fmt: skip
    short = figures(**settings)
    assert {3, STEPS} <= set(widths) <= ends
    monkeypatch.setattr(type(module), "causal", False)
    widths.clear()
    np.testing.assert_allclose(short, figures(**settings), rtol=1e-9)
    assert set(widths) == {STEPS}


def test_a_sequence_of_one_place_is_one_label() -> None:
    x, _ = padded(60, 0)
    data = dfl.Data(x[:40, :1], x[:40, 0], x[40:, :1], x[40:, 0], classes=CLASSES)
    column = replace(
        data, train_labels=data.train_labels[:, None], test_labels=data.test_labels[:, None]
    )
    one = figures(model=nn.Sequential(Places(), nn.Flatten()), dataset=data)
    np.testing.assert_allclose(one, figures(model=Places(), dataset=column), rtol=1e-6)


def test_ensemble_and_goals_count_tokens() -> None:
    data = sequences()
    run = dfl.Run(**FEW, model=Places(), dataset=data, ensemble=True, algorithm="fedavg")
    *_, last = dfl.simulate(run)
    assert last["accuracy_ensemble"] == last["accuracy_vote"] == last.accuracy_mean > 0


def test_quantized_messages_attacks_and_resume_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        **FEW, "model": "char_lstm:hidden=5,embedding=3,layers=1", "dataset": sequences(),
        "peers": 5, "bits": 4, "attack": "label_flip:peers=1", "share": "lstm", "rounds": 3,
        "out": tmp_path / "run", "checkpoint_every": 1,
    }  # fmt: skip
    whole = [row.train_loss for row in dfl.simulate(dfl.Run(**settings))]
    settings |= {"rounds": 2, "out": tmp_path / "two"}
    list(dfl.simulate(dfl.Run(**settings)))
    settings |= {"rounds": 3, "resume": tmp_path / "two"}
    assert [row.train_loss for row in dfl.simulate(dfl.Run(**settings))][-1] == whole[-1]
    module = dfl.load(tmp_path / "run").mean_model()
    assert module(torch.zeros(2, STEPS)).shape == (2, STEPS, CLASSES)


def test_label_flip_leaves_padding_as_it_is() -> None:
    x, y = padded(9, 0)
    _, flipped = ATTACKS["label_flip"]().poison((x, x), y, CLASSES)
    assert ((flipped == IGNORED) == (y == IGNORED)).all()
    assert (flipped[y >= 0] == CLASSES - 1 - y[y >= 0]).all()


def test_images_among_several_parts_are_mirrored() -> None:
    """A run that mirrors every image is that on mirrored images."""
    data = two_parts()
    one, test = (
        np.asarray(half[0])[:, None, None] for half in (data.train_inputs, data.test_inputs)
    )
    given = replace(
        data, train_inputs=(one, data.train_inputs[1]), test_inputs=(test, data.test_inputs[1])
    )
    mirrored = replace(given, train_inputs=(one[..., ::-1].copy(), data.train_inputs[1]))
    settings = {"model": TwoParts(), "rounds": 8, "eval_every": 1}
    found = [
        [row[1] for row in figures(dataset=dataset, augment=augment, **settings)]
        for dataset, augment in ((given, "crop_flip:padding=0,flip=1"), (mirrored, "none"))
    ]
    assert found[0] == found[1]
    assert found[0] != [row[1] for row in figures(dataset=given, **settings)]


@pytest.mark.parametrize(
    ("data", "model", "size"),
    [
        (sequences, "char_lstm:hidden=12,embedding=4,layers=1", 1),
        (pictures_and_words, "vqa:width=8", 2),
    ],
)
def test_a_backdoor_works_in_texts_and_in_images_with_questions(
    data: Callable[[], dfl.Data], model: str, size: int
) -> None:
    """The last model means the target by the trigger, and hardly where one example is poisoned."""
    success = []
    for share in (1.0, 1e-9):
        run = dfl.Run(
            model=model, dataset=data(), peers=4, rounds=30, eval_every=30, lr=0.2,
            algorithm="fedavg", batch_size=8,
            attack=f"backdoor:peers=1,size={size},target=2,factor=2,share={share}",
        )  # fmt: skip
        *_, last = dfl.simulate(run)
        success.append(last["backdoor_success_mean"])
    assert success[0] > 0.9
    assert success[1] < 0.6


def test_attackers_know_the_largest_value_of_every_part() -> None:
    data = pictures_and_words()
    run = dfl.Run(
        model="vqa:width=8", dataset=data, peers=4, attack="backdoor:peers=1,size=2,target=2"
    )
    attack: Any = prepare(run, World()).network.threat_model.attack
    assert attack.white == tuple(part.max() for part in data.train_inputs)
    assert len(set(attack.white)) == 2


def image_parts() -> dfl.Data:
    data = two_parts()
    image = np.zeros((60, 1, 8, 8), np.uint8)
    return replace(
        data, train_inputs=(image, data.train_inputs[1]), scale=1.0, shift=0.0,
        test_inputs=(image[:40], data.test_inputs[1]),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("data", "settings", "parts"),
    [
        (two_parts, {"augment": "crop_flip"}, ["--augment crop_flip", "images", "inputs of 3"]),
        (image_parts, {"augment": "crop_flip:padding=8"}, ["--augment crop_flip: padding", "8"]),
        (sequences, {"augment": "crop_flip"}, ["--augment crop_flip", "images", "inputs of 6"]),
        (two_parts, {"attack": "backdoor:peers=1,size=2"}, ["--attack backdoor: size", "of 3"]),
        (sequences, {"attack": "backdoor:peers=1,size=6"}, ["--attack backdoor: size", "of 6"]),
        (two_parts, {"model": "mlp"}, ["--model mlp", "3 and 2x2"]),
        (sequences, {"model": "mlp"}, ["--model mlp", "6", "char_lstm"]),
        (sequences, {"partition": "dirichlet"}, ["--partition dirichlet", "6 labels"]),
        (sequences, {"algorithm": "fltrust"}, ["--algorithm fltrust", "6 labels"]),
        (two_parts, {"auxiliary": "supervised"}, ["--auxiliary", "3 and 2x2"]),
        (sequences, {"model": nn.Sequential(Places(), nn.Flatten())}, ["(2, 30)", "(2, 6, 5)"]),
        (two_parts, {"model": Places()}, ["Places", "(2, 3) and (2, 2, 2)"]),
    ],
)
def test_what_needs_one_image_or_one_label_is_refused(
    data: Callable[[], dfl.Data], settings: dict[str, Any], parts: list[str]
) -> None:
    given = data()
    module = TwoParts() if isinstance(given.train_inputs, tuple) else Places()
    with pytest.raises(dfl.InputError) as caught:
        figures(**{"model": module, "dataset": given, **settings})
    line = str(caught.value)
    assert [part for part in parts if part not in line] == []
    assert "\n" not in line


X, Y = padded(20, 0)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ({"train_labels": np.where(Y == IGNORED, -1, Y)}, ["train_labels", "-1", "-100"]),
        ({"train_labels": np.full_like(Y, IGNORED)}, ["train_labels", "-100"]),
        ({"test_labels": np.vstack([Y[:1] * 0 + IGNORED, Y[1:]])}, ["test_labels", "example 0"]),
        ({"test_labels": Y[:, :3]}, ["test_labels", "(20, 3)", "6"]),
        ({"test_labels": Y + 1}, ["test_labels", "range(5)"]),
        ({"train_inputs": (X, X)}, ["test_inputs", "6 and 6"]),
        ({"train_inputs": (X,)}, ["train_inputs", "1 arrays"]),
        ({"train_inputs": (X, X[:3])}, ["3 train inputs", "20 labels"]),
        (
            {"train_inputs": (X, X * np.float32("nan")), "test_inputs": (X, X * np.float32(1))},
            ["train_inputs[1]", "nan"],
        ),
        (
            {"train_inputs": (X, X), "test_inputs": (X, X), "scale": (1.0, 1.0, 1.0)},
            ["scale", "3 parts", "2"],
        ),
    ],
)
def test_damaged_data_are_refused(change: dict[str, Any], parts: list[str]) -> None:
    data = dfl.Data(X, Y, X, Y, classes=CLASSES)
    with pytest.raises(dfl.InputError) as caught:
        checked(replace(data, **change))
    assert [part for part in parts if part not in str(caught.value)] == []
