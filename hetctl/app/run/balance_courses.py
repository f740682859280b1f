"""Balancing of a run's members, from their logs."""

from __future__ import annotations

from pathlib import Path

from hetctl.methods.balance.observation_log import ManagerStart, counted, course_of, records_in
from hetctl.model.errors import BadInputError
from hetctl.model.run_status import BalanceCourse
from hetctl.storage.paths import RunFolder


def balance_courses(folder: RunFolder) -> tuple[BalanceCourse, ...]:
    """Return the courses of all members with balanced batches, the largest gain first."""
    found = (_course(path) for path in sorted(folder.balance.glob("*.jsonl")))
    return tuple(sorted(filter(None, found), key=lambda course: -course.gain))


def _course(path: Path) -> BalanceCourse | None:
    """Return the course of one member; None for a log without iterations, or damaged on disk."""
    try:
        with path.open(encoding="utf-8") as lines:
            records = list(records_in(lines))
    except (OSError, UnicodeDecodeError, BadInputError):
        return None
    workers = [record.workers for record in records if isinstance(record, ManagerStart)]
    iterations = counted(records)
    # A member may go on with another number of workers: the course is that of the last ones.
    same = [one for one in iterations if workers and len(one.batches) == len(workers[-1])]
    return course_of(path.stem, workers[-1], same) if same else None
