"""Two hosts on one machine: network namespaces with a host name each, joined by a cable that can be
pulled out.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import eventually
from tests.support.mpirun import ENV, ROOT, mpirun_command

NAMES = ("alpha", "beta")
TCP = {"UCX_TLS": "tcp,self"}
"""What keeps MPICH from the memory that the two share in truth."""

LAUNCHER = """#!/bin/sh
# As ssh: options, a host, a command; what was started there goes on when this is killed here.
while [ "${1#-}" != "$1" ]; do shift; done
case $1 in 10.77.0.1) name=alpha ;; *) name=beta ;; esac
shift
setsid ip netns exec "$name-$PAIR" unshare --uts sh -c "hostname $name; $*" &
wait
"""


@dataclass(frozen=True)
class Hosts:
    """10.77.0.1, called alpha, and 10.77.0.2, called beta.

    Attributes:
        pair: what their namespaces are called by, besides.
        launcher: what starts a program on one of them.
    """

    pair: str
    launcher: Path

    def mpirun(self, ranks: int, *command: str, **more: str) -> "subprocess.Popen[str]":
        """Start so many ranks on each, from alpha."""
        mpirun, _, _, *program = mpirun_command(ranks, *command)
        enter = ["ip", "netns", "exec", f"alpha-{self.pair}", "unshare", "--uts", "sh", "-c"]
        hosts = ["-hosts", f"10.77.0.1:{ranks},10.77.0.2:{ranks}", "-iface", f"alpha{self.pair}"]
        launch = [
            "-launcher",
            "ssh",
            "-launcher-exec",
            str(self.launcher),
            *hosts,
            "-n",
            str(2 * ranks),
        ]
        return subprocess.Popen([*enter, 'hostname alpha; exec "$@"', "sh", mpirun, *launch, *program], cwd=ROOT,
                                env=ENV | TCP | {"PAIR": self.pair} | more, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, start_new_session=True)  # fmt: skip

    def plug(self, state: str) -> None:
        """Pull the cable out of beta (`down`), or put it back (`up`)."""
        _ip("-n", f"beta-{self.pair}", "link", "set", f"beta{self.pair}", state)

    def moved(self) -> int:
        """Bytes that have gone through the cable, both ways."""
        counters = f"/sys/class/net/alpha{self.pair}/statistics"
        shown = ["cat", f"{counters}/rx_bytes", f"{counters}/tx_bytes"]
        return sum(map(int, _ip("netns", "exec", f"alpha-{self.pair}", *shown).split()))

    def running(self) -> dict[int, str]:
        """The processes on both, and their commands."""
        pids = [
            int(p) for name in NAMES for p in _ip("netns", "pids", f"{name}-{self.pair}").split()
        ]
        commands = {p: Path(f"/proc/{p}/cmdline") for p in pids}
        return {p: c.read_text().replace("\0", " ") for p, c in commands.items() if c.exists()}


def obstacle() -> str:
    """Why there can be no two hosts here; nothing, if there can."""
    missing = [each for each in ("ip", "unshare", "setsid") if shutil.which(each) is None]
    if missing:
        return f"{missing[0]} is not installed (iproute2, util-linux)"
    probe = ["ip", "netns", "exec", f"probe{os.getpid()}", "unshare", "--uts", "hostname", "probe"]
    try:
        _ip("netns", "add", probe[3])
        subprocess.run(probe, capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here ({error.stderr.strip()})"
    finally:
        subprocess.run(["ip", "netns", "del", probe[3]], capture_output=True)
    return ""


@contextmanager
def two_hosts(folder: Path) -> Iterator[Hosts]:
    """Set the two up, and take them down with whatever still runs on them."""
    hosts = Hosts(str(os.getpid()), folder / "launcher")
    hosts.launcher.write_text(LAUNCHER)
    hosts.launcher.chmod(0o755)
    spaces, cables = ([f"{name}{mark}{hosts.pair}" for name in NAMES] for mark in ("-", ""))
    try:
        for space in spaces:
            _ip("netns", "add", space)
        _ip(
            "link",
            "add",
            cables[0],
            "netns",
            spaces[0],
            "type",
            "veth",
            "peer",
            "name",
            cables[1],
            "netns",
            spaces[1],
        )
        for number, (space, cable) in enumerate(zip(spaces, cables, strict=True), start=1):
            _ip("-n", space, "addr", "add", f"10.77.0.{number}/24", "dev", cable)
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "set", cable, "up")
        assert eventually(
            lambda: all(map(_carries, spaces, cables)), 20
        )  # else MPI finds no way between them
        yield hosts
    finally:
        for pid in hosts.running():
            os.kill(pid, signal.SIGKILL)
        for space in spaces:
            _ip("netns", "del", space)


def _carries(space: str, cable: str) -> bool:
    return "state UP" in _ip("-n", space, "link", "show", "dev", cable)


def _ip(*more: str) -> str:
    return subprocess.run(["ip", *more], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(obstacle())
