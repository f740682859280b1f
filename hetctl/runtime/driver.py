"""The driver of one batch job: plans a round, runs its steps, reads the events, plans the next.

``python -m hetctl.runtime.driver RUN_FOLDER --round N --job J --started SECONDS``
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetctl.control.budget import exceeded
from hetctl.control.flotilla import should_stop
from hetctl.core.codec import encode
from hetctl.core.events import DRIVER, EventWriter, read_events
from hetctl.core.layout import RoundFolder, RunFolder, write_private
from hetctl.core.plan import Allocation
from hetctl.core.profile import Candidate
from hetctl.core.progress import events_in, progress_in
from hetctl.core.run import RoundFile, RunSpec, read_spec, write_round
from hetctl.core.usage import usage_of
from hetctl.perf.course import least_step_s
from hetctl.perf.rounds import round_s, step_s
from hetctl.perf.work import candidates
from hetctl.planners import planner_named
from hetctl.planners.base import Request, ask, options_from
from hetctl.runtime.nodes import nodes_of_this_job
from hetctl.runtime.steps import EndedStep, StepPool

POLL_S = 0.05
EARLIEST_WARNING_S = 60
"""Before the time it was asked for, a warning of the time limit may come (sbatch's --signal)."""
WARN_SHARE, KILL_SHARE = 0.6, 0.85
"""Shares of the grace period after which steps that have not left are terminated, and killed."""


@dataclass
class OpenRound:
    """A round with steps that are still running.

    Parameters
    ----------
    allocated : int
        GPUs that the round was given.
    active : dict
        Members whose steps run.
    held : dict
        GPUs by member; a member whose step failed holds none.
    """

    folder: RoundFolder
    events: EventWriter
    allocated: int
    active: dict[str, Allocation] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)
    stopped_by: str | None = None
    failed: bool = False

    def stop(self, reason: str) -> None:
        """Ask the trainers to checkpoint and leave; the first reason stands."""
        if self.stopped_by is None:
            self.stopped_by = reason
            write_private(self.folder.stop, reason + "\n")


class Driver:
    """Runs as many rounds as fit in one allocation.

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
        self._nodes = nodes_of_this_job(self._spec.site, self._spec.gpus)
        self._pool = StepPool(self._spec.site, self._nodes)
        self._gpus = sum(len(node.gpus) for node in self._nodes)
        self._open: list[OpenRound] = []
        self._no_room: dict[str, int] = {}
        self._changed = True
        self._released = False
        self._ending: str | None = None
        self._ended_at = 0.0
        self._killing = False

    def run(self) -> str:
        """Run rounds until nothing is left or the job has to end; return why it ended."""
        self._events.write("job_started", job=self._job, nodes=encode(self._nodes), deadline=self._deadline)
        while True:
            self._reap()
            self._watch_the_clock()
            self._watch_the_flotillas()
            self._start_round()
            if self._ending and not self._open:
                break
            time.sleep(POLL_S)
        self._events.write("job_ended", job=self._job, reason=self._ending)
        return self._ending

    def end(self, reason: str) -> None:
        """Start no more rounds; the first reason stands. Signal handlers call this at any moment."""
        if self._ending is None:
            self._ending, self._ended_at = reason, time.time()

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
        del open_round.active[step.name]
        self._changed = self._released = True
        if step.exit_code != 0:
            del open_round.held[step.name]
            open_round.failed = True
        elif _had_no_room(open_round, step.name):
            self._no_room[step.name] = step.allocation.gpus
        fault = step.exit_code != 0 and not self._killing
        open_round.events.write(
            "step_ended", member=step.name, exit_code=step.exit_code, cause=step.cause, fault=fault
        )
        if not open_round.active:
            open_round.events.write("round_ended", ended_by=open_round.stopped_by or self._end_of(open_round))
            self._open.remove(open_round)

    def _end_of(self, open_round: OpenRound) -> str:
        """Say why a round ended that nobody stopped: trainers see the deadline for themselves."""
        if open_round.failed:
            return "failed"
        left = self._waiting(including_open=True).keys() & open_round.held.keys()
        return "deadline" if left else "converged"

    def _watch_the_clock(self) -> None:
        """At the job's end ask every trainer to checkpoint and leave, then make them leave."""
        if self._ending is None and time.time() >= self._deadline:
            self.end("deadline")
        if self._ending is None:
            return
        for open_round in self._open:
            open_round.stop(self._ending)
        overdue = time.time() - self._ended_at
        self._killing = overdue > WARN_SHARE * self._spec.grace_s
        if overdue > KILL_SHARE * self._spec.grace_s:
            self._pool.signal(signal.SIGKILL)
        elif self._killing:
            self._pool.signal(signal.SIGTERM)

    def _watch_the_flotillas(self) -> None:
        """Stop a round when too few of its GPUs are active (FLEET, section 4.3.2, "Training")."""
        alpha = self._planner.stop_share(self._options)
        if not alpha or not self._released:
            return
        self._released = False
        waiting = self._waiting(including_open=True)
        for open_round in self._open:
            active = {name: gpus for name, gpus in open_round.held.items() if name in waiting}
            if should_stop(
                active,
                open_round.allocated,
                alpha,
                waiting=len(waiting) > len(active),
                max_gpus={name: waiting[name].max_gpus for name in active},
            ):
                open_round.stop("alpha")

    def _start_round(self) -> None:
        """Ask the planner, if it may be asked now, and launch what it allocates."""
        if self._ending or not self._changed or not self._may_plan():
            return
        self._changed = False
        waiting = self._waiting()
        if not waiting:
            if not self._open:
                self.end("finished")
            return
        if reason := exceeded(self._spec.budget, usage_of(events_in(self._folder), time.time())):
            self.end(reason)
            return
        allocations = self._plan(waiting)
        if allocations:
            self._open_round(allocations, waiting)
        elif not self._open:
            self.end("deadline")

    def _may_plan(self) -> bool:
        """Ask a global planner only when all GPUs are free, a local one when any is."""
        return not self._open or (self._planner.paradigm == "local" and bool(self._pool.free_nodes()))

    def _waiting(self, *, including_open: bool = False) -> dict[str, Candidate]:
        """Members that need training, without those that a step is training."""
        spec = self._spec
        progress = progress_in(self._folder, spec.ensemble, spec.retries)
        profiles = {profile.member: profile for profile in spec.profiles}
        active = candidates(spec.ensemble, profiles, progress, self._gpus, spec.site.gpus_per_node)
        rounds = () if including_open else self._open
        busy = {name for open_round in rounds for name in open_round.active}
        return {candidate.name: candidate for candidate in active if candidate.name not in busy}

    def _plan(self, waiting: dict[str, Candidate]) -> tuple[Allocation, ...]:
        in_order = sorted(waiting.values(), key=lambda c: self._planner.order(c, self._options))
        request = Request(
            candidates=in_order,
            nodes=self._pool.free_nodes(),
            gpus=self._gpus,
            round_index=self._next_folder().index,
            options=self._options,
        )
        left = self._deadline - time.time()

        def fits(allocation: Allocation) -> bool:
            name = allocation.member
            more = allocation.gpus > self._no_room.get(name, 0)
            return more and least_step_s(waiting[name], allocation.rate) <= left

        decision, _ = ask(self._planner, request, fits)
        return decision.start

    def _next_folder(self) -> RoundFolder:
        if not self._first_round.file.exists():
            return self._first_round
        return self._folder.round(self._folder.next_index())

    def _open_round(self, allocations: tuple[Allocation, ...], waiting: dict[str, Candidate]) -> None:
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
                allocations=allocations,
                checkpoints=spec.checkpoints,
                device=spec.site.device,
            ),
        )
        events = EventWriter(folder.events, DRIVER)
        ends = [(step_s(waiting[a.member], a.rate), a.gpus) for a in allocations]
        alpha = self._planner.stop_share(self._options)
        events.write(
            "round_started",
            index=folder.index,
            job=self._job,
            predicted_s=round_s(ends, alpha),
            members=[allocation.member for allocation in allocations],
        )
        self._open.append(OpenRound(folder, events, sum(a.gpus for a in allocations)))
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


def _had_no_room(open_round: OpenRound, member: str) -> bool:
    """Whether a trainer left since its next epoch, as measured, would not fit before the deadline."""
    events = read_events(open_round.folder.events / f"{member}.jsonl")
    return any(event.kind == "stopped" and event.data["reason"] == "deadline" for event in events)


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
