"""Life of an agent, from its connection to the end of its driver.

It ignores the batch system's signals, on which ranks write a checkpoint and the driver ends the job. In the
step of all nodes a `Keeper` starts it again after it has lost its connection or was killed. Its ranks, and
its copies of partitions and states, end with its process: a new one begins with nothing, and its driver sees
a node that joins.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

from hetctl.cluster.launchers.agents import AGENTS
from hetctl.runtime.agent.agent import Agent, TemplateEndedError, end_orphaned_job
from hetctl.runtime.agent.joining import DismissedError, DriverFile, OrphanedError, join, reconnect
from hetctl.runtime.agent.rank_template import run_to_the_end
from hetctl.runtime.frameworks import preload_framework
from hetctl.runtime.job_logs import log_line
from hetctl.runtime.worker.scripts.warm_start import WarmPythons
from hetctl.runtime.worker.worker import serve
from hetctl.storage.processes import die_with_parent, raise_descriptor_limit

DRIVER_LOST = 77
"""Exit code of an agent that has lost its driver; the driver may take the node back."""
KILLED = 128 + signal.SIGKILL
"""Exit code of an agent after a kill of itself, or of its template and thus of all its ranks."""
ENDED = 128 + signal.SIGTERM
MOST_RESTARTS = 3
"""Most restarts of a killed agent; after so many, the cause is likely to stay."""
RESTART_PAUSE_S = 0.1


def run_agent(driver: DriverFile, step: str, frameworks: Sequence[str], pythons: WarmPythons) -> int:
    """Run the agent of a resource set until its driver ends; return the exit code of its process.

    Parameters
    ----------
    step : str
        Name of the step that started the agent.
    frameworks : sequence of str
        Frameworks to import once for all its ranks.
    pythons : WarmPythons
        Warm Pythons of its ranks.
    """
    raise_descriptor_limit()
    run_once = partial(_run_once, driver, step, frameworks, pythons)
    if step == AGENTS:
        return Keeper().keep(lambda is_first: run_once(is_first=is_first))
    # A member's step ends with its agent, and the agent's exit code tells why.
    if (code := run_once(is_first=True)) != DRIVER_LOST:
        return code
    end_orphaned_job(driver.address.cancel, driver.address.orphaned_s)
    return 0


def _run_once(
    driver: DriverFile, step: str, frameworks: Sequence[str], pythons: WarmPythons, *, is_first: bool
) -> int:
    try:
        agent = Agent(
            lambda facts: join(driver.address, facts) if is_first else reconnect(driver, facts),
            step,
            frameworks,
            preload=preload_framework,
            serve=serve,
            pythons=pythons,
            identity=driver.address.identity,
        )
    except OrphanedError as error:
        patience_s = max(0.0, driver.address.orphaned_s - error.silent_s)
        end_orphaned_job(driver.address.cancel, patience_s)
        return 0
    except (ConnectionError, TimeoutError) as error:
        print(f"agent: cannot connect to the driver: {error}", file=sys.stderr)
        return 0 if isinstance(error, DismissedError) and not is_first else 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        return 0 if agent.run() else DRIVER_LOST
    except TemplateEndedError as error:
        log_line(f"agent: {error}")
        return KILLED


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
        # SIGTERM ends an agent in order; any other signal killed it, or its template and thus its ranks.
        while code == DRIVER_LOST or (code > 128 and code != ENDED and restarts < MOST_RESTARTS):
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
