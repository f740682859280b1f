"""Traces of visits: those of a run, and those that a run repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetctl.app.project import Project
from hetctl.app.run.select_run import record_of
from hetctl.inputs.visit_log import read_run_trace
from hetctl.methods.hopper.schedule import trace_line
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.hops import DONE, RunVisit, Visit
from hetctl.model.plan import HOPPER
from hetctl.storage.atomic_io import write_private
from hetctl.storage.paths import RunFolder
from hetctl.storage.visit_fold import VisitLog

APART_S = 1e-6
"""Least time between two starts in a trace, whose lines are repeated in the order of their starts."""


@dataclass(frozen=True)
class RunTrace:
    """Trace of a run.

    Parameters
    ----------
    visits : int
        Number of its lines.
    """

    run: str
    visits: int
    text: str


def trace_of_run(project: Project, run: str | None) -> RunTrace:
    """Return the visits of a run so far, by default of the newest one.

    Raises
    ------
    BadInputError
        If no visit has ended.
    """
    with project.reading() as catalog:
        spec = record_of(catalog, run).spec
    names = [member.name for member in spec.ensemble.members]
    visits = VisitLog(project.home.run(spec.run), names).look().visits
    if not visits:
        raise BadInputError(
            f"no visit of run {spec.run} has ended: members hop with --mode hopper, or auto",
            "name another run, or wait for its first visits (`hetctl status`)",
        )
    return RunTrace(spec.run, len(visits), "".join(lines_of(visits)))


def lines_of(visits: Sequence[RunVisit]) -> list[str]:
    """Return the lines of visits that are in the order of their starts.

    Clocks of nodes differ. So a visit that seems to begin before an earlier one begins just after it.
    """
    origin = min(visit.began_at for visit in visits)
    lines, last_s = [], -APART_S
    for visit in visits:
        start_s = last_s = max(visit.began_at - origin, last_s + APART_S)
        end_s = max(visit.ended_at - origin, start_s)
        unit = (visit.member, visit.hopper_epoch, f"p{visit.partition}")
        traced = Visit(visit.number, *unit, visit.worker)
        lines.append(trace_line(traced, start_s, end_s, lost=visit.state != DONE))
    return lines


def check_replay(trace: Path, ensemble: Ensemble, mode: str) -> None:
    """Check a trace for a run of an ensemble; nothing is written.

    Raises
    ------
    BadInputError
        If the members do not hop or come from a search, or a line of the trace does not fit the ensemble.
    """
    if mode != HOPPER:
        raise BadInputError(
            f"--replay repeats visits of members that hop, but the mode is {mode}", "add --mode hopper"
        )
    if ensemble.search is not None:
        raise BadInputError(
            f"--replay repeats the visits of members that are known before, but {ensemble.name} has a search,"
            " whose trials come while the run goes on",
            "leave out --replay",
        )
    count = ensemble.partitions.count if ensemble.partitions else 0
    members = [member.name for member in ensemble.members]
    read_run_trace(trace, members, [f"p{number}" for number in range(count)])


def keep_replay(trace: Path, folder: RunFolder) -> None:
    """Copy a trace into the folder of a run, where its jobs read it."""
    write_private(folder.create().replay, trace.read_text(encoding="utf-8-sig"))


def replay_now(stored: str, trace: Path | None) -> str:
    """Return the path of the stored trace if a trace has the same content, else the trace's own.

    Parameters
    ----------
    stored : str
        Path of the trace of a run; empty if it has none.
    trace : Path or None
        Trace that is given now; None: none is given.
    """
    if trace is None or (stored and _text(Path(stored)) == _text(trace)):
        return stored
    return str(trace)


def _text(trace: Path) -> str:
    try:
        return trace.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{trace}: cannot be read: {error}") from None
