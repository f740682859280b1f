"""One member on its GPUs, from the start of its step to the end, computed at once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetctl.core.plan import Allocation
from hetctl.core.profile import Candidate
from hetctl.perf.course import Course


@dataclass(frozen=True)
class Step:
    """What a member does in one round.

    Parameters
    ----------
    candidate : Candidate
        As it was when the step started.
    samples_left : float
        When the step ends; 0 if the member has converged.
    """

    candidate: Candidate
    allocation: Allocation
    round_index: int
    start_s: float
    end_s: float
    samples_left: float

    @property
    def converged(self) -> bool:
        """Whether the member needs no more training after this step."""
        return self.samples_left == 0

    @property
    def samples(self) -> float:
        """Samples trained in this step."""
        return self.candidate.samples_left - self.samples_left


def begin(
    candidate: Candidate, allocation: Allocation, round_index: int, start_s: float, deadline_s: float
) -> Step | None:
    """Return the step as it goes if nobody stops it; None if nothing could be done by the deadline.

    An epoch that would end after the deadline, evaluation and checkpoint included, is not started.
    A member without known epochs trains on until there is just time for a checkpoint.
    """
    course = Course(candidate, allocation.rate)
    training_s = deadline_s - start_s - candidate.startup_s
    epochs = course.epochs_within(training_s)
    done_s, left = course.end_of(epochs), course.left_after(epochs)
    if epochs == 0 and course.count:
        trained = (training_s - candidate.checkpoint_s) * allocation.rate
        if candidate.samples_per_epoch or trained <= 0:
            return None
        done_s, left = training_s, course.left_after(0) - trained
    elif training_s < 0:
        return None
    end_s = start_s + candidate.startup_s + done_s
    return Step(candidate, allocation, round_index, start_s, end_s, left)


def stopped(step: Step, now: float) -> Step:
    """Return the step as it goes if it is told to stop: it checkpoints in mid-epoch.

    A step that is starting up ends as soon as it has; one that has trained all samples of its epoch
    ends with the epoch; and one that would be over by the time of a checkpoint goes its way.
    """
    ready = step.start_s + step.candidate.startup_s
    ending = now + step.candidate.checkpoint_s
    if step.end_s <= ending:
        return step
    if now <= ready:
        return replace(step, end_s=ready, samples_left=step.candidate.samples_left)
    course = Course(step.candidate, step.allocation.rate)
    epochs = course.epochs_within(now - ready)
    trained = max(now - ready - course.end_of(epochs), 0.0) * step.allocation.rate
    if trained < course.size_of(epochs):
        return replace(step, end_s=ending, samples_left=course.left_after(epochs) - trained)
    return replace(step, end_s=ready + course.end_of(epochs + 1), samples_left=course.left_after(epochs + 1))
