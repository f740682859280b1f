"""One profile point of a member that is a command: it runs for a given time, and its reports are timed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

from hetctl.model.ensemble import COMMAND, Ensemble, Member
from hetctl.model.errors import BadInputError
from hetctl.model.profile import Hardware, ProfilePoint, shape_digest
from hetctl.model.serialization import encode
from hetctl.perf.step_times import Mark, ScriptPace, is_measured, script_pace
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.group import CollectiveBackend, Group
from hetctl.runtime.worker.hardware import gpu_and_driver
from hetctl.runtime.worker.member_trainer import StopSignal
from hetctl.runtime.worker.messages import Assignment
from hetctl.runtime.worker.reporting import reporter
from hetctl.runtime.worker.scripts.command_environment import CommandSettings
from hetctl.runtime.worker.scripts.command_process import (
    CommandProcess,
    WrongReportError,
    parse_report,
    shown,
)
from hetctl.runtime.worker.scripts.command_run import CommandRun, command_environment
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.profile_request import Measurements, ProfileTarget, read_measurements

GRACE_S = 10.0
"""Grace period in seconds of a command that has run for long enough."""
SAMPLE_EVERY_S = 1.0
"""Seconds between two samples of the memory of the command."""
ADVICE = (
    "let the script call hetctl.report(epoch=.., finished=False, samples=..) within its epochs, give it more"
    " time with --for, or import a rate that you know with `hetctl profile import FILE`"
)


def measure_command(assignment: Assignment, context: WorkerContext) -> None:
    """Run a member's command for the given time; write its rate to the event file of the point.

    Raises
    ------
    BadInputError
        On rank 0, if its reports give no rate.
    """
    measurements = read_measurements(Path(assignment.task.folder))
    point = measurements.target(assignment.task.name)
    site = measurements.site
    group = context.join(assignment.rank_info, site.network, site.timeouts, CollectiveBackend())
    began = assignment.launched_at if assignment.own_step else time.time()
    times = _run(measurements, point, assignment, group, context)
    group.barrier_and_close()
    if group.rank == 0:
        result = _point(measurements, point, times, times.pace(began), assignment.task.gpu_type)
        reporter(assignment.task, group, context.send_written).write("point", **encode(result))


def _run(
    measurements: Measurements,
    point: ProfileTarget,
    assignment: Assignment,
    group: Group,
    context: WorkerContext,
) -> ReportTimes:
    """Run the command until its rate is known or its time is over; return its reports."""
    member, folder = measurements.ensemble.member(point.member), Path(assignment.task.folder)
    scratch = folder / "scratch" / point.source
    make_private_folder(scratch.parent)
    make_private_folder(scratch)
    deadline = time.time() + measurements.command_s
    settings = CommandSettings(folder.name, 0, 0, str(scratch), deadline, profiled=True)
    words, project = member.command_line(str(scratch)), Path(measurements.ensemble.folder)
    with ExitStack() as stack:
        environment = command_environment(group, context, member, settings, stack)
        process = stack.enter_context(closing(CommandProcess(words, project, environment, GRACE_S)))
        times = ReportTimes(process.private_bytes)
        stop = StopSignal(times.sample_memory, deadline)
        CommandRun(group, process, stop, times, context).watch()
    if group.rank == 0:
        shutil.rmtree(scratch, ignore_errors=True)
    return times


@dataclass
class ReportTimes:
    """Arrivals of a command's reports, and its memory.

    Parameters
    ----------
    private_bytes : callable
        Function that returns the private memory of the command in bytes.
    """

    private_bytes: Callable[[], int]
    marks: list[Mark] = field(default_factory=list)
    peak_bytes: int = 0
    _lines: int = 0
    _wrong: str = ""
    _next_sample: float = 0.0

    def take(self, line: bytes) -> None:
        """Note the time of a report; checkpoints are of no use here, and metrics are not judged."""
        self._lines += 1
        try:
            report = parse_report(line)
        except WrongReportError as error:
            self._wrong = self._wrong or f"{error}: {shown(line)}"
            return
        if report.epoch is not None:
            samples = report.samples or 0.0
            self.marks.append(Mark(time.time(), report.epoch, samples, report.finished, report.seconds))

    def reason_to_stop(self) -> str | None:
        """Return a reason once the rate is known, and the end of an epoch with its evaluation was seen."""
        return "its rate is known" if is_measured(self.marks) else None

    def sample_memory(self) -> None:
        """Note the memory of the command from time to time."""
        if (now := time.monotonic()) >= self._next_sample:
            self._next_sample = now + SAMPLE_EVERY_S
            self.peak_bytes = max(self.peak_bytes, self.private_bytes())

    def pace(self, began: float) -> ScriptPace:
        """Return the pace of a command that began at a time, in seconds since the epoch.

        Raises
        ------
        BadInputError
            If it has reported too little.
        """
        if (pace := script_pace(self.marks, began)) is None:
            raise BadInputError(f"{self._what_lacks()} in {time.time() - began:.0f} s", ADVICE)
        return pace

    def _what_lacks(self) -> str:
        if not self._lines:
            return "the script has reported nothing"
        if not self.marks and self._wrong:
            return f"the script has reported nothing, but written lines that are no reports ({self._wrong})"
        if not any(mark.samples for mark in self.marks):
            return "the script has reported no samples"
        return f"the script has reported too little for a rate ({self._lines} reports)"


def _point(
    measurements: Measurements,
    point: ProfileTarget,
    times: ReportTimes,
    pace: ScriptPace,
    gpu_type: str | None,
) -> ProfilePoint:
    ensemble, found = measurements.ensemble, gpu_and_driver()
    member: Member = ensemble.member(point.member)
    return ProfilePoint(
        member=member.name,
        gpus=point.gpus,
        rate=pace.rate,
        fingerprint=member.fingerprint,
        batch_size=member.batch_size,
        measured_at=time.time(),
        machine=Hardware(gpu_type or measurements.site.gpu_type or found[0], found[1], COMMAND),
        samples_per_epoch=_epoch_samples(ensemble, pace),
        startup_s=pace.startup_s,
        peak_memory_bytes=times.peak_bytes,
        epoch_s=pace.epoch_s,
        rate_error=pace.per_sample.error if pace.runs > 1 else None,
        step_spread=pace.per_sample.spread,
        steps=pace.runs,
        shape=shape_digest(member, ensemble.rate_keys),
    )


def _epoch_samples(ensemble: Ensemble, pace: ScriptPace) -> int | None:
    seen = None if pace.epoch_samples is None else int(pace.epoch_samples)
    return ensemble.samples_per_epoch or seen
