"""Display of a run on the terminal until it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from hetctl.cli.output import as_json, console, show
from hetctl.model.errors import HetctlError, LockedError, MembersFailedError, RunStalledError
from hetctl.model.job import BETWEEN_JOBS, IN_DOUBT, STALLED, UNDER_WAY
from hetctl.model.run_status import MOST_MEMBERS, MOST_SIMULATED
from hetctl.model.serialization import encode

if TYPE_CHECKING:
    from rich.console import RenderableType

    from hetctl.app.project import Project
    from hetctl.model.run_status import RunStatus

ADVANCED = (BETWEEN_JOBS, IN_DOUBT)
"""States that only a job's script or another command ends."""


def follow(
    project: Project, run: str, *, advancing: bool, more: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Show a run until it ends; with `advancing`, submit its next jobs if no other process does, and compare.

    Parameters
    ----------
    more : mapping
        Keys of the JSON object beside those of the status.

    Raises
    ------
    MembersFailedError, RunStalledError
        If the run ended and some of its members failed, or if it is stalled.
    """
    try:
        status = _watch(project, run, advancing)
    except KeyboardInterrupt:
        click.echo(f"\nrun {run} goes on; `hetctl status` shows it, `hetctl cancel` ends it", err=True)
        raise
    show_status(status, more)


def most_shown() -> int | None:
    """Return the largest number of members to show; None: all."""
    return None if as_json() else MOST_MEMBERS


def show_status(status: RunStatus, more: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Print the status of a run.

    Raises
    ------
    MembersFailedError, RunStalledError
        If the run ended and some of its members failed, or if it is stalled.
    """
    fields = {**encode(status), **more} if as_json() else None
    from hetctl.reports.summary import comparison_lines

    show(fields, lambda: [_table(status), *comparison_lines(status)], _failure(status))


def _failure(status: RunStatus) -> HetctlError | None:
    if status.state == STALLED:
        return RunStalledError(
            f"run {status.run} is stalled: {status.reason}", "correct the cause, then `hetctl submit` goes on"
        )
    from hetctl.reports.summary import names_text

    failed = [name for name, state in status.states.items() if state == "failed"]
    if not failed or status.state in UNDER_WAY:
        return None
    return MembersFailedError(
        f"{len(failed)} of {len(status.states)} members failed: {names_text(failed)}",
        "correct the cause, then `hetctl submit --new` starts another run",
    )


def _watch(project: Project, run: str, advancing: bool) -> RunStatus:
    from rich.live import Live

    from hetctl.app.run.status import RunWatch

    watch = RunWatch(project, run)
    quiet = as_json() or not (sys.stdout.isatty() or console().is_jupyter)
    status = watch.poll(_room(quiet))
    with Live(None if quiet else _table(status), console=console(), transient=True) as live:
        while status.state in UNDER_WAY:
            time.sleep(project.waits.run_poll_s)
            if advancing and status.state in ADVANCED and not watch.silent:
                _advance(project, run)
            status = watch.poll(_room(quiet))
            if not quiet:
                live.update(_table(status))
    # Earlier statuses had only the members that fit the terminal, or none.
    # Who waited for the run is told what it gained, unless that takes long.
    last = watch.compared if advancing and len(status.states) <= MOST_SIMULATED else watch.poll
    return last(most_shown())


def _room(quiet: bool) -> int:
    """Return the number of members that fit the terminal, whose size may change."""
    return 0 if quiet else console().height


def _advance(project: Project, run: str) -> None:
    """Advance the run, unless another process, such as the job's own script, has the lock."""
    from hetctl.app.run.lifecycle import advance

    try:
        advance(project, run, patience_s=0.0)
    except LockedError:
        return


def _table(status: RunStatus) -> RenderableType:
    from hetctl.reports.status_table import status_table

    return status_table(status, console().width)
