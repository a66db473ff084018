"""Functions that the commands share: command lines, one-line errors, interrupts, output."""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO, get_args, get_origin

from dfl.core.errors import InputError, printable
from dfl.core.parse import KINDS, nearest, read

if TYPE_CHECKING:
    from cyclopts import App, CycloptsError, Token

    from dfl.core.help.help_page import HelpPage

SCRIPT = "dfl"
"""The console script."""
HELP = ("--help", "-h")
"""The flags that ask for help."""


def program(command: str) -> str:
    """Return how this process calls a command: dfl run, or python -m dfl.run.

    Args:
        command: its name, run.
    """
    started = sys.argv[0]
    return f"{SCRIPT} {command}" if started.split(" ")[0] == SCRIPT else f"python -m dfl.{command}"


def app(command: str, about: str) -> App:
    """Return a command line that reads values as the other commands do.

    Args:
        command: its name, run.
        about: the text of --help.
    """
    from cyclopts import App, Parameter

    app = App(
        name=program(command), result_action="return_value", version_flags=[], help_flags=[],
        suppress_keyboard_interrupt=False,
    )  # fmt: skip
    app.help = about
    app.default_parameter = Parameter(converter=_value, negative_iterable=())
    return app


def call(app: App, tokens: Sequence[str], page: HelpPage | None = None) -> Any:
    """Run the command of a command line on its arguments and return its result; None after --help.

    Args:
        app: the command line.
        tokens: the arguments.
        page: what --help shows besides the flags.

    Raises:
        InputError: an unknown flag, or a bad value.
    """
    from cyclopts import CycloptsError

    if any(token in HELP for token in tokens):
        _help(app, tokens, page)
        return None
    try:
        return app(tokens, exit_on_error=False, print_error=False)
    except CycloptsError as error:
        raise InputError(_complaint(error)) from None


def _help(app: App, tokens: Sequence[str], page: HelpPage | None) -> None:
    """Print the page of a command, or after `--help KIND` the components of the kind."""
    from dfl.core.help.help_page import HelpPage, show, terminal_width

    escape_output()
    page = page or HelpPage()
    named = tokens[0] in HELP and len(tokens) > 1 and not tokens[1].startswith("-")
    width = terminal_width()
    show(page.kind(tokens[1:], width) if named and page.components else page.text(app, width))


def look_at(folder: Path, names: Sequence[str]) -> str:
    """Return the last line of a command: the file to open, or the folder where it has none of them.

    Args:
        folder: that the command wrote to.
        names: the files, from the most telling one.
    """
    found = next((folder / name for name in names if (folder / name).exists()), folder)
    return f"{'look at':<11}{found}"


def refuse_several(**flags: bool) -> None:
    """Refuse more than one of some flags.

    Raises:
        InputError: several are given.
    """
    given = [f"--{name.replace('_', '-')}" for name, on in flags.items() if on]
    if len(given) > 1:
        raise InputError(f"{' and '.join(given)} exclude each other: give one of them")


def escape_output() -> None:
    """Make stdout escape what its encoding lacks, as stderr does: file names may be any bytes."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def leave_on_interrupt() -> None:
    """Make Ctrl-C end this process with one line during imports, where nothing catches it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def catch_interrupt() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again, after `leave_on_interrupt`."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def spare_imports() -> None:
    """Search for no garbage while this process imports, nor for what is garbage at its end.

    Modules are not garbage. Searching torch's for it takes a third of the time that `import torch`
    takes, most of it when the process ends. Called where a process begins that is ours alone.
    """
    gc.disable()
    atexit.register(gc.freeze)


def search_garbage() -> None:
    """Search for garbage again, after `spare_imports`, but not among what is there.

    Cycles that are garbage already, as of data that were read before, stay for good.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def _leave(number: int, frame: FrameType | None) -> None:
    os.write(sys.stderr.fileno(), b"dfl: interrupted\n")
    os._exit(130)


def run_command(work: Callable[[Sequence[str]], int | None]) -> int:
    """Run a command with the arguments of this process and return the exit code.

    A warning is printed as one line, once. A closed standard output does not end the command.
    """
    catch_interrupt()
    search_garbage()
    shown = set[str]()

    def warn(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = printable(" ".join(str(message).split()))
        if text not in shown:
            print("dfl: warning:", text, file=sys.stderr, flush=True)
        shown.add(text)

    try:
        with lossy_output(), warnings.catch_warnings():
            warnings.showwarning = warn
            return work(sys.argv[1:]) or 0
    except InputError as error:
        print_error(error)
        return error.code
    except KeyboardInterrupt:
        print("dfl: interrupted", file=sys.stderr, flush=True)
        return 130


def print_error(error: Exception | str) -> None:
    """Print an error as one line."""
    print("dfl:", printable(" ".join(str(error).split())), file=sys.stderr, flush=True)


@contextmanager
def lossy_output() -> Iterator[None]:
    """Drop what cannot be written to stdout or stderr, and escape what the encoding of stdout
    lacks.
    """
    escape_output()
    streams = (sys.stdout, sys.stderr)
    sys.stdout, sys.stderr = (_Lossy(each) for each in streams)
    try:
        yield
    finally:
        for each in (sys.stdout, sys.stderr):
            each.flush()  # at exit it would not be dropped
        sys.stdout, sys.stderr = streams


@contextmanager
def steady() -> Iterator[None]:
    """Keep a command running when its output cannot be written; end it at the second Ctrl-C.

    The first Ctrl-C raises KeyboardInterrupt.
    """
    _open_all()
    handler = signal.getsignal(signal.SIGINT)
    hook = sys.unraisablehook

    def unraisable(error: sys.UnraisableHookArgs) -> None:
        if error.exc_type is KeyboardInterrupt:
            # Python ignores it in some callbacks, as those of imports: raise it again after them.
            signal.signal(signal.SIGINT, _interrupt)
            from _thread import interrupt_main
            from threading import Timer

            Timer(0.05, interrupt_main).start()
        else:
            hook(error)

    # Any other handler is the caller's own, or ignores the signal, as in the background.
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
        sys.unraisablehook = unraisable
    try:
        with lossy_output():
            yield
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGINT, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def _open_all() -> None:
    """Open standard input, output and error where they are closed.

    Otherwise a file of the run gets their descriptor, and MPI prints into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor


class _Lossy:
    """A text stream that drops what cannot be written: its reader is gone, or its disk is full."""

    def __init__(self, stream: TextIO | None) -> None:
        self.stream = stream or io.StringIO()

    def __getattr__(self, name: str) -> object:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self._dropping():
            self.stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self.stream.flush()

    @contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            # Buffered text would fail again at exit.
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())


def _value(kind: object, tokens: Sequence[Token]) -> object:
    """Read the value of a flag like an option of a component; `Run` checks choices.

    A message on an argument without a flag lacks its name, which `_complaint` has.
    """
    several = get_origin(kind) is tuple
    kind, *_ = get_args(kind) or (kind,)  # int of int | None
    values = [
        read(token.keyword or "", token.value, getattr(kind, "__name__", "str")) for token in tokens
    ]
    return tuple(values) if several else values[0]


def _complaint(error: CycloptsError) -> str:
    """Return the message of an error of cyclopts in the form of all other errors."""
    from cyclopts import (
        CoercionError,
        MissingArgumentError,
        RepeatArgumentError,
        UnknownOptionError,
        UnusedCliTokensError,
    )

    match error:
        case CoercionError(token=token, target_type=kind) if token and kind is bool:
            return f"{token.keyword} must be {KINDS['bool'].meant}, not {token.value!r}"
        case UnknownOptionError(token=token, argument_collection=arguments):
            name = (token.keyword or token.value).partition("=")[0]
            known = [each.name for each in arguments if each.name.startswith("--")]
            return f"unknown flag {name!r}{nearest(name, ['--help', *known])}"
        case MissingArgumentError(argument=argument) if argument and argument.name.startswith("--"):
            return f"{argument.name} needs a value: write {argument.name} VALUE, --help lists them"
        case MissingArgumentError(argument=argument) if argument:
            return f"{argument.name} is missing, --help describes it"
        case RepeatArgumentError(token=token):
            keyword, value = token.keyword, token.value
            return f"{keyword} is given twice, the second time with {value!r}: give it once"
        case UnusedCliTokensError(unused_tokens=tokens) if tokens:
            return f"{tokens[0]!r} belongs to no flag: write --FLAG VALUE, --help lists the flags"
    cause = error.__cause__
    if not isinstance(cause, InputError):
        return str(error)
    # What is given by its place has no keyword: the message lacks the name, which is known here.
    name = error.argument.name if error.argument and str(cause).startswith(" ") else ""
    return f"{name}{cause}"
