"""A round with running tasks, and the members that were told to stop, with the times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from hetctl.model.exit_reason import EXIT_CODES, MEMBER_FAULTS, ExitReason
from hetctl.model.plan import Allocation
from hetctl.runtime.driver.classify_exit import DESCRIPTIONS, exit_reason_of, with_peak
from hetctl.runtime.driver.running_group import EndedGroup
from hetctl.scheduling.rounds import DEADLINE
from hetctl.storage.event_files import EventWriter
from hetctl.storage.event_log import EventFile, end_of_file
from hetctl.storage.paths import RunFolder
from hetctl.storage.task_fold import TaskReport, report_of


@dataclass
class ActiveRound:
    """A round with running tasks.

    Parameters
    ----------
    stop_task : callable
        Function that tells the ranks of a member to stop, given its name and the reason.
    active : dict
        Allocations of the members whose tasks run.
    stopping_since : dict
        Members that were told to stop, with the times, in seconds since the epoch, from which their delays
        count.
    terminated : set
        Members that had to be ended by a signal.
    stopped : bool
        True if all members were told to stop.
    reports : dict
        Reports of the trainers of tasks that have ended, by member.
    visits : bool
        True if the tasks are visits, whose ranks report to the driver and write no events.
    """

    folder: RunFolder
    index: int
    events: EventWriter
    stop_task: Callable[[str, str], None]
    active: dict[str, Allocation] = field(default_factory=dict)
    stopping_since: dict[str, float] = field(default_factory=dict)
    terminated: set[str] = field(default_factory=set)
    stopped: bool = False
    reports: dict[str, TaskReport] = field(default_factory=dict)
    visits: bool = False
    _event_files: dict[str, EventFile] = field(default_factory=dict)

    def expect_events_of(self, name: str) -> None:
        """Read a member's events from here on: its file has those of earlier rounds, too."""
        self._event_files[name] = end_of_file(self.folder.events_of(name), name)

    def stop(self, reason: str, busy_s: Mapping[str, float]) -> None:
        """Tell the trainers to write a checkpoint and stop; the first reason stands.

        Parameters
        ----------
        busy_s : mapping of str to float
            Seconds for which members may be too busy to notice it; the delay of members that are missing
            here counts from now on.
        """
        for name in self.active:
            self._expect(name, busy_s)
            if not self.stopped:
                self.stop_task(name, reason)
        self.stopped = True

    def stop_member(self, name: str, reason: str, busy_s: Mapping[str, float]) -> None:
        """Tell one member's trainers, if they still run, to write a checkpoint and stop."""
        if name not in self.active:
            return
        self._expect(name, busy_s)
        self.stop_task(name, reason)

    def _expect(self, name: str, busy_s: Mapping[str, float]) -> None:
        since = time.time() + busy_s.get(name, 0.0)
        self.stopping_since[name] = min(since, self.stopping_since.get(name, since))

    def overdue(self) -> Iterator[tuple[str, float]]:
        """Return the members that were told to stop and still run, and their delays in seconds."""
        now = time.time()
        return ((name, now - since) for name, since in self.stopping_since.items() if name in self.active)

    def report_of(self, name: str) -> TaskReport:
        """Return the report of a member's trainer; OSError if its events cannot be read."""
        # A trainer that outlives its driver for a moment may still write events of an earlier round.
        return report_of(e for e in self._event_files[name].fresh() if e.round == self.index)

    def close(self, task: EndedGroup, report: TaskReport, profiled_peak: int) -> ExitReason:
        """Record the end of a task and its reason; return the reason.

        Parameters
        ----------
        profiled_peak : int
            Known peak of the member's memory in bytes, used if its trainer reported none.
        """
        del self.active[task.name]
        self.reports[task.name] = report
        reason = self._reason_of(task, report)
        description = task.description(reason)
        if reason is ExitReason.OUT_OF_MEMORY and not task.overuse:
            description = with_peak(description, report.peak_memory_bytes or profiled_peak)
        self._write_end(task.name, task.exit_code, reason, description)
        # The next visit of a member that hops is a task of the same round and name, and was not told to stop.
        self.stopping_since.pop(task.name, None)
        self.terminated.discard(task.name)
        return reason

    def note_not_launched(self, name: str) -> None:
        """Record the end of a task whose start was recorded, and which could not be launched."""
        reason = ExitReason.NOT_LAUNCHED
        self._write_end(name, EXIT_CODES[ExitReason.PROGRAM_ERROR], reason, DESCRIPTIONS[reason])

    def _write_end(self, name: str, exit_code: int, reason: ExitReason, description: str) -> None:
        self.events.write(
            "task_ended",
            member=name,
            exit_code=exit_code,
            reason=reason.value,
            description=description,
            fault=reason in MEMBER_FAULTS,
        )

    def _reason_of(self, task: EndedGroup, report: TaskReport) -> ExitReason:
        """Return why a task ended; a member that was told to stop may also be killed while it does."""
        if task.hung:
            return ExitReason.HUNG
        # The signal was the driver's own: its exit code must not count as a failure of the member.
        if task.name in self.terminated:
            return ExitReason.STOPPED
        if task.exit_code == 0 and (report.exit_reason or self.visits):
            return report.exit_reason or ExitReason.STOPPED
        # srun and ranks may exit with 0 after a node is lost, so a clean exit counts
        # only with the trainer's last event.
        reason = exit_reason_of(task.exit_code, task.output, report.failed_by)
        if reason is not ExitReason.KILLED:
            return reason
        # The trainer's last event says that its state is in a checkpoint: it was killed at its very end.
        if report.exit_reason:
            return report.exit_reason
        if task.lost_nodes:
            return ExitReason.NODE_FAILURE
        return ExitReason.STOPPED if task.name in self.stopping_since else reason

    def end(self, reason: str) -> None:
        """Record the end of the round."""
        self.events.write("round_ended", ended_by=reason)

    def had_no_room(self, member: str) -> bool:
        """Return true if a trainer stopped since its next epoch, as measured, would pass the deadline."""
        return DEADLINE in self.reports[member].stop_reasons
