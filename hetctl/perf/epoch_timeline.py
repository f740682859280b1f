"""Times of a member's epochs at a constant rate."""

from __future__ import annotations

import math

from hetctl.model.workload import Workload

TOLERANCE = 1e-9
"""Tolerance in epochs, so that rounding neither adds nor removes an epoch."""
PART_SHARE = 0.9
"""Share of a whole job's time above which an epoch is trained in parts."""


def task_s(workload: Workload, rate: float) -> float:
    """Return the seconds until a member that trains without interruption has converged."""
    timeline = EpochTimeline(workload, rate)
    return workload.startup_s + timeline.end_of(timeline.count)


def least_task_s(workload: Workload, rate: float, max_uninterrupted_s: float = math.inf) -> float:
    """Return the least seconds of a useful task: its start-up and one epoch.

    If that is longer than `max_uninterrupted_s`, any part of the epoch is useful: a part ends with a
    checkpoint, too.
    """
    first = EpochTimeline(workload, rate).end_of(1) if workload.samples_per_epoch else 0.0
    whole = workload.startup_s + max(first, workload.checkpoint_s)
    return whole if whole <= max_uninterrupted_s else workload.startup_s + workload.checkpoint_s


def has_room(
    workload: Workload, rate: float, start_s: float, deadline_s: float, max_uninterrupted_s: float = math.inf
) -> bool:
    """Return true if a task that begins at `start_s` can be useful before the deadline (`least_task_s`)."""
    timeline = EpochTimeline(workload, rate)
    training_s = deadline_s - (start_s + workload.startup_s)
    if training_s >= 0 and (timeline.epochs_within(training_s) or not timeline.count):
        return True
    in_parts = not workload.samples_per_epoch or workload.startup_s + timeline.end_of(1) > max_uninterrupted_s
    return in_parts and training_s > workload.checkpoint_s


class EpochTimeline:
    """Epochs of a member that trains without interruption; seconds count from the end of its start-up.

    Epochs end when the samples left are a multiple of an epoch's samples, so that the first one is shorter
    for a member that was stopped within an epoch. If the length of an epoch is unknown, all remaining work
    is one epoch without evaluation.
    """

    __slots__ = ("count", "each", "first", "left", "overhead_s", "rate")

    def __init__(self, workload: Workload, rate: float, left: float | None = None) -> None:
        left = workload.samples_left if left is None else left
        self.each = float(workload.samples_per_epoch or left or 1.0)
        # Work left is a difference of floats: 3.0000000001 epochs are three.
        self.count = max(1, math.ceil(left / self.each - TOLERANCE)) if left else 0
        self.first = left - max(self.count - 1, 0) * self.each
        self.left = left
        self.rate = rate
        self.overhead_s = workload.overhead_s

    def size_of(self, epoch: int) -> float:
        """Return the samples of an epoch, counted from 0."""
        return self.each if epoch else self.first

    def end_of(self, epochs: int) -> float:
        """Return the seconds until that many epochs are finished, with evaluation and checkpoint."""
        if epochs == 0:
            return 0.0
        return (self.first + (epochs - 1) * self.each) / self.rate + epochs * self.overhead_s

    def epochs_within(self, seconds: float) -> int:
        """Return the number of epochs that end within a number of seconds."""
        period_s = self.each / self.rate + self.overhead_s
        further = (seconds - self.end_of(1)) / period_s + TOLERANCE
        # The minimum comes before int(), which raises for an infinite time.
        return 0 if further < 0 else 1 + int(min(self.count - 1, further))

    def left_after(self, epochs: int) -> float:
        """Return the samples left after that many epochs."""
        return (self.count - epochs) * self.each if epochs else self.left

    def left_at(self, seconds: float) -> float:
        """Return the samples left after a number of seconds."""
        epochs = self.epochs_within(seconds)
        if epochs >= self.count:
            return 0.0
        trained = max(seconds - self.end_of(epochs), 0.0) * self.rate
        return self.left_after(epochs) - min(trained, self.size_of(epochs))
