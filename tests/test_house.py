"""Does the code keep the bar and the walls of the design?"""

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = sorted(f for folder in ("dfl", "topologies", "experiments") for f in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
Function = ast.FunctionDef | ast.AsyncFunctionDef
DEEPER = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.AsyncFor, ast.AsyncWith, ast.Match)


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def functions(file: Path) -> Iterator[Function]:
    return (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, Function))


def depth(node: ast.AST, level: int = 0) -> int:
    """The deepest nesting of blocks; a function inside starts anew, and elif is no deeper than if."""
    apart = (*Function.__args__, ast.Lambda, ast.ClassDef)
    inside = [child for child in ast.iter_child_nodes(node) if not isinstance(child, apart)]
    return max((depth(c, level + (isinstance(c, DEEPER) and not is_elif(node, c))) for c in inside), default=level)


def is_elif(node: ast.AST, child: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]


def imports(file: Path) -> set[str]:
    """Dotted names of everything that a file imports, at any depth of the file, type checking included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def module_name(file: Path) -> str:
    parts = list(file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def roots(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(file)}


@pytest.mark.parametrize("file", [*SOURCE, *TESTS], ids=name_of)
def test_files_and_functions_stay_small(file: Path) -> None:
    assert len(file.read_text().splitlines()) <= 300
    for function in functions(file):
        where = f"{name_of(file)}:{function.lineno} {function.name}"
        assert (function.end_lineno or 0) - function.lineno + 1 <= 50, where
        arguments = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
        assert len([a for a in arguments if a not in ("self", "cls")]) <= 5, where
        assert depth(function) <= 2, where


def test_functions_are_short_as_a_rule() -> None:
    lengths = sorted((f.end_lineno or 0) - f.lineno + 1 for file in SOURCE for f in functions(file))
    assert lengths[int(0.9 * len(lengths))] <= 20


def test_tests_weigh_as_much_as_the_source() -> None:
    source, tests = (sum(len(f.read_text().splitlines()) for f in files) for files in (SOURCE, TESTS))
    assert tests >= 0.8 * source


@pytest.mark.parametrize("file", SOURCE, ids=name_of)
def test_every_public_name_is_documented(file: Path) -> None:
    tree = ast.parse(file.read_text())
    public = [n for n in tree.body if isinstance(n, Function | ast.ClassDef) and not n.name.startswith("_")]
    assert [n for n in (tree, *public) if not ast.get_docstring(n)] == []


@pytest.mark.parametrize("file", SOURCE, ids=name_of)
def test_walls(file: Path) -> None:
    name, seen = module_name(file), roots(file)
    inside = name.partition(".")[0]
    assert inside != "topologies" or not seen & {"dfl", "experiments", "torch", "mpi4py"}
    assert inside != "dfl" or name == "dfl.simulation" or "topologies" not in seen
    assert inside == "experiments" or "experiments" not in seen
    assert name == "dfl.mpi" or "mpi4py" not in seen
    assert name != "dfl.keys" or {n for n in imports(file) if n.startswith("dfl")} <= {"dfl.lazy", "dfl.lazy.torch"}


@pytest.mark.parametrize("file", sorted((ROOT / "dfl/algorithms").glob("[a-z]*.py")), ids=name_of)
def test_methods_are_handed_the_network(file: Path) -> None:
    allowed = {f"dfl.{name}" for name in ("local", "aggregators", "split", "roots", "keys", "errors", "lazy")}
    seen = {n for n in run_time_imports(file) if n.partition(".")[0] == "dfl"}
    assert {n for n in seen if not n.startswith("dfl.algorithms")} <= allowed


SWEEP = ("sweep", "grid", "jobs", "cells", "board", "tables", "sweep_plots", "lines", "compare", "slurm")


@pytest.mark.parametrize("name", SWEEP)
def test_a_sweep_knows_of_a_run_its_settings_and_its_folder(name: str) -> None:
    leaves = {"cli", "config", "errors", "files", "specs", "values", "plots"}
    allowed = {f"dfl.{each}" for each in leaves | set(SWEEP)} | {"dfl.simulation"}
    seen = {n for n in run_time_imports(ROOT / "dfl" / f"{name}.py") if n.partition(".")[0] == "dfl"}
    assert seen <= allowed
    assert "dfl.simulation" not in seen or name == "grid"  # which checks a cell as a command line is checked


def run_time_imports(file: Path) -> set[str]:
    """The imports of a file without those under `if TYPE_CHECKING`."""
    tree = ast.parse(file.read_text())
    tree.body = [n for n in tree.body if not (isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING")]
    froms = [n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module]
    found = {f"{n.module}.{alias.name}" if n.module == "dfl" else str(n.module) for n in froms for alias in n.names}
    return found | {alias.name for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}


def test_no_circle() -> None:
    """Imports at the top of modules have an order; what a function imports when called cannot close a circle."""
    known = {module_name(f): f for f in SOURCE}
    graph = {name: {i for i in top_imports(f) if i in known and i != name} for name, f in known.items()}
    done: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        for other in graph[name] - set(done):
            # A member of a package imports its package for the registry, which imports its members last.
            if not (other.startswith(f"{name}.") or name.startswith(f"{other}.")):
                visit(other, (*path, name))
        done.append(name)

    for name in graph:
        visit(name, ())


def top_imports(file: Path) -> set[str]:
    tree = ast.parse(file.read_text())
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("file", SOURCE, ids=name_of)
def test_nothing_is_pickled_or_evaluated(file: Path) -> None:
    assert not roots(file) & {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    calls = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
    assert not {ast.unparse(c.func) for c in calls} & {"eval", "exec", "torch.save", "torch.load", "torch.manual_seed"}
    keywords = {(k.arg, ast.unparse(k.value)) for c in calls for k in c.keywords}
    assert not {pair for pair in keywords if pair[0] == "allow_pickle"} - {("allow_pickle", "False")}


def test_mpi_never_pickles() -> None:
    """mpi4py's lower-case methods pickle; only its upper-case ones may be called."""
    tree = ast.parse((ROOT / "dfl/mpi.py").read_text())
    calls = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
    used = {c.attr for c in calls if ast.unparse(c.value) in ("self.comm", "world.comm", "link")}
    assert used
    assert all(name[0].isupper() for name in used), used


def test_the_checks_see_what_they_look_for() -> None:
    nested = ast.parse("def f():\n for i in x:\n  if i:\n   while i:\n    pass").body[0]
    assert depth(nested) == 3
    ladder = ast.parse("def f():\n if a:\n  pass\n elif b:\n  pass\n elif c:\n  pass").body[0]
    assert depth(ladder) == 1
    assert all(a <= b for a, b in pairwise(SOURCE))
