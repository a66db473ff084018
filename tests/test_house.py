"""Rules of the source that no linter holds: no pickle and no eval."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = sorted(
    f for folder in ("dfl", "topologies", "experiments") for f in (ROOT / folder).rglob("*.py")
)


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def imports(file: Path) -> set[str]:
    """Return the dotted names that a file imports, also in functions and for type checking."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def roots(file: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(file)}


@pytest.mark.parametrize("file", SOURCE, ids=name_of)
def test_nothing_is_pickled_or_evaluated(file: Path) -> None:
    assert not roots(file) & {"pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
    calls = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
    named = {"exec"} if file.name == "model_file.py" else set()  # the file that --model names
    assert not ({ast.unparse(c.func) for c in calls} - named) & {
        "eval",
        "exec",
        "torch.save",
        "torch.load",
        "torch.manual_seed",
    }
    keywords = {(k.arg, ast.unparse(k.value)) for c in calls for k in c.keywords}
    assert not {pair for pair in keywords if pair[0] == "allow_pickle"} - {
        ("allow_pickle", "False")
    }


def test_mpi_never_pickles() -> None:
    """The lower-case methods of mpi4py pickle; only its upper-case ones may be called."""
    tree = ast.parse((ROOT / "dfl/comm/mpi.py").read_text())
    calls = [
        n.func
        for n in ast.walk(tree)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)
    ]
    used = {c.attr for c in calls if ast.unparse(c.value) in ("self.comm", "world.comm", "link")}
    assert used
    assert all(name[0].isupper() for name in used), used
