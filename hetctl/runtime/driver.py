"""The driver of one batch job: plans a round, runs its steps, reads the events, plans the next.

``python -m hetctl.runtime.driver RUN_FOLDER --round N --job J --started SECONDS``
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hetctl.control.budget import exceeded
from hetctl.control.flotilla import should_stop
from hetctl.core.codec import encode
from hetctl.core.events import DRIVER, EventWriter
from hetctl.core.layout import RoundFolder, RunFolder
from hetctl.core.plan import Allocation
from hetctl.core.profile import Candidate
from hetctl.core.progress import events_in
from hetctl.core.run import RoundFile, RunSpec, read_round, read_spec, write_round
from hetctl.core.usage import usage_of
from hetctl.perf.course import least_step_s
from hetctl.perf.rounds import round_s, step_s
from hetctl.planners import planner_named
from hetctl.planners.base import Decision, Request, ask, options_from
from hetctl.runtime.members import Members, Seen
from hetctl.runtime.nodes import nodes_of_this_job
from hetctl.runtime.rounds import DEADLINE, OpenRound
from hetctl.runtime.steps import EndedStep, StepPool

POLL_S = 0.05
EARLIEST_WARNING_S = 60
"""Before the time it was asked for, a warning of the time limit may come (sbatch's --signal)."""
WARN_SHARE, KILL_SHARE = 0.6, 0.85
"""Shares of the grace period after which steps that have not left are terminated, and killed."""
RESIZE, PREEMPTED = "resize", "preempted"
"""Why the planner takes a member's GPUs: to give it others, or to let it wait."""


class Driver:
    """Carries out a planner's decisions in one allocation.

    Members that start together are a round. While somebody waits for GPUs that others are about to
    leave, the planner is not asked.

    Parameters
    ----------
    job : int
        Number of the job in its run.
    first_round : int
        Index of the folder that was made when the job was submitted.
    started : float
        When the job started, in seconds since the epoch; its limit counts from here.
    """

    def __init__(self, folder: RunFolder, job: int, first_round: int, started: float) -> None:
        self._folder = folder
        self._spec: RunSpec = read_spec(folder)
        self._job = job
        self._first_round = folder.round(first_round).create()
        self._events = EventWriter(self._first_round.events, DRIVER)
        self._deadline = started + self._spec.wall_s - self._spec.grace_s
        self._planner = planner_named(self._spec.planner)
        self._options = options_from(self._spec.options)
        self._alpha = self._planner.stop_share(self._options)
        self._nodes = nodes_of_this_job(self._spec.site, self._spec.gpus)
        self._pool = StepPool(self._spec.site, self._nodes)
        self._gpus = sum(len(node.gpus) for node in self._nodes)
        self._busy_s = {p.member: p.startup_s + p.evaluate_s + p.checkpoint_s for p in self._spec.profiles}
        self._run_began = _began_at(folder)
        self._members = Members(folder, self._spec, self._gpus, self._run_began)
        self._memory = _last_memory(folder)
        self._open: list[OpenRound] = []
        self._pending: list[Allocation] = []
        self._no_room: dict[str, int] = {}
        self._again_at = math.inf
        self._changed = True
        self._released = False
        self._ending: str | None = None

    def run(self) -> str:
        """Run rounds until nothing is left or the job has to end; return why it ended."""
        self._events.write("job_started", job=self._job, nodes=encode(self._nodes), deadline=self._deadline)
        while True:
            self._reap()
            self._watch_the_clock()
            self._watch_the_flotillas()
            self._watch_who_leaves()
            self._start_round()
            if self._ending and not self._open:
                break
            time.sleep(POLL_S)
        self._events.write("job_ended", job=self._job, reason=self._ending)
        return self._ending

    def end(self, reason: str) -> None:
        """Start no more rounds; the first reason stands. Signal handlers call this at any moment."""
        if self._ending is None:
            self._ending = reason

    def heed_warning(self) -> None:
        """End the job, unless the warning is one of the time limit, which the driver knows better.

        Slurm looks at its clocks so rarely that it warns up to a minute too early.
        """
        if self._deadline - time.time() > EARLIEST_WARNING_S:
            self.end("signal")

    def _reap(self) -> None:
        for step in self._pool.reap():
            open_round = next(r for r in self._open if r.active.get(step.name) == step.allocation)
            self._close_step(open_round, step)

    def _close_step(self, open_round: OpenRound, step: EndedStep) -> None:
        self._changed = self._released = True
        open_round.close(step)
        if step.exit_code == 0 and open_round.had_no_room(step.name):
            self._no_room[step.name] = step.allocation.gpus
        if not open_round.active:
            open_round.end(self._members.left())
            self._open.remove(open_round)

    def _watch_the_clock(self) -> None:
        """Ask the planner again when it wanted that; at the job's end ask every trainer to leave."""
        if time.time() >= self._again_at:
            self._again_at, self._changed = math.inf, True
        if time.time() >= self._deadline:
            self.end(DEADLINE)
        if self._ending:
            for open_round in self._open:
                open_round.stop(self._ending, {})

    def _watch_the_flotillas(self) -> None:
        """Stop a round when too few of its GPUs are active (FLEET, section 4.3.2, "Training")."""
        if not self._alpha or not self._released:
            return
        self._released = False
        left = self._members.left()
        for open_round in self._open:
            active = {name: gpus for name, gpus in open_round.held.items() if name in left}
            if should_stop(
                active,
                open_round.allocated,
                self._alpha,
                waiting=len(left) > len(active),
                max_gpus={name: left[name].max_gpus for name in active},
            ):
                open_round.stop("alpha", self._busy_s)

    def _watch_who_leaves(self) -> None:
        """Make those leave that were told to and have not done so within the grace."""
        for open_round in self._open:
            for name, seconds in open_round.overdue():
                if seconds > WARN_SHARE * self._spec.grace_s:
                    open_round.terminated.add(name)
                    kill = seconds > KILL_SHARE * self._spec.grace_s
                    self._pool.signal(signal.SIGKILL if kill else signal.SIGTERM, name)

    def _start_round(self) -> None:
        """Ask the planner, if it may be asked now, and start those whose GPUs are free."""
        if self._ending:
            return
        if self._changed and not self._pending and self._may_plan():
            self._changed = False
            self._decide()
        if ready := [allocation for allocation in self._pending if self._pool.can_hold(allocation)]:
            self._pending = [allocation for allocation in self._pending if allocation not in ready]
            self._start(ready)

    def _may_plan(self) -> bool:
        """Ask a global planner only when all GPUs are free, a local one when any is."""
        if not self._open or self._planner.paradigm == "elastic":
            return True
        return self._planner.paradigm == "local" and bool(self._pool.free_nodes())

    def _decide(self) -> None:
        """Ask the planner; tell those to leave whose GPUs it takes, and note who gets some."""
        seen = self._members.seen(self._open, time.time())
        request = self._request(seen)
        if not request.candidates and not request.held:
            if not self._open:
                self.end("finished")
            return
        if not request.nodes and not request.held:
            return
        decision, _ = ask(self._planner, request, lambda allocation: self._fits(seen.left, allocation))
        self._memory = decision.memory
        self._again_at = math.inf if decision.again_s is None else self._run_began + decision.again_s
        self._pending = list(decision.start)
        self._tell_to_leave(decision)
        if not self._open and not self._pending:
            self.end(DEADLINE)

    def _request(self, seen: Seen) -> Request:
        return Request(
            candidates=sorted(seen.waiting, key=lambda c: self._planner.order(c, self._options)),
            nodes=self._pool.free_nodes(),
            gpus=self._gpus,
            round_index=self._next_folder().index,
            options=self._options,
            held=seen.held if self._planner.paradigm == "elastic" else (),
            cluster=self._nodes,
            now_s=time.time() - self._run_began,
            memory=self._memory,
        )

    def _fits(self, left: Mapping[str, Candidate], allocation: Allocation) -> bool:
        """Whether the member would get an epoch done before the deadline, whatever it has left at most.

        Going by a guess, it might lose its GPUs and then find no room on others.
        """
        name = allocation.member
        more = allocation.gpus > self._no_room.get(name, 0)
        return more and least_step_s(left[name], allocation.rate) <= self._deadline - time.time()

    def _tell_to_leave(self, decision: Decision) -> None:
        given = {allocation.member for allocation in decision.start}
        for open_round in self._open:
            for name in open_round.active.keys() & {*given, *decision.stop}:
                open_round.stop_member(name, RESIZE if name in given else PREEMPTED, self._busy_s)

    def _start(self, ready: Sequence[Allocation]) -> None:
        """Start members as one round, but for those that have got done, or too late, by now."""
        left = self._members.left()
        allocations = [a for a in ready if a.member in left and self._fits(left, a)]
        self._changed |= len(allocations) < len(ready)
        if not allocations:
            return
        if reason := exceeded(self._spec.budget, usage_of(events_in(self._folder), time.time())):
            self.end(reason)
        else:
            self._open_round(allocations, left)

    def _next_folder(self) -> RoundFolder:
        if not self._first_round.file.exists():
            return self._first_round
        return self._folder.round(self._folder.next_index())

    def _open_round(self, allocations: Sequence[Allocation], left: Mapping[str, Candidate]) -> None:
        folder = self._next_folder().create()
        if folder != self._first_round:
            folder.script.symlink_to(Path("..") / self._first_round.path.name / folder.script.name)
        spec = self._spec
        members = tuple(spec.ensemble.member(a.member) for a in allocations)
        write_round(
            folder.file,
            RoundFile(
                run=spec.run,
                index=folder.index,
                job=self._job,
                deadline=self._deadline,
                ensemble=replace(spec.ensemble, members=members),
                allocations=tuple(allocations),
                checkpoints=spec.checkpoints,
                device=spec.site.device,
                memory=self._memory,
            ),
        )
        events = EventWriter(folder.events, DRIVER)
        ends = [(step_s(left[a.member], a.rate), a.gpus) for a in allocations]
        events.write(
            "round_started",
            index=folder.index,
            job=self._job,
            predicted_s=round_s(ends, self._alpha),
            members=[allocation.member for allocation in allocations],
        )
        self._open.append(OpenRound(folder, events, sum(a.gpus for a in allocations), time.time()))
        for allocation in allocations:
            self._launch(self._open[-1], allocation)

    def _launch(self, open_round: OpenRound, allocation: Allocation) -> None:
        name = allocation.member
        command = [sys.executable, "-m", "hetctl.runtime", str(open_round.folder.file), "--member", name]
        open_round.active[name] = allocation
        open_round.held[name] = allocation.gpus
        open_round.events.write(
            "step_started", member=name, gpus=allocation.gpus, placement=encode(allocation.placement)
        )
        self._pool.launch(name, allocation, command, open_round.folder.log_of(name))


def _began_at(folder: RunFolder) -> float:
    """Return when the first job of the run started, in seconds since the epoch."""
    return min((event.time for event in events_in(folder)), default=time.time())


def _last_memory(folder: RunFolder) -> Any:
    """Return what the planner remembered when the newest round of the run was opened."""
    planned = [opened for opened in folder.rounds() if opened.file.exists()]
    return read_round(planned[-1].file).memory if planned else None


def main() -> int:
    """Run the driver; the exit code is 0 however the members fared."""
    parser = argparse.ArgumentParser(prog="python -m hetctl.runtime.driver", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--round", type=int, required=True)
    parser.add_argument("--job", type=int, required=True)
    parser.add_argument("--started", type=float, required=True)
    arguments = parser.parse_args()
    folder = RunFolder(arguments.run_folder.resolve())
    driver = Driver(folder, arguments.job, arguments.round, arguments.started)
    signal.signal(signal.SIGUSR2, lambda *_: driver.heed_warning())
    signal.signal(signal.SIGTERM, lambda *_: driver.end("signal"))
    print(f"job {arguments.job} of run {folder.name} ended: {driver.run()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
