"""Lease of a run: only one driver of its jobs trains at a time.

Drivers draw numbers. Each makes the file of its number, which only one of them can (link(2)), and waits for
those with lower numbers. At its turn it writes itself into the lease file. All open these files by name:
network file systems may show an old state of a folder, but not of a file that is opened.

No two clocks are compared. The holder touches its file. A waiting driver counts by its own clock how long
that file has not changed. The holder's own limit is shorter: if it could not touch its file for that long, it
ends at once, so that one that stood still finds out before it does anything else. Its ranks read the file
before they write.

The wait is shorter if this machine or the batch system knows that the holder has ended.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hetctl.model.serialization import decode, encode
from hetctl.model.site import LEASE_SHARE
from hetctl.model.values import dataclass
from hetctl.storage.atomic_io import draft, hard_link, write_json
from hetctl.storage.paths import RunFolder
from hetctl.storage.patience import PATIENT
from hetctl.storage.processes import HostBoot, Process
from hetctl.storage.run_files import read_record

RENEW_EVERY_S = 2.0
POLL_S = 0.2
HERE_S = 2.0
"""Seconds in which all processes of a job on one machine end after its driver."""
OVER_S = 15.0
"""Seconds without a sign of life after which a driver is dead if the batch system, which may err, says so."""


class SupersededError(Exception):
    """End of the wait for a lease: another driver goes on with the run, or the job has to end."""


class LeaseLostError(OSError):
    """Attempt to write by a rank whose driver has lost the lease."""


@dataclass(frozen=True)
class LeaseHolder:
    """A driver that holds the lease, or waits for it.

    Parameters
    ----------
    number : int
        Number that it drew; later drivers have larger ones.
    alone : bool
        True if all processes of its job run on this machine.
    over : bool
        True if it and its ranks have ended.
    """

    number: int
    job: int
    batch_id: str
    machine: HostBoot
    driver: Process
    alone: bool
    over: bool = False

    @property
    def is_dead_here(self) -> bool:
        """True if this machine knows that the driver and all its ranks have ended, or are about to."""
        here = HostBoot.this()
        if not self.alone or self.machine.host != here.host:
            return False
        return self.machine != here or not self.driver.alive

    def __str__(self) -> str:
        return f"the driver of job {self.job} (batch job {self.batch_id or 'unknown'} on {self.machine.host})"


@dataclass(frozen=True)
class LeaseMark:
    """Lease under which a rank writes.

    Parameters
    ----------
    path : str
        File of the lease.
    """

    path: str
    number: int

    def check(self) -> None:
        """Raise LeaseLostError if another driver holds the lease; ignore a file that cannot be read."""
        seen = None
        with suppress(OSError):
            seen = _read(Path(self.path))
        if seen and seen[0].number != self.number:
            raise LeaseLostError(f"{seen[0]} has taken over: nothing more is written")


class Lease:
    """Lease of a run, for its driver to take, keep and release.

    Attributes
    ----------
    is_claimed : bool
        True if a later driver waits for it.

    Parameters
    ----------
    lease_s : float
        Seconds without a sign of life after which a driver counts as dead.
    alone : bool
        Same as in `LeaseHolder`.
    on_lost : callable
        Function called, in any thread, with the reason why the driver must end at once.
    say : callable
        Function that writes a line into the log of the job.
    """

    def __init__(
        self,
        folder: RunFolder,
        job: int,
        batch_id: str,
        lease_s: float,
        *,
        alone: bool,
        on_lost: Callable[[str], None],
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._lease_s, self._clock, self._on_lost = folder, lease_s, clock, on_lost
        self._say = say
        self._holder = LeaseHolder(0, job, batch_id, HostBoot.this(), Process.of(os.getpid()), alone)
        self.is_claimed = False
        self._seen: dict[int, tuple[int, float]] = {}
        self._ended = threading.Event()
        self._moving = threading.Lock()
        self._renewed_at = clock()
        self._path = PATIENT.call(self._draw)
        threading.Thread(target=self._keep_renewed, name="lease", daemon=True).start()

    @property
    def mark(self) -> LeaseMark:
        """Lease under which the ranks write."""
        return LeaseMark(str(self._folder.lease), self._holder.number)

    @property
    def is_fresh(self) -> bool:
        """True if it was renewed just now, and may be passed on to agents."""
        return self._clock() - self._renewed_at < 2 * RENEW_EVERY_S

    def acquire(self, gives_up: Callable[[], str], sleep: Callable[[float], None] = time.sleep) -> None:
        """Wait until all earlier drivers have ended, and hold the lease from then on.

        Parameters
        ----------
        gives_up : callable
            Function that returns why the job has to end without the lease; empty if it need not.

        Raises
        ------
        SupersededError
            If the driver of a later job is there, or the job has to end.
        """
        try:
            told: LeaseHolder | None = None
            while (waits := PATIENT.call(self._earlier)) != []:
                for holder in waits or ():
                    if holder.job > self._holder.job:
                        raise SupersededError(f"{holder} goes on with the run")
                if self.is_claimed:
                    raise SupersededError("a later driver goes on with the run")
                if reason := gives_up():
                    raise SupersededError(f"{reason} while others had the lease of the run")
                if waits and told != waits[0]:
                    told = waits[0]
                    self._say(
                        f"waiting for the end of {told}: {self._lease_s:g} s if it gives no sign of life"
                    )
                sleep(POLL_S)
            PATIENT.call(self._hold)
        except BaseException:
            self._withdraw()
            raise

    def check(self) -> None:
        """End the driver if it lost the lease while it stood still, or could not renew it for too long."""
        self._end_if_late()
        if self._clock() - self._renewed_at > LEASE_SHARE * OVER_S:
            self.renew()

    def _end_if_late(self) -> None:
        if self._clock() - self._renewed_at > LEASE_SHARE * self._lease_s:
            self._on_lost("the lease could not be renewed in time")

    def release(self) -> None:
        """Let the next driver begin: this one and its ranks have ended."""
        self._ended.set()
        with self._moving, suppress(OSError):
            seen = _read(self._path)
            if seen and seen[0].number == self._holder.number:
                write_json(self._path, encode(replace(self._holder, over=True)))

    def renew(self) -> None:
        """Touch the file, unless the lease is lost; an error of the file system is no loss yet."""
        self._end_if_late()
        began = self._clock()
        with self._moving, suppress(OSError):
            with self._path.open("rb") as file:
                owner = decode(LeaseHolder, json.loads(file.read()))
                if owner.number != self._holder.number:
                    self._on_lost(f"{owner} has taken over")
                os.utime(file.fileno())
            self._renewed_at = began
            self.is_claimed = any(not one.over and one.job >= self._holder.job for one in self._later())

    def _keep_renewed(self) -> None:
        while not self._ended.wait(RENEW_EVERY_S):
            # A file that is being replaced by hand, or a damaged one, is no reason to stop renewing.
            with suppress(ValueError):
                self.renew()

    def _draw(self) -> Path:
        while True:
            number = self._current() + 1
            while not self._is_first(number):
                number += 1
            # A lower number than the present one was used before, and its file deleted since.
            if self._current() < number:
                return self._folder.ticket(number)
            self._folder.ticket(number).unlink(missing_ok=True)

    def _is_first(self, number: int) -> bool:
        """Make the file of a number; return False if another driver has made it."""
        self._holder = replace(self._holder, number=number)
        with draft(self._folder.ticket(number)) as own:
            write_json(own, encode(self._holder))
            return hard_link(own, self._folder.ticket(number))

    def _current(self) -> int:
        seen = _read(self._folder.lease)
        return seen[0].number if seen else 0

    def _earlier(self) -> list[LeaseHolder] | None:
        """Return the earlier drivers that may still be alive; None if that cannot be seen now."""
        began, holds = self._clock(), _read(self._folder.lease)
        numbers = range(holds[0].number + 1 if holds else 1, self._holder.number)
        tickets = [_read(self._folder.ticket(number)) for number in numbers]
        # A driver that has taken the lease meanwhile has deleted its ticket.
        if None in tickets or _read(self._folder.lease) != holds:
            return None
        found = [seen for seen in (holds, *tickets) if seen and not seen[0].over]
        return [holder for holder, touched in found if not self._is_silent(holder, touched, began)]

    def _later(self) -> Iterator[LeaseHolder]:
        number = self._holder.number + 1
        while seen := _read(self._folder.ticket(number)):
            yield seen[0]
            number += 1

    def _is_silent(self, holder: LeaseHolder, touched: int, now: float) -> bool:
        before, since = self._seen.get(holder.number, (None, 0.0))
        if touched != before:
            self._seen[holder.number] = touched, self._clock()
            return False
        silent_s = now - since
        if silent_s > self._lease_s or (silent_s > HERE_S and holder.is_dead_here):
            return True
        return silent_s > OVER_S and self._ended_by_batch_system(holder)

    def _ended_by_batch_system(self, holder: LeaseHolder) -> bool:
        """Return true if the batch system had ended the whole job when it was last asked."""
        record = read_record(self._folder)
        jobs = record.jobs if record else ()
        return any(job.batch_id == holder.batch_id and job.left_no_process for job in jobs)

    def _hold(self) -> None:
        with self._moving:
            self._end_if_late()
            before = self._current()
            write_json(self._folder.lease, encode(self._holder))
            # This driver may have stood still here, and count as dead for others.
            self._end_if_late()
            self._path = self._folder.lease
        for number in range(before + 1, self._holder.number + 1):
            self._folder.ticket(number).unlink(missing_ok=True)

    def _withdraw(self) -> None:
        if self._path == self._folder.lease:
            self._ended.set()
        else:
            # Its file stays: a number is used once.
            self.release()


def release_ended(folder: RunFolder, job: int) -> None:
    """Release the lease of a job whose driver was killed on this machine, so that the next need not wait."""
    seen = _read(folder.lease)
    # The next driver takes a released lease at any moment, and would find its own overwritten.
    if not seen or seen[0].over or seen[0].job != job:
        return
    if seen[0].machine == HostBoot.this() and not seen[0].driver.alive:
        write_json(folder.lease, encode(replace(seen[0], over=True)))


def _read(path: Path) -> tuple[LeaseHolder, int] | None:
    """Return the driver in a file, and the time of the last touch in nanoseconds; None without the file."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        return decode(LeaseHolder, json.loads(file.read())), os.fstat(file.fileno()).st_mtime_ns
    return None
