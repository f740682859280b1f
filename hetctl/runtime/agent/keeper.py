"""The process of a step that starts its agent, and starts it again after a loss.

An agent's ranks, and its copies of partitions and states, end with its process. A new process begins with
nothing, and its driver sees a node that joins.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from hetctl.runtime.agent.rank_template import run_to_the_end
from hetctl.storage.processes import die_with_parent

DRIVER_LOST = 77
"""Exit code of an agent that has lost its driver; the driver may take the node back."""
KILLED = 128 + signal.SIGKILL
"""Exit code of an agent after a kill of itself, or of its template and thus of all its ranks."""
MOST_RESTARTS = 3
"""Most restarts of a killed agent; after so many, the cause is likely to stay."""
RESTART_PAUSE_S = 0.1


class Keeper:
    """Process that keeps an agent running; it passes SIGTERM on, which an agent at work ignores."""

    def __init__(self) -> None:
        self._child = 0
        signal.signal(signal.SIGTERM, self._pass_on)

    def keep(self, live: Callable[[bool], int]) -> int:
        """Run an agent in a process of its own, repeatedly, until it ends in order.

        Parameters
        ----------
        live : callable
            Body of the agent, which returns its exit code; its argument is true in the first run.

        Returns
        -------
        int
            The last exit code, 128 + n if signal n ended the agent.
        """
        code, restarts = self._run(lambda: live(True)), 0
        while code == DRIVER_LOST or (_was_killed(code) and restarts < MOST_RESTARTS):
            if code != DRIVER_LOST:
                restarts += 1
                time.sleep(RESTART_PAUSE_S)
            code = self._run(lambda: live(False))
        # No child is left, and an exception while Python ends would be printed.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return code

    def _run(self, body: Callable[[], int]) -> int:
        end_with_keeper = die_with_parent(signal.SIGKILL)
        # Right after the fork a signal would meet this handler in the child, or no child number here.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            end_with_keeper()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            run_to_the_end(body)
        self._child = pid
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        # Until it is reaped, no other process gets its number, so a late signal meets the right process.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self._child = 0
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return code if code >= 0 else 128 - code

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        if not self._child:
            sys.exit(128 + number)
        os.kill(self._child, number)


def _was_killed(code: int) -> bool:
    """Return true if a signal other than SIGTERM ended the agent or its ranks."""
    return code > 128 and code != 128 + signal.SIGTERM
