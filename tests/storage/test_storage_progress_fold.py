"""Progress of members and use of resources, folded from events."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from whole_folds import progress_in, progress_of, usage_of

from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.events import (
    DRIVER,
    FREE_DISK_ERRORS,
    FREE_NODE_FAILURES,
    MEMBER_FAULTS,
    REQUESTS,
    Event,
    ExitReason,
)
from hetctl.model.run import Usage
from hetctl.perf.rate_prediction import seen_rates
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import RunFolder
from hetctl.storage.progress_fold import ProgressFold, events_in

ENSEMBLE = Ensemble("e", "tensorflow", Functions("a:b", "a:c"), (Member("a"), Member("b")), "/x")
RETRIES = 2


def event(source, kind, time=0.0, **data):
    return Event(source, 0, kind, time, data)


def epoch(member, number, **later):
    result = {
        "epoch": number,
        "metrics": {"loss": 1 / min(number, 2**53)},
        "duration_s": 1.0,
        "gpus": 1,
        "finished_at": 0.0,
    }
    return event(member, "epoch", **result | later)


def started(member, time, gpus):
    return event(DRIVER, "task_started", time, member=member, gpus=gpus, placement=[])


def ended(member, reason="program-error", description="exit code 1", time=0.0, **more):
    end = {"member": member, "exit_code": 1, "reason": reason, "description": description}
    return event(DRIVER, "task_ended", time, **end, **more)


def fold(*events):
    return progress_of(ENSEMBLE, events, RETRIES)


def test_every_member_is_active_at_zero_without_events():
    progress = fold()
    assert list(progress) == ["a", "b"]
    assert all(member.active and not member.epochs for member in progress.values())


def test_the_newest_restarts_are_kept():
    starts = [event("a", "first_step", startup_s=9.0, restart_s=None)]
    starts += [event("a", "first_step", startup_s=9.0, restart_s=float(seconds)) for seconds in range(5)]
    assert fold(*starts[:1])["a"].restarts_s == ()
    assert fold(*starts)["a"].restarts_s == (2.0, 3.0, 4.0)
    # One that begins on a rank that others have started did not wait for itself alone.
    assert (fold(*starts)["a"].startup_s, fold(starts[-1])["a"].startup_s) == (9.0, 4.0)


def test_a_rate_counts_before_the_first_epoch_has_ended():
    timed = {"rate": 50.0, "gpus": 2, "batch_size": 32, "gpu_type": None, "error": 0.04}
    begun = [event("a", "started", epochs=0, part_samples=0, samples=640), event("a", "rate", 1.0, **timed)]
    member = fold(*begun)["a"]
    assert (member.samples_per_epoch, len(member.epochs)) == (640, 0)
    assert seen_rates(member.epochs, 32) == {"": {2: 50.0}}
    again = event("a", "started", 2.0, epochs=0, part_samples=0)
    member = fold(*begun, again, epoch("a", 1, rate=40.0, gpus=1, batch_size=32))["a"]
    assert (member.samples_per_epoch, seen_rates(member.epochs, 32)) == (640, {"": {2: 50.0, 1: 40.0}})


def test_an_epoch_that_is_reported_twice_counts_once():
    progress = fold(epoch("a", 1), epoch("a", 2), epoch("a", 2, evaluate_s=1.0), epoch("a", 3))["a"]
    assert [done.epoch for done in progress.epochs] == [1, 2, 3]


def saved(member, time, epochs, part_samples=0):
    return event(member, "checkpoint", time, epoch=epochs, part_samples=part_samples)


def reached_at(*events):
    progress = ProgressFold(ENSEMBLE, RETRIES)
    progress.add(events)
    return progress.reached_at


def test_only_getting_further_than_ever_is_progress():
    told = [
        saved("a", 1, 1),
        saved("a", 2, 1),
        saved("b", 3, 0, 10),
        saved("b", 4, 0, 5),
        saved("a", 5, 1, 2),
    ]
    assert [reached_at(*told[: count + 1]) for count in range(len(told))] == [1, 1, 3, 3, 5]


def test_a_checkpoint_of_nothing_is_no_progress():
    assert reached_at(saved("a", 1, 0)) == 0.0


def test_an_epoch_with_numbers_beyond_all_floats_is_left_out():
    assert len(fold(epoch("a", 1), epoch("a", 10**400))["a"].epochs) == 1


def in_lines(*events):
    return [replace(each, seq=line, time=float(line)) for line, each in enumerate(events)]


def resumed(epochs, part_samples=0):
    return event("a", "started", epochs=epochs, part_samples=part_samples)


FIRST_LIFE = [epoch("a", number, finished_at=float(number)) for number in (1, 2, 3, 4)]
SECOND_LIFE = [epoch("a", number, finished_at=10.0 + number) for number in (3, 4)]


def test_epochs_after_the_checkpoint_count_no_more():
    told = in_lines(resumed(0), *FIRST_LIFE, resumed(2, 64), *SECOND_LIFE)
    counted = [len(fold(*told[:count])["a"].epochs) for count in range(len(told) + 1)]
    assert counted == [0, 0, 1, 2, 3, 4, 2, 3, 4]
    assert fold(*told[:6])["a"].part_samples == 64
    assert [done.finished_at for done in fold(*told)["a"].epochs] == [1.0, 2.0, 13.0, 14.0]


@given(st.permutations(range(8)))
def test_clocks_do_not_tell_which_epochs_count(order):
    told = in_lines(resumed(0), *FIRST_LIFE, resumed(2), *SECOND_LIFE)
    progress = fold(*(told[number] for number in order))["a"]
    assert [done.finished_at for done in progress.epochs] == [1.0, 2.0, 13.0, 14.0]


def test_epochs_trained_again_do_not_forgive_failures():
    lives = [resumed(0), *FIRST_LIFE[:1], ended("a")] * (RETRIES + 2)
    again = [replace(each, seq=line) for line, each in enumerate(lives)]
    again = [
        replace(each, data={**each.data, "finished_at": float(each.seq)}) if each.kind == "epoch" else each
        for each in again
    ]
    progress = fold(*again)["a"]
    assert progress.failed
    assert len(progress.epochs) == 1


def test_failures_add_up_until_an_epoch_is_finished():
    failing = [ended("a")] * RETRIES
    assert fold(*failing)["a"].failures == RETRIES
    assert fold(*failing, epoch("a", 1))["a"].failures == 0
    assert fold(*failing, epoch("a", 1), *failing)["a"].active


@pytest.mark.parametrize(
    "reason",
    sorted(MEMBER_FAULTS - {ExitReason.OUT_OF_MEMORY, ExitReason.BAD_INPUT}, key=lambda each: each.value),
)
def test_member_is_given_up_after_its_retries_whatever_its_fault(reason):
    failing = [ended("a", reason.value, f"it {reason.value}")] * (RETRIES + 1)
    assert fold(*failing[1:])["a"].active
    assert fold(*failing)["a"].failed == f"it {reason.value}"


def test_a_member_fails_with_its_own_error_after_its_retries():
    failing = [event("a", "failed", error="no such layer"), ended("a")] * (RETRIES + 1)
    progress = fold(*failing)
    assert progress["a"].failed == "no such layer"
    assert progress["b"].active


@pytest.mark.parametrize(
    "reason",
    sorted(
        set(ExitReason) - MEMBER_FAULTS - {ExitReason.NODE_FAILURE, ExitReason.DISK_ERROR},
        key=lambda each: each.value,
    ),
)
def test_ends_without_fault_of_the_member_do_not_count(reason):
    assert fold(*[ended("a", reason.value)] * 9)["a"] == fold()["a"]


def test_an_input_error_fails_a_member_at_once_until_it_is_tried_again():
    ends = event("a", "failed", error="no such metric"), ended("a", "bad-input")
    assert fold(*ends)["a"].failed == "no such metric"
    assert fold(*ends, event(REQUESTS, "request", member="a", want="retry"))["a"] == fold()["a"]


def test_the_error_is_that_of_the_last_failure():
    ends = [event("a", "failed", error="no such layer"), ended("a")] * RETRIES
    assert fold(*ends, ended("a", "killed", "killed by SIGKILL"))["a"].failed == "killed by SIGKILL"


def test_node_failures_are_free_up_to_a_cap():
    failing = [ended("a", "node-failure", "node failure")] * FREE_NODE_FAILURES
    assert (fold(*failing)["a"].failures, fold(*failing)["a"].active) == (0, True)
    more = [ended("a", "node-failure", "node failure")] * (RETRIES + 1)
    assert fold(*failing, *more)["a"].failed == "node failure"
    assert fold(*failing, epoch("a", 1), *more[:1])["a"].failures == 1


def test_disk_errors_are_free_as_long_as_there_is_progress():
    failing = [ended("a", "disk-error", "the file system did not answer")] * FREE_DISK_ERRORS
    assert fold(*failing)["a"].failures == 0
    assert fold(*failing, saved("a", 9, 0, 10), *failing, epoch("a", 1), *failing)["a"].failures == 0
    # The same checkpoint again, from which each attempt begins, is none.
    begun = [saved("a", 9, 0, 10), *failing, saved("a", 9, 0, 10)]
    assert fold(*begun, *failing[:RETRIES])["a"].active
    assert fold(*begun, *failing[:RETRIES], failing[0])["a"].failed == "the file system did not answer"


def test_out_of_memory_fails_a_member_at_its_smallest_batch():
    progress = fold(ended("a", "out-of-memory", "out of memory: 3.00 GiB at its peak"))
    assert progress["a"].failed == "out of memory: 3.00 GiB at its peak"
    assert progress["b"].active


UNFIT = (
    *({"unfit_gpus": 4}, {"unfit_gpus": 2}, {"unfit_gpus": 4, "gpu_type": None}),
    *({"unfit_gpus": 2, "gpu_type": "V100"}, {"gpu_type": "V100"}),
)


def test_numbers_of_gpus_without_enough_memory_do_not_count_until_the_batch_is_smaller():
    shrinking = replace(ENSEMBLE, members=(Member("a", batch_size=50, min_batch_size=16),))
    ends = [
        event(
            DRIVER, "task_ended", at, member="a", exit_code=71, reason="out-of-memory", description="", **of
        )
        for at, of in enumerate(UNFIT)
    ]
    known = [progress_of(shrinking, ends[: n + 1], RETRIES)["a"] for n in range(len(ends))]
    assert [progress.unfit for progress in known] == [
        *((("", 4),), (("", 2), ("", 4)), (("", 2), ("", 4)), (("", 2), ("", 4), ("V100", 2))),
        (),
    ]
    assert [progress.batch_size for progress in known] == [None, None, None, None, 25]
    assert all(progress.active and not progress.failures for progress in known)


def test_out_of_memory_halves_the_batch_down_to_the_least():
    shrinking = replace(ENSEMBLE, members=(Member("a", batch_size=50, min_batch_size=16),))
    sizes = []
    for times in range(4):
        ends = [
            event("a", "failed", error="MemoryError"),
            ended("a", "out-of-memory", "out of memory"),
        ] * times
        progress = progress_of(shrinking, [*ends, epoch("a", 1)], RETRIES)["a"]
        sizes.append((progress.batch_size, progress.failures, progress.failed))
    assert sizes == [(None, 0, None), (25, 0, None), (16, 0, None), (16, 0, "out of memory")]


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_batches_shrink_to_the_least_and_no_further(batch_size, least):
    member, sizes = Member("a", batch_size=batch_size, min_batch_size=least), [batch_size]
    while smaller := member.smaller_batch(sizes[-1]):
        sizes.append(smaller)
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[-1] == min(least, batch_size)


def test_a_member_that_has_converged_cannot_fail_any_more():
    progress = fold(event("a", "converged", reason="target"), *[ended("a")] * 5)["a"]
    assert (progress.converged, progress.failed) == ("target", None)


def test_a_member_with_a_raised_limit_continues_and_can_fail():
    done = [*(epoch("a", number) for number in (1, 2)), event("a", "converged", reason="2 epochs done")]
    rule = StopRule(metric="loss", max_epochs=2)
    limited, raised = (
        replace(ENSEMBLE, members=(Member("a", stop=replace(rule, max_epochs=most)),)) for most in (2, 3)
    )
    assert progress_of(limited, done, RETRIES)["a"].converged == "2 epochs done"
    going_on = progress_of(raised, done, RETRIES)["a"]
    assert (going_on.active, len(going_on.epochs)) == (True, 2)
    assert progress_of(raised, [*done, *[ended("a")] * (RETRIES + 1)], RETRIES)["a"].failed
    again = [*done, epoch("a", 3), event("a", "converged", reason="3 epochs done")]
    assert progress_of(raised, again, RETRIES)["a"].converged == "3 epochs done"


def test_a_stopped_member_that_has_reached_a_lowered_limit_is_done():
    events = [*(epoch("a", number) for number in (1, 2, 3)), event("a", "stopped", reason="deadline")]
    found = {}
    for most in (3, 2, 4):
        rule = StopRule(metric="loss", max_epochs=most)
        limited = replace(ENSEMBLE, members=(Member("a", stop=rule),))
        found[most] = progress_of(limited, events, RETRIES)["a"]
        # In training it has yet to save what it has reached.
        assert progress_of(limited, events[:-1], RETRIES)["a"].active
    assert {most: done.converged for most, done in found.items()} == {
        3: "3 epochs done",
        2: "2 epochs done",
        4: None,
    }


def test_part_of_an_epoch_counts_until_the_epoch_is_finished():
    stopped = event("a", "stopped", reason="alpha", part_samples=320)
    assert fold(epoch("a", 1), stopped)["a"].part_samples == 320
    assert fold(epoch("a", 1), stopped, epoch("a", 2))["a"].part_samples == 0


def test_the_time_of_a_command_adds_up():
    starts = [event("a", "stopped", reason="deadline", duration_s=5.0) for _ in range(2)]
    done = event("a", "converged", reason="exit code 0", duration_s=2.5)
    assert fold(*starts, done)["a"].script_s == 12.5


def test_members_that_are_not_in_the_ensemble_are_passed_over():
    assert fold(epoch("stranger", 1), ended("stranger")) == fold()


@given(st.lists(st.integers(1, 8), max_size=12), st.randoms())
def test_the_order_of_epochs_does_not_matter(numbers, random):
    events = [epoch("a", number) for number in numbers]
    shuffled = random.sample(events, len(events))
    assert fold(*events) == fold(*shuffled)


@given(st.permutations([epoch("a", 1), epoch("a", 2), epoch("b", 1), event("b", "converged", reason="r")]))
def test_members_do_not_touch_each_other(events):
    assert fold(*events) == {
        "a": fold(*(e for e in events if e.source == "a"))["a"],
        "b": fold(*(e for e in events if e.source == "b"))["b"],
    }


def test_events_of_all_rounds_are_read(tmp_path):
    run = RunFolder(tmp_path)
    for index in (0, 1):
        writer = EventWriter(run.create().events, "a", index)
        writer.write("epoch", **epoch("a", index + 1).data)
    assert [e.data["epoch"] for e in events_in(run)] == [1, 2]
    assert len(progress_in(run, ENSEMBLE, RETRIES)["a"].epochs) == 2


def test_use_counts_rounds_and_gpu_seconds():
    events = [
        event(DRIVER, "round_started", 0),
        started("a", 10, 2),
        started("b", 10, 1),
        ended("a", time=30),
        event(DRIVER, "round_started", 30),
        event("a", "task_started", 30, member="a", gpus=50, placement=[]),
    ]
    assert usage_of(events, now=50) == Usage(rounds=2, gpu_seconds=20 * 2 + 40)


def test_a_task_of_a_killed_job_counts_until_the_last_event():
    events = [
        event(DRIVER, "job_started", 0, job=0),
        started("a", 10, 2),
        event("a", "epoch", 30),
        event(DRIVER, "job_started", 1000, job=1),
    ]
    assert usage_of(events, now=2000).gpu_seconds == 20 * 2
    seats = [{"node": "n", "gpus": [0], "seat": seat} for seat in (1, 2)]
    start, *_, end, after = events
    shared = [
        event(DRIVER, "task_started", 10, member=name, gpus=1, placement=[seat])
        for name, seat in zip("ab", seats, strict=True)
    ]
    # A shared GPU counts once, also while the job runs.
    assert usage_of([start, *shared, end, after], now=2000).gpu_seconds == 20
    assert usage_of([start, *shared, end], now=30).gpu_seconds == 20


def test_use_sums_the_measured_energy_of_ended_tasks():
    events = [
        *(started("a", 10, 2), ended("a", time=30, energy_j=500.0)),
        *(started("b", 10, 1), ended("b", time=30)),
        *(started("a", 40, 2), ended("a", time=50, energy_j=25.5)),
    ]
    assert usage_of(events, now=60).energy_j == 525.5
    assert usage_of(events[2:4], now=60).energy_j is None


def test_an_end_without_a_start_costs_nothing():
    assert usage_of([ended("a", time=30)], now=50) == Usage(0, 0.0)


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0, 100)), max_size=8))
def test_use_is_the_sum_over_steps(steps):
    events, now = [], 0.0
    for gpus, seconds in steps:
        events.append(started("a", now, gpus))
        now += seconds
        events.append(ended("a", time=now))
    assert usage_of(events, now).gpu_seconds == pytest.approx(sum(g * s for g, s in steps))
