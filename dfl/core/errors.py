"""Errors that the user sees as one line and an exit code, without a traceback."""

from collections.abc import Iterator
from contextlib import contextmanager


class InputError(ValueError):
    """A bad flag, option, file or combination.

    The message is one line that names the flag or file, the value and what would be accepted.
    `dfl.run` prints it once and ends every rank with exit code 2.
    """

    code = 2


class DivergedError(ArithmeticError):
    """A peer's model, its loss or its accuracy is not finite. The message names the peer and round;
    exit code 3.
    """

    code = 3


class Suspended(Exception):  # noqa: N818  it is no error
    """A run received a signal to stop and wrote a checkpoint from which it can be resumed.

    The exit code is 75, on which clusters requeue a job.
    """

    code = 75


def one_line(error: BaseException) -> str:
    """Return the kind and the message of an error of another library as one line of at most 300
    characters.
    """
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 300 else f"{text[:297]}..."


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Raise an `InputError` in place of any other error of a block that calls a component.

    Args:
        what: the beginning of its message, as "--mixing fails"; the error follows.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"{what}: {one_line(error)}") from error


def printable(text: str) -> str:
    """Return a text as one line that a terminal can show: other characters are escaped, as \\n and
    \\x1b.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
