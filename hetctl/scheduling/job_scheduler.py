"""The scheduling of one batch job as a state machine: events in, commands out.

It has no clock, opens no file and starts no process. The driver sends the events of its ranks and the
simulator those of its virtual clock; both carry out the commands and decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from hetctl.model.events import JOB_FATAL, ExitReason
from hetctl.model.values import dataclass
from hetctl.scheduling import events
from hetctl.scheduling.commands import ScheduleTick, Stop, Task
from hetctl.scheduling.pool import Pool

if TYPE_CHECKING:
    # Workers import this module, and need no planner.
    from hetctl.model.workload import Workload
    from hetctl.scheduling.planners.base import RunningMember

LAUNCH_PAUSES_S = {ExitReason.NOT_LAUNCHED: 5.0, ExitReason.DISK_ERROR: 30.0}
"""Pauses in seconds before the next start, by reasons for a task's end that could end the next one, too.

A pause doubles each time that the same member ends so in a row.
"""
LONGEST_LAUNCH_PAUSE_S = 300.0
FINISHED = "finished"
DEADLINE = "deadline"
ALONE = "alone"
"""Reason for which a rank stops a member that cannot train fused with the others there."""
SIGNAL = "signal"
"""Reason for stopping a member after one of its ranks got SIGTERM."""


@dataclass
class RunningTask:
    """Task in execution.

    Parameters
    ----------
    rate : float
        Rate that the planner last knew, in samples/s.
    since_s : float
        Start of its group.
    is_guess : bool
        True while `rate` is an estimate.
    done : bool
        True once the state after its visit is in a store; its end follows.
    """

    task: Task
    round: int
    rate: float
    since_s: float
    stopping: bool = False
    done: bool = False
    is_guess: bool = False


@dataclass(frozen=True)
class ObservedMembers:
    """Members of a run at one moment.

    Parameters
    ----------
    left : mapping of str to Workload
        All members that need training, with the work left after their finished epochs.
    waiting : sequence of Workload
        Members without GPUs, in the planner's order.
    held : tuple of RunningMember
        Members in training that were not stopped, with the work that they are likely to have left.
    """

    left: Mapping[str, Workload]
    waiting: Sequence[Workload]
    held: tuple[RunningMember, ...]


class Observer(Protocol):
    """State of the members; the driver and the simulator each implement it."""

    def left(self, now_s: float) -> Mapping[str, Workload]:
        """Return the members that need training, by name, as `ObservedMembers.left`."""

    def seen(self, now_s: float, running: Mapping[str, RunningTask], deferred: Set[str]) -> ObservedMembers:
        """Return all members as the planner may see them, without the waiting ones in `deferred`."""

    def used_up(self) -> str | None:
        """Return the limit on the whole run that forbids another round, or None."""


class JobScheduler:
    """State machine that schedules a job, or one phase of it; it has a subclass for each way to train.

    Pass the events of one time to `handle` one by one, a `Tick` first; then call `schedule`, which
    decides. Carry out the commands of each call in their order.

    Attributes
    ----------
    running : dict of str to RunningTask
        Tasks by name.
    ending : str or None
        Reason for the job's end; once it is set, no task starts.
    pool : Pool
        Nodes of the job, and their GPUs that no task holds.
    """

    def __init__(self) -> None:
        self.running: dict[str, RunningTask] = {}
        self.ending: str | None = None
        self.pool = Pool()
        self._ended_s = math.inf
        self._launch_from_s = -math.inf
        self._pauses_in_a_row: dict[str, int] = {}
        self._commands: list[Any] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.JobOpened: self._on_job_opened,
            events.NodeJoined: self._on_node_joined,
            events.NodeLost: self._on_node_lost,
            events.MemberWithdrawn: self._on_member_withdrawn,
            events.TaskSignalled: self._on_task_signalled,
            events.TaskEnded: self._on_task_ended,
            events.Tick: self._on_tick,
            events.JobEnding: lambda event: self._end(event.reason, event.now_s),
        }

    def handle(self, event: Any) -> list[Any]:
        """Record an event and return the commands that follow at once; events of other phases have none."""
        if handler := self._handlers.get(type(event)):
            handler(event)
        return self._take_commands()

    def schedule(self, now_s: float) -> list[Any]:
        """Return the commands that follow from all events until now."""
        self._review(now_s)
        if not self.ending and now_s >= self._launch_from_s:
            self._start_tasks(now_s)
        if self.ending and not self.running:
            self._end_job(now_s)
        elif (at_s := self._next_s(now_s)) < math.inf:
            self._commands.append(ScheduleTick(at_s))
        return self._take_commands()

    def reopened(self, now_s: float) -> events.JobOpened:
        """Return the first event of the phase that follows this one in the same job."""
        nodes = tuple(self.pool.nodes.values())
        return replace(self._opened, now_s=now_s, nodes=nodes, first_round=self._next_round)

    def _review(self, now_s: float) -> None:
        """End what has to end now."""

    def _start_tasks(self, now_s: float) -> None:
        """Start what can start now."""

    def _end_job(self, now_s: float) -> None:
        """End the job, in which no task runs any more."""

    def _next_s(self, _now_s: float) -> float:
        """Return the time of the next action if no event comes before."""
        return math.inf

    def _take_commands(self) -> list[Any]:
        commands, self._commands = self._commands, []
        return commands

    def _on_job_opened(self, event: events.JobOpened) -> None:
        self._opened, self._next_round = event, event.first_round
        self.pool.add(event.nodes)
        self._on_tick(event)

    def _on_tick(self, event: events.JobOpened | events.Tick) -> None:
        if event.now_s >= self._opened.deadline_s:
            self._end(DEADLINE, event.now_s)

    def _on_node_joined(self, event: events.NodeJoined) -> None:
        self.pool.add([event.node])
        # If a node is back at once, a group that lost its ranks there still holds the GPUs until it ends.
        for running in self.running.values():
            self.pool.take(running.task.allocation.placement)

    def _on_node_lost(self, event: events.NodeLost) -> None:
        """Continue on the remaining nodes; tasks on the lost node have ended and are planned again."""
        self.pool.remove(event.node)
        if not self.pool.nodes:
            self._end(ExitReason.NODE_FAILURE.value, event.now_s)

    def _on_member_withdrawn(self, event: events.MemberWithdrawn) -> None:
        if event.member in self.running and not self.running[event.member].stopping:
            self._stop(event.member, event.reason)

    def _on_task_signalled(self, event: events.TaskSignalled) -> None:
        """Stop the whole group, unless it is already stopping."""
        if not self.running[event.name].stopping:
            self._stop(event.name, SIGNAL)

    def _on_task_ended(self, event: events.TaskEnded) -> None:
        """Release the GPUs; end the job or delay the next launch if the end requires it."""
        if event.reason in JOB_FATAL:
            self._end(event.reason.value, event.now_s)
        earlier = self._pauses_in_a_row.pop(event.name, 0)
        if pause_s := LAUNCH_PAUSES_S.get(event.reason):
            self._pauses_in_a_row[event.name] = earlier + 1
            longer_s = min(pause_s * 2**earlier, LONGEST_LAUNCH_PAUSE_S)
            self._launch_from_s = max(self._launch_from_s, event.now_s + longer_s)
        self.pool.release(self.running.pop(event.name).task.allocation.placement)

    def _end(self, reason: str, now_s: float) -> None:
        """Start no more tasks and stop all; the first reason is kept."""
        if self.ending:
            return
        self.ending, self._ended_s = reason, now_s
        for number in dict.fromkeys(running.round for running in self.running.values()):
            self._stop_round(number, reason, at_once=True)

    def _stop_round(self, number: int, reason: str, *, at_once: bool = False) -> None:
        for running in self.running.values():
            running.stopping |= running.round == number
        self._commands.append(Stop(number, reason, at_once=at_once))

    def _stop(self, name: str, reason: str) -> None:
        running = self.running[name]
        running.stopping = True
        self._commands.append(Stop(running.round, reason, name))

    def _run(self, task: Task, number: int, since_s: float) -> None:
        """Enter a task that starts now."""
        self.pool.take(task.allocation.placement)
        self.running[task.name] = RunningTask(task, number, task.allocation.rate, since_s)
