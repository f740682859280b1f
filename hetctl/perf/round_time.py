"""Predicted duration of a round at its start."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.model.workload import Workload
from hetctl.perf.epoch_timeline import EpochTimeline


def step_s(workload: Workload, rate: float) -> float:
    """Return the seconds until a member that trains without interruption has converged."""
    course = EpochTimeline(workload, rate)
    return workload.startup_s + course.end_of(course.count)


def round_s(steps: Sequence[tuple[float, int]], alpha: float) -> float:
    """Return the seconds until less than the share `alpha` of a round's GPUs is active.

    Parameters
    ----------
    steps : sequence of (seconds, GPUs)
        Seconds and GPUs of each member's step.
    """
    active = sum(gpus for _, gpus in steps)
    least = alpha * active
    for seconds, gpus in sorted(steps):
        active -= gpus
        if active < least or active == 0:
            return seconds
    return 0.0
