"""The driver of a job: ``python -m hetctl.runtime.driver RUN_FOLDER --job J --deadline SECONDS``."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from hetctl.model.errors import HetctlError
from hetctl.model.interpreter import skip_last_collections
from hetctl.model.job import GAVE_WAY
from hetctl.runtime.driver.driver import SIGNAL_DELAY_S, Driver
from hetctl.runtime.job_logs import log_line
from hetctl.storage.lease import GaveWayError
from hetctl.storage.paths import RunFolder
from hetctl.storage.processes import raise_descriptor_limit


def main(signal_delay_s: float = SIGNAL_DELAY_S) -> int:
    """Run the driver; the exit code is 0 even if members failed."""
    parser = argparse.ArgumentParser(prog="python -m hetctl.runtime.driver", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--job", type=int, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("--batch-id", default="")
    arguments = parser.parse_args()
    # A thousand agents take as many descriptors as usual limits allow.
    raise_descriptor_limit()
    folder = RunFolder(arguments.run_folder.resolve())
    # While it waits for the lease there is nothing to end in order but that.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        driver = Driver(folder, arguments.job, arguments.deadline, arguments.batch_id, signal_delay_s)
    except GaveWayError as error:
        log_line(f"job {arguments.job} of run {folder.name} leaves: {error}")
        return GAVE_WAY
    except HetctlError as error:
        log_line(f"job {arguments.job} of run {folder.name} cannot begin: {error.message} ({error.hint})")
        return error.exit_code
    signal.signal(signal.SIGTERM, lambda *_: driver.end("signal"))
    log_line(f"job {arguments.job} of run {folder.name} ended: {driver.run()}")
    return 0


if __name__ == "__main__":
    skip_last_collections()
    sys.exit(main())
