"""Virtual workers under a virtual clock: pipelined passes on their GPUs, waves between them (HetPipe).

Each GPU runs one task at a time, under the three conditions of section 4 ("Partition Scheduling"): forward
passes in the order of minibatches, backward passes too, and of both the one that could start first. In the
last stage a minibatch's backward pass follows its forward pass as one task. Which minibatch may enter is
decided by `hetctl.control.wsp`, as in a real run.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

from hetctl.control.wsp import Bounds, Clock, GlobalClock


@dataclass(frozen=True)
class StageTimes:
    """A GPU's part of a minibatch.

    Parameters
    ----------
    forward_s, backward_s : float
        Receiving what the pass needs from another GPU included: the GPU waits for it.
    most_held : int
        Minibatches whose activations its memory holds, from forward to backward pass.
    """

    forward_s: float
    backward_s: float
    most_held: int


@dataclass(frozen=True)
class Pipeline:
    """A virtual worker.

    Parameters
    ----------
    push_s, pull_s : float
        What sending the updates of a wave to the parameter servers takes, and fetching their weights.
        Both go on beside the passes.
    """

    stages: tuple[StageTimes, ...]
    push_s: float = 0.0
    pull_s: float = 0.0

    @property
    def bottleneck_s(self) -> float:
        """Seconds of a minibatch in the slowest stage: no rate is above one in this time."""
        return max(stage.forward_s + stage.backward_s for stage in self.stages)


class Pass(Enum):
    """What a task does with a minibatch."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"


class Task(NamedTuple):
    """A pass of a minibatch on a GPU, from start to end; it could have started when it was `ready_s`."""

    worker: int
    stage: int
    minibatch: int
    what: Pass
    ready_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PipelineRun:
    """What happened.

    Parameters
    ----------
    tasks : tuple of Task
        In the order of their starts; the last ones may not have ended.
    completed_s : tuple of tuple of float
        By virtual worker, when each of its minibatches was complete.
    """

    bounds: Bounds
    tasks: tuple[Task, ...]
    completed_s: tuple[tuple[float, ...], ...]

    @property
    def rates(self) -> tuple[float, ...]:
        """Minibatches/s of each virtual worker, over the whole waves of its latter half."""
        return tuple(_rate(times, self.bounds.in_flight) for times in self.completed_s)

    @property
    def throughput(self) -> float:
        """Minibatches/s of all virtual workers: in the long run none is faster than the slowest."""
        return len(self.rates) * min(self.rates)

    @property
    def end_s(self) -> float:
        """When the last minibatch was complete."""
        return max(times[-1] for times in self.completed_s)

    def busy_fractions(self, worker: int) -> tuple[float, ...]:
        """Return the share of the time until the end in which each GPU of a virtual worker was busy."""
        mine = [task for task in self.tasks if task.worker == worker]
        busy_s = [0.0] * (1 + max(task.stage for task in mine))
        for task in mine:
            busy_s[task.stage] += max(0.0, min(task.end_s, self.end_s) - task.start_s)
        return tuple(seconds / self.end_s for seconds in busy_s)


def _rate(completed_s: Sequence[float], wave: int) -> float:
    last = len(completed_s) // wave * wave
    first = max(wave, last // wave // 2 * wave)
    return (last - first) / (completed_s[last - 1] - completed_s[first - 1])


def simulate_pipelines(pipelines: Sequence[Pipeline], bounds: Bounds, waves: int) -> PipelineRun:
    """Run until every virtual worker has completed so many waves, at least 2."""
    if waves < 2:
        raise ValueError(f"{waves} waves are too few for a rate")
    return _Simulation(pipelines, bounds).run(waves)


class _Worker:
    """A virtual worker at some time: its clock, and what waits at each GPU, first come first."""

    def __init__(self, number: int, pipeline: Pipeline, bounds: Bounds) -> None:
        self.number, self.pipeline, self.clock = number, pipeline, Clock(bounds)
        self.queues: list[deque[tuple[int, Pass, float]]] = [deque() for _ in pipeline.stages]
        self._seconds = [_seconds(stage) for stage in pipeline.stages]
        self.busy = [False] * len(pipeline.stages)
        self.held = [0] * len(pipeline.stages)
        self.completed_s: list[float] = []
        self.pushing_until_s = 0.0
        self.pulling = False

    def admit(self, now: float) -> None:
        """Let all minibatches in that may start."""
        while self.clock.may_start:
            self.clock = self.clock.start()
            self.arrive(0, self.clock.started, Pass.FORWARD, now)

    def arrive(self, stage: int, minibatch: int, what: Pass, now: float) -> None:
        """Queue a pass that can start as soon as the GPU is free; the last one has all passes in one."""
        last = stage == len(self.queues) - 1
        self.queues[stage].append((minibatch, Pass.BOTH if last else what, now))

    def next_task(self, stage: int, now: float) -> Task | None:
        """Start the first task that waits for a GPU and fits its memory, if the GPU is free."""
        if self.busy[stage]:
            return None
        queue, room = self.queues[stage], self.held[stage] < self.pipeline.stages[stage].most_held
        waiting = next((one for one in queue if room or one[1] is Pass.BACKWARD), None)
        if waiting is None:
            return None
        queue.remove(waiting)
        minibatch, what, ready_s = waiting
        self.busy[stage] = True
        self.held[stage] += what is not Pass.BACKWARD
        return Task(self.number, stage, minibatch, what, ready_s, now, now + self._seconds[stage][what])

    def finish(self, task: Task, now: float) -> bool:
        """Hand on what a task has computed; return whether that completes the minibatch."""
        self.busy[task.stage] = False
        if task.what is Pass.FORWARD:
            self.arrive(task.stage + 1, task.minibatch, Pass.FORWARD, now)
            return False
        self.held[task.stage] -= 1
        if task.stage > 0:
            self.arrive(task.stage - 1, task.minibatch, Pass.BACKWARD, now)
            return False
        self.completed_s.append(now)
        self.clock = self.clock.complete()
        return True


def _seconds(stage: StageTimes) -> dict[Pass, float]:
    both_s = stage.forward_s + stage.backward_s
    return {Pass.FORWARD: stage.forward_s, Pass.BACKWARD: stage.backward_s, Pass.BOTH: both_s}


class _Simulation:
    """All virtual workers and the parameter servers, and what is going to happen."""

    def __init__(self, pipelines: Sequence[Pipeline], bounds: Bounds) -> None:
        self._bounds = bounds
        self._workers = [_Worker(i, pipeline, bounds) for i, pipeline in enumerate(pipelines)]
        self._global = GlobalClock((0,) * len(self._workers))
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = 0
        self._tasks: list[Task] = []

    def run(self, waves: int) -> PipelineRun:
        for worker in self._workers:
            self._go_on(worker, 0.0)
        while any(worker.clock.waves < waves for worker in self._workers):
            now, _, happen = heapq.heappop(self._events)
            happen(now)
        completed_s = tuple(tuple(worker.completed_s) for worker in self._workers)
        return PipelineRun(self._bounds, tuple(self._tasks), completed_s)

    def _at(self, time_s: float, happen: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (time_s, self._count, happen))

    def _go_on(self, worker: _Worker, now: float) -> None:
        """Start whatever can start."""
        worker.admit(now)
        for stage in range(len(worker.queues)):
            task = worker.next_task(stage, now)
            if task is not None:
                self._tasks.append(task)
                self._at(task.end_s, partial(self._end, worker, task))

    def _end(self, worker: _Worker, task: Task, now: float) -> None:
        waves = worker.clock.waves
        if worker.finish(task, now) and worker.clock.waves > waves:
            worker.pushing_until_s = max(now, worker.pushing_until_s) + worker.pipeline.push_s
            self._at(worker.pushing_until_s, partial(self._pushed, worker, waves))
            self._pull(worker, now)
        self._go_on(worker, now)

    def _pushed(self, worker: _Worker, wave: int, now: float) -> None:
        self._global = self._global.push(worker.number, wave)
        for each in self._workers:
            self._pull(each, now)

    def _pull(self, worker: _Worker, now: float) -> None:
        """Begin to fetch the global weights if they are wanted and there."""
        clock = worker.clock
        if clock.must_pull and not worker.pulling and self._global.now >= clock.waves_wanted:
            worker.pulling = True
            self._at(now + worker.pipeline.pull_s, partial(self._pulled, worker, self._global.now))

    def _pulled(self, worker: _Worker, waves: int, now: float) -> None:
        worker.pulling = False
        worker.clock = worker.clock.pull(waves)
        self._pull(worker, now)
        self._go_on(worker, now)
