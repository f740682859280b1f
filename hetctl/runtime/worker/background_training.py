"""Process beside rank 0 that trains the networks of a predictor while the steps go on (LB-BSP, section 4).

Another thread would hold Python's lock in the steps, and a fork is not safe once frameworks have threads.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import IO, TYPE_CHECKING, Any

from hetctl.runtime.job_logs import log_line

if TYPE_CHECKING:
    from hetctl.methods.balance.predictors.base import Values
    from hetctl.methods.balance.predictors.network_training import Training

DUTY = 0.01
"""Largest share of one core's time that trainings take."""
COMMAND = (sys.executable, "-m", "hetctl.runtime.worker.background_training")
LENGTH_BYTES = 8
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class BackgroundTraining:
    """One training at a time, in a process of the lowest priority.

    No call waits, but `start` takes some milliseconds. Without a result, as after the death of the process,
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
        """Let the process end; a training is not awaited."""
        self._given.put(None)

    def _serve(self) -> None:
        """Pass trainings to the process, and its results back, until there is no more."""
        pipe = subprocess.PIPE
        try:
            with subprocess.Popen(COMMAND, stdin=pipe, stdout=pipe, env=os.environ | ONE_THREAD) as process:
                assert process.stdin is not None
                assert process.stdout is not None
                while (training := self._given.get()) is not None:
                    _send(process.stdin, training)
                    self._found.put(_receive(process.stdout))
        except (OSError, EOFError) as error:
            log_line(f"the background training of the speed predictor has failed: {error!r}")


def main() -> None:
    """Compute the trainings on standard input until it ends, as it does with the parent."""
    # Signals to the whole job are for the parent.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    _yield_to_all()
    # A parent that was killed may have sent only a part.
    with suppress(EOFError):
        while True:
            training: Training = _receive(sys.stdin.buffer)
            began_s = time.process_time()
            found = training.fitted()
            _send(sys.stdout.buffer, (found, time.process_time() - began_s))


def _send(stream: IO[bytes], value: Any) -> None:
    """Write a training, or its result, behind the number of its bytes."""
    from hetctl.methods.balance.managers import state_of
    from hetctl.runtime.frameworks.packed_state import to_bytes

    data = to_bytes(state_of(value))
    stream.write(len(data).to_bytes(LENGTH_BYTES, "big"))
    stream.write(data)
    stream.flush()


def _receive(stream: IO[bytes]) -> Any:
    """Wait for what `_send` has written; EOFError if the other process has ended."""
    from hetctl.methods.balance.managers import made_of
    from hetctl.runtime.frameworks.packed_state import from_bytes

    return made_of(from_bytes(_whole(stream, int.from_bytes(_whole(stream, LENGTH_BYTES), "big"))))


def _whole(stream: IO[bytes], count: int) -> bytes:
    data = stream.read(count)
    if len(data) < count:
        raise EOFError("the other process has ended")
    return data


def _yield_to_all() -> None:
    """Run at idle priority (SCHED_IDLE); the modules of numpy are not loaded yet."""
    os.nice(19)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


if __name__ == "__main__":
    main()
