"""Supervisor of a local job, which enforces its wall-clock limit and records its result."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hetctl.cluster.batch.local import Claim, End, Slots, claim, claim_file, end_file, lock_folder, status_of
from hetctl.model.errors import is_transient
from hetctl.model.interpreter import skip_last_collections
from hetctl.model.job import GIVEN_GPUS, JobState
from hetctl.model.serialization import encode
from hetctl.storage.atomic_io import write_json
from hetctl.storage.patience import PATIENT
from hetctl.storage.processes import HostBoot, Process, die_with_parent

CANCEL_GRACE_S = 20.0
POLL_S = 0.1
CANCELLING = (signal.SIGTERM, signal.SIGINT)


def main(cancel_grace_s: float = CANCEL_GRACE_S) -> int:
    """Run a script as the job of this name, unless another supervisor has claimed it; record its result.

    Parameters
    ----------
    cancel_grace_s : float
        Time in seconds from the SIGTERM to a script to the SIGKILL.
    """
    parser = argparse.ArgumentParser(prog="python -m hetctl.cluster.batch.supervisor", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("job")
    parser.add_argument("script")
    parser.add_argument("--wall", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--gpus", type=int, required=True, metavar="K", help="GPUs or slots that it takes")
    parser.add_argument("--of", type=int, required=True, metavar="N", help="GPUs or slots of this machine")
    parser.add_argument("--device", choices=("gpu", "slot"), required=True)
    parser.add_argument("--after", metavar="JOB", help="wait until this job is over")
    arguments = parser.parse_args()
    supervisor = _Supervisor(arguments.folder, arguments.job, cancel_grace_s)
    if PATIENT.call(claim, arguments.folder, arguments.job, supervisor.claim):
        slots = Slots(lock_folder(), arguments.device, arguments.of)
        if arguments.after:
            supervisor.wait_for(arguments.after)
        supervisor.wait_for_slots(slots, arguments.gpus)
        supervisor.run(arguments.script, arguments.wall, slots)
    return 0


class _Supervisor:
    def __init__(self, folder: Path, job: str, cancel_grace_s: float) -> None:
        self._folder = folder
        self._job = job
        self._cancel_grace_s = cancel_grace_s
        self._cancelled = False
        # Set before the claim makes this process known, so that the first of these signals cancels the job.
        for number in CANCELLING:
            signal.signal(number, self._cancel)
        self.claim = Claim(HostBoot.this(), Process.of(os.getpid()))

    def wait_for(self, job: str) -> None:
        """Wait until another job is over, or this one is cancelled."""
        while not self._cancelled and not self._is_over(job):
            time.sleep(POLL_S)

    def wait_for_slots(self, slots: Slots, wanted: int) -> None:
        while not self._cancelled and not slots.acquire(wanted):
            time.sleep(POLL_S)

    def run(self, script: str, wall_s: float, slots: Slots) -> None:
        """Run the script, unless the job is cancelled; record its result."""
        end = End(None, "cancelled") if self._cancelled else self._supervise(script, wall_s, slots)
        PATIENT.call(write_json, end_file(self._folder, self._job), encode(end))

    def _is_over(self, job: str) -> bool:
        try:
            return status_of(self._folder, job).state not in (JobState.PENDING, JobState.RUNNING)
        except OSError as error:
            if is_transient(error):
                return False  # It is looked at again.
            raise

    def _cancel(self, *_: object) -> None:
        self._cancelled = True

    def _supervise(self, script: str, wall_s: float, slots: Slots) -> End:
        """Run a script in its own process group; TERM it at its limit or on cancellation, later KILL all.

        If the supervisor itself is killed, the script gets the same signal as on cancellation.
        """
        job = subprocess.Popen(
            ["bash", script],
            env={**os.environ, GIVEN_GPUS: ",".join(map(str, slots.numbers))},
            # The script holds the slots, too, if this supervisor is killed.
            pass_fds=slots.descriptors,
            start_new_session=True,
            preexec_fn=self._prepare_script(),
        )
        limit, ended_by = time.monotonic() + wall_s, None
        while (code := job.poll()) is None:
            now = time.monotonic()
            if ended_by is None and (self._cancelled or now >= limit):
                ended_by = "cancelled" if self._cancelled else "timeout"
                limit = now + self._cancel_grace_s
                job.send_signal(signal.SIGTERM)  # to the script alone, which stops its steps in order
            elif now >= limit:
                os.killpg(job.pid, signal.SIGKILL)
            time.sleep(POLL_S)
        # As other batch systems do.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        return End(code if code >= 0 else 128 - code, ended_by, _reason_of(code, ended_by, wall_s))

    def _prepare_script(self) -> Callable[[], None]:
        """Return a function that the script's process calls before it becomes the script.

        The function notes its process in the claim, so that the script is known to run even if the supervisor
        is killed at that moment.
        """
        heed_parent = die_with_parent(signal.SIGTERM)

        def prepare() -> None:
            # The supervisor's own handler, which is here until exec(2), would swallow the signals.
            for number in CANCELLING:
                signal.signal(number, signal.SIG_DFL)
            claimed = replace(self.claim, script=Process.of(os.getpid()))
            PATIENT.call(write_json, claim_file(self._folder, self._job), encode(claimed))
            heed_parent()

        return prepare


def _reason_of(code: int, ended_by: str | None, wall_s: float) -> str:
    if ended_by == "timeout":
        return f"reached its limit of {wall_s:g} s"
    return f"ended by {signal.Signals(-code).name}" if code < 0 and not ended_by else ""


if __name__ == "__main__":
    skip_last_collections()
    sys.exit(main())
