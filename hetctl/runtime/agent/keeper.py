"""The process of a step that starts its agent, and starts it again when that was lost.

All that an agent has begun ends with its process: its ranks, copies of partitions and of states. A new
process therefore begins with nothing, and its driver sees a node that joins.
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

RETURNS = 77
"""Exit code of an agent that has lost its driver, which may take the node back."""
KILLED = 128 + signal.SIGKILL
"""Exit code of an agent that was killed, or whose ranks were all killed with their template."""
MOST_RESTARTS = 3
"""Restarts of an agent that was killed; after more, the cause is likely to stay."""
RESTART_PAUSE_S = 0.1


class Keeper:
    """Process that keeps an agent running; SIGTERM to it is passed on, and an agent at work ignores that."""

    def __init__(self) -> None:
        self._child = 0
        signal.signal(signal.SIGTERM, self._pass_on)

    def keep(self, live: Callable[[bool], int]) -> int:
        """Run an agent in a process of its own, again and again until it ends in order.

        Parameters
        ----------
        live : callable
            Body of the agent, which returns its exit code; its argument is true at the first time.

        Returns
        -------
        int
            The last exit code, 128 + n if signal n ended the agent.
        """
        code, restarts = self._run(lambda: live(True)), 0
        while code == RETURNS or (_was_killed(code) and restarts < MOST_RESTARTS):
            if code != RETURNS:
                restarts += 1
                time.sleep(RESTART_PAUSE_S)
            code = self._run(lambda: live(False))
        # Nothing is left to pass it on to, and an exception amid Python's own end would be printed.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return code

    def _run(self, body: Callable[[], int]) -> int:
        end_with_keeper = die_with_parent(signal.SIGKILL)
        # Between the fork and the next lines a signal would find the handler in the child, or no child.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        pid = os.fork()
        if pid == 0:
            end_with_keeper()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
            run_to_the_end(body)
        self._child = pid
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        # Until it is reaped, its number is no other process's, and a signal that comes with its end finds it.
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
    """Return true if a signal other than SIGTERM has ended the agent, or its ranks."""
    return code > 128 and code != 128 + signal.SIGTERM
