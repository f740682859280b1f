"""Connection of an agent to its driver, and reconnection after the driver counts it as lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hetctl.model.serialization import decode, encode, parse
from hetctl.model.site import LEASE_SHARE
from hetctl.model.values import dataclass
from hetctl.runtime.agent.messages import REJECTED, SHUTDOWN, AgentAssignment, AgentFacts, Archive
from hetctl.runtime.transport import Address, Connection, JobIdentity, connect
from hetctl.runtime.worker.scripts.warm_start import WarmPython

CONNECT_S = 60.0
ASSIGNMENT_TIMEOUT_S = 60.0
ATTEMPT_S = 5.0
"""Seconds per attempt to reconnect."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""Pauses between attempts; each is twice as long as the last."""


class DismissedError(ConnectionError):
    """The driver does not need this agent, or has ended in order."""


class OrphanedError(ConnectionError):
    """The driver has ended without dismissing its agents.

    Parameters
    ----------
    silent_s : float
        Seconds for which the driver has sent nothing.
    """

    def __init__(self, silent_s: float) -> None:
        super().__init__(f"no heartbeat of the driver for {silent_s:.0f} s")
        self.silent_s = silent_s


@dataclass(frozen=True, kw_only=True)
class DriverAddress(Address):
    """Address of a driver from its file.

    Parameters
    ----------
    identity : JobIdentity or None
        Identity of the job; None if it is on one machine.
    orphaned_s : float
        Time of the site's `Timeouts`, in seconds.
    cancel : tuple of str
        Command by which agents end the job of a dead driver; empty for none.
    pythons : tuple of WarmPython
        Pythons that each agent starts before all else.
    environment : Archive or None
        Environment from which agents start; None: that of the command.
    """

    identity: JobIdentity | None = None
    orphaned_s: float
    cancel: tuple[str, ...] = ()
    pythons: tuple[WarmPython, ...] = ()
    environment: Archive | None = None


class DriverFile:
    """File with a driver's address, which the driver touches as long as it runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = path.read_text(encoding="utf-8")
        self.address: DriverAddress = parse(DriverAddress, self._text)
        self._touched = path.stat().st_mtime_ns

    def touched(self) -> int | None:
        """Return the last touch in nanoseconds; None if the file is gone or another driver's."""
        try:
            if self._path.read_text(encoding="utf-8") != self._text:
                return None
            self._touched = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        except OSError:
            pass  # A file system that does not answer says nothing about the driver.
        return self._touched


def join(
    address: DriverAddress, facts: AgentFacts, connect_s: float = CONNECT_S
) -> tuple[Connection, AgentAssignment]:
    """Connect to the driver, and wait for its assignment.

    Raises
    ------
    DismissedError
        If the driver does not need the agent.
    ConnectionError, TimeoutError
        If the driver cannot be reached, or rejects the agent for now.
    """
    connection = connect(address, encode(facts), connect_s, address.identity)
    try:
        answer: Any = connection.receive(ASSIGNMENT_TIMEOUT_S)
        if SHUTDOWN in answer:
            raise DismissedError("the driver does not need this agent")
        if REJECTED in answer:
            raise ConnectionError(answer[REJECTED])
        assignment = decode(AgentAssignment, answer)
        # A disconnected node's ranks end before the driver starts their members on other nodes.
        connection.limit_unanswered(LEASE_SHARE * assignment.silence_s)
    except BaseException:
        connection.close()
        raise
    return connection, assignment


def reconnect(
    file: DriverFile,
    facts: AgentFacts,
    attempt_s: float = ATTEMPT_S,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[Connection, AgentAssignment]:
    """Reconnect with growing pauses; the driver accepts once the last agent here counts as lost.

    Parameters
    ----------
    attempt_s : float
        Seconds per attempt.

    Raises
    ------
    DismissedError
        If the driver has ended in order, or does not need the agent.
    OrphanedError
        If the driver has ended without dismissing its agents: its port on this machine is closed, or it has
        not touched its file for `orphaned_s`.
    """
    pause_s, touched, last_touch_at = FIRST_PAUSE_S, file.touched(), clock()
    while True:
        is_refused = False
        try:
            return join(file.address, facts, attempt_s)
        except DismissedError:
            raise
        except (ConnectionError, TimeoutError) as error:
            is_refused = isinstance(error, ConnectionRefusedError)
        before, touched = touched, file.touched()
        if touched is None:
            raise DismissedError("the driver has ended")
        if touched != before:
            last_touch_at = clock()
        silent_s = clock() - last_touch_at
        if silent_s > file.address.orphaned_s or (is_refused and file.address.is_here):
            raise OrphanedError(silent_s)
        sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
