"""Adapters of low rank on a base that is frozen, or personal."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import dfl
from dfl.comm.mpi import World
from dfl.core.isolation import isolated
from dfl.models.layers import LoRALinear, adapters
from dfl.models.parameter_layout import ParameterLayout, draw, drawn
from dfl.models.zoo import MODELS
from dfl.simulation.prepare import prepare
from dfl.training.task import Task
from tests.support.mpirun import mpirun
from tests.support.sequences import CLASSES, STEPS, padded, sequences

pytestmark = pytest.mark.usefixtures("no_figures")

PLAIN = "transformer:width=6,depth=2,heads=2"
LORA = f"{PLAIN},lora=2,alpha=3"
ATTACK = "label_flip:peers=1"
ADAPTERS = 2 * 2 * 2 * (6 + 6)
"""Numbers of the adapters: blocks, layers with an adapter, rank, inputs and outputs."""
FEW: dict[str, Any] = {
    "dataset": sequences(), "model": LORA, "share": "*.lora_*", "peers": 3, "rounds": 2, "lr": 0.3,
    "eval_every": 1,
}  # fmt: skip


def rows(**settings: Any) -> list[Any]:
    return list(dfl.simulate(dfl.Run(**{**FEW, **settings})))


def task(**settings: Any) -> Task:
    return prepare(dfl.Run(**{**FEW, **settings}), World()).task


def module(**options: Any) -> nn.Module:
    adapters = {"lora": 2, "alpha": 3.0} if options.get("lora", 2) else {}
    options = {"width": 6, "depth": 2, "heads": 2} | adapters | options
    return MODELS["transformer"]((STEPS,), CLASSES, (STEPS,), **options)


def test_an_adapter_adds_a_product_of_low_rank_to_the_weights() -> None:
    layer = LoRALinear(5, 4, rank=2, alpha=6.0)
    x = torch.randn(3, 7, 5)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))
    nn.init.normal_(layer.lora_b)
    whole = layer.weight + 3 * layer.lora_b @ layer.lora_a
    torch.testing.assert_close(layer(x), nn.functional.linear(x, whole, layer.bias))


def test_adapters_start_at_normal_numbers_and_at_zero() -> None:
    made = MODELS["transformer"]((9,), 80, width=256, depth=1, lora=64)
    layout = ParameterLayout.of(made)
    assert set(layout.names) == set(adapters(made))
    many = draw(made, layout, seed=0, peers=range(3))
    assert torch.equal(draw(made, layout, seed=0, peers=[2])[0], many[2])
    for name, value in layout.views(many).items():
        if name.endswith("lora_b"):
            assert not value.any()
        else:
            z = value * 16  # the square root of the inputs
            assert (float(z.mean()), float(z.std())) == pytest.approx((0, 1), abs=0.02)
            assert float(z.abs().max()) > 3.5
            assert not torch.equal(value[0], value[1])


def test_a_frozen_base_is_drawn_as_that_of_the_model_without_adapters() -> None:
    plain = module(lora=0)
    names = [name for name, _ in plain.named_parameters()]
    expected = drawn(plain, names, 0, [0])
    for base in (task(), task(init="independent"), task(seed=0, peers=5)):
        assert base.frozen.keys() == expected.keys()
        for name, value in base.frozen.items():
            assert torch.equal(value.flatten(), expected[name][0])
    assert not torch.equal(task(seed=1).frozen["last.weight"], task().frozen["last.weight"])
    assert rows()[0].train_loss == rows(model=PLAIN, share="all")[0].train_loss


def test_one_peer_trains_its_adapters_as_torch_does() -> None:
    """All examples in every step, so that there is no order; momentum over the steps of a round."""
    settings = {"peers": 1, "algorithm": "local_only", "batch_size": 0, "local_steps": 4}
    found = [row.train_loss for row in rows(**settings, share="all", rounds=1, momentum=0.8)]
    made, start = module(), task(peers=1)
    layout = start.parameter_layout
    (row,) = draw(made, layout, 0, [0])
    made.load_state_dict({**start.frozen, **layout.views(row)})
    x, y = (torch.from_numpy(each) for each in padded(60, 0))
    optimizer = torch.optim.SGD([made.get_parameter(n) for n in adapters(made)], 0.3, momentum=0.8)
    losses = []
    for _ in range(5):
        loss = nn.functional.cross_entropy(made(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert found == pytest.approx([losses[0], losses[4]], rel=1e-5)


def test_adapters_on_a_frozen_base_are_those_of_a_module_with_the_same_base() -> None:
    """A base without gradients has the same figures as one of rate 0: a caller's own, frozen."""
    start = task()
    own = module()
    layout = start.parameter_layout
    (row,) = draw(own, layout, 0, [0])
    own.load_state_dict({**start.frozen, **layout.views(row)})
    given = [{**row, "seconds": 0} for row in rows(model=own, bits=8)]
    assert given == [{**row, "seconds": 0} for row in rows(bits=8)]


@pytest.mark.parametrize("share", ["*.lora_*", "all"])
@pytest.mark.parametrize("bits", [None, 4, 8])
def test_messages_hold_the_adapters_alone(share: str, bits: int | None) -> None:
    """Three peers on a ring, with six messages a round."""
    last = rows(share=share, bits=bits)[-1]
    size = 4 * ADAPTERS if bits is None else ADAPTERS * bits // 8 + 4
    assert last["payload_bytes"] == 2 * 6 * size


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_personal_base_is_trained_and_not_sent(engine: str, tmp_path: Path) -> None:
    run = {"model": f"{LORA},base=trained", "engine": engine, "topology": "complete"}
    assert rows(**run, out=tmp_path / "run")[-1]["payload_bytes"] == 2 * 6 * 4 * ADAPTERS
    state = load_file(tmp_path / "run" / "state.safetensors")
    begin = task(**run).parameter_layout.views(draw_of(task(**run)))
    for name, value in state.items():
        assert len(value) == 3
        if name.endswith("key.bias"):  # it adds one number to all scores of a place
            continue
        assert (value[0] == value[1]).all() == ("lora_" in name)
        assert not torch.equal(value[0], begin[name])


def draw_of(task: Task) -> torch.Tensor:
    return draw(task.module, task.parameter_layout, 0, [0])[0]


def test_engines_agree() -> None:
    one, other = ([r.train_loss for r in rows(engine=each)] for each in ("loop", "batched"))
    assert one == pytest.approx(other, rel=1e-5)
    assert one[-1] < one[0]


@pytest.mark.parametrize("others", [1, 2, 30])
@pytest.mark.parametrize(("rank", "width", "n"), [(1, 5, 3), (3, 3, 1), (2, 16, 2)])
def test_a_peer_has_the_same_bits_among_any_others(
    rank: int, width: int, n: int, others: int
) -> None:
    problem = task(model=f"transformer:width={width},depth=2,heads=1,lora={rank}", engine="batched")
    torch.manual_seed(0)
    layout = problem.parameter_layout
    many = {
        name: torch.randn(32, *shape)
        for name, shape in zip(layout.names, layout.shapes, strict=True)
    }
    x = torch.randint(CLASSES, (32, n, STEPS))

    def outputs(which: list[int]) -> list[torch.Tensor]:
        leaves = {name: value[which].requires_grad_() for name, value in many.items()}
        out = problem.outputs(leaves, x[which])
        return [out.detach(), *torch.autograd.grad(out.square().sum(), list(leaves.values()))]

    with isolated(1):
        whole, some = outputs([*range(32)]), [31, *range(others)]
        for part, all_of_them in zip(outputs(some), whole, strict=True):
            assert torch.equal(part, all_of_them[some])


def test_a_resumed_run_has_the_same_bytes(tmp_path: Path) -> None:
    settings: dict[str, Any] = {**FEW, "bits": 4, "checkpoint_every": 1}
    list(dfl.simulate(dfl.Run(**settings | {"rounds": 3, "out": tmp_path / "whole"})))
    list(dfl.simulate(dfl.Run(**settings | {"rounds": 2, "out": tmp_path / "part"})))
    list(dfl.simulate(dfl.resumed(tmp_path / "part", rounds=3, dataset=sequences())))
    one, other = (tmp_path / name / "state.safetensors" for name in ("whole", "part"))
    assert one.read_bytes() == other.read_bytes()
    checkpoints = [*(tmp_path / "whole" / "checkpoint").glob("*.safetensors")]
    shapes = [value.shape for file in checkpoints for value in load_file(file).values()]
    assert max(shapes) == (3, ADAPTERS)


def test_the_base_and_its_size_are_saved_once(tmp_path: Path) -> None:
    rows(out=tmp_path / "run")
    state = load_file(tmp_path / "run" / "state.safetensors")
    assert {name: len(v) for name, v in state.items()} == {
        name: 3 if "lora_" in name else 1 for name, _ in module().named_parameters()
    }
    record = json.loads((tmp_path / "run" / "run.json").read_text())["model"]
    base = sum(value.numel() for value in module(lora=0).parameters())
    assert (record["parameters"], record["frozen"]) == (ADAPTERS, base)
    made = dfl.load(tmp_path / "run").model(1)
    assert torch.equal(made.state_dict()["last.weight"], task().frozen["last.weight"])
    assert [n for n, v in made.named_parameters() if v.requires_grad] == [*adapters(made)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the model without adapters, with an attacker."""
    folder = tmp_path_factory.mktemp("base") / "run"
    settings = {"model": PLAIN, "share": "all", "attack": ATTACK}
    rows(**settings, out=folder, report=False)
    return folder


@pytest.mark.parametrize("peers", [3, 5])
def test_a_base_is_the_mean_of_the_honest_peers_of_another_run(trained: Path, peers: int) -> None:
    base, mean = task(init_from=trained, peers=peers), dfl.load(trained).mean_model()
    for name, value in base.frozen.items():
        assert torch.equal(value, mean.get_parameter(name))
    first = rows(init_from=trained, peers=peers)[0]
    assert first["accuracy_mean"] == pytest.approx(first["accuracy_mean_model"])
    assert first.consensus_distance == 0


def test_a_trained_base_starts_from_another_run_at_each_peers_own(trained: Path) -> None:
    settings = {"model": f"{LORA},base=trained", "init_from": trained, "attack": ATTACK}
    last = dfl.load(trained).rows.iloc[-1]
    assert rows(**settings)[0].train_loss == pytest.approx(last["train_loss"], rel=1e-12)


def test_adapters_go_on_from_another_run_with_its_base(trained: Path, tmp_path: Path) -> None:
    rows(init_from=trained, out=tmp_path / "first", seed=3)
    state = load_file(tmp_path / "first" / "state.safetensors")
    again = task(init_from=tmp_path / "first", peers=4)
    for name, value in again.frozen.items():
        assert torch.equal(value, state[name][0])
    last = dfl.load(tmp_path / "first").rows.iloc[-1]
    for model in (LORA, f"{LORA},base=trained"):
        first = rows(init_from=tmp_path / "first", model=model)[0]
        assert first["accuracy_mean"] == pytest.approx(last["accuracy_mean"], abs=1e-12)


@pytest.mark.parametrize("option", ["alpha=8", "base=trained"])
def test_options_of_adapters_are_refused_without_adapters(option: str) -> None:
    name = option if option.startswith("base") else "alpha"
    with pytest.raises(dfl.InputError, match=f"transformer: {name} is of adapters, and lora=0"):
        task(model=f"{PLAIN},{option}")


@pytest.mark.parametrize("other", ["width=8,depth=2,heads=2", "width=6,depth=3,heads=2"])
def test_a_base_of_another_form_is_refused(trained: Path, other: str) -> None:
    with pytest.raises(dfl.InputError, match=r"--init-from .* has other parameters"):
        task(init_from=trained, model=f"transformer:{other},lora=2")


FROM = """
import sys
from pathlib import Path
import dfl
from tests.models.test_adapters import FEW
base, out = map(Path, sys.argv[1:])
list(dfl.simulate(dfl.Run(**FEW | {"peers": 5}, bits=4, init_from=base, out=out)))
"""


@pytest.mark.mpi
def test_a_base_from_another_run_does_not_depend_on_the_ranks(
    trained: Path, tmp_path: Path
) -> None:
    """Only rank 0 reads the other run; every rank gets the base, and its peers' adapters."""
    (tmp_path / "from.py").write_text(FROM)
    rows(init_from=trained, peers=5, bits=4, out=tmp_path / "one")
    done = mpirun(3, str(tmp_path / "from.py"), str(trained), str(tmp_path / "three"), timeout=120)
    assert done.returncode == 0, done.stderr
    one, other = (tmp_path / name / "state.safetensors" for name in ("one", "three"))
    assert one.read_bytes() == other.read_bytes()


MEMORY = """
import resource
import numpy as np
import dfl
x = np.random.default_rng(0).integers(80, size=(104, 21)).astype(np.uint8)
data = dfl.Data(x[:100, :-1], x[:100, 1:].astype(int), x[100:, :-1], x[100:, 1:].astype(int), 80)
run = dfl.Run(
    dataset=data, peers=100, rounds=1, batch_size=1, lr=0.1, bits=8,
    model="transformer:width=384,depth=6,heads=6,lora=8", share="*.lora_*",
)
rows = list(dfl.simulate(run))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, rows[-1]["payload_bytes"])
"""


@pytest.mark.slow
def test_a_hundred_peers_on_one_base_of_ten_million_parameters_take_little_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True
    )
    kilobytes, payload = map(int, done.stdout.split())
    assert payload == 200 * (6 * 2 * 2 * 8 * 384 + 4)
    assert kilobytes < 2 * 2**20
