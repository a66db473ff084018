"""The command `dfl list [KIND [NAME...]]`: the components that there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from cyclopts import Parameter

from dfl.config import COMPONENTS
from dfl.core import command_line
from dfl.core.help.catalogue import find, overview, page
from dfl.core.help.help_page import show, terminal_width
from dfl.core.registry import Registry

_ABOUT = (
    "List the components of a kind: what each is, its options, its source and an example. With "
    "names, show all that is known of these. Without a kind, list the kinds."
)
DATA = "sites.csv --sites site --outcome y --covariates x"
"""The data of examples of `dfl.inference`."""


def main() -> int:
    """Run the command line of this process and return the exit code: 0, 2, or 130 for Ctrl-C."""
    return command_line.run_command(_run_command_line)


def _run_command_line(tokens: Sequence[str]) -> None:
    app = command_line.app("list", _ABOUT)

    @app.default
    def command(*kind: Annotated[str, Parameter(required=False)]) -> None:
        """List.

        Parameters
        ----------
        kind: str
            A kind, as topologies, and names of its components.
        """
        show(listing(kind, terminal_width()))

    command_line.call(app, tokens)


def listing(tokens: Sequence[str], width: int) -> str:
    """Return the kinds, the components of a kind, or some of them with all that is known of them.

    Args:
        tokens: nothing; a kind; or a kind and names.
        width: columns of the text.

    Raises:
        InputError: there is no such kind or component.
    """
    every = kinds()
    if not tokens:
        return overview(every, width)
    registry = find(tokens[0], every)
    run, inference = command_line.program("run"), command_line.program("inference")
    # `in` would compare registries, which imports the components of other packages.
    of_runs = any(registry is each for each in every[: len(COMPONENTS)])
    return page(
        registry, tokens[1:], f"{run} --peers 16" if of_runs else f"{inference} {DATA}", width
    )


def kinds() -> list[Registry[Any]]:
    """Return the registries of all kinds: those of runs, and then those of `dfl.inference`."""
    from dfl.inference.estimators import ESTIMATORS
    from dfl.inference.models import MODELS
    from dfl.simulation.components import registries

    return [*(registries()[name] for name in COMPONENTS), MODELS, ESTIMATORS]
