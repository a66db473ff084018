"""Components are registered by name, and those of other packages found by entry points."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dfl.algorithms import ALGORITHMS, Algorithm
from dfl.commands.list import listing
from dfl.core.errors import InputError
from dfl.core.help.catalogue import page
from dfl.core.registry import Registry, choose, split_specs
from dfl.datasets import DATASETS
from dfl.simulation.components import registries
from tests.conftest import Command
from tests.support.mpirun import ENV, ROOT, mpirun_command
from tests.support.plugins import PACKAGE, declare, install

SPECS = ["--algorithm", "combine_then_adapt", "--topology", "wheel", "--dataset", "xor"]
FEW = ["--peers", "6", "--rounds", "3", "--eval-every", "1", "--model", "softmax"]


def part() -> int:
    return 1


def other() -> int:
    return 2


def refused(make: Callable[[], object]) -> str:
    with pytest.raises(InputError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def parts() -> Registry[Callable[..., int]]:
    registry: Registry[Callable[..., int]] = Registry("part", "dfl.parts")
    registry.register("ours")(part)
    return registry


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ("mlp", ["mlp"]),
        ("mlp:hidden=20+30+mlp:hidden=5", ["mlp:hidden=20+30", "mlp:hidden=5"]),
        ("mlp:hidden=20+2nn+2nn", ["mlp:hidden=20", "2nn", "2nn"]),
        ("a:p=1e+5,q=3+5+2nd:rate=2e-3+b", ["a:p=1e+5,q=3+5", "2nd:rate=2e-3", "b"]),
        ("a++b", ["a+", "b"]),
    ],
)  # fmt: skip
def test_specs_are_joined_by_a_plus_before_a_name(specs: str, expected: list[str]) -> None:
    assert split_specs(specs) == expected


def test_a_registry_is_a_mapping_by_name(parts: Registry[Callable[..., int]]) -> None:
    assert (list(parts), len(parts), "ours" in parts, "theirs" in parts) == (
        ["ours"],
        1,
        True,
        False,
    )
    assert parts["ours"]() == 1
    with pytest.raises(KeyError):
        parts["theirs"]


def test_a_registered_class_has_its_name_as_attribute() -> None:
    class Mine:
        name: ClassVar[str]

    registry: Registry[type[Mine]] = Registry("part", "dfl.parts")
    assert registry.register("mine")(Mine) is Mine
    assert Mine.name == "mine"


def test_a_name_belongs_to_one_component(parts: Registry[Callable[..., int]]) -> None:
    parts.register("ours")(part)  # the same definition
    line = refused(lambda: parts.register("ours")(other))
    assert line.startswith("--part ours is both ")
    assert "test_registry:part" in line
    assert "test_registry:other" in line


@pytest.mark.parametrize("name", ["", "a:b", "a,b", "a+b", "a b", "22", "_a"])
def test_a_name_that_no_spec_can_have_is_refused(
    parts: Registry[Callable[..., int]], name: str
) -> None:
    line = refused(lambda: parts.register(name))
    assert line.startswith("--part: a component must have a name of letters")
    assert line.endswith(f"not {name!r}")


@dataclass(frozen=True)
class Positional:
    a: float = 3


def positional(peers: int, a: float = 3) -> float:
    return a


@pytest.mark.parametrize("component", [Positional, positional])
def test_an_option_must_be_keyword_only(component: Callable[..., object]) -> None:
    registry: Registry[Callable[..., object]] = Registry("part", "dfl.parts")
    registry.register("mine")(component)
    line = refused(lambda: choose("--part", "mine:a=4", registry))
    assert line.startswith("--part mine: a is no option, since it is not keyword-only")
    line = refused(lambda: choose("--part", "mine:peers=4", registry))
    assert line.startswith("--part mine: unknown option 'peers'")


def test_components_are_replaced_during_a_block(parts: Registry[Callable[..., int]]) -> None:
    with parts.replaced(ours=other, theirs=other):
        assert (parts["ours"](), list(parts)) == (2, ["ours", "theirs"])
    assert (parts["ours"](), list(parts)) == (1, ["ours"])


# --- other packages


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return a folder of packages on `sys.path`; their modules are dropped at the end."""
    folder = tmp_path / "packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(folder):
            del sys.modules[name]


def test_names_are_listed_without_imports(
    parts: Registry[Callable[..., int]], packages: Path
) -> None:
    (packages / "extras.py").write_text("def theirs(*, size: int = 3): return size")
    declare(packages, "dfl-extras", {"dfl.parts": {"theirs": "extras:theirs"}})
    assert list(parts) == ["ours", "theirs"]
    assert "theirs" in parts
    shown = page(parts, (), "dfl run", 80)
    assert "ours" in shown
    assert "package dfl-extras" in shown
    assert "extras" not in sys.modules
    assert "size=3" in page(parts, ["theirs"], "dfl run", 80)
    assert "extras" in sys.modules
    assert choose("--part", "theirs:size=4", parts)() == 4
    assert refused(lambda: parts["theirs"](size="x")).startswith("--part theirs: size must be ")


def test_a_kind_is_listed_without_the_packages_of_others(packages: Path) -> None:
    declare(packages, "dfl-extras", {"dfl.topologies": {"theirs": "no_such_module:theirs"}})
    assert listing(["algorithms", "choco"], 80).startswith("choco\n")
    assert "digits" in listing(["datasets"], 80)


def test_a_package_may_declare_and_register_a_component(packages: Path) -> None:
    (packages / "extras.py").write_text(
        "from dfl.datasets import DATASETS\n"
        "@DATASETS.register('theirs')\n"
        "def theirs(directory): ...\n"
    )
    declare(packages, "dfl-extras", {"dfl.datasets": {"theirs": "extras:theirs"}})
    with DATASETS.replaced():
        assert DATASETS["theirs"].__module__ == "extras"
        assert list(DATASETS).count("theirs") == 1


@pytest.mark.parametrize("name", ["ours", "theirs"])
def test_two_components_of_one_name_are_refused(
    parts: Registry[Callable[..., int]], packages: Path, name: str
) -> None:
    declare(packages, "dfl-extras", {"dfl.parts": {name: "extras:part"}})
    declare(packages, "dfl-more", {"dfl.parts": {"theirs": "more:part"}})
    for use in (lambda: list(parts), lambda: parts["ours"], lambda: "x" in parts):
        line = refused(use)
        assert line.startswith(f"--part {name} is both ")
        assert "extras:part of package dfl-extras" in line
        assert ("test_registry:part" if name == "ours" else "more:part of package dfl-more") in line


@pytest.mark.parametrize("text", ["import no_such_module", "1 / 0", "raise RuntimeError('a\\nb')"])
def test_a_package_that_cannot_be_imported_is_refused(
    parts: Registry[Callable[..., int]], packages: Path, text: str
) -> None:
    (packages / "extras.py").write_text(text)
    declare(packages, "dfl-extras", {"dfl.parts": {"theirs": "extras:theirs"}})
    assert "theirs" in parts
    line = refused(lambda: parts["theirs"])
    assert line.startswith("--part theirs: package dfl-extras cannot be imported (")


@pytest.mark.parametrize("text", ["", "theirs = 3"])
def test_an_entry_point_that_is_no_component_is_refused(
    parts: Registry[Callable[..., int]], packages: Path, text: str
) -> None:
    (packages / "extras.py").write_text(text)
    declare(packages, "dfl-extras", {"dfl.parts": {"theirs": "extras:theirs"}})
    assert "package dfl-extras" in refused(lambda: parts["theirs"])


def test_every_registry_has_a_group_of_entry_points() -> None:
    groups = [registry.group for registry in registries().values()]
    assert len(set(groups)) == len(groups) == 16
    assert all(group.startswith("dfl.") for group in groups)


def test_components_of_a_package_run(dfl_run: Command, packages: Path) -> None:
    install(packages)
    assert "combine_then_adapt\n  of package dfl-example" in dfl_run("--help", "algorithms").out
    assert not any(name.startswith("dfl_example") for name in sys.modules)
    ended = dfl_run(*SPECS, *FEW, "--out", "run")
    assert (ended.code, ended.err) == (0, "")
    line = dfl_run.refused("--algorithm", "combine_then_adapt:silent=-1", *FEW)
    assert line.startswith("--algorithm combine_then_adapt: silent must be at least 0, not -1")
    assert "combine_then_adapt" in dfl_run.refused("--algorithm", "combine_than_adapt", *FEW)


def test_a_method_of_a_package_has_what_other_methods_have(
    dfl_run: Command, packages: Path
) -> None:
    install(packages)
    given = [*SPECS[:2], *FEW]
    shown = " ".join(dfl_run(*given, "--dry-run").out.split())
    assert "0 rows of memory per peer, 1 message to each neighbour" in shown
    assert dfl_run(*given, "--faults", "link_loss:p=0.2", "--attack", "alie").code == 0
    assert "--bits 4" in dfl_run.refused(*given, "--bits", "4")


def test_a_package_with_the_name_of_a_method_of_dfl_is_refused(
    dfl_run: Command, packages: Path
) -> None:
    declare(packages, "dfl-extras", {"dfl.algorithms": {"fedavg": "extras:FedAvg"}})
    line = dfl_run.refused(*FEW)
    assert line.startswith("--algorithm fedavg is both dfl.algorithms.server.fedavg:FedAvg and ")
    assert "package dfl-extras" in line


def test_methods_of_a_package_are_registered_algorithms(packages: Path) -> None:
    install(packages)
    found: Any = ALGORITHMS["combine_then_adapt"]
    assert issubclass(found, Algorithm)
    assert found.name == "combine_then_adapt"


@pytest.mark.slow
@pytest.mark.mpi
def test_an_installed_package_runs_from_the_command_line(tmp_path: Path) -> None:
    """A package that pip installed runs on 1 and 3 ranks and in a sweep, and is in the help."""
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=False, symlinks=True)
    python = str(environment / "bin" / "python")
    (site,) = environment.glob("lib/python*/site-packages")
    reused = [path for path in sys.path if "-packages" in path]
    (site / "reused.pth").write_text("\n".join([str(ROOT), *reused]))
    source = tmp_path / "source"
    shutil.copytree(PACKAGE, source)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    flags = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    subprocess.run([*pip, *flags, str(source)], check=True)

    variables = {name: value for name, value in ENV.items() if name != "PYTHONPATH"}
    variables["LD_LIBRARY_PATH"] = f"{sys.prefix}/lib"  # mpi4py searches MPI beside its Python

    def dfl(*arguments: str, ranks: int = 1) -> str:
        launch = [python] if ranks == 1 else [*mpirun_command(ranks)[:-1], python]
        ended = subprocess.run(
            [*launch, "-m", *arguments],
            cwd=tmp_path,
            env=variables,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    shown = dfl("dfl.run", "--help", "algorithms")
    assert "combine_then_adapt\n  of package dfl-example" in shown
    states = []
    for ranks in (1, 3):
        dfl("dfl.run", *SPECS, *FEW, "--out", f"run{ranks}", ranks=ranks)
        states.append((tmp_path / f"run{ranks}" / "state.safetensors").read_bytes())
    assert states[0] == states[1]
    grid = 'topology = "wheel"\ndataset = "xor"\npeers = 6\nrounds = 2\nmodel = "softmax"\n'
    varies = '[sweep]\nalgorithm = ["combine_then_adapt"]\n'
    (tmp_path / "grid.toml").write_text(grid + varies)
    dfl("dfl.sweep", "grid.toml")
    assert len(list((tmp_path / "sweeps" / "grid").rglob("run.json"))) == 1
