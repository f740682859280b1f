"""One driver of a run holds its lease, whatever others believe; clocks of the tests are their own."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace

import pytest
from workbench import wait_for

from hetctl.model.job import Job, JobState
from hetctl.model.plan import Plan
from hetctl.model.serialization import encode
from hetctl.model.site import LEASE_SHARE
from hetctl.storage import lease as leases
from hetctl.storage.lease import Lease, LeaseLostError, SupersededError, release_ended
from hetctl.storage.paths import RunFolder
from hetctl.storage.processes import Process
from hetctl.storage.run_files import CatalogRecord, write_record

LEASE_S = 100.0
PLAN = Plan("fluid", "makespan", 2, 2, 1.0, 1.0, 1.0, ())


class Clock:
    """A clock that only sleeping drivers move."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class LostError(Exception):
    """End of a driver in these tests."""


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "r").create()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def draw(folder, clock):
    """Make drivers that draw a number; none renews its lease by itself."""

    def lose(reason):
        raise LostError(reason)

    def make(job=0, *, alone=False):
        made = Lease(
            *(folder, job, f"10{job}", LEASE_S), alone=alone, on_lost=lose, say=lambda _: None, clock=clock
        )
        made._ended.set()
        return made

    return make


def take(lease, clock, gives_up=lambda: ""):
    def sleep(seconds):
        clock.sleep(seconds)
        lease.renew()

    lease.acquire(gives_up, sleep)
    return lease


def test_the_first_driver_has_the_lease_at_once(draw, clock, folder):
    take(draw(), clock).mark.check()
    assert clock.now == 0.0
    assert [path.name for path in folder.path.glob("driver.lease*")] == ["driver.lease"]


def test_a_released_lease_is_taken_at_once(draw, clock):
    take(draw(0), clock).release()
    take(draw(1), clock)
    assert clock.now == 0.0


def test_a_driver_that_gives_signs_of_life_is_waited_for(draw, clock):
    holder, steps = take(draw(0), clock), iter(range(100))

    def touch():
        if next(steps, None) is None:
            return "the job ended"
        time.sleep(0.005)  # by the clock of the file system
        clock.sleep(LEASE_S / 3)
        holder.renew()
        return ""

    with pytest.raises(SupersededError, match="the job ended"):
        take(draw(1), clock, touch)
    assert clock.now > 10 * LEASE_S
    holder.mark.check()


def test_a_holder_knows_of_a_later_driver_that_waits(draw, clock):
    holder = take(draw(1), clock)
    for job, is_claimed in ((0, False), (1, True)):
        draw(job)
        holder.renew()
        assert holder.is_claimed is is_claimed


def test_a_silent_driver_is_replaced_and_ends_when_it_wakes(draw, clock):
    silent = take(draw(0), clock)
    take(draw(1), clock)
    assert LEASE_S < clock.now < 1.1 * LEASE_S
    with pytest.raises(LeaseLostError, match="job 1"):
        silent.mark.check()
    for act in (silent.check, silent.renew):
        with pytest.raises(LostError, match="in time"):
            act()


def test_a_holder_ends_before_others_count_it_as_dead(draw, clock):
    holder = take(draw(0), clock)
    clock.now = LEASE_SHARE * LEASE_S + 1
    assert clock.now < LEASE_S
    with pytest.raises(LostError):
        holder.renew()


def test_a_driver_that_stood_still_as_it_waited_does_not_begin(draw, clock):
    take(draw(0), clock).release()
    late = draw(1)
    clock.now = 2 * LEASE_S
    with pytest.raises(LostError):
        take(late, clock)


def test_a_holder_whose_file_is_another_drivers_ends(draw, clock):
    first, second = take(draw(0), clock), draw(1)
    first.release()
    take(second, clock)
    with pytest.raises(LostError, match="job 1"):
        first.renew()


def test_the_driver_of_an_earlier_job_gives_way(draw, clock):
    holder = take(draw(2), clock)
    with pytest.raises(SupersededError, match="job 2"):
        take(draw(1), clock)
    # Nothing of it keeps others waiting.
    holder.release()
    take(draw(3), clock)
    assert clock.now == 0.0


def test_a_driver_that_waits_gives_way_to_a_later_one(draw, clock):
    take(draw(0), clock)
    second = draw(1)
    draw(2)
    second.renew()
    with pytest.raises(SupersededError, match="a later driver"):
        take(second, clock)


def with_process(lease, started):
    lease._holder = replace(lease._holder, driver=Process(os.getpid(), started))
    return lease


def test_a_driver_killed_here_is_known_to_be_dead(draw, clock):
    with_process(take(draw(0, alone=True), clock), -1)._hold()
    take(draw(1), clock)
    assert clock.now < LEASE_S / 10


def call(folder, state, batch_id="100", failed_nodes=()):
    """Record what the batch system said of the first job."""
    job = Job(0, "r-0", batch_id, state, 2, 3600, 0.0, failed_nodes=failed_nodes)
    write_record(folder, encode(CatalogRecord("i", 0.0, "running", "", PLAN, (job,))))


@pytest.mark.parametrize(
    "state", [JobState.CANCELLED, JobState.TIMEOUT, JobState.FAILED, JobState.OUT_OF_MEMORY]
)
def test_a_job_that_was_killed_as_a_whole_is_replaced_soon(draw, clock, folder, state):
    take(draw(0), clock)
    call(folder, state)
    take(draw(1), clock)
    assert clock.now < LEASE_S / 5


@pytest.mark.parametrize(
    ("state", "known"),
    [
        (JobState.RUNNING, {}),
        (JobState.UNKNOWN, {}),
        (JobState.VANISHED, {}),
        (JobState.NODE_FAILED, {}),
        (JobState.CANCELLED, {"failed_nodes": ("n1",)}),
        (JobState.CANCELLED, {"batch_id": "99"}),
    ],
)
def test_a_job_that_may_have_left_processes_is_waited_for(draw, clock, folder, state, known):
    take(draw(0), clock)
    call(folder, state, **known)
    take(draw(1), clock)
    assert clock.now > LEASE_S


def test_a_living_driver_whose_job_is_called_over_is_waited_for(draw, clock, folder):
    holder, steps = take(draw(0), clock), iter(range(20))
    call(folder, JobState.CANCELLED)

    def touch():
        time.sleep(0.005)  # by the clock of the file system
        clock.sleep(LEASE_S / 10)
        holder.renew()
        return "the job ended" if next(steps, None) is None else ""

    with pytest.raises(SupersededError, match="the job ended"):
        take(draw(1), clock, touch)
    holder.mark.check()


def test_a_replaced_driver_ends_when_it_wakes_soon_after(draw, clock, folder):
    woken = take(draw(0), clock)
    call(folder, JobState.CANCELLED)
    take(draw(1), clock)
    assert clock.now < LEASE_SHARE * LEASE_S
    with pytest.raises(LostError, match="job 1"):
        woken.check()


@pytest.mark.parametrize("is_dead", [True, False])
def test_the_script_of_a_killed_driver_releases_its_lease(draw, clock, folder, is_dead):
    holder = take(draw(0), clock)
    if is_dead:
        with_process(holder, -1)._hold()
    release_ended(folder, 1)
    assert not leases._read(folder.lease)[0].over
    release_ended(folder, 0)
    assert leases._read(folder.lease)[0].over is is_dead


def test_a_lease_that_was_released_is_not_written_again(draw, clock, folder):
    holder = with_process(take(draw(0), clock), -1)
    holder.release()
    before = folder.lease.stat().st_ino
    release_ended(folder, 0)
    assert folder.lease.stat().st_ino == before


def test_of_many_drivers_at_once_one_holds_at_a_time(folder):
    held, most, done, guard = [], [], [], threading.Lock()

    def drive():
        lease = Lease(folder, 0, "1", LEASE_S, alone=False, on_lost=done.append, say=lambda _: None)
        try:
            lease.acquire(lambda: "", lambda _: time.sleep(0.001))
        except SupersededError:
            done.append("gave way")
            return
        with guard:
            held.append(lease)
            most.append(len(held))
        time.sleep(0.005)
        with guard:
            held.remove(lease)
        lease.release()
        done.append("held")

    threads = [threading.Thread(target=drive) for _ in range(12)]
    for thread in threads:
        thread.start()
    wait_for(lambda: len(done) == len(threads), 60)
    assert max(most) == 1
    assert set(done) <= {"held", "gave way"}
    assert done.count("held") == len(most)
