"""Processes of this machine, told apart even when the kernel uses a number again."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True)
class Process:
    """A process by its number and by when it started, in clock ticks since the machine did."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Identify a process that exists.

        Raises
        ------
        OSError
            If it does not.
        """
        return cls(pid, int(_stat(pid)[19]))

    @property
    def alive(self) -> bool:
        """Whether the process still runs; one that only waits to be reaped does not."""
        try:
            fields = _stat(self.pid)
        except OSError:
            return _is_hidden(self.pid)
        return int(fields[19]) == self.started and fields[0] not in "ZX"

    @property
    def group_alive(self) -> bool:
        """Whether anything runs in the group that this process leads, or led."""
        try:
            reused = int(_stat(self.pid)[19]) != self.started
        except OSError:
            reused = False
        return not reused and any(int(fields[2]) == self.pid for fields in _running())


@dataclass(frozen=True)
class HostBoot:
    """A machine from one start to the next."""

    host: str
    boot: str

    @classmethod
    def this(cls) -> HostBoot:
        """Identify the machine that we are on."""
        return cls(socket.gethostname(), BOOT_ID.read_text(encoding="ascii").strip())


def die_with_parent(number: signal.Signals) -> Callable[[], None]:
    """Return what a child calls before it becomes another program, to get a signal when we are gone.

    The signal is sent when the thread ends that started the child. A program that takes on another
    user's rights (setuid) never gets it.
    """
    parent = os.getpid()

    def ask_for_signal() -> None:
        _LIBC.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:  # it was gone before we asked
            os.kill(os.getpid(), number)

    return ask_for_signal


def name_process(name: str) -> None:
    """Set the name of this process as ps(1) and top(1) show it, of which the kernel keeps 15 characters."""
    _LIBC.prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def _is_hidden(pid: int) -> bool:
    """Whether a process is there that /proc does not show: another user's, on some machines."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        pass
    return False


def _running() -> Iterator[list[str]]:
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                fields = _stat(int(entry.name))
            except OSError:
                continue
            if fields[0] not in "ZX":
                yield fields


def _stat(pid: int) -> list[str]:
    """Return the fields of proc(5)'s ``stat`` from the state on; the name before it may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
