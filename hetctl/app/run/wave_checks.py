"""Check of a run's pipelines: versions of weights that minibatches used, against their layouts' bounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hetctl.app.project import Project
from hetctl.app.run.select_run import known_run
from hetctl.methods.pipeline.wsp import Bounds, staleness, violations
from hetctl.model.errors import BadInputError
from hetctl.model.events import DRIVER
from hetctl.model.pipelines import PipelineLayout, WaveCheck, WaveRecord
from hetctl.model.serialization import parse
from hetctl.model.values import dataclass
from hetctl.storage.paths import RunFolder
from hetctl.storage.progress_fold import events_in

Layouts = Mapping[int, PipelineLayout]
"""Layouts of a member by round."""


@dataclass(frozen=True)
class CheckedRun:
    """A run with what the logs of its pipelines say."""

    run: str
    checks: tuple[WaveCheck, ...]


def check_run(project: Project, run: str | None) -> CheckedRun:
    """Check the logs of a run, by default of the newest one.

    Raises
    ------
    BadInputError
        If it has no logs of pipelines.
    """
    spec = known_run(project, run)[0].spec
    checks = wave_checks(project.home.run(spec.run))
    if not checks:
        raise BadInputError(
            f"no pipeline of run {spec.run} has trained a wave: members are pipelines with --mode pipeline,"
            " or auto",
            "name another run, or wait for its first waves (`hetctl status`)",
        )
    return CheckedRun(spec.run, checks)


def wave_checks(folder: RunFolder) -> tuple[WaveCheck, ...]:
    """Return a check of each member that trained as a pipeline, for each pair of N_m and D of its layouts."""
    return tuple(
        check
        for member, layouts in _layouts_in(folder).items()
        for check in _checks(member, layouts, read_waves(folder, member))
    )


def _layouts_in(folder: RunFolder) -> Mapping[str, Layouts]:
    layouts: defaultdict[str, dict[int, PipelineLayout]] = defaultdict(dict)
    for event in events_in(folder):
        if event.source == DRIVER and event.kind == "task_started" and event.record.pipeline:
            layouts[event.record.member][event.round] = event.record.pipeline
    return layouts


def _checks(member: str, layouts: Layouts, records: Iterable[WaveRecord]) -> Iterator[WaveCheck]:
    alike: defaultdict[tuple[int, int, bool], list[WaveRecord]] = defaultdict(list)
    for record in records:
        # Without its task the bounds of a record are not known.
        if layout := layouts.get(record.round):
            alike[layout.in_flight, layout.distance, len(layout.workers) > 1].append(record)
    for (in_flight, distance, shares), own in sorted(alike.items()):
        yield _check(member, Bounds(in_flight, distance), own, shares=shares)


def _check(member: str, bounds: Bounds, records: Sequence[WaveRecord], *, shares: bool) -> WaveCheck:
    local, overall = staleness(records, bounds)
    return WaveCheck(
        member=member,
        in_flight=bounds.in_flight,
        distance=bounds.distance,
        minibatches=sum(len(record.completed) for record in records),
        local=local,
        local_bound=bounds.local_staleness,
        overall=overall if shares else None,
        overall_bound=bounds.global_staleness,
        violations=tuple(violations(records, bounds)),
    )


def read_waves(folder: RunFolder, member: str) -> Iterator[WaveRecord]:
    """Yield the records of all ranks of a member; incomplete or corrupt lines are skipped."""
    for log in sorted(folder.waves.glob("*.jsonl")):
        name, _, rank = log.stem.rpartition("-")
        if name == member and rank.isdigit():
            yield from _records_of(log)


def _records_of(log: Path) -> Iterator[WaveRecord]:
    with log.open("rb") as lines:
        for line in lines:
            # A rank that was killed may leave half a line.
            with suppress(ValueError, RecursionError):
                record = parse(WaveRecord, line)
                if len(record.completed) == len(record.pulled):
                    yield record
