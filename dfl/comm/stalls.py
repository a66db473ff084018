"""Who keeps the others waiting? What ranks show of themselves, and how one that waits for too long judges it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dfl.core.files import read_bytes

SHOWN = 4
"""Ranks of a host, and hosts, that are named in a line at the most."""


@dataclass(frozen=True)
class Sign:
    """What a rank shows of itself.

    Attributes:
        turns: how many things it has begun that all ranks do together.
        waiting: whether it waits for the others in the last of them.
        seconds: for how long it has been waiting, or has not.
        doing, round: what it is at; there is no round before the first and after the last.
        when: seconds since 1970, by the clock of its host.
    """

    rank: int
    host: str
    pid: int
    turns: int
    waiting: bool
    seconds: float
    doing: str
    round: int | None
    when: float


Signs = Mapping[int, Sign | None]
"""What each rank shows; None where nothing is found."""


def read(path: Path) -> Sign | None:
    """What a rank shows, if anything."""
    try:
        return Sign(**json.loads(read_bytes(path)))
    except (OSError, ValueError, TypeError):
        return None


def verdict(mine: Sign, now: Signs, before: Signs, gap: float) -> str:
    """Who is late, in a line; nothing if this rank is to be patient still.

    Args:
        mine: what the rank that waits shows.
        now, before: what the others show, and showed `gap` seconds ago.
    """
    unknown = [rank for rank, sign in now.items() if sign is None]
    silent = [sign for rank, sign in now.items() if sign and sign == before.get(rank)]
    alive = [sign for sign in now.values() if sign and sign not in silent]
    busy = [sign for sign in alive if not sign.waiting and sign.turns < mine.turns]
    strict = mine.round is not None
    if silent:
        age = min(max(gap, mine.when - sign.when) for sign in silent)
        who = f"{_named(silent)} did not arrive: no sign of life for {age:.0f} s"
    elif busy and strict:
        slowest = max(busy, key=lambda sign: sign.seconds)
        who = f"{_named(busy)} did not arrive: alive, computing for {slowest.seconds:.0f} s ({_at(slowest)})"
    elif unknown and strict:
        who = f"{ranks_named(unknown)} did not arrive: no heartbeat to tell where they are"
    elif not unknown and all(sign.waiting and sign.seconds >= gap / 2 for sign in alive):
        who = _stuck([mine, *alive])
    else:
        return ""
    return f"rank {mine.rank} on {mine.host} waited {mine.seconds:.0f} s ({_at(mine)}): {who}"


def _stuck(signs: Sequence[Sign]) -> str:
    hosts = {sign.host for sign in signs}
    between = (
        f"messages do not get through between {_named(signs)}"
        if len(hosts) > 1
        else "for each other"
    )
    return f"all {len(signs)} ranks are alive and wait{', ' if len(hosts) > 1 else ' '}{between}"


def _at(sign: Sign) -> str:
    return sign.doing if sign.round is None else f"{sign.doing}, round {sign.round}"


def _named(signs: Sequence[Sign]) -> str:
    """Ranks by host: rank 3 on node7 and ranks 4, 5 on node8."""
    hosts = sorted({sign.host for sign in signs})
    named = [
        f"{ranks_named(sorted(s.rank for s in signs if s.host == host))} on {host}"
        for host in hosts
    ]
    return " and ".join(named[:SHOWN]) + (
        f" and on {len(hosts) - SHOWN} more hosts" if len(hosts) > SHOWN else ""
    )


def ranks_named(ranks: Sequence[int]) -> str:
    """Return ranks in words, a few of them: ranks 3, 4, 5, 6 and 10 more."""
    shown = ", ".join(map(str, ranks[:SHOWN])) + (
        f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    )
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
