"""Process beside rank 0 that trains the networks of a predictor while the steps go on (LB-BSP, section 4).

Another thread would hold Python's lock in the steps, and a fork is not safe once frameworks have threads.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING

from hetctl.runtime.job_logs import log_line

if TYPE_CHECKING:
    from hetctl.methods.balance.predictors.network_training import Training
    from hetctl.methods.balance.step_time import Values

DUTY = 0.01
"""Largest share of one core's time that trainings take."""
COMMAND = (sys.executable, "-m", "hetctl.runtime.worker.background_training")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class BackgroundTraining:
    """One training at a time, in a process of the lowest priority.

    No call waits, but `start` takes some milliseconds. Without a result, as when the process has died,
    networks stay as they are.

    Parameters
    ----------
    duty : float
        Largest share of one core's time that trainings take.
    """

    def __init__(self, duty: float = DUTY) -> None:
        self._duty = duty
        self._given: SimpleQueue[Training | None] = SimpleQueue()
        self._found: SimpleQueue[tuple[Values, float]] = SimpleQueue()
        self._is_free = False
        self._next_start_at = 0.0

    def start(self) -> None:
        """Start the process; without it, nothing is trained."""
        Thread(target=self._serve, name="background training", daemon=True).start()
        self._is_free = True

    def offer(self, training: Training) -> None:
        """Begin a training, unless one has no result yet or the last one was too recent for `duty`."""
        if self._is_free and time.monotonic() >= self._next_start_at:
            self._is_free = False
            self._given.put(training)

    def result(self) -> Values | None:
        """Return the result of the training, once; None as long as there is none."""
        with suppress(Empty):
            found, cpu_s = self._found.get_nowait()
            self._is_free = True
            self._next_start_at = time.monotonic() + cpu_s / self._duty
            return found
        return None

    def close(self) -> None:
        """Let the process end; do not wait for a training."""
        self._given.put(None)

    def _serve(self) -> None:
        """Pass trainings to the process and results back, until there are no more."""
        pipe = subprocess.PIPE
        try:
            with subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, env=os.environ | ONE_THREAD) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                while (training := self._given.get()) is not None:
                    pickle.dump(training, process.stdin)
                    process.stdin.flush()
                    self._found.put(pickle.load(process.stdout))
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            log_line(f"the background training of the speed predictor has failed: {error!r}")


def main() -> None:
    """Compute the trainings on standard input until it ends; it ends with the parent."""
    # The parent handles signals to the whole job.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    # Idle priority; the modules of numpy are not loaded yet.
    os.nice(19)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    # A parent that was killed may have sent only a part.
    with suppress(EOFError, pickle.UnpicklingError):
        while True:
            training: Training = pickle.load(sys.stdin.buffer)
            began_s = time.process_time()
            found = training.fitted()
            pickle.dump((found, time.process_time() - began_s), sys.stdout.buffer)
            sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
