"""An agent on this node: ``python -m hetctl.runtime.agent DRIVER_FILE --step NAME --framework NAME ..``."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path

from hetctl.model.interpreter import skip_last_collections
from hetctl.runtime.agent.binding import set_variables
from hetctl.runtime.agent.joining import DriverFile
from hetctl.runtime.worker.scripts.warm_start import WarmPythons
from hetctl.storage.patience import PATIENT


def main() -> int:
    """Run the agent until the driver ends."""
    parser = argparse.ArgumentParser(prog="python -m hetctl.runtime.agent", description=__doc__)
    parser.add_argument("driver_file", type=Path)
    parser.add_argument("--step", required=True)
    parser.add_argument("--framework", action="append", default=[])
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--mps", type=int, metavar="PERCENT")
    parser.add_argument("--staged", nargs=2, metavar=("FOLDER", "LOCK"))
    arguments = parser.parse_args()
    set_variables(arguments.threads)
    driver = PATIENT.call(DriverFile, arguments.driver_file)
    # They import while this process does.
    pythons = WarmPythons(driver.address.pythons)
    # Only now: this imports NumPy, whose BLAS reads the variables. Without them each rank would use all cores
    # of the node, and the agent would create threads before it forks ranks.
    from hetctl.runtime.agent.agent_process import run_agent
    from hetctl.runtime.agent.mps import mps_daemon

    with mps_daemon(arguments.mps) if arguments.mps else nullcontext():
        code = run_agent(driver, arguments.step, arguments.framework, pythons)
    if arguments.staged:
        from hetctl.runtime.agent.environment import Environment

        folder, lock = arguments.staged
        Environment(Path(folder), int(lock)).leave()
    return code


if __name__ == "__main__":
    skip_last_collections()
    sys.exit(main())
