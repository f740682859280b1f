"""An agent on this node: ``python -m hetctl.runtime.agent DRIVER_FILE --step NAME --framework NAME ..``.

It ends when the driver ends. It ignores signals of the batch system: these are for the ranks, which write a
checkpoint, and for the driver, which ends the job. In the step of all nodes it is a child of a `Keeper`, and
is started again after the loss of its connection, and after it was killed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from hetctl.cluster.launchers.agents import AGENTS
from hetctl.runtime.agent.agent import Agent, TemplateEndedError, end_orphaned_job
from hetctl.runtime.agent.joining import DismissedError, DriverFile, OrphanedError, join, reconnect
from hetctl.runtime.agent.keeper import KILLED, RETURNS, Keeper
from hetctl.runtime.frameworks import preload_framework
from hetctl.runtime.job_logs import log_line
from hetctl.runtime.worker.worker import serve


def main() -> int:
    """Run the agent until the driver ends."""
    parser = argparse.ArgumentParser(prog="python -m hetctl.runtime.agent", description=__doc__)
    parser.add_argument("driver_file", type=Path)
    parser.add_argument("--step", required=True)
    parser.add_argument("--framework", action="append", default=[])
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    driver = DriverFile(arguments.driver_file)
    if arguments.step == AGENTS:
        return Keeper().keep(lambda is_first: live(driver, arguments, is_first=is_first))
    # A member's step ends with its agent, whose exit code gives the cause.
    if (code := live(driver, arguments, is_first=True)) != RETURNS:
        return code
    end_orphaned_job(driver.address.cancel, driver.address.orphaned_s)
    return 0


def live(driver: DriverFile, arguments: argparse.Namespace, *, is_first: bool) -> int:
    """Run one agent; return its exit code."""
    try:
        agent = Agent(
            lambda facts: join(driver.address, facts) if is_first else reconnect(driver, facts),
            *(arguments.step, arguments.threads),
            frameworks=arguments.framework,
            preload=preload_framework,
            serve=serve,
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
        return 0 if agent.run() else RETURNS
    except TemplateEndedError as error:
        log_line(f"agent: {error}")
        return KILLED


if __name__ == "__main__":
    sys.exit(main())
