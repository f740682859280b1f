"""Points of a profiling folder: the requested, the measured and the failed ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hetctl.app.run.logs import tail_of
from hetctl.catalog.catalog import Catalog
from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.events import Event
from hetctl.model.profile import shape_digest
from hetctl.model.values import dataclass
from hetctl.storage.event_files import read_folder
from hetctl.storage.paths import RunFolder
from hetctl.storage.profile_request import (
    LINKS,
    RATE,
    Measurements,
    ProfileTarget,
    measurements_file,
    read_measurements,
)

MEASURED = ("point", "layers", "links")
"""Kinds of event that end a measured point."""
SKIPPED, FAILED = "skipped", "failed"
"""Kinds of event that end a point that the job left out, as it cannot change the plan, and a failed one."""


@dataclass(frozen=True)
class Failure:
    """Point that could not be measured, with its log and the last lines that `error` does not repeat."""

    point: ProfileTarget
    error: str
    log_tail: tuple[str, ...]
    log: str


def events_of(folder: Path) -> list[Event]:
    """Return all events of a folder."""
    return read_folder(folder / "events")


def last_sign_of(folder: Path) -> float | None:
    """Return the time of the job's last activity, in seconds since the epoch; None if it has not started."""
    events = folder / "events"
    if not events.exists():
        return None
    # A job that has made its folder has started, even before its first event.
    return max([events.stat().st_mtime, *(event.time for event in events_of(folder))])


def measurements_in(folders: Iterable[Path]) -> list[tuple[Path, Measurements]]:
    """Return the measurements of folders, except those without the file because of a crash."""
    return [(folder, read_measurements(folder)) for folder in folders if measurements_file(folder).exists()]


def records_in(folder: Path, kind: str) -> list[Any]:
    """Return the records of the events of a kind: ``point``, ``layers``, ``links`` or ``preprocess``."""
    return [event.record for event in events_of(folder) if event.kind == kind]


def wanted_of(measurements: Measurements, ensemble: Ensemble) -> set[ProfileTarget]:
    """Return the points of a job whose members have not changed since; rates hold for the same shape."""
    now = {member.name: member for member in ensemble.members}
    then = {member.name: member for member in measurements.ensemble.members}
    # A point of an edited member is still measured by its job, but is no result for the present one.
    return {
        point
        for point in measurements.points
        if point.what == LINKS
        or (point.member in now and _digest(now, point, ensemble) == _digest(then, point, ensemble))
    }


def _digest(members: Mapping[str, Member], point: ProfileTarget, ensemble: Ensemble) -> str:
    """Return the digest of everything in a member that the results of a point depend on."""
    member = members[point.member]
    return shape_digest(member, ensemble.rate_keys) if point.what == RATE else member.fingerprint


def sources_in(folder: Path, *kinds: str) -> set[str]:
    """Return the sources of the points with an event of these kinds, as of `MEASURED`."""
    return {event.source for event in events_of(folder) if event.kind in kinds}


def failures_in(folder: Path, points: Iterable[ProfileTarget], *, lost: bool) -> list[Failure]:
    """Return the points that failed.

    Parameters
    ----------
    lost : bool
        True if points without a result count as failed, after the job's end.
    """
    errors = {event.source: event.record.error for event in events_of(folder) if event.kind == FAILED}
    failures = []
    for point in points:
        if lost or point.source in errors:
            error = errors.get(point.source, "the job ended before it was measured")
            log = folder / "logs" / f"{point.source}.log"
            if not log.exists():
                # No rank has begun with the point: the log of the script and the driver says why.
                log = RunFolder(folder).job(0).log
            failures.append(Failure(point, error, tail_of(log, error), str(log)))
    return failures


def ingest(catalog: Catalog, folder: Path) -> None:
    """Store the measurements in the catalog; this may be repeated."""
    for _, measurements in measurements_in([folder]):
        ensemble, site = measurements.ensemble.name, measurements.site.name
        for kind in ("point", "layers", "links", "preprocess"):
            catalog.save_points(ensemble, site, records_in(folder, kind))
