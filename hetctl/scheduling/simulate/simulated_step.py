"""Step of one member on its GPUs, computed at once from start to end."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from hetctl.model.plan import Allocation, Forecast
from hetctl.model.workload import Workload
from hetctl.perf.epoch_timeline import TOLERANCE, EpochTimeline


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Training of a member in one round.

    Parameters
    ----------
    workload : Workload
        The member when the step started.
    samples_left : float
        Samples that are left when the step ends; 0 if the member has converged.
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
        """True if the member needs no more training after this step."""
        return self.samples_left == 0

    @property
    def samples(self) -> float:
        """Samples trained in this step."""
        return self.workload.samples_left - self.samples_left

    @property
    def ready_s(self) -> float:
        """Time of the end of the start-up, unless the step ends before."""
        return self.start_s + self.workload.startup_s

    @property
    def startup_s(self) -> float:
        """Seconds of this step spent on start-up."""
        return min(self.workload.startup_s, self.end_s - self.start_s)

    def left_at(self, now: float) -> float:
        """Return the samples that are left at `now`, before the step's end."""
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
) -> SimulatedStep | None:
    """Return the step as it goes unless stopped; None if no progress is possible before the deadline.

    An epoch that would end after the deadline, evaluation and checkpoint included, is not started.
    A member without known epochs trains until there is just time for a checkpoint, and so does one
    whose next epoch would fit no job.

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
    if (
        part > 0
        and epochs < timeline.count
        and (not workload.samples_per_epoch or next_s > max_uninterrupted_s)
    ):
        done_s, left = training_s, left - part
    elif training_s < 0 or (epochs == 0 and timeline.count):
        return None
    end_s = ready_s + done_s
    return SimulatedStep(
        workload, allocation, round_index, start_s, end_s, left, rate, ready_s, workload.samples_left
    )


def begin_at_pace(
    workload: Workload,
    allocation: Allocation,
    round_index: int,
    start_s: float,
    deadline_s: float,
    max_uninterrupted_s: float,
    rate: float | None,
) -> SimulatedStep | None:
    """Return the step of a member that fits at its own rate.

    If it does not fit at the rate of its round, the deadline stops it in the middle of an epoch.
    """
    epochs = begin(workload, allocation, round_index, start_s, deadline_s, max_uninterrupted_s, rate)
    return epochs or begin(workload, allocation, round_index, start_s, deadline_s, 0.0, rate)


def paced(
    step: SimulatedStep, now: float, rate: float, deadline_s: float, max_uninterrupted_s: float = math.inf
) -> SimulatedStep:
    """Return the step with training at `rate` from `now` on."""
    start_s = _trains_on_s(step, now)
    left = step.left_at(start_s)
    workload = replace(step.workload, samples_left=left, startup_s=0.0)
    rest = begin_at_pace(workload, step.allocation, 0, start_s, deadline_s, max_uninterrupted_s, rate)
    if rest is None:
        return step
    return replace(
        step, end_s=rest.end_s, samples_left=rest.samples_left, rate=rate, paced_s=start_s, paced_left=left
    )


def _trains_on_s(step: SimulatedStep, now: float) -> float:
    """Return when a step trains after `now`: at once, or after its present start-up or evaluation."""
    if now <= step.paced_s:
        return step.paced_s
    timeline = EpochTimeline(step.workload, step.rate, step.paced_left)
    epochs = timeline.epochs_within(now - step.paced_s)
    trained = (now - step.paced_s - timeline.end_of(epochs)) * step.rate
    return now if trained < timeline.size_of(epochs) else step.paced_s + timeline.end_of(epochs + 1)


def stopped(step: SimulatedStep, now: float) -> SimulatedStep:
    """Return the step after a stop command: it checkpoints in the middle of an epoch.

    A step in its start-up ends after it; one that has trained all samples of its epoch ends with the
    epoch; and one that would end before a checkpoint could be written ends as planned.
    """
    ending = now + step.workload.checkpoint_s
    if step.end_s <= ending:
        return step
    if now <= step.paced_s:
        return replace(step, end_s=step.paced_s, samples_left=step.paced_left)
    timeline = EpochTimeline(step.workload, step.rate, step.paced_left)
    epochs = timeline.epochs_within(now - step.paced_s)
    trained = max(now - step.paced_s - timeline.end_of(epochs), 0.0) * step.rate
    if trained < timeline.size_of(epochs):
        return replace(step, end_s=ending, samples_left=timeline.left_after(epochs) - trained)
    end_s = step.paced_s + timeline.end_of(epochs + 1)
    return replace(step, end_s=end_s, samples_left=timeline.left_after(epochs + 1))


def kept_at(step: SimulatedStep, now: float) -> float:
    """Return the samples left if all progress after the last finished epoch is lost."""
    epoch = step.workload.samples_per_epoch
    if not epoch or now <= step.ready_s:
        return step.workload.samples_left
    timeline = EpochTimeline(step.workload, step.rate, step.paced_left)
    left = timeline.left_after(timeline.epochs_within(now - step.paced_s))
    # A step may have begun within an epoch, whose first part is in an earlier checkpoint.
    return min(math.ceil(left / epoch - TOLERANCE) * epoch, step.workload.samples_left)


def lost(step: SimulatedStep, now: float, checkpoint_every_s: float) -> SimulatedStep:
    """Return the step if its GPUs fail at `now`: progress after the last checkpoint is lost.

    A checkpoint is written after each epoch, or every `checkpoint_every_s` by a member without epochs.
    """
    end_s = max(now, step.start_s)
    if step.workload.samples_per_epoch or now <= step.ready_s:
        return replace(step, end_s=end_s, samples_left=kept_at(step, now))
    last_s = now - (now - step.ready_s) % checkpoint_every_s
    return replace(step, end_s=end_s, samples_left=step.left_at(last_s))


def forecasts(members: Iterable[str], steps: Iterable[SimulatedStep]) -> tuple[Forecast, ...]:
    """Return when each member is done, and for how long it trains, from all steps in order of starts."""
    done_s: dict[str, float] = {}
    training_s: dict[str, float] = defaultdict(float)
    for step in steps:
        done_s[step.workload.name] = step.end_s
        training_s[step.workload.name] += step.end_s - step.start_s
    return tuple(Forecast(name, done_s[name], training_s[name]) for name in members)
