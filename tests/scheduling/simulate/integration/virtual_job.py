"""Batch jobs of the real driver under a virtual clock, with groups that do nothing but count samples."""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from whole_folds import progress_in

from hetctl.model.ensemble import Ensemble, Functions, Member, TrainingCode
from hetctl.model.events import DRIVER
from hetctl.model.plan import Allocation, Placement
from hetctl.model.profile import MemberProfile
from hetctl.model.run import RunSpec
from hetctl.model.serialization import encode
from hetctl.model.site import Cluster, Node, Queue, Site
from hetctl.model.training_progress import EpochResult, LiveMetrics
from hetctl.runtime.driver.agent_pool import KILLED
from hetctl.runtime.driver.driver import Driver
from hetctl.runtime.driver.rank_group import RankGroup
from hetctl.runtime.worker.messages import TaskMessage
from hetctl.scheduling.commands import Command, ScheduleTick
from hetctl.scheduling.events import SchedulingEvent
from hetctl.scheduling.planners.base import Decision, Planner, Request
from hetctl.scheduling.round_scheduler import RoundScheduler
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import RunFolder
from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_files import write_spec

Parts = tuple[Placement, ...]
Round = tuple[float, dict[str, Parts]]
"""Start of a round, and its members with their GPUs."""
Conclusion = tuple[SchedulingEvent | None, list[Command]]
"""An event and the commands that followed; None: those that follow from all events of a moment."""


class Recorded(RoundScheduler):
    """The scheduling of a job, with all that it is sent and commands."""

    log: list[Conclusion]
    decisions: dict[str, Decision]
    replan_at_s = math.inf

    def __init__(self, planner: Planner, options: Any, *rest: Any, **more: Any) -> None:
        super().__init__(told_once(planner, self.decisions), options, *rest, **more)

    def handle(self, event: SchedulingEvent) -> list[Command]:
        commands = super().handle(event)
        self.log.append((event, commands))
        return commands

    def schedule(self, now_s: float) -> list[Command]:
        commands = super().schedule(now_s)
        self.log.append((None, commands))
        type(self).replan_at_s = min(
            (c.at_s for c in commands if isinstance(c, ScheduleTick)), default=math.inf
        )
        return commands


def told_once(planner: Planner, decisions: dict[str, Decision]) -> Planner:
    """Return a planner that decides on equal requests alike, though it may search until its time is up.

    It requests ticks at times of the grid only.
    """

    def decide(request: Request) -> Decision:
        waiting = [(c.name, c.samples_left) for c in request.workloads]
        held = [(h.workload.name, h.workload.samples_left, h.allocation, h.fixed) for h in request.held]
        key = str(
            (waiting, held, request.nodes, request.cluster, request.now_s, json.dumps(request.planner_state))
        )
        if key not in decisions:
            decision = planner.decide(request)
            replan_at_s = decision.replan_at_s
            decisions[key] = replace(
                decision, replan_at_s=replan_at_s and round(replan_at_s / GRID_S) * GRID_S
            )
        return decisions[key]

    return replace(planner, decide=decide)


def recorded(log: list[Conclusion], decisions: dict[str, Decision]) -> type[Recorded]:
    """Return a replacement of `RoundScheduler`; all jobs of a run write to one log."""
    return type("RecordedHere", (Recorded,), {"log": log, "decisions": decisions})


BEGAN_AT = 0.0
"""Times on the virtual clock are those of the scheduling, without any rounding between them."""
GRID_S = 2.0**-20
"""Grid to which the times of ticks are rounded: no member is a last bit short of its end."""
MOST_JOBS = 100


@dataclass
class Trained:
    """Contents of a member's last checkpoint."""

    epochs: int = 0
    samples: float = 0.0


@dataclass
class Group:
    """A member in training.

    Parameters
    ----------
    ready : float
        When its start-up is over.
    since : float
        When it had trained `part` samples of its epoch.
    epochs : int
        Finished by this group.
    """

    task: TaskMessage
    allocation: Allocation
    ready: float
    since: float
    part: float
    deadline: float
    max_uninterrupted_s: float
    rate: float
    epochs: int = 0
    began: bool = False
    told: str | None = None

    @property
    def nodes(self) -> set[str]:
        return {part.node for part in self.allocation.placement}


@dataclass
class VirtualPool:
    """The groups of one job, in place of `hetctl.runtime.driver.rank_pool.RankPool`.

    Parameters
    ----------
    failed_at : mapping of str to float
        When nodes fail, on the virtual clock.
    lockstep : bool
        Whether the groups of a round all train at the rate of the slowest.
    """

    nodes: tuple[Node, ...]
    profiles: Mapping[str, MemberProfile]
    trained: Mapping[str, Trained]
    failed_at: Mapping[str, float]
    job: int
    lockstep: bool = False
    groups: list[Group] = field(default_factory=list)
    written: dict[str, int] = field(default_factory=dict)
    staged: list = field(default_factory=list)
    returned: list[str] = field(default_factory=list)

    @property
    def gpus(self) -> int:
        return sum(len(node.gpus) for node in self.nodes)

    def start(
        self,
        task: TaskMessage,
        _placement: tuple[Placement, ...],
        _code: TrainingCode | None = None,
        *,
        alone: bool,
    ) -> None:
        del alone
        training = task.training
        assert training is not None
        allocation = training.allocation
        assert training.max_uninterrupted_s is not None
        ready = time.time() + self.profiles[task.name].startup_s
        part = self.trained[task.name].samples
        limits = training.deadline, training.max_uninterrupted_s
        self.groups.append(Group(task, allocation, ready, ready, part, *limits, allocation.rate))
        if self.lockstep:
            self._set_pace({task.round})

    def stop(self, name: str, reason: str, _busy_s: float) -> None:
        for group in self.groups:
            if group.task.name == name:
                group.told = group.told or reason

    def live_metrics(self) -> dict[str, LiveMetrics]:
        return {}

    def wait(self, seconds: float) -> None:
        """Sleep, for which the virtual clock stands."""
        time.sleep(seconds)

    def take_written(self) -> dict[str, int]:
        written, self.written = self.written, {}
        return written

    def signalled(self) -> tuple[str, ...]:
        return ()

    def reap(self) -> list[RankGroup]:
        self.nodes = tuple(n for n in self.nodes if self.failed_at.get(n.name, math.inf) > time.time())
        over = [(group, lost) for group in self.groups if (lost := self._train(group)) is not None]
        # Work that is done at the moment in which a node fails counts as done.
        over.sort(key=lambda ended: len(ended[1]))
        self.groups = [group for group in self.groups if group not in [ended for ended, _ in over]]
        if self.lockstep:
            self._set_pace({group.task.round for group, _ in over})
        return [
            RankGroup(
                group.task,
                group.allocation.placement,
                exit_code=KILLED if lost else 0,
                lost_nodes=lost,
            )
            for group, lost in over
        ]

    def _set_pace(self, rounds: set[int | None]) -> None:
        for index in rounds:
            together = [group for group in self.groups if group.task.round == index]
            for group in together:
                if time.time() > group.since:
                    group.part += (time.time() - group.since) * group.rate
                    group.since = time.time()
                group.rate = min(other.allocation.rate for other in together)

    def shutdown(self) -> None:
        assert not self.groups

    def next_at(self) -> float:
        """Return when the next thing happens."""
        fails = (self.failed_at[node.name] for node in self.nodes if node.name in self.failed_at)
        return min((*fails, *(at for group in self.groups for at in self._next(group))), default=math.inf)

    def _next(self, group: Group) -> Iterable[float]:
        if group.told or not group.began:
            yield max(time.time(), group.ready)
        else:
            yield min(self._epoch_ends(group), group.deadline)

    def _epoch_ends(self, group: Group) -> float:
        epoch = self.profiles[group.task.name].samples_per_epoch
        assert epoch is not None
        return group.since + (epoch - group.part) / group.rate

    def _train(self, group: Group) -> tuple[str, ...] | None:
        """Train until now; return the lost nodes of a group that is over, None of any other."""
        name, now = group.task.name, time.time()
        profile, done = self.profiles[name], self.trained[name]
        task = group.task
        events = EventWriter(task.events, task.name, task.round, partial(self._note_written, name))
        assert profile.samples is not None
        assert profile.samples_per_epoch is not None
        if now >= group.ready and not group.began:
            group.began = True
            events.write("first_step")
        while group.began:
            if done.epochs * profile.samples_per_epoch >= profile.samples:
                events.write("converged", reason="all epochs done")
                return ()
            ends_at = self._epoch_ends(group)
            in_parts = profile.startup_s + profile.samples_per_epoch / group.rate > group.max_uninterrupted_s
            if group.epochs and ends_at > group.deadline and not group.part and not in_parts:
                return self._stop(group, events, "deadline")
            if ends_at > now:
                break
            done.epochs, done.samples = done.epochs + 1, 0.0
            group.epochs, group.part, group.since = group.epochs + 1, 0.0, ends_at
            result = EpochResult(
                done.epochs, {"loss": 1.0, "val_accuracy": 0.1}, 1.0, group.allocation.gpus, ends_at
            )
            events.write("epoch", **encode(result), evaluate_s=0.0)
        if failed := [node for node in group.nodes if self.failed_at.get(node, math.inf) <= now]:
            return tuple(failed)
        if now >= group.ready and group.told:
            return self._stop(group, events, group.told)
        return None

    def _note_written(self, name: str, length: int) -> None:
        self.written[name] = length

    def _stop(self, group: Group, events: EventWriter, reason: str) -> tuple[str, ...]:
        samples = group.part + (time.time() - group.since) * group.rate
        self.trained[group.task.name].samples = samples
        events.write("stopped", reason=reason, part_samples=int(samples))
        return ()


class VirtualRun:
    """A run of the real driver, from job to job until all members have converged.

    Parameters
    ----------
    cluster : Cluster
        All nodes that there are; a job gets those that have not failed before it starts.
    usable_s : float
        Of each job, from its start to its deadline.
    failed_at_s : mapping of str to float
        When nodes fail, in seconds from the start of the run.
    lockstep : bool
        As in `VirtualPool`.
    """

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        profiles: Sequence[MemberProfile],
        planner: str,
        options: Mapping[str, Any],
        cluster: Cluster,
        usable_s: float = 1e6,
        failed_at_s: Mapping[str, float] | None = None,
        *,
        lockstep: bool = False,
    ) -> None:
        self._monkeypatch, self._usable_s, self._cluster = monkeypatch, usable_s, cluster
        self._now, self._idle, self._lockstep = BEGAN_AT, 0, lockstep
        self.log: list[Conclusion] = []
        self.decisions: dict[str, Decision] = {}
        self._core = recorded(self.log, self.decisions)
        self._profiles = {profile.member: profile for profile in profiles}
        self._trained: dict[str, Trained] = defaultdict(Trained)
        self._failed_at = {node: BEGAN_AT + at_s for node, at_s in (failed_at_s or {}).items()}
        per_node = cluster.gpus_per_node
        self._run = RunFolder(folder / "runs" / "r")
        self._run.create()
        site = Site(
            *("local", "local", "local", len(cluster.nodes), per_node, per_node, 2**30, (Queue("local"),))
        )
        members = tuple(Member(p.member, {}, max_gpus=max(p.rates)) for p in profiles)
        functions = Functions("nets:input_fn", "nets:model_fn")
        self.ensemble = Ensemble("e", "tensorflow", functions, members, "/x")
        self._spec = RunSpec(
            run="r", ensemble=self.ensemble, site=site, queue="local", checkpoints=str(folder / "c"),
            planner=planner, options=options, gpus=cluster.gpus, wall_s=10**6, grace_s=60,
            profiles=tuple(profiles),
        )  # fmt: skip
        write_spec(self._run, self._spec)

    def rounds(self) -> list[Round]:
        """Run job after job; return the rounds."""
        self._monkeypatch.setattr(time, "time", lambda: self._now)
        self._monkeypatch.setattr(time, "sleep", self._sleep)
        self._monkeypatch.setattr(os, "fsync", lambda _: None)
        self._monkeypatch.setattr("hetctl.runtime.driver.job_modes.RoundScheduler", self._core)
        for job in range(MOST_JOBS):
            if not any(p.active for p in progress_in(self._run, self.ensemble, 2).values()):
                return list(self._read())
            self._drive(job)
        raise AssertionError("the run comes to no end")

    def _sleep(self, seconds: float) -> None:
        """Sleep until there is something to see: no event is seen late, and none together with others."""
        next_at = min(self._rank_pool.next_at(), BEGAN_AT + self._core.replan_at_s)
        self._idle = self._idle + 1 if next_at == math.inf else 0
        assert self._idle < 3, "nothing is going to happen, and the driver goes on"
        self._now = self._now + seconds if self._idle else max(self._now, next_at)

    def _drive(self, job: int) -> None:
        nodes = tuple(n for n in self._cluster.nodes if self._failed_at.get(n.name, math.inf) > self._now)
        self._rank_pool = rank_pool = VirtualPool(
            nodes, self._profiles, self._trained, self._failed_at, job, self._lockstep
        )
        self._monkeypatch.setattr("hetctl.runtime.driver.driver.nodes_of_this_job", lambda *_: nodes)
        self._monkeypatch.setattr("hetctl.runtime.driver.driver.RankPool", lambda *_, **__: rank_pool)
        Driver(self._run, job, self._now + self._usable_s).run()

    def _read(self) -> Iterable[Round]:
        events = [event for event in events_in(self._run) if event.source == DRIVER]
        starts = [event for event in events if event.kind == "task_started"]
        for opened in (event for event in events if event.kind == "round_started"):
            members = opened.data["members"]
            ours = [e for e in starts if e.data["member"] in members and e.time == opened.time]
            yield (
                opened.time - BEGAN_AT,
                {
                    e.data["member"]: tuple(
                        Placement(p["node"], tuple(p["gpus"]), p.get("seat", 0)) for p in e.data["placement"]
                    )
                    for e in ours
                },
            )
