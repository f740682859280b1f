"""The driver of one batch job: plans a round, runs its steps, reads the events, plans the next.

``python -m hetctl.runtime.driver RUN_FOLDER --round N --job J --deadline SECONDS --batch-id ID``
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetctl.control.budget import exceeded
from hetctl.control.ends import failed_nodes
from hetctl.control.flotilla import should_stop
from hetctl.core.codec import encode
from hetctl.core.ends import ENDS_THE_JOB, Why
from hetctl.core.events import DRIVER, SteadyWriter
from hetctl.core.layout import RunFolder
from hetctl.core.plan import Allocation
from hetctl.core.profile import Candidate
from hetctl.core.progress import events_in
from hetctl.core.run import RunSpec, read_spec
from hetctl.core.usage import usage_of
from hetctl.perf.course import PART_SHARE, least_step_s
from hetctl.perf.rounds import round_s, step_s
from hetctl.planners import planner_named
from hetctl.planners.base import Decision, Request, ask, options_from
from hetctl.runtime.crew import Crew
from hetctl.runtime.engagement import EndedGroup
from hetctl.runtime.exchanges import Exchanges
from hetctl.runtime.history import began_at, first_folder, last_memory, next_folder
from hetctl.runtime.members import Members, Seen
from hetctl.runtime.nodes import nodes_of_this_job
from hetctl.runtime.opening import Opener
from hetctl.runtime.rounds import DEADLINE, OpenRound
from hetctl.runtime.steady import in_words, say

POLL_S = 0.05
SETTLE_S = 0.5
"""After a batch system has signalled a step, the driver hears of it within this time."""
LAUNCH_PAUSE_S = 5.0
"""So long nothing is launched after the batch system did not answer the launcher."""
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
    deadline : float
        When all training has to stop, in seconds since the epoch.
    batch_id : str
        The batch system's number of the job.
    """

    def __init__(
        self, folder: RunFolder, job: int, first_round: int, deadline: float, batch_id: str = ""
    ) -> None:
        self._folder = folder
        self._spec: RunSpec = read_spec(folder)
        self._job = job
        self._batch_id = batch_id
        self._first_round = first_folder(folder, first_round)
        self._events = SteadyWriter(self._first_round.events, DRIVER, self._end_by_disk)
        self._deadline = deadline
        self._longest_s = PART_SHARE * (deadline - time.time())
        self._planner = planner_named(self._spec.planner)
        self._options = options_from(self._spec.options)
        self._alpha = self._planner.stop_share(self._options)
        self._crew = Crew(
            self._spec.site, nodes_of_this_job(self._spec.site, self._spec.gpus), self._first_round.path
        )
        self._exchanges = Exchanges(self._spec.site)
        self._busy_s = {p.member: p.startup_s + p.evaluate_s + p.checkpoint_s for p in self._spec.profiles}
        self._opener = Opener(
            *(folder, self._first_round, self._spec, job, deadline, self._longest_s),
            *(self._crew, self._exchanges, self._end_by_disk),
        )
        self._run_began = began_at(folder)
        self._members = Members(folder, self._spec, self._crew.gpus, self._run_began)
        self._memory = last_memory(folder)
        self._open: list[OpenRound] = []
        self._pending: list[Allocation] = []
        self._no_room: dict[str, int] = {}
        self._again_at = math.inf
        self._not_before = 0.0
        self._changed = True
        self._released = False
        self._ending: str | None = None

    def run(self) -> str:
        """Run rounds until nothing is left or the job has to end; return why it ended."""
        self._events.write(
            "job_started",
            job=self._job,
            batch_id=self._batch_id,
            nodes=encode(self._crew.nodes),
            deadline=self._deadline,
        )
        while True:
            self._reap()
            self._watch_the_flotillas()
            self._watch_who_leaves()
            try:
                self._start_round()
            except OSError as error:
                self._end_by_disk(error)
            if self._ending and not self._open:
                break
            time.sleep(POLL_S)
        self._crew.leave()
        self._exchanges.leave()
        self._events.write("job_ended", job=self._job, reason=self._ending)
        return self._ending

    def end(self, reason: str) -> None:
        """Start no more rounds; the first reason stands. Signal handlers call this at any moment."""
        if self._ending is None:
            self._ending = reason

    def _end_by_disk(self, error: OSError) -> None:
        reason = in_words(error)
        if self._ending is None:
            say(f"the job ends: {reason} ({error})")
        self.end(reason)

    def _reap(self) -> None:
        """Look for steps that have ended, then whether all should end: a step may have heard it first."""
        ended = self._crew.reap()
        self._exchanges.reap()
        if not self._ending and any(step.exit_code == 128 + signal.SIGTERM for step in ended):
            # A batch system that ends a job signals steps and driver in any order.
            time.sleep(SETTLE_S)
        self._watch_the_clock()
        for step in ended:
            open_round = next(r for r in self._open if r.active.get(step.name) == step.allocation)
            self._close_step(open_round, step)

    def _close_step(self, open_round: OpenRound, step: EndedGroup) -> None:
        self._changed = self._released = True
        self._draw_consequences(open_round.close(step, self._members.peak_memory(step.name)), step)
        if step.exit_code == 0 and open_round.had_no_room(step.name):
            self._no_room[step.name] = step.allocation.gpus
        self._close_if_over(open_round)

    def _draw_consequences(self, why: Why, step: EndedGroup) -> None:
        """Do what the end of a step means for the job; `Members` know what it means for the member."""
        if why in ENDS_THE_JOB:
            self.end(why.value)
        elif why is Why.NOT_LAUNCHED:
            self._not_before = time.time() + LAUNCH_PAUSE_S
        elif why is Why.NODE_FAILURE:
            nodes = failed_nodes(step.output, (place.node for place in step.allocation.placement))
            self._events.write("node_failed", job=self._job, member=step.name, nodes=list(nodes))
            # Slurm may start no more steps on the nodes that are left: the lost ones still count.
            self.end(why.value)

    def _close_if_over(self, open_round: OpenRound) -> None:
        if not open_round.active:
            open_round.end(self._members.left())
            self._open.remove(open_round)

    def _watch_the_clock(self) -> None:
        """Ask the planner again when it wanted that; at the job's end ask every trainer to leave.

        The script measures the time, too, and hears the batch system's signals: it tells by a file.
        """
        if time.time() >= self._again_at:
            self._again_at, self._changed = math.inf, True
        if (told := self._folder.job_stop(self._job)).exists():
            self.end(told.read_text(encoding="utf-8").strip() or "signal")
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
                    self._crew.send_signal(signal.SIGKILL if kill else signal.SIGTERM, name)

    def _start_round(self) -> None:
        """Ask the planner, if it may be asked now, and start those whose GPUs are free."""
        if self._ending or time.time() < self._not_before:
            return
        if self._changed and not self._pending and self._may_plan():
            self._changed = False
            self._decide()
        if ready := [allocation for allocation in self._pending if self._crew.can_hold(allocation)]:
            self._pending = [allocation for allocation in self._pending if allocation not in ready]
            self._start(ready)

    def _may_plan(self) -> bool:
        """Ask a global planner only when all GPUs are free, a local one when any is."""
        if not self._open or self._planner.paradigm == "elastic":
            return True
        return self._planner.paradigm == "local" and bool(self._crew.free_nodes())

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
            nodes=self._crew.free_nodes(),
            gpus=self._crew.gpus,
            round_index=next_folder(self._folder, self._first_round).index,
            options=self._options,
            held=seen.held if self._planner.paradigm == "elastic" else (),
            cluster=self._crew.nodes,
            now_s=time.time() - self._run_began,
            memory=self._memory,
        )

    def _fits(self, left: Mapping[str, Candidate], allocation: Allocation) -> bool:
        """Whether the member would get an epoch done before the deadline, whatever it has left at most.

        Going by a guess, it might lose its GPUs and then find no room on others.
        """
        candidate = left[allocation.member]
        seconds = least_step_s(candidate, allocation.rate, self._longest_s)
        more = allocation.gpus > self._no_room.get(candidate.name, 0)
        return more and seconds <= self._deadline - time.time()

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
            return
        ends = [(step_s(left[a.member], a.rate), a.gpus) for a in allocations]
        members = self._members.as_they_are(a.member for a in allocations)
        opened = self._opener.open(allocations, members, round_s(ends, self._alpha), self._memory)
        self._open.append(opened)
        self._close_if_over(opened)


def main() -> int:
    """Run the driver; the exit code is 0 however the members fared."""
    parser = argparse.ArgumentParser(prog="python -m hetctl.runtime.driver", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--round", type=int, required=True)
    parser.add_argument("--job", type=int, required=True)
    parser.add_argument("--deadline", type=float, required=True)
    parser.add_argument("--batch-id", default="")
    arguments = parser.parse_args()
    folder = RunFolder(arguments.run_folder.resolve())
    driver = Driver(folder, arguments.job, arguments.round, arguments.deadline, arguments.batch_id)
    signal.signal(signal.SIGTERM, lambda *_: driver.end("signal"))
    say(f"job {arguments.job} of run {folder.name} ended: {driver.run()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
