"""Trace of the visits of a run."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.app.project import Project
from hetctl.app.run.select_run import known_run
from hetctl.methods.hopper.schedule import trace_line
from hetctl.model.errors import BadInputError
from hetctl.model.hops import DONE, Visit, VisitEnd
from hetctl.model.values import dataclass
from hetctl.storage.visit_fold import FoldLog, VisitFold

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
    spec = known_run(project, run)[0].spec
    names = [member.name for member in spec.ensemble.members]
    visits = FoldLog(VisitFold(), project.home.run(spec.run), names).refresh().visits
    if not visits:
        raise BadInputError(
            f"no visit of run {spec.run} has ended: members hop with --mode hopper, or auto",
            "name another run, or wait for its first visits (`hetctl status`)",
        )
    return RunTrace(spec.run, len(visits), "".join(lines_of(visits)))


def lines_of(visits: Sequence[VisitEnd]) -> list[str]:
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
