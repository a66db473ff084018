"""Write the pages that are read off the code and the results: python docs/generate.py.

`conf.py` calls `write` before each build. The pages go to `docs/_generated`, which git ignores.
"""

from __future__ import annotations

import ast
import contextlib
import csv
import inspect
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS), str(ROOT)]

import docstrings  # noqa: E402
import layers  # noqa: E402
from columns import DESCRIBED, PEERS  # noqa: E402

import dfl.__main__  # noqa: E402
import topologies.__main__  # noqa: E402
from dfl import commands  # noqa: E402
from dfl.config import COMPONENTS, SECTIONS, Run  # noqa: E402
from dfl.core.help.docstrings import cited, described  # noqa: E402
from dfl.core.options import MOST, Option, options  # noqa: E402
from dfl.core.registry import flag, usage  # noqa: E402
from dfl.simulation.components import registries  # noqa: E402
from experiments.findings import finding, question  # noqa: E402

OUT = DOCS / "_generated"
RESULTS = ROOT / "experiments/results"
COMMANDS: dict[str, Callable[[], object]] = {
    **{f"dfl {name}": dfl.__main__.main for name in commands.COMMANDS},
    "python -m topologies": lambda: topologies.__main__.main(["--help"]),
}
"""The commands whose --help is shown, as functions of the arguments of this process."""
LONGEST = 300
"""Rows of the longest table that a page of the lab book shows."""
THEMES = {
    "messages_and_graphs": "Messages and graphs",
    "methods": "Methods",
    "servers_and_robustness": "Servers and robustness",
    "personal_layers": "Personal layers",
    "workloads": "Workloads",
    "inference": "Inference",
    "speed": "Speed",
}
"""Folder of `experiments` -> heading in the lab book."""


def pages() -> dict[str, str]:
    """Return the text of every page, by its path below `OUT`."""
    return {
        "command-line.md": command_line(),
        "components.md": components(),
        "columns.md": columns(),
        **lab_book(),
    }


def write() -> None:
    """Write the pages that have changed, and remove those that are no longer there."""
    found = pages()
    for path in OUT.rglob("*.md"):
        if str(path.relative_to(OUT)) not in found:
            path.unlink()
    for name, text in found.items():
        path = OUT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    layers.draw(OUT / "layers.png")


def command_line() -> str:
    """Return the page of the commands: the settings of a run in sections, and every --help."""
    described_as = docstrings.attributes(ROOT / "dfl/config.py", "Run")
    lines = [
        "# Command line\n",
        "The flags of `dfl run`, the keys of a TOML file (`--config`) and the fields of `dfl.Run`",
        "are the same names. A component is written `name:key=value,key=value`. `dfl run` is",
        "`python -m dfl.run`, and every `dfl COMMAND` is `python -m dfl COMMAND`.",
    ]
    for name, option in options(Run).items():
        if name in SECTIONS:
            lines += [f"\n## {SECTIONS[name]}\n", "| flag | value | default | meaning |"]
            lines.append("|---|---|---|---|")
        value = docstrings.cell(accepted(option))
        if name in COMPONENTS:
            value = f"[{flag(name)[2:]}](#{anchor(name)})"
        meaning = docstrings.cell(described_as[name].partition("\n\n")[0])
        lines.append(f"| `{flag(name)}` | {value} | {written(option.default)} | {meaning} |")
    lines += [
        "\n## Objects of Python\n",
        "A field of `dfl.Run` that takes a component by name also takes an object.\n",
    ]
    for name in COMPONENTS:
        if about := described_as[name].partition("\n\n")[2].removeprefix("An object: "):
            lines.append(f"`{name}`: {docstrings.markdown(about)}\n")
    lines.append("## Help texts\n")
    for command in COMMANDS:
        lines += [f"### {command}\n", "```text", help_text(command), "```\n"]
    return "\n".join(lines)


def help_text(command: str) -> str:
    """Return what a command prints for --help, in 100 columns."""
    shown = io.StringIO()
    before = dict(os.environ), sys.argv
    os.environ["COLUMNS"] = "100"
    sys.argv = [*command.split(), "--help"]
    try:
        with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
            COMMANDS[command]()
    finally:
        os.environ.clear()
        os.environ.update(before[0])
        sys.argv = before[1]
    return shown.getvalue().strip()


def components() -> str:
    """Return the page of all components, with their options and sources."""
    from dfl.inference.estimators import ESTIMATORS
    from dfl.inference.models import MODELS

    lines = [
        "# Components\n",
        "Every component of this package, as its registry has it: options with their defaults,",
        "equations and sources. Other packages add theirs by entry points.\n",
    ]
    kinds: dict[str, Mapping[str, Callable[..., Any]]] = {**registries()}
    kinds |= {"inference model": MODELS, "estimator": ESTIMATORS}
    for kind, registry in kinds.items():
        title = flag(kind)[2:] if kind in registries() else kind
        lines += [f"({anchor(kind)})=", f"## {title.replace('-', ' ').capitalize()}\n"]
        lines.append(f"`{'--' + title if kind in registries() else title}`\n")
        for name in sorted(registry):
            lines.append(component(name, registry))
    return "\n".join(lines)


def component(name: str, registry: Mapping[str, Callable[..., Any]]) -> str:
    """Return the section of one component."""
    made = registry[name]
    described_as = described(made)
    lines = [f"### {name}\n", f"`{usage(name, made)}`\n", docstrings.markdown(described_as.summary)]
    lines += ["", docstrings.markdown(described_as.body), ""]
    known = options(made)
    if known:
        lines.append(f"| option | value | default |{' meaning |' * bool(described_as.options)}")
        lines.append(f"|---|---|---|{'---|' * bool(described_as.options)}")
    for key, option in known.items():
        meaning = docstrings.cell(described_as.options.get(key, ""))
        value = docstrings.cell(accepted(option))
        more = f" {meaning} |" * bool(described_as.options)
        lines.append(f"| `{key}` | {value} | {written(option.default)} |{more}")
    module = inspect.getdoc(inspect.getmodule(inspect.unwrap(made))) or ""
    source = described_as.source or "; ".join(cited(module) if alone(made, registry) else [])
    stated = f"Source: {docstrings.markdown(source)}. " if source else ""
    lines.append(f"\n{stated}Code: `{file_of(made)}`.\n")
    return "\n".join(lines)


def alone(made: Callable[..., Any], registry: Mapping[str, Callable[..., Any]]) -> bool:
    """Return whether a component is the only one of its module, whose source is then its own."""
    return sum(file_of(other) == file_of(made) for other in registry.values()) == 1


def file_of(made: Callable[..., Any]) -> str:
    """Return the file of a component."""
    path = Path(inspect.getsourcefile(inspect.unwrap(made)) or "")
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def accepted(option: Option) -> str:
    """Return the values of an option; a bound that is only the largest number is left out."""
    low, high = option.bounds.get("ge"), option.bounds.get("le")
    return f"{low} or more" if low is not None and high in (MOST, 2**63 - 1) else option.accepted


def written(default: object) -> str:
    """Return a default value as it is written on the command line."""
    if default is inspect.Parameter.empty:
        return "required"
    if isinstance(default, tuple):
        return "`" + "+".join(map(str, default)) + "`" if default else ""
    if default is None:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def anchor(kind: str) -> str:
    """Return the anchor of a kind of component."""
    return f"kind-{kind.replace('_', '-').replace(' ', '-')}"


def columns() -> str:
    """Return the page of the columns of metrics.csv and peers.csv."""
    from dfl.store.callbacks import Row

    always = {
        name: inspect.getdoc(value) or ""
        for name, value in vars(Row).items()
        if isinstance(value, property)
    }
    lines = [
        "# Columns of the CSV files\n",
        "## metrics.csv\n",
        "A row per evaluation. Accuracies are shares from 0 to 1, bytes and messages are counted",
        "from the first round on. Figures are over the honest peers.\n",
        "| column | meaning |",
        "|---|---|",
        *(f"| `{name}` | {docstrings.cell(text)} |" for name, text in always.items()),
        "\nThese columns are there where the run has them:\n",
        "| column | where | meaning |",
        "|---|---|---|",
        *(f"| `{name}` | {where} | {text} |" for name, (where, text) in DESCRIBED.items()),
        "\n## peers.csv\n",
        "A row per peer, at the end. What an own method observes follows these columns.\n",
        "| column | meaning |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in PEERS.items()),
    ]
    return "\n".join(lines) + "\n"


def lab_book() -> dict[str, str]:
    """Return the page of every experiment with results, and their table of contents."""
    found = {path.stem: path for path in sorted((ROOT / "experiments").glob("*/*.py"))}
    found |= {f"{path.parent.name}_{path.stem}": path for path in found.values()}
    made: dict[str, str] = {}
    contents = [
        "# Lab book\n",
        "Every experiment of `experiments/`: what it compares, its command, its finding, its table",
        "and its figure, as they are in the repository. The first sentence of the finding stands",
        "here. A figure at the end of a run is the mean over the last tenth of its rounds, then",
        "over seeds, unless a page states otherwise. Columns `published_full_setting` are figures",
        "of a paper in its own setting, which is larger than ours.\n",
    ]
    for theme, title in THEMES.items():
        names = [
            name
            for name in sorted(each.name for each in RESULTS.iterdir() if each.is_dir())
            if found[name].parent.name == theme
        ]
        contents += [f"## {title}\n", "| question | finding |", "|---|---|"]
        for name in names:
            asked = docstrings.cell(question(found[name]))
            contents.append(f"| [{asked}]({name}.md) | {docstrings.cell(finding(found[name]))} |")
        contents += ["\n```{toctree}", ":hidden:", ""]
        contents += [*(f"{name} <{name}>" for name in names), "```\n"]
        made |= {f"lab-book/{name}.md": experiment(name, found[name]) for name in names}
    return {"lab-book/index.md": "\n".join(contents), **made}


def experiment(name: str, path: Path) -> str:
    """Return the page of an experiment."""
    rest = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[2]
    title = question(path)
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    folder = RESULTS / name
    lines = [f"# {short(title)}\n", f"`{module}`\n"]
    if short(title) != title:
        lines.append(f"{docstrings.markdown(title)}.\n")
    lines += [docstrings.markdown(rest), ""]
    if (folder / "figure.png").exists():
        lines += ["## Figure\n", f"![{title}](../../../experiments/results/{name}/figure.png)\n"]
    for table in sorted(folder.glob("*.csv"), key=lambda path: (path.name != "table.csv", path)):
        lines += [f"## {table.name}\n", *rows(table), ""]
    return "\n".join(lines)


def short(title: str) -> str:
    """Return the first clause of a sentence."""
    return next((part for part in title.split(": ") if part), title)


def rows(path: Path) -> Iterator[str]:
    """Yield the lines of a table, or of a long one where it is; numbers have four digits."""
    with path.open(newline="") as file:
        head, *body = csv.reader(file)
    if len(body) > LONGEST:
        yield f"{len(body):,} rows, in `{path.relative_to(ROOT)}`."
        return
    yield f"| {' | '.join(f'`{each}`' for each in head)} |"
    yield "|" + "---|" * len(head)
    for row in body:
        yield f"| {' | '.join(docstrings.cell(digits(each)) for each in row)} |"


def digits(text: str) -> str:
    """Return a number with at most four digits; text as it is."""
    try:
        number = float(text)
    except ValueError:
        return text
    return text if number == int(number) and "e" not in text else f"{number:.4g}"


if __name__ == "__main__":
    write()
