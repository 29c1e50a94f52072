"""Links of a given rate on one machine: network namespaces on a bridge, shaped by tc.

Everything is inside of namespaces made here, the bridge too: no interface, address or route of the
machine is touched, and nothing that is sent leaves it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import UnsupportedError

_PREFIX = "hopsparse-"
_INTERFACE = "rank"


@dataclass(frozen=True)
class Place:
    """Where a process of one rank runs.

    Attributes:
        namespace: Name of its network namespace.
        interface: Its one interface there, beside the loopback.
        address: IPv4 address of that.
    """

    namespace: str
    interface: str
    address: str

    def command(self, *words: str) -> list[str]:
        """A command that runs there.

        Example:
            >>> Place("hopsparse-1-0", "rank", "10.77.0.1").command("true")
            ['ip', 'netns', 'exec', 'hopsparse-1-0', 'true']
        """
        return ["ip", "netns", "exec", self.namespace, *words]


def require_namespaces() -> None:
    """Say what this machine lacks to make namespaces.

    Raises:
        UnsupportedError: Not root, or no `ip` or `tc`; or the kernel refuses.
    """
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    missing += ["root"] if os.geteuid() != 0 else []
    if missing:
        raise UnsupportedError(
            f"network namespaces without {', '.join(missing)}",
            need="root, and ip and tc of iproute2",
            hint="sudo, in a container with CAP_NET_ADMIN and CAP_SYS_ADMIN; "
            "apt-get install iproute2",
        )


@contextmanager
def linked(ranks: int, mbit: int) -> Iterator[list[Place]]:
    """Namespaces on one bridge, gone when the block is left, also by Ctrl-C or SIGTERM.

    Those that a killed process of this kind left behind are removed first.

    Args:
        ranks: How many.
        mbit: What each sends and receives at most, in Mbit/s; 0: whatever it can.

    Yields:
        The place of each rank.

    Raises:
        UnsupportedError: This machine does not make such namespaces.
    """
    require_namespaces()
    remove_orphans()
    hub = f"{_PREFIX}{os.getpid()}-hub"
    names = [hub, *(f"{_PREFIX}{os.getpid()}-{rank}" for rank in range(ranks))]
    with _terminated_by_exception():
        try:
            _make(hub, names[1:], mbit)
            yield [_place(rank, name) for rank, name in enumerate(names[1:])]
        finally:
            with _uninterrupted():
                _remove(names)


def remove_orphans() -> None:
    """Remove namespaces of processes that are gone."""
    for name in _existing():
        process = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and process.isdigit() and not Path("/proc", process).exists():
            _remove([name])


def _existing() -> list[str]:
    told = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False)
    return [line.split()[0] for line in told.stdout.splitlines() if line.strip()]


def _place(rank: int, name: str) -> Place:
    return Place(name, f"{_INTERFACE}{rank}", f"10.77.0.{rank + 1}")


def _make(hub: str, names: list[str], mbit: int) -> None:
    _run("ip", "netns", "add", hub)
    _run("ip", "-n", hub, "link", "add", "bridge0", "type", "bridge")
    _run("ip", "-n", hub, "link", "set", "bridge0", "up")
    for rank, name in enumerate(names):
        place, port = _place(rank, name), f"port{rank}"
        _run("ip", "netns", "add", name)
        pair = ("type", "veth", "peer", "name", place.interface, "netns", name)
        _run("ip", "-n", hub, "link", "add", port, *pair)
        _run("ip", "-n", hub, "link", "set", port, "master", "bridge0", "up")
        address = f"{place.address}/24"
        _run("ip", "-n", name, "addr", "add", address, "dev", place.interface)
        _run("ip", "-n", name, "link", "set", place.interface, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        if mbit:
            # What a switch does: each port sends and receives at the rate, and queues 100 ms of it.
            shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "100ms")
            for inside, interface in ((name, place.interface), (hub, port)):
                _run("tc", "-n", inside, "qdisc", "add", "dev", interface, *shape)


def _remove(names: list[str]) -> None:
    """Interfaces go with their namespaces."""
    have = set(_existing())
    for name in names:
        if name in have:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _run(*words: str) -> None:
    # Not in the terminal's group of processes: Ctrl-C would end it half done.
    done = subprocess.run(
        words, capture_output=True, text=True, check=False, start_new_session=True
    )
    if done.returncode:
        raise UnsupportedError(
            f"{' '.join(words)}: {done.stderr.strip() or done.returncode}",
            need="a machine that makes network namespaces, veth pairs, bridges and tbf queues",
            hint="a container with CAP_NET_ADMIN and CAP_SYS_ADMIN, or a virtual machine",
        )


@contextmanager
def _terminated_by_exception() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that what follows it is still done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """A second Ctrl-C waits until the block is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            with suppress(TypeError):  # a handler that Python did not set
                signal.signal(each, handler)
