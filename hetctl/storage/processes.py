"""Processes of this machine, identified even if the kernel reuses a process number."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hetctl.model.values import dataclass

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
MOST_DESCRIPTORS = 2**16
"""Highest descriptor limit that this process sets: some programs go through all numbers below it."""
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Process:
    """Process identified by its number and its start time, in clock ticks since the machine was booted."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return the identity of an existing process.

        Raises
        ------
        OSError
            If the process does not exist.
        """
        # Field 22 of /proc/PID/stat (proc(5)): the first two, number and name, are cut off.
        return cls(pid, int(_stat(pid)[19]))

    @property
    def alive(self) -> bool:
        """True if the process still runs; a zombie does not count."""
        try:
            fields = _stat(self.pid)
        except OSError:
            return _is_hidden(self.pid)
        # kill(pid, 0) would succeed for a zombie, and PID 1 of a container may reap slowly.
        return int(fields[19]) == self.started and fields[0] not in "ZX"

    @property
    def group_alive(self) -> bool:
        """True if any process runs in the group that this process leads or led."""
        try:
            reused = int(_stat(self.pid)[19]) != self.started
        except OSError:
            reused = False
        # Its leader may be gone while others of the group run.
        return not reused and any(True for _ in _running(self.pid))


@dataclass(frozen=True)
class HostBoot:
    """Machine between two boots."""

    host: str
    boot: str

    @classmethod
    def this(cls) -> HostBoot:
        """Return the identity of the current machine."""
        # After a reboot the numbers and the start times of processes repeat.
        return cls(os.uname().nodename, BOOT_ID.read_text(encoding="ascii").strip())


def die_with_parent(number: signal.Signals) -> Callable[[], None]:
    """Return a function for a child to call before exec, so that it receives a signal when its parent ends.

    The signal is sent when the thread that started the child ends. A setuid program never receives it.
    """
    parent = os.getpid()

    def request_signal() -> None:
        _LIBC.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # the parent ended before the request
            os.kill(os.getpid(), number)

    return request_signal


def group_cpu_seconds(group: int) -> float:
    """Return the CPU time of the processes of a group and of their children that have ended, in seconds."""
    # Fields 14 to 17 of /proc/PID/stat.
    ticks = sum(sum(map(int, fields[11:15])) for _, fields in _running(group))
    return ticks / os.sysconf("SC_CLK_TCK")


def commands_below(pids: Iterable[int], forked: Mapping[int, int]) -> dict[int, set[int]]:
    """Return the commands that each process started: its descendants in other sessions.

    Parameters
    ----------
    forked : mapping of int to int
        Command by process, if another process has forked it.
    """
    children = {pid: [command] for pid, command in forked.items()}
    sessions: dict[int, str] = {}
    for pid, fields in _running():
        children.setdefault(int(fields[1]), []).append(pid)
        sessions[pid] = fields[3]
    return {
        pid: {below for below in _below(pid, children) if sessions.get(below) != sessions.get(pid)}
        for pid in pids
    }


def _below(pid: int, children: Mapping[int, Sequence[int]]) -> Iterator[int]:
    yield pid
    for child in children.get(pid, ()):
        yield from _below(child, children)


def name_process(name: str) -> None:
    """Set the name of this process in ps(1) and top(1); the kernel keeps 15 characters."""
    _LIBC.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def raise_descriptor_limit() -> None:
    """Let this process, and those that it starts, open as many descriptors as the hard limit allows.

    The soft limit is often 1,024, for the sake of select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_DESCRIPTORS)), hard))


def _is_hidden(pid: int) -> bool:
    """Return true if a process exists that /proc hides: another user's, on some machines."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        pass
    return False


def _running(group: int | None = None) -> Iterator[tuple[int, list[str]]]:
    """Yield the processes that run, of a process group or all, with their fields as of `_stat`."""
    for name in os.listdir("/proc"):  # noqa: PTH208 - of these files only the names are needed
        if name.isdigit():
            try:
                # A file takes 10 us; ranks look every two seconds, and a node may have thousands.
                if group is not None and os.getpgid(int(name)) != group:
                    continue
                fields = _stat(int(name))
            except OSError:
                continue
            if fields[0] not in "ZX":
                yield int(name), fields


def _stat(pid: int) -> list[str]:
    """Return the fields of ``stat`` of proc(5) after the process name, which may contain any character."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
