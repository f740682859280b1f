"""Life of an agent, from its connection to the end of its driver.

It ignores the batch system's signals, on which ranks write a checkpoint and the driver ends the job. In the
step of all nodes a `Keeper` starts it again after it has lost its connection or was killed.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from functools import partial

from hetctl.cluster.launchers.agents import AGENTS
from hetctl.runtime.agent.agent import Agent, TemplateEndedError, end_orphaned_job
from hetctl.runtime.agent.joining import DismissedError, DriverFile, OrphanedError, join, reconnect
from hetctl.runtime.agent.keeper import DRIVER_LOST, KILLED, Keeper
from hetctl.runtime.frameworks import preload_framework
from hetctl.runtime.job_logs import log_line
from hetctl.runtime.worker.scripts.warm_start import WarmPythons
from hetctl.runtime.worker.worker import serve
from hetctl.storage.processes import raise_descriptor_limit


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
