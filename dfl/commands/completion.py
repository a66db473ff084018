"""The command `dfl completion`: a script by which bash and zsh complete `dfl`.

    source <(dfl completion)

It completes commands, their flags with components and choices, and the kinds and names of
`dfl list`; else names of files. It is made once, and starts no Python when it completes.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from importlib import import_module

from dfl.commands import COMMANDS
from dfl.commands.list import kinds
from dfl.config import COMPONENTS, Run
from dfl.core import command_line
from dfl.core.help.catalogue import kind_of
from dfl.core.options import options
from dfl.core.registry import flag

_ABOUT = "Print a script that completes dfl in bash and zsh: source <(dfl completion)"

_FLAG = re.compile(r"^  (?:-h, )?(--[a-z-]+)(?:, (--no-[a-z-]+))?(?: (PATH))?", re.MULTILINE)
"""A flag in a help text, its opposite, and whether its value is a file."""

_SCRIPT = """\
# Completes dfl in bash, and in zsh by its bashcompinit: source <(dfl completion)
if [ -n "${ZSH_VERSION-}" ]; then
    autoload -U +X compinit && compinit
    autoload -U +X bashcompinit && bashcompinit
fi
_dfl() {
    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD - 1]}" words=""
    case "$COMP_CWORD ${COMP_WORDS[1]} $previous" in
    1\\ *) words="@COMMANDS@" ;;
    2\\ list\\ *) words="@KINDS@" ;;
@CASES@
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}
complete -o default -F _dfl dfl
"""


def main() -> int:
    """Run the command line of this process and return the exit code: 0, 2, or 130 for Ctrl-C."""
    return command_line.run_command(_run_command_line)


def _run_command_line(tokens: Sequence[str]) -> None:
    app = command_line.app("completion", _ABOUT)

    @app.default
    def command() -> None:
        """Print it."""
        print(script(), end="")

    command_line.call(app, tokens)


def script() -> str:
    """Return the script."""
    cases = [line for command in COMMANDS for line in _cases(command)]
    return (
        _SCRIPT.replace("@COMMANDS@", " ".join(COMMANDS))
        .replace("@KINDS@", " ".join(map(kind_of, kinds())))
        .replace("@CASES@", "\n".join(cases))
    )


def _cases(command: str) -> Iterator[str]:
    """Yield the cases of a command: the values of its flags, the flags, or names of a kind."""
    text = _help(command)
    found = _FLAG.findall(text)
    values: dict[str, Sequence[str]] = {name: () for name, _, file in found if file}
    for name, known in {**values, **_values(command)}.items():
        yield f'    *\\ {command}\\ {name}) words="{" ".join(known)}" ;;'
    flags = " ".join(dict.fromkeys(filter(None, (each for pair in found for each in pair[:2]))))
    where = '[[ "$current" != -* ]] || ' if "\nArguments\n" in text else ""
    names = "".join(
        f' {kind_of(each)}) words="{" ".join(each)}" ;;' for each in kinds() if command == "list"
    )
    named = f' case "${{COMP_WORDS[2]}}" in{names} esac;' if names else ""
    yield f'    *\\ {command}\\ *){named} {where}words="{flags}" ;;'


def _values(command: str) -> Mapping[str, Sequence[str]]:
    """Return the values of the flags of a command, where there is a choice."""
    from dfl.inference.estimators import ESTIMATORS
    from dfl.inference.models import MODELS
    from dfl.simulation.components import registries

    if command == "inference":
        return {each.flag: list(each) for each in (MODELS, ESTIMATORS)}
    if command != "run":
        return {}
    return {
        flag(name): list(registries()[name]) if name in COMPONENTS else option.choices
        for name, option in options(Run).items()
        if name in COMPONENTS or option.choices
    }


def _help(command: str) -> str:
    """Return what a command prints for --help."""
    before, printed = sys.argv, io.StringIO()
    sys.argv = [command, "--help"]
    try:
        with redirect_stdout(printed):
            import_module(COMMANDS[command][0]).main()
    finally:
        sys.argv = before
    return printed.getvalue()
