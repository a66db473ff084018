"""The command `dfl completion`: a script by which bash and zsh complete `dfl`.

    source <(dfl completion)

It completes commands, the flags of `dfl run` with their components and choices, and the kinds of
`dfl list`; else names of files. It is made once, and starts no Python when it completes.
"""

from __future__ import annotations

from collections.abc import Sequence

from dfl.commands import COMMANDS
from dfl.config import COMPONENTS, Run
from dfl.core import command_line
from dfl.core.help.catalogue import kind_of
from dfl.core.options import options
from dfl.core.registry import flag

_ABOUT = "Print a script that completes dfl in bash and zsh: source <(dfl completion)"

OWN = ("--config", "--dry-run", "--quiet", "--verbose", "--help")
"""The flags of `dfl run` that are not fields of `Run`."""

_SCRIPT = """\
# Completes dfl in bash, and in zsh by its bashcompinit: source <(dfl completion)
if [ -n "${ZSH_VERSION-}" ]; then
    autoload -U +X compinit && compinit
    autoload -U +X bashcompinit && bashcompinit
fi
_dfl() {
    local current="${COMP_WORDS[COMP_CWORD]}" previous="${COMP_WORDS[COMP_CWORD - 1]}" words=""
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="@COMMANDS@"
    else
        case "${COMP_WORDS[1]} $previous" in
@VALUES@
        "list "*) words="@KINDS@" ;;
        "run "*) words="@FLAGS@" ;;
        esac
    fi
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
    from dfl.simulation.components import registries

    kinds = registries()
    values: dict[str, Sequence[str]] = {
        flag(name): list(kinds[name]) if name in COMPONENTS else option.choices
        for name, option in options(Run).items()
        if name in COMPONENTS or option.choices
    }
    files = [flag(name) for name, option in options(Run).items() if option.spelled == "Path"]
    lines = [f'        "run {name}") words="{" ".join(v)}" ;;' for name, v in values.items()]
    lines += [f'        "run {name}") ;;' for name in (*files, "--config")]
    flags = [*map(flag, options(Run)), *OWN]
    return (
        _SCRIPT.replace("@COMMANDS@", " ".join(COMMANDS))
        .replace("@VALUES@", "\n".join(lines))
        .replace("@KINDS@", " ".join(map(kind_of, kinds.values())))
        .replace("@FLAGS@", " ".join(flags))
    )
