"""Removal of runs that have ended or were cancelled, with all their files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hetctl.app.project import Project
from hetctl.app.run.job_states import refresh_jobs
from hetctl.app.run.select_run import is_name, record_of
from hetctl.catalog.catalog import Catalog
from hetctl.model.errors import LockedError
from hetctl.model.job import UNDER_WAY, RunReason, check_run_removal
from hetctl.model.run import RunSpec
from hetctl.model.run_results import Pruned, Removal
from hetctl.storage.purge import files_below, remove_files, use_up_name
from hetctl.storage.run_files import checkpoint_folder


def removals(project: Project, names: Sequence[str]) -> list[Removal]:
    """Return what would be removed; the errors are those of `remove_runs`."""
    with project.reading() as catalog:
        return [_removal(project, catalog, name) for name in dict.fromkeys(names)]


def remove_runs(project: Project, names: Sequence[str]) -> list[Removal]:
    """Remove runs from the catalog, with their folders and checkpoints.

    Raises
    ------
    BadInputError
        If there is no such run; nothing is then removed.
    LockedError
        If a run is under way, or a job of it may still write; nothing is then removed.
    BatchSystemError
        If the batch system cannot be asked about jobs of a run.
    """
    with project.writing() as catalog:
        found = [_removal(project, catalog, name) for name in dict.fromkeys(names)]
        for one in found:
            if one.state:
                _refuse_alive(project, catalog, one.run)
        for one in found:
            if one.state:
                check_run_removal(one.state, RunReason.REMOVED)
                use_up_name(project.home, one.run)
                catalog.remove_run(one.run)
            # After the catalog: no command finds a run there whose files are gone.
            remove_files(project.home, one.run)
    return found


def prune_runs(project: Project, names: Sequence[str]) -> list[Pruned]:
    """Delete the checkpoints of runs but those of their members' best epochs; errors as of `remove_runs`.

    A member that gets more epochs later goes on from its best one. What commands write stays.
    """
    with project.writing() as catalog:
        found = [_removal(project, catalog, name) for name in dict.fromkeys(names)]
        for one in found:
            _refuse_alive(project, catalog, one.run)
        return [_prune(project, record_of(catalog, one.run).spec, one.checkpoint_bytes) for one in found]


def _prune(project: Project, spec: RunSpec, before: int) -> Pruned:
    # Imported here: it needs NumPy, and most commands delete nothing.
    from hetctl.runtime.worker.checkpoint import CheckpointFolder

    trained = [member for member in spec.ensemble.members if not member.command]
    kept = [
        member.name
        for member in trained
        if CheckpointFolder(checkpoint_folder(spec, member.name), member=member).keep_best_alone()
    ]
    return Pruned(spec.run, tuple(kept), before - _bytes_in(project.home.checkpoints / spec.run))


def _removal(project: Project, catalog: Catalog, run: str) -> Removal:
    folder, checkpoints = project.home.run(run).path, project.home.checkpoints / run
    state = catalog.run_state(run)
    if state is None and not (is_name(run) and (folder.exists() or checkpoints.exists())):
        record_of(catalog, run)
    if state in UNDER_WAY:
        raise LockedError(f"run {run} is under way", f"`hetctl cancel {run}` ends its jobs first")
    return Removal(run, state or "", _bytes_in(folder), _bytes_in(checkpoints))


def _refuse_alive(project: Project, catalog: Catalog, run: str) -> None:
    jobs = [job for job in catalog.jobs(run) if not job.state.over]
    if not jobs:
        return
    spec = record_of(catalog, run).spec
    for job in refresh_jobs(catalog, project.batch_system(spec.site), project.home.run(run)):
        if not job.state.over:
            raise LockedError(
                f"job {job.batch_id} of run {run} is {job.state.value}: it may still write",
                "wait until it has ended, and repeat the command",
            )


def _bytes_in(folder: Path) -> int:
    return sum(path.stat(follow_symlinks=False).st_size for path in files_below(folder))
