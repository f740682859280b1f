"""Rates of scripts from their reports."""

from __future__ import annotations

import pytest

from hetctl.perf.step_times import EpochPace, Mark, add_mark, epoch_pace, is_measured, script_pace


def within(epoch: int, began: float, samples: float, rate: float, every_s: float = 0.5) -> list[Mark]:
    """Return reports within an epoch that began at a time, without its end."""
    count = int(samples / rate / every_s)
    return [Mark(began + n * every_s, epoch, n * every_s * rate, finished=False) for n in range(1, count + 1)]


def test_an_epoch_has_the_rate_between_its_ends():
    assert epoch_pace([Mark(10, 1, 100), Mark(20, 2, 100)]) == EpochPace(10, 0)
    assert epoch_pace([Mark(10, 1, 100)]) == EpochPace()
    assert epoch_pace([Mark(10, 1, 100), Mark(20, 2, 0)]) == EpochPace()


def test_seconds_of_training_leave_the_rest_as_overhead():
    assert epoch_pace([Mark(10, 1, 100), Mark(20, 2, 100, seconds=8)]) == EpochPace(12.5, 2)
    assert epoch_pace([Mark(20, 2, 100, seconds=8)]) == EpochPace(12.5)


def test_reports_within_an_epoch_leave_its_evaluation_out():
    end = Mark(116, 2, 100)
    marks = [Mark(100, 1, 100), *within(2, 101, 100, 10), end]
    assert epoch_pace(marks) == EpochPace(pytest.approx(10), pytest.approx(6))
    # The first epoch after a start has a rate by them, too.
    assert epoch_pace(marks[1:]) == EpochPace(pytest.approx(10))
    # Too few of them are no rate of the epoch.
    few = [Mark(100, 1, 100), *marks[1:4], end]
    assert epoch_pace(few) == EpochPace(100 / 16, 0)
    assert epoch_pace(few[1:]) == EpochPace(95 / 14.5, 0)


def test_first_and_last_mark_of_an_epoch_are_kept():
    kept: list[Mark] = []
    for mark in (marks := [Mark(0, 1, 10), *within(2, 1, 100, 10)]):
        kept = add_mark(kept, mark)
    assert kept == [marks[0], marks[1], marks[-1]]
    other = Mark(30, 3, 1, finished=False)
    assert add_mark(kept, other) == [*kept, other]


def test_a_script_has_a_rate_a_start_and_ends_of_epochs():
    marks = [*within(1, 105, 100, 10), Mark(117, 1, 100), *within(2, 118, 100, 10), Mark(130, 2, 100)]
    pace = script_pace(marks, 100)
    assert pace is not None
    assert (pace.rate, pace.startup_s, pace.epoch_s) == (
        pytest.approx(10),
        pytest.approx(5),
        pytest.approx(3),
    )
    assert pace.epoch_samples == 100
    assert is_measured(marks)
    assert not is_measured(marks[:-1])


def test_whole_epochs_are_a_rate_if_there_is_no_other():
    marks = [Mark(12, 1, 100), Mark(22, 2, 100), Mark(32, 3, 100)]
    pace = script_pace(marks, 0)
    assert pace is not None
    assert (pace.rate, pace.startup_s, pace.epoch_s, pace.runs) == (10, pytest.approx(2), 0, 2)
    said = script_pace([Mark(12, 1, 100, seconds=5)], 0)
    assert said is not None
    assert (said.rate, said.startup_s) == (20, pytest.approx(7))


@pytest.mark.parametrize(
    "marks",
    [[], [Mark(9, 1, 100)], [Mark(9, 1, 0), Mark(10, 2, 0)], within(1, 0, 5, 10), [Mark(1, 1, 9, False)]],
    ids=["none", "one epoch", "no samples", "one within", "one part"],
)
def test_too_few_reports_are_no_rate(marks):
    assert script_pace(marks, 0) is None


def test_a_step_that_is_reported_twice_or_counted_back_is_no_run():
    marks = [*within(1, 0, 50, 10), *within(1, 10, 50, 10)]
    pace = script_pace(marks, 0)
    assert pace is not None
    assert pace.rate == pytest.approx(10)
