"""Simulated pipelines, the period of virtual workers, and the minibatches in flight that they need (HetPipe).

Each GPU runs one task at a time, under the three conditions of section 4 ("Partition Scheduling"): forward
passes run in the order of minibatches, backward passes, too, and of both the one that was ready first. In
the last stage a minibatch's forward and backward pass are one task. A minibatch enters a pipeline when the
one N_m before it has left. Between waves virtual workers keep the clock distance of `wsp`, and share links
and servers (`transfers`). The period is found by simulation, and is never below its limits: the slowest
stage, waves, shared links.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial
from statistics import fmean
from typing import NamedTuple

from hetctl.methods.pipeline.stage_costs import minibatches_held, most_in_flight
from hetctl.methods.pipeline.stages import Passes
from hetctl.methods.pipeline.transfers import ALONE, Network, Traffic, load_s
from hetctl.methods.pipeline.wsp import Bounds, StageQueue
from hetctl.model.values import dataclass


class StageTask(NamedTuple):
    """A task on the GPU of a stage; it was ready at `ready_s`."""

    stage: int
    minibatch: int
    backward: bool
    ready_s: float
    start_s: float
    end_s: float


class Pipeline(NamedTuple):
    """Passes and transfers of a virtual worker."""

    passes: Passes
    traffic: Traffic = ALONE


def held(passes: Passes, in_flight: int) -> list[int]:
    """Return the minibatches that each stage holds between their forward and backward passes."""
    last = len(passes) - 1
    return [minibatches_held(last - stage, in_flight, is_first=not stage) for stage in range(len(passes))]


def run_waves(workers: Sequence[Pipeline], bounds: Bounds, waves: int) -> list[WorkerRun]:
    """Run virtual workers until each has completed `waves` waves.

    When a minibatch is complete, the next one enters as soon as it may start. The last minibatch of a wave
    starts when the wave D + 1 before it, of all virtual workers, is in the weights. The weights are fetched
    only when it would otherwise have to wait, with all waves sent by then.
    """
    network, servers = Network(), Servers(len(workers))
    servers.runs = [WorkerRun(one, number, bounds, network, servers) for number, one in enumerate(workers)]
    for run in servers.runs:
        run.fill(0.0)
    while min(len(run.completed_s) for run in servers.runs) < waves * bounds.in_flight:
        network.step()
    return servers.runs


class Servers:
    """Parameter servers, which know the waves of each virtual worker that are sent."""

    def __init__(self, workers: int) -> None:
        self.runs: list[WorkerRun] = []
        self._sent = [0] * workers

    @property
    def waves(self) -> int:
        """Number of waves of all virtual workers in the global weights, c_global."""
        return min(self._sent)

    def receive(self, worker: int, now_s: float) -> None:
        """Add a wave; whoever waits for it may fetch the weights."""
        before = self.waves
        self._sent[worker] += 1
        if self.waves > before:
            for run in self.runs:
                run.fetch_if_wanted(now_s)


class WorkerRun:
    """A virtual worker in a simulation: waiting and running tasks of each stage.

    Attributes
    ----------
    tasks : list of StageTask
        Tasks in order of their starts; the last ones may not have ended.
    completed_s : list of float
        Completion time of each minibatch.
    waits_s : list of tuple of float
        When it began to wait for global weights, and when it had them.
    """

    def __init__(
        self, worker: Pipeline, number: int, bounds: Bounds, network: Network, servers: Servers
    ) -> None:
        self.tasks: list[StageTask] = []
        self.completed_s: list[float] = []
        self.waits_s: list[tuple[float, float]] = []
        self._number, self._bounds, self._network, self._servers = number, bounds, network, servers
        self._passes, self._traffic, self._last = worker.passes, worker.traffic, len(worker.passes) - 1
        self._receiving = tuple(zip(worker.traffic.activations, worker.traffic.gradients, strict=True))
        self._queues: list[StageQueue[tuple[int, float]]] = [
            StageQueue(capacity) for capacity in held(worker.passes, bounds.in_flight)
        ]
        self._running = [False] * len(worker.passes)
        self._room, self._entered, self._fetched = bounds.in_flight, 0, 0
        self._to_send, self._is_fetching = 0, False
        self._wanted: tuple[int, float] | None = None

    def fill(self, now_s: float) -> None:
        """Let minibatches enter while there is room and the weights are new enough."""
        while self._room and self._wanted is None:
            needed = self._bounds.waves_needed(self._entered + 1)
            if needed > self._fetched:
                self._wanted = needed, now_s
                # Weights that cross no link are there at once, and more minibatches may enter.
                self.fetch_if_wanted(now_s)
                continue
            self._room -= 1
            self._entered += 1
            self._queues[0].add((self._entered, now_s), backward=False)
        self._start(0, now_s)

    def fetch_if_wanted(self, now_s: float) -> None:
        """Fetch the global weights if they are waited for and new enough."""
        if self._wanted and not self._is_fetching and self._servers.waves >= self._wanted[0]:
            self._is_fetching = True
            self._network.carry(self._traffic.pull, now_s, partial(self._adopt, self._servers.waves))

    def _adopt(self, waves: int, now_s: float) -> None:
        assert self._wanted is not None
        self.waits_s.append((self._wanted[1], now_s))
        self._fetched, self._wanted, self._is_fetching = waves, None, False
        self.fill(now_s)

    def _complete(self, now_s: float) -> None:
        self.completed_s.append(now_s)
        self._room += 1
        if len(self.completed_s) % self._bounds.in_flight == 0:
            self._to_send += 1
            if self._to_send == 1:
                self._network.carry(self._traffic.push, now_s, self._sent)
        self.fill(now_s)

    def _sent(self, now_s: float) -> None:
        """Record the arrival of a wave at the servers, and send the next one."""
        self._to_send -= 1
        self._servers.receive(self._number, now_s)
        if self._to_send:
            self._network.carry(self._traffic.push, now_s, self._sent)

    def _start(self, stage: int, now_s: float) -> None:
        """Start the first waiting task; forward passes are skipped while memory is full."""
        if self._running[stage] or (ready := self._queues[stage].take()) is None:
            return
        backward, (minibatch, ready_s) = ready
        self._running[stage] = True
        # `backward` is an index here: 0 for the forward pass, 1 for the backward pass.
        passes = self._passes[stage]
        end_s = now_s + (sum(passes) if stage == self._last else passes[backward])
        resources, seconds = self._receiving[stage][backward] if self._receiving else ((), 0.0)
        if resources:
            # Links may be busy at first.
            end_s += self._network.end_s(resources, now_s, seconds) - now_s - seconds
        self.tasks.append(StageTask(stage, minibatch, backward, ready_s, now_s, end_s))
        self._network.at(end_s, partial(self._end, stage, backward, minibatch))

    def _end(self, stage: int, backward: bool, minibatch: int, now_s: float) -> None:
        self._running[stage] = False
        if backward or stage == self._last:
            self._queues[stage].release()
        if stage < self._last and not backward:
            self._queues[stage + 1].add((minibatch, now_s), backward=False)
        elif stage > 0:
            self._queues[stage - 1].add((minibatch, now_s), backward=True)
        # The end of a task frees this GPU, may free room for an activation, and gives a neighbour its input.
        for near in range(max(0, stage - 1), min(self._last, stage + 1) + 1):
            self._start(near, now_s)
        if stage == 0 and (backward or self._last == 0):
            self._complete(now_s)


SAME = 1e-9
"""Relative tolerance within which times count as equal."""
WAVES, MINIBATCHES = 8, 96
"""Waves until the steady state, or fewer that contain this number of minibatches; then twice as many are
measured."""


def bottleneck_s(passes: Passes) -> float:
    """Return the least period, the seconds of the slowest stage."""
    return max(forward_s + backward_s for forward_s, backward_s in passes)


def wave_time_s(passes: Passes, push_s: float, pull_s: float, distance: int) -> float:
    """Return the least time of a wave in seconds, independent of the number of its minibatches.

    The last minibatch of a wave starts when the wave D + 1 before it has been sent and fetched, and then
    passes all stages; waves are sent one after the other.
    """
    through_s = sum(map(sum, passes))
    return max(through_s, push_s, (push_s + pull_s + through_s) / (distance + 1))


def least_period_s(workers: Sequence[Pipeline], in_flight: int, distance: int = 0) -> float:
    """Return a lower bound of the period: the highest of those by stages, by waves and by shared links."""
    waves_s = (wave_time_s(passes, one.push_s, one.pull_s, distance) for passes, one in workers)
    return max(
        max(bottleneck_s(passes) for passes, _ in workers),
        max(waves_s) / in_flight,
        load_s([traffic for _, traffic in workers], in_flight, distance),
    )


def sufficient_depth(passes: Passes, sync_s: float, distance: int) -> int:
    """Return a number of minibatches in flight with which neither stages nor waves wait for each other.

    Activations are taken to have the links for themselves.

    Parameters
    ----------
    sync_s : float
        Seconds to send a wave, or to fetch the weights.
    """
    wave_s = wave_time_s(passes, sync_s, sync_s, distance)
    return max(most_in_flight(len(passes)), math.ceil(wave_s / bottleneck_s(passes)) + 1)


def common_period_s(workers: Sequence[Pipeline], in_flight: int, distance: int) -> float:
    """Return the period of virtual workers that exchange waves and therefore wait for each other."""
    if not any(traffic.is_shared for _, traffic in workers):
        # Equal virtual workers run alike unless they compete for something.
        workers = tuple(dict.fromkeys(workers))
    return max(least_period_s(workers, in_flight, distance), _measured_s(tuple(workers), in_flight, distance))


@lru_cache(maxsize=10_000)
def _measured_s(workers: tuple[Pipeline, ...], in_flight: int, distance: int) -> float:
    first = max(1, min(WAVES, MINIBATCHES // in_flight))
    runs = run_waves(workers, Bounds(in_flight, distance), 3 * first)
    ends_s = [run.completed_s[in_flight - 1 :: in_flight] for run in runs]
    taken_s = max(ends[3 * first - 1] - ends[first - 1] for ends in ends_s)
    return taken_s / (2 * first * in_flight)


@dataclass(frozen=True)
class PipelineRun:
    """Result of a simulation, with the run of each virtual worker."""

    bounds: Bounds
    workers: tuple[WorkerRun, ...]

    @property
    def completed_s(self) -> list[list[float]]:
        """Completion times of the minibatches, by virtual worker."""
        return [worker.completed_s for worker in self.workers]

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
        tasks = self.workers[worker].tasks
        busy_s = [0.0] * (1 + max(task.stage for task in tasks))
        for task in tasks:
            busy_s[task.stage] += max(0.0, min(task.end_s, self.end_s) - task.start_s)
        return tuple(seconds / self.end_s for seconds in busy_s)

    @property
    def waiting_fraction(self) -> float:
        """Mean share of the run in which a virtual worker waited for global weights."""
        return fmean(map(self.waiting_s, range(len(self.workers)))) / self.end_s

    @property
    def idle_fraction(self) -> float:
        """Mean share of the run in which a virtual worker waited and none of its GPUs had a pass."""
        return fmean(map(self.idle_s, range(len(self.workers)))) / self.end_s

    def waiting_s(self, worker: int) -> float:
        """Return the seconds for which a virtual worker waited for global weights."""
        return sum(end_s - begin_s for begin_s, end_s in self.workers[worker].waits_s)

    def idle_s(self, worker: int) -> float:
        """Return the part of `waiting_s` in which none of the virtual worker's GPUs had a pass."""
        busy = [(task.start_s, task.end_s) for task in self.workers[worker].tasks]
        return sum(_gaps_s(busy, begin_s, end_s) for begin_s, end_s in self.workers[worker].waits_s)


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
