"""A model in a user's file: --model my_model.py:build."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import dfl
from dfl.models.model_file import LOADED, ModelFile, file_of
from dfl.sweep import combinations, run_grid
from tests.conftest import Command
from tests.support.launched import here
from tests.support.mpirun import mpirun
from tests.support.small_run import FLAGS, small
from tests.support.stopping import crash, same

pytestmark = pytest.mark.usefixtures("no_figures")

OWN = Path(__file__).parents[1] / "mpi" / "own_model.py"
"""A model with an embedding, which no rule of dfl draws."""
REST = [flag for flag in FLAGS if not flag.startswith("--model=")]
FIXED = """
import torch
from torch import nn

def build(shape, classes):
    module = nn.Sequential(nn.Flatten(), nn.Linear(shape[1] * shape[2], classes))
    with torch.no_grad():
        for value in module.parameters():
            value.copy_(torch.linspace(-1, 1, value.numel()).view(value.shape))
    return module
"""
SCALED = FIXED.replace("linspace(-1, 1", "linspace(-2, 2")


def written(folder: Path, text: str, name: str = "my_model.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_a_run_is_that_of_the_same_module_given_in_python(tmp_path: Path) -> None:
    path = written(tmp_path, FIXED)
    (module,) = ModelFile.of(f"{path}:build").build((1, 8, 8), 10, seed=0)
    rows = [
        [
            (row.train_loss, row.accuracy_mean, row.consensus_distance)
            for row in dfl.simulate(small(model=model))
        ]
        for model in (f"{path}:build", module)
    ]
    assert rows[0] == rows[1]
    other = written(tmp_path, SCALED, "other.py")
    (first, *_) = dfl.simulate(small(model=f"{other}:build"))
    assert first.train_loss != rows[0][0][0]


def test_values_depend_on_the_seed_alone_and_generators_stay_as_they_were() -> None:
    file = ModelFile.of(f"{OWN}:build")

    def values(seed: int) -> torch.Tensor:
        (module,) = file.build((1, 8, 8), 10, seed)
        return torch.cat([value.detach().flatten() for value in module.parameters()])

    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    first = values(0)
    drawn = (float(torch.rand(())), float(np.random.random()), random.random())  # noqa: NPY002
    torch.manual_seed(5)
    np.random.seed(5)  # noqa: NPY002
    random.seed(5)
    assert drawn == (float(torch.rand(())), float(np.random.random()), random.random())  # noqa: NPY002
    assert torch.equal(first, values(0))
    assert not torch.equal(first, values(1))


def test_options_follow_the_function(tmp_path: Path) -> None:
    (wide,) = ModelFile.of(f"{OWN}:build:width=7").build((1, 8, 8), 10, 0)
    assert wide.get_parameter("last.weight").shape == (10, 7)
    with pytest.raises(dfl.InputError, match=r"own_model.py build: unknown option 'wdth'.*width"):
        ModelFile.of(f"{OWN}:build:wdth=7").build((1, 8, 8), 10, 0)


def test_a_function_may_return_several_modules(tmp_path: Path) -> None:
    kinds = FIXED.replace("return module", "return [module, nn.Sequential(*module, nn.ReLU())]")
    path = written(tmp_path, kinds)
    modules = ModelFile.of(f"{path}:build").build((1, 8, 8), 10, seed=0)
    assert [len(list(module.children())) for module in modules] == [2, 3]
    run = small(share="1.*")
    rows = [
        [row.train_loss for row in dfl.simulate(replace(run, model=model))]
        for model in (f"{path}:build", list(modules))
    ]
    assert rows[0] == rows[1]


@pytest.mark.parametrize("spec", ["mlp", "mlp:hidden=3", "own:model.py", "theirs:path=a.py"])
def test_components_are_no_files(spec: str) -> None:
    assert file_of(spec) is None


BAD = {
    "no function": ("", "my_model.py", ["my_model.py:FUNCTION"]),
    "an empty function": ("", "my_model.py:", ["my_model.py:FUNCTION"]),
    "no file": (None, "my_model.py:build", ["No such file"]),
    "no such user": (None, "~no-such-user/my_model.py:build", ["No such file"]),
    "a syntax error": ("\n\ndef build(:\n", "my_model.py:build", ["in line 3", "SyntaxError"]),
    "a null byte": ("a = 1\0", "my_model.py:build", ["no Python"]),
    "an exception": ("\n1 / 0\n", "my_model.py:build", ["ZeroDivisionError"]),
    "an import": ("import nothing_of_this_name", "my_model.py:build", ["nothing_of_this_name"]),
    "an exit": ("raise SystemExit(0)", "my_model.py:build", ["SystemExit"]),
    "another name": (FIXED, "my_model.py:biuld", ["biuld", "did you mean build?"]),
    "a number": ("build = 3", "my_model.py:build", ["build"]),
    "an exception in it": (
        "def build(shape, classes):\n    raise KeyError('width')",
        "my_model.py:build",
        ["build((1, 8, 8), 10)", "KeyError", "width"],
    ),
    "other arguments": ("def build(): pass", "my_model.py:build", ["build((1, 8, 8), 10)"]),
    "no module": ("def build(shape, classes):\n    return 3", "my_model.py:build", ["not 3"]),
    "no values": (
        "import torch\ndef build(shape, classes):\n"
        "    return torch.nn.Sequential(\n"
        "        torch.nn.Flatten(), torch.nn.Linear(64, classes, device='meta'))",
        "my_model.py:build",
        ["parameter 1.weight is on the meta device"],
    ),
    "another output": (
        "from torch import nn\ndef build(shape, classes):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes - 1))",
        "my_model.py:build",
        ["(2, 9)", "(2, 10)"],
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_one_line(dfl_run: Command, case: str) -> None:
    text, spec, parts = BAD[case]
    if text is not None:
        written(dfl_run.folder, text)
    line = dfl_run.refused(*REST, f"--model={spec}")
    assert "model" in line
    assert [part for part in parts if part not in line] == []
    assert LOADED not in line


def test_a_large_file_is_not_read(dfl_run: Command) -> None:
    written(dfl_run.folder, "#" * (2**20 + 1))
    assert "1,048,577 bytes" in dfl_run.refused(*REST, "--model=my_model.py:build")


def test_a_run_is_resumed_with_the_same_file_only(tmp_path: Path) -> None:
    path = written(tmp_path, OWN.read_text())
    run = small(model=f"{path}:build")
    list(dfl.simulate(replace(run, out=tmp_path / "whole")))
    crash(replace(run, out=tmp_path / "run"), 4)
    path.write_text(OWN.read_text() + "# another\n")
    with pytest.raises(dfl.InputError, match=f"--model {path}:build is not the one"):
        list(dfl.simulate(dfl.resumed(tmp_path / "run")))
    shutil.copy(OWN, path)
    list(dfl.simulate(dfl.resumed(tmp_path / "run")))
    same(tmp_path / "whole", tmp_path / "run")


EMBEDDED = """
import torch
from torch import nn

class Embedded(nn.Module):
    def __init__(self, classes, rows):
        super().__init__()
        self.embedding, self.last = nn.Embedding(rows, 4), nn.Linear(4, classes)

    def forward(self, x):
        return self.last(self.embedding(x.flatten(1)[:, {pixel}].long()))

def build(shape, classes):
    return Embedded(classes, {rows})
"""


@pytest.mark.slow
@pytest.mark.parametrize("peer", [0, 1])
def test_all_ranks_refuse_a_model_that_fails_on_the_examples_of_one(
    tmp_path: Path, peer: int
) -> None:
    """The value 2 stands at a pixel of one peer alone."""
    x = np.zeros((8, 3), np.float32)
    x[[0, 5], [0, 1]] = 2
    np.savez(tmp_path / "data.npz", x=x, y=np.arange(8) % 2)
    model = written(tmp_path, EMBEDDED.format(pixel=peer, rows=2))
    job = f"""
import dfl, numpy as np, os
from dfl.models.model_file import ModelFile
from pathlib import Path
given = np.load("{tmp_path}/data.npz")
data = dfl.Data(given["x"], given["y"], given["x"][1:3], given["y"][1:3], 2)
parts = [np.arange(4), np.arange(4, 8)]
run = dfl.Run(
    model="{model}:build", dataset=data, partition=parts, peers=2, rounds=1,
    out=Path("{tmp_path}/run"),
)
try:
    list(dfl.simulate(run))
except dfl.InputError as error:
    os.write(1, f"{{error}}\\n".encode())  # in one piece
"""
    done = mpirun(2, "-c", job, timeout=50)  # a rank that stops alone waits for 60 s
    (line,) = set(done.stdout.splitlines())
    assert line.startswith("the model Embedded fails on inputs of shape")
    assert done.stdout.count(line) == 2
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_rank_without_peers_needs_no_examples_to_try_a_model_on(tmp_path: Path) -> None:
    model = written(tmp_path, EMBEDDED.format(pixel=3, rows=17))
    flags = [f"--model={model}:build", f"--out={tmp_path / 'run'}"]
    done = mpirun(5, "-m", "dfl.run", *REST, *flags)
    assert done.returncode == 0, done.stderr


def test_a_sweep_varies_its_options(tmp_path: Path) -> None:
    specs = [f"{OWN}:build:width={width}" for width in (2, 3)]
    cells = combinations({"peers": 4, "rounds": 1, "examples_per_peer": 10}, {"model": specs})
    with here() as names:
        run_grid(cells, tmp_path / "sweep")
    found = [dfl.load(tmp_path / "sweep" / name).state["last.weight"].shape for name in names]
    assert found == [(4, 10, 2), (4, 10, 3)]
