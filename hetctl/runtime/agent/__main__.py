"""An agent on this node: ``python -m hetctl.runtime.agent DRIVER_FILE --step NAME --framework NAME``.

It ends when the driver ends. It ignores signals of the batch system: these are for the ranks, which write a
checkpoint, and for the driver, which ends the job.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from hetctl.runtime.agent.agent import Agent, end_orphaned_job
from hetctl.runtime.frameworks import preload_framework
from hetctl.runtime.worker.messages import read_address
from hetctl.runtime.worker.worker import serve


def main() -> int:
    """Run the agent until the driver ends."""
    parser = argparse.ArgumentParser(prog="python -m hetctl.runtime.agent", description=__doc__)
    parser.add_argument("driver_file", type=Path)
    parser.add_argument("--step", required=True)
    parser.add_argument("--framework")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    address = read_address(arguments.driver_file)
    try:
        agent = Agent(
            *(address, arguments.step, arguments.threads),
            *(lambda: preload_framework(arguments.framework), serve),
        )
    except (ConnectionError, TimeoutError) as error:
        print(f"agent: cannot connect to the driver: {error}", file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not agent.run():
        end_orphaned_job(agent.orphaned_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
