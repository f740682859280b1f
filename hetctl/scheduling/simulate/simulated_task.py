"""Task of one member on its GPUs, computed at once from start to end."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from hetctl.model.plan import Allocation, Forecast
from hetctl.model.values import dataclass
from hetctl.model.workload import Workload
from hetctl.perf.epoch_timeline import TOLERANCE, EpochTimeline


@dataclass(frozen=True, slots=True)
class SimulatedTask:
    """Training of a member in one round.

    Parameters
    ----------
    workload : Workload
        The member when the task started.
    samples_left : float
        Samples that are left when the task ends; 0 if the member has converged.
    rate : float
        Rate in samples/s from `paced_s` on, when `paced_left` samples were left.
    """

    workload: Workload
    allocation: Allocation
    round_index: int
    start_s: float
    end_s: float
    samples_left: float
    rate: float
    paced_s: float
    paced_left: float

    @property
    def converged(self) -> bool:
        """True if the member needs no more training after this task."""
        return self.samples_left == 0

    @property
    def samples(self) -> float:
        """Samples trained in this task."""
        return self.workload.samples_left - self.samples_left

    @property
    def ready_s(self) -> float:
        """Time of the end of the start-up, unless the task ends before."""
        return self.start_s + self.workload.startup_s

    @property
    def startup_s(self) -> float:
        """Seconds of this task spent on start-up."""
        return min(self.workload.startup_s, self.end_s - self.start_s)

    def left_at(self, now: float) -> float:
        """Return the samples that are left at `now`, before the task's end."""
        if now <= self.paced_s:
            return self.paced_left
        return EpochTimeline(self.workload, self.rate, self.paced_left).left_at(now - self.paced_s)


def begin(
    workload: Workload,
    allocation: Allocation,
    round_index: int,
    start_s: float,
    deadline_s: float,
    max_uninterrupted_s: float = math.inf,
    rate: float | None = None,
) -> SimulatedTask | None:
    """Return the task as it goes unless stopped; None if no progress is possible before the deadline.

    After another epoch, none is started that would end after the deadline, evaluation and checkpoint
    included. A member trains until there is just time for a checkpoint if its epochs are unknown, if its
    next epoch would fit no job, or if its first one does not fit at the pace of its round.

    Parameters
    ----------
    max_uninterrupted_s : float
        Largest time of an epoch with its start-up that fits a job, in seconds.
    rate : float or None
        Rate in samples/s; None: the allocation's.
    """
    rate = allocation.rate if rate is None else rate
    timeline = EpochTimeline(workload, rate)
    ready_s = start_s + workload.startup_s
    training_s = deadline_s - ready_s
    epochs = timeline.epochs_within(training_s)
    done_s, left = timeline.end_of(epochs), timeline.left_after(epochs)
    next_s = workload.startup_s + timeline.end_of(epochs + 1) - done_s
    part = (training_s - done_s - workload.checkpoint_s) * rate
    in_parts = not epochs or not workload.samples_per_epoch or next_s > max_uninterrupted_s
    if in_parts and part > 0 and epochs < timeline.count:
        done_s, left = training_s, left - part
    elif training_s < 0 or (epochs == 0 and timeline.count):
        return None
    end_s = ready_s + done_s
    return SimulatedTask(
        workload, allocation, round_index, start_s, end_s, left, rate, ready_s, workload.samples_left
    )


def with_rate(
    task: SimulatedTask, now: float, rate: float, deadline_s: float, max_uninterrupted_s: float = math.inf
) -> SimulatedTask:
    """Return the task with training at `rate` from `now` on."""
    start_s = _trains_on_s(task, now)
    left = task.left_at(start_s)
    workload = replace(task.workload, samples_left=left, startup_s=0.0)
    rest = begin(workload, task.allocation, 0, start_s, deadline_s, max_uninterrupted_s, rate)
    if rest is None:
        return task
    return replace(
        task, end_s=rest.end_s, samples_left=rest.samples_left, rate=rate, paced_s=start_s, paced_left=left
    )


def _trains_on_s(task: SimulatedTask, now: float) -> float:
    """Return when a task trains after `now`: at once, or after its present start-up or evaluation."""
    if now <= task.paced_s:
        return task.paced_s
    timeline = EpochTimeline(task.workload, task.rate, task.paced_left)
    epochs = timeline.epochs_within(now - task.paced_s)
    trained = (now - task.paced_s - timeline.end_of(epochs)) * task.rate
    return now if trained < timeline.size_of(epochs) else task.paced_s + timeline.end_of(epochs + 1)


def stopped(task: SimulatedTask, now: float) -> SimulatedTask:
    """Return the task after a stop command: it checkpoints in the middle of an epoch.

    A task in its start-up ends after it. One that has trained all samples of its epoch ends with the
    epoch. One that would end before a checkpoint is written ends as planned.
    """
    ending = now + task.workload.checkpoint_s
    if task.end_s <= ending:
        return task
    if now <= task.paced_s:
        return replace(task, end_s=task.paced_s, samples_left=task.paced_left)
    timeline = EpochTimeline(task.workload, task.rate, task.paced_left)
    epochs = timeline.epochs_within(now - task.paced_s)
    trained = max(now - task.paced_s - timeline.end_of(epochs), 0.0) * task.rate
    if trained < timeline.size_of(epochs):
        return replace(task, end_s=ending, samples_left=timeline.left_after(epochs) - trained)
    end_s = task.paced_s + timeline.end_of(epochs + 1)
    return replace(task, end_s=end_s, samples_left=timeline.left_after(epochs + 1))


def samples_left_after_failure(task: SimulatedTask, now: float) -> float:
    """Return the samples left if all progress after the last finished epoch is lost."""
    epoch = task.workload.samples_per_epoch
    if not epoch or now <= task.ready_s:
        return task.workload.samples_left
    timeline = EpochTimeline(task.workload, task.rate, task.paced_left)
    left = timeline.left_after(timeline.epochs_within(now - task.paced_s))
    # A task may have begun within an epoch, whose first part is in an earlier checkpoint.
    return min(math.ceil(left / epoch - TOLERANCE) * epoch, task.workload.samples_left)


def after_failure(task: SimulatedTask, now: float, checkpoint_every_s: float) -> SimulatedTask:
    """Return the task if its GPUs fail at `now`: progress after the last checkpoint is lost.

    A checkpoint is written after each epoch, or every `checkpoint_every_s` by a member without epochs.
    """
    end_s = max(now, task.start_s)
    if task.workload.samples_per_epoch or now <= task.ready_s:
        return replace(task, end_s=end_s, samples_left=samples_left_after_failure(task, now))
    last_s = now - (now - task.ready_s) % checkpoint_every_s
    return replace(task, end_s=end_s, samples_left=task.left_at(last_s))


def forecasts(members: Iterable[str], tasks: Iterable[SimulatedTask]) -> tuple[Forecast, ...]:
    """Return when each member is done, and for how long it trains, from all tasks in order of starts."""
    done_s: dict[str, float] = {}
    training_s: dict[str, float] = defaultdict(float)
    for task in tasks:
        done_s[task.workload.name] = task.end_s
        training_s[task.workload.name] += task.end_s - task.start_s
    return tuple(Forecast(name, done_s[name], training_s[name]) for name in members)
