"""An agent's way to its driver: the first connection, and later ones after the driver has given it up."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetctl.model.serialization import decode, encode
from hetctl.runtime.agent.messages import LEAVE, AgentAssignment, AgentFacts
from hetctl.runtime.transport import Address, Connection, connect

CONNECT_S = 60.0
ASSIGNMENT_TIMEOUT_S = 60.0
AGAIN_S = 5.0
"""Seconds of one attempt to connect again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0
"""Pauses between attempts; each is twice as long as the one before."""
LEASE_SHARE = 0.8
"""Share of the driver's patience with silence after which an agent that nobody answers ends its ranks.

So those of a node that is cut off have ended when the driver starts their members elsewhere.
"""


class DismissedError(ConnectionError):
    """The driver does not need this agent, or has ended in order."""


class OrphanedError(ConnectionError):
    """The driver has ended without a word.

    Parameters
    ----------
    silent_s : float
        Seconds for which the driver has sent nothing.
    """

    def __init__(self, silent_s: float) -> None:
        super().__init__(f"no heartbeat of the driver for {silent_s:.0f} s")
        self.silent_s = silent_s


@dataclass(frozen=True)
class DriverAddress(Address):
    """Address of a driver, as in its file.

    Parameters
    ----------
    orphaned_s : float
        Time of the site's `Timeouts`, in seconds.
    """

    orphaned_s: float


class DriverFile:
    """File with the address of a driver, which the driver touches as long as it runs."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._text = path.read_text(encoding="utf-8")
        self.address: DriverAddress = decode(DriverAddress, json.loads(self._text))
        self._touched = path.stat().st_mtime_ns

    def touched(self) -> int | None:
        """Return the time of the last touch in nanoseconds; None if the file is gone, or another driver's."""
        try:
            if self._path.read_text(encoding="utf-8") != self._text:
                return None
            self._touched = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        except OSError:
            pass  # The file system does not answer, which says nothing about the driver.
        return self._touched


def join(
    address: Address, facts: AgentFacts, connect_s: float = CONNECT_S
) -> tuple[Connection, AgentAssignment]:
    """Connect to the driver, and wait for its assignment.

    Raises
    ------
    DismissedError
        If the driver does not need the agent.
    ConnectionError, TimeoutError
        If it cannot be reached, or rejects the agent for now.
    """
    connection = connect(address, encode(facts), connect_s)
    try:
        answer: Any = connection.receive(ASSIGNMENT_TIMEOUT_S)
        if LEAVE in answer:
            raise DismissedError("the driver does not need this agent")
        assignment = decode(AgentAssignment, answer)
        connection.limit_unanswered(LEASE_SHARE * assignment.silence_s)
    except BaseException:
        connection.close()
        raise
    return connection, assignment


def join_again(
    file: DriverFile, facts: AgentFacts, again_s: float = AGAIN_S
) -> tuple[Connection, AgentAssignment]:
    """Connect to the driver again, with growing pauses, as soon as it has given up the last agent here.

    Raises
    ------
    DismissedError
        If the driver has ended in order, or does not need the agent any more.
    OrphanedError
        If the driver has ended without a word: on this machine nobody listens at its address, or it has not
        touched its file for `orphaned_s`.
    """
    pause_s, touched, heard_at = FIRST_PAUSE_S, file.touched(), time.monotonic()
    while True:
        is_refused = False
        try:
            return join(file.address, facts, again_s)
        except DismissedError:
            raise
        except (ConnectionError, TimeoutError) as error:
            is_refused = isinstance(error, ConnectionRefusedError)
        before, touched = touched, file.touched()
        if touched is None:
            raise DismissedError("the driver has ended")
        if touched != before:
            heard_at = time.monotonic()
        silent_s = time.monotonic() - heard_at
        if silent_s > file.address.orphaned_s or (is_refused and file.address.is_here):
            raise OrphanedError(silent_s)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
