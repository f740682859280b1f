"""The driver of a job: ``python -m hetctl.runtime.driver FOLDER --job J --deadline SECONDS``."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from pathlib import Path

from hetctl.model.errors import HetctlError
from hetctl.model.interpreter import load_entry, skip_last_collections
from hetctl.model.job import PROBE, PROFILE, SUPERSEDED_EXIT, TRAIN
from hetctl.runtime.driver.driver import SIGNAL_DELAY_S, Driver
from hetctl.runtime.job_logs import log_line
from hetctl.storage.lease import SupersededError
from hetctl.storage.paths import RunFolder
from hetctl.storage.processes import raise_descriptor_limit

MEASURING = {
    PROFILE: "hetctl.runtime.driver.profile_job:run_profile_job",
    PROBE: "hetctl.runtime.driver.probe:run_probe_job",
}
"""Functions for the modes that train nothing, as ``module:function``; each gets the job's folder."""


def main(signal_delay_s: float = SIGNAL_DELAY_S) -> int:
    """Run the driver; the exit code is 0 even if members failed."""
    parser = argparse.ArgumentParser(prog="python -m hetctl.runtime.driver", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mode", choices=(TRAIN, *MEASURING), default=TRAIN)
    parser.add_argument("--job", type=int, default=0)
    parser.add_argument("--deadline", type=float, default=math.inf)
    parser.add_argument("--batch-id", default="")
    arguments = parser.parse_args()
    # A thousand agents use up the usual limit.
    raise_descriptor_limit()
    # On SIGTERM: a driver that waits for the lease stops waiting; one that measures ends its ranks.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder = arguments.folder.resolve()
    try:
        if arguments.mode != TRAIN:
            load_entry(MEASURING[arguments.mode])(folder)
            return 0
        run, job = RunFolder(folder), arguments.job
        driver = Driver(run, job, arguments.deadline, arguments.batch_id, signal_delay_s)
    except SupersededError as error:
        log_line(f"job {job} of run {run.name} leaves: {error}")
        return SUPERSEDED_EXIT
    except HetctlError as error:
        log_line(f"job {arguments.job} of {folder.name} cannot begin: {error.message} ({error.hint})")
        return error.exit_code
    signal.signal(signal.SIGTERM, lambda *_: driver.end("signal"))
    log_line(f"job {job} of run {run.name} ended: {driver.run()}")
    return 0


if __name__ == "__main__":
    skip_last_collections()
    sys.exit(main())
