"""Catalog made anew from its newest sound copy, and from the files of runs and profiling jobs.

Files take precedence over the copy, as they are written before the catalog.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from hetctl.app.profile.folder import ingest, measurements_in
from hetctl.app.project import Project
from hetctl.app.run.job_states import ended_by_files, job_events, reason_to_end
from hetctl.catalog.catalog import Catalog
from hetctl.catalog.database import (
    UnusableCatalogError,
    backups_of,
    copy_database,
    is_sound,
    open_database,
    open_to_read,
)
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError, DamagedFileError
from hetctl.model.job import ENDED, QUEUED, STOPPED, Job, JobState, run_after
from hetctl.model.plan import Plan
from hetctl.model.run import RunSpec
from hetctl.model.site import Site
from hetctl.model.values import dataclass
from hetctl.storage.paths import Home, RunFolder
from hetctl.storage.profile_request import measurements_file, read_measurements
from hetctl.storage.run_files import CatalogRecord, read_claim, read_record, read_spec

LOGGER = logging.getLogger(__name__)
PATIENCE_S = 30.0
"""Seconds to wait for the lock: a job's script may rebuild the catalog, too."""

T = TypeVar("T")
F = TypeVar("F")


@dataclass(frozen=True)
class RebuiltCatalog:
    """Catalog after it was made anew.

    Parameters
    ----------
    beginning : str
        Sound copy that it began with: the catalog as it was, or a backup; empty if there was none.
    replaced : str
        Path under which the previous catalog is kept; empty if there was none.
    runs : tuple of str
        Names of its runs, the oldest first.
    profiles : int
        Number of profiling jobs whose measurements were read.
    """

    path: str
    beginning: str
    replaced: str
    runs: tuple[str, ...]
    profiles: int


def rebuilding_if_needed(project: Project, act: Callable[[], T]) -> T:
    """Act; if the catalog is missing or damaged, rebuild it and act again, as nobody is there to do it."""
    try:
        return act()
    except UnusableCatalogError as error:
        LOGGER.warning("%s; it is rebuilt", error.message)
        rebuild_catalog(project)
        return act()


def rebuild_catalog(project: Project) -> RebuiltCatalog:
    """Make the catalog of a project anew: keep a sound one, and add what the files have beyond it.

    Raises
    ------
    BadInputError
        If there is nothing to make it from.
    LockedError
        If another process keeps the project locked.
    """
    home = project.home
    sources = [path for path in (home.catalog, *backups_of(home.catalog)) if path.exists()]
    if not sources and not home.every_run() and not home.profiles.exists():
        raise BadInputError(
            f"{home.path} has no catalog, no run and no profile", "start with `hetctl profile`"
        )
    with project.lock(PATIENCE_S):
        new = home.catalog.with_name(f".{home.catalog.name}.new")
        new.unlink(missing_ok=True)
        beginning = next((path for path in sources if is_sound(path)), None)
        if beginning:
            engine = open_to_read(beginning)
            copy_database(engine, new)
            engine.dispose()
        # Constructed, not opened: opening would make a backup of what is no catalog yet.
        with Catalog(new, open_database(new), is_protected=True) as catalog:
            _restore_runs(catalog, home)
            profiles = [folder for folder, _ in _profiles(home)]
            for folder in profiles:
                ingest(catalog, folder)
            _restore_inputs(catalog, home, beginning.stat().st_mtime if beginning else 0.0)
            runs = tuple(catalog.run_names())
        replaced = _swap(home, new)
    return RebuiltCatalog(
        path=str(home.catalog),
        beginning=str(beginning or ""),
        replaced=replaced,
        runs=runs,
        profiles=len(profiles),
    )


def _restore_runs(catalog: Catalog, home: Home) -> None:
    found = [(folder, spec) for folder in home.every_run() if (spec := _if_whole(read_spec, folder))]
    records = {folder.name: read_record(folder) for folder, _ in found}
    known = [record for record in records.values() if record]
    if known:
        catalog.restore_identity(max(known, key=lambda record: record.created_at).identity)
    every = [
        (records[folder.name] or record_by_files(catalog, home, folder, spec), spec) for folder, spec in found
    ]
    for record, spec in sorted(every, key=lambda one: one[0].created_at):
        catalog.restore_run(spec, record)


def _if_whole(read: Callable[[F], T], folder: F) -> T | None:
    """Read a file of a folder; None if it is damaged: the folder is left out."""
    try:
        return read(folder)
    except DamagedFileError as error:
        LOGGER.warning("%s; it is left out", error.message)
        return None


def _profiles(home: Home) -> list[tuple[Path, float]]:
    """Return the folders of profiling jobs, each with the time of its request, the oldest first."""
    files = home.profiles.glob(f"*/{measurements_file(Path()).name}")
    whole = (file for file in files if _if_whole(read_measurements, file.parent))
    return sorted(((file.parent, file.stat().st_mtime) for file in whole), key=lambda one: one[1])


def _restore_inputs(catalog: Catalog, home: Home, since: float) -> None:
    """Store the ensembles and sites of runs and profiling jobs, if newer than the copy or missing in it."""
    for at, ensemble, site in sorted(_inputs(home), key=lambda one: one[0]):
        if at > since or catalog.ensemble(ensemble.name) is None:
            catalog.save_ensemble(ensemble)
        if at > since or catalog.site(site.name) is None:
            catalog.save_site(site)


def _inputs(home: Home) -> Iterator[tuple[float, Ensemble, Site]]:
    for folder in home.every_run():
        if spec := _if_whole(read_spec, folder):
            yield folder.spec.stat().st_mtime, spec.ensemble, spec.site
    for path, at in _profiles(home):
        for _, measurements in measurements_in([path]):
            yield at, measurements.ensemble, measurements.site


def _swap(home: Home, new: Path) -> str:
    """Replace the catalog by the new one; return the path under which the old one is kept."""
    # Move the journal of a killed writer first: SQLite would take it for one of the new file.
    journal = home.catalog.with_name(f"{home.catalog.name}-journal")
    kept = home.damaged_catalog
    if journal.exists():
        journal.replace(kept.with_name(f"{kept.name}-journal"))
    was_there = home.catalog.exists()
    if was_there:
        # Linked, so that a command that reads finds one of the two at any moment.
        kept.unlink(missing_ok=True)
        os.link(home.catalog, kept)
    new.replace(home.catalog)
    return str(kept) if was_there else ""


def record_by_files(catalog: Catalog, home: Home, folder: RunFolder, spec: RunSpec) -> CatalogRecord:
    """Return a record of a run whose version of hetctl wrote none, from its other files.

    They do not say why a run without a job has stopped, or what its plan predicted.
    """
    jobs = ended_by_files(tuple(_jobs_of(home, folder, spec)), job_events(folder), done=False, silent=True)
    end = reason_to_end(spec, folder, jobs)
    state, text = (run_after(QUEUED, end[0]), end[1]) if end else (QUEUED, "")
    if state not in ENDED and all(job.state.over for job in jobs):
        state, text = STOPPED, "`hetctl submit` continues it"
    return CatalogRecord(
        identity=catalog.identity,
        created_at=min((job.submitted_at for job in jobs), default=folder.spec.stat().st_mtime),
        state=state,
        reason=text,
        plan=Plan(spec.planner, "", spec.gpus, spec.site.gpus_per_node, 0.0, 0.0, 1.0, ()),
        jobs=jobs,
    )


def _jobs_of(home: Home, folder: RunFolder, spec: RunSpec) -> Iterator[Job]:
    """Yield the jobs that have a script; the next command finds out which the batch system has."""
    number = 0
    while (files := folder.job(number)).script.exists():
        name = _name_of(home, spec.run, number, files.script.read_text(encoding="utf-8"))
        claimed = read_claim(files)
        is_last = not files.of_next.script.exists()
        unclaimed = JobState.SUBMITTING if is_last else JobState.VANISHED
        yield Job(
            number=number,
            name=name,
            batch_id=claimed,
            state=JobState.UNKNOWN if claimed else unclaimed,
            nodes=-(-spec.gpus // spec.site.gpus_per_node),
            wall_s=spec.wall_s,
            submitted_at=files.script.stat().st_mtime,
        )
        number += 1


def _name_of(home: Home, run: str, number: int, script: str) -> str:
    """Return the unique name of a job, from its script or, if it is local, its supervisor's file."""
    pattern = re.compile(rf"hetctl-{re.escape(run)}-{number}-[0-9a-f]{{8}}")
    claims = " ".join(path.name for path in home.local_jobs.glob("*.claim"))
    found = pattern.search(script) or pattern.search(claims)
    return found.group() if found else f"hetctl-{run}-{number}"
