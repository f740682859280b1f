"""Simulation of virtual workers and of whole plans on a virtual clock, with the same flow as in planning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from hetctl.methods.pipeline.evaluate import PipelinePlan
from hetctl.methods.pipeline.throughput import Flow, Pipeline, run_waves
from hetctl.methods.pipeline.wsp import Bounds

LEAST_WAVES, MINIBATCHES = 32, 4000
"""Waves of each virtual worker in the steady state, or fewer that contain this number of minibatches. The
waves until the clock distance is used up are added."""


@dataclass(frozen=True)
class PipelineRun:
    """Result of a simulation: the flow of each virtual worker."""

    bounds: Bounds
    flows: tuple[Flow, ...]

    @property
    def completed_s(self) -> list[list[float]]:
        """Completion times of the minibatches, by virtual worker."""
        return [flow.completed_s for flow in self.flows]

    @property
    def rates(self) -> tuple[float, ...]:
        """Minibatches/s of each virtual worker, over the whole waves of the second half."""
        return tuple(_rate(times, self.bounds.in_flight) for times in self.completed_s)

    @property
    def throughput(self) -> float:
        """Minibatches/s of all virtual workers; in the long run none is faster than the slowest."""
        return len(self.rates) * min(self.rates)

    @property
    def end_s(self) -> float:
        """Completion time of the last minibatch in seconds."""
        return max(times[-1] for times in self.completed_s)

    def busy_fractions(self, worker: int) -> tuple[float, ...]:
        """Return the share of the run in which each GPU of a virtual worker was busy."""
        tasks = self.flows[worker].tasks
        busy_s = [0.0] * (1 + max(task.stage for task in tasks))
        for task in tasks:
            busy_s[task.stage] += max(0.0, min(task.end_s, self.end_s) - task.start_s)
        return tuple(seconds / self.end_s for seconds in busy_s)

    @property
    def waiting_fraction(self) -> float:
        """Mean share of the run in which a virtual worker waited for global weights."""
        return fmean(map(self.waiting_s, range(len(self.flows)))) / self.end_s

    @property
    def idle_fraction(self) -> float:
        """Mean share of the run in which it waited and none of its GPUs had a pass."""
        return fmean(map(self.idle_s, range(len(self.flows)))) / self.end_s

    def waiting_s(self, worker: int) -> float:
        """Return the seconds for which a virtual worker waited for global weights."""
        return sum(end_s - begin_s for begin_s, end_s in self.flows[worker].waits_s)

    def idle_s(self, worker: int) -> float:
        """Return the part of these seconds in which none of its GPUs had a pass."""
        busy = [(task.start_s, task.end_s) for task in self.flows[worker].tasks]
        return sum(_gaps_s(busy, begin_s, end_s) for begin_s, end_s in self.flows[worker].waits_s)


def _gaps_s(busy: Sequence[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """Return the seconds between two times that no interval covers; intervals are sorted by their start."""
    idle_s, until_s = 0.0, begin_s
    for start_s, stop_s in busy:
        if start_s >= end_s:
            break
        idle_s += max(0.0, start_s - until_s)
        until_s = max(until_s, stop_s)
    return idle_s + max(0.0, end_s - until_s)


def _rate(completed_s: Sequence[float], wave: int) -> float:
    last = len(completed_s) // wave * wave
    first = max(wave, last // wave // 2 * wave)
    return (last - first) / (completed_s[last - 1] - completed_s[first - 1])


def simulate_pipelines(pipelines: Sequence[Pipeline], bounds: Bounds, waves: int) -> PipelineRun:
    """Run until every virtual worker has completed `waves` waves, at least 2."""
    if waves < 2:
        raise ValueError(f"{waves} waves are too few for a rate")
    return PipelineRun(bounds, tuple(run_waves(pipelines, bounds, waves)))


def steady_waves(plan: PipelinePlan) -> int:
    """Return the number of waves of each virtual worker that is enough to show a plan's throughput."""
    return max(2, min(LEAST_WAVES, MINIBATCHES // plan.in_flight)) + 4 * plan.distance


def simulate_plan(plan: PipelinePlan, waves: int) -> PipelineRun:
    """Simulate a plan until each virtual worker has completed `waves` waves, at least 2."""
    return simulate_pipelines(plan.pipelines, Bounds(plan.in_flight, plan.distance), waves)
