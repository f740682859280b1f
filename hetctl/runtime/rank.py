"""``python -m hetctl.runtime.rank CREW_FILE --seat NAME``: the process on one GPU, for the whole job.

It does one task after another as the driver tells it, and ends with the driver, or with its first failure:
a process in which something has failed is not to be trusted with another member.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hetctl.core.codec import decode, encode
from hetctl.core.ends import LOST_PEER
from hetctl.runtime.assignment import MEASURE, TRAIN, Assignment, read_address
from hetctl.runtime.desk import Desk
from hetctl.runtime.device import bind_device
from hetctl.runtime.machine import forget_peak
from hetctl.runtime.measure import measure
from hetctl.runtime.reporting import report_failure
from hetctl.runtime.steps import private_log
from hetctl.runtime.training import train
from hetctl.runtime.wire import Wire, knock

KNOCK_S = 60.0
ORPHANED = 76
"""What a rank exits with whose driver is gone."""

WORK: dict[str, Callable[[Assignment, Desk], None]] = {TRAIN: train, MEASURE: measure}


def main() -> int:
    """Work until the driver lets go; the exit code is 0 if nothing has failed."""
    parser = argparse.ArgumentParser(prog="python -m hetctl.runtime.rank", description=__doc__)
    parser.add_argument("crew_file", type=Path)
    parser.add_argument("--seat", required=True)
    parser.add_argument("--device", required=True)
    arguments = parser.parse_args()
    cores = bind_device(arguments.device, gpus=1)
    wire = knock(read_address(arguments.crew_file), {"seat": arguments.seat}, KNOCK_S)
    inbox = Inbox(wire)
    with ExitStack() as keep:
        desk = Desk(
            cores,
            keep,
            announce=lambda address: wire.send({"master": encode(address)}),
            give_sign=lambda: wire.send({}),
        )
        for assignment in inbox.assignments():
            if code := work(assignment, desk):
                return code
            wire.send({"done": True})
    return 0


class Inbox:
    """The assignments that come over the wire; a rank at work ends when its driver is gone."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._queue: queue.Queue[Assignment | None] = queue.Queue()
        self._at_work = threading.Lock()
        threading.Thread(target=self._listen, name="inbox", daemon=True).start()

    def assignments(self) -> Iterator[Assignment]:
        """Yield one after another, until the driver is gone."""
        while (assignment := self._queue.get()) is not None:
            with self._at_work:
                yield assignment

    def _listen(self) -> None:
        try:
            while True:
                self._queue.put(decode(Assignment, self._wire.receive()))
        except ConnectionError:
            if not self._at_work.acquire(blocking=False):
                os._exit(ORPHANED)
            self._queue.put(None)


def work(assignment: Assignment, desk: Desk) -> int:
    """Do one task, its output in its log; return what to exit with, or 0 to go on."""
    with output_to(assignment.task.log):
        forget_peak()
        try:
            WORK[assignment.task.kind](assignment, desk)
        except Exception as error:
            if desk.group.broken():
                print(f"rank {desk.group.rank} leaves, since another one is gone", file=sys.stderr)
                return LOST_PEER
            return report_failure(error, assignment.task.events, assignment.task.name)
        desk.clear()
    return 0


@contextmanager
def output_to(log: Path) -> Iterator[None]:
    """Send standard output and errors, those of other threads and libraries too, to a log."""
    before = os.dup(1), os.dup(2)
    try:
        with private_log(log) as file:
            _point_to(file.fileno(), file.fileno())
        yield
    finally:
        _point_to(*before)
        for descriptor in before:
            os.close(descriptor)


def _point_to(output: int, errors: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(output, 1)
    os.dup2(errors, 2)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # What a framework does at an exit may wait for ranks that are no more.
    os._exit(code)
