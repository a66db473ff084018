"""The settings by which runs differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from dfl.config import Run
from dfl.core.parse import unquoted

IRRELEVANT = (
    "out", "resume", "data_dir", "checkpoint_every", "timeout", "log_level", "report",
    "tensorboard", "profile",
)  # fmt: skip
"""Settings that do not distinguish runs."""


def differences(
    settings: Sequence[Mapping[str, object]], folders: Sequence[Path]
) -> list[dict[str, str]]:
    """Return the settings by which runs differ, with folder names if these do not suffice.

    Args:
        settings: the settings, as run.json has them. One that is missing has its default, as in a
            run of an earlier version.
        folders: the folders of the runs.
    """
    names = [name for name in Run.__dataclass_fields__ if name not in IRRELEVANT]
    defaults = Run().to_dict()
    complete = [defaults | dict(each) for each in settings]
    differ = [name for name in names if len({str(each.get(name)) for each in complete}) > 1]
    found = [{name: unquoted(each.get(name)) for name in differ} for each in complete]
    if differ and len({str(each) for each in found}) == len(found):
        return found
    short = [folder.resolve().name for folder in folders]
    unique = short if len(set(short)) == len(short) else list(map(str, folders))
    return [{"run": name} | each for name, each in zip(unique, found, strict=True)]
