"""Display of a run on the terminal until it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from hetctl.cli.output import as_json, console, show
from hetctl.model.errors import HetctlError, LockedError, MembersFailedError, RunStalledError
from hetctl.model.job import BETWEEN_JOBS, IN_DOUBT, STALLED, UNDER_WAY
from hetctl.model.run_status import MOST_MEMBERS, MOST_SIMULATED
from hetctl.model.serialization import encode
from hetctl.model.values import dataclass

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from hetctl.app.project import Project
    from hetctl.app.run.lifecycle import RunTransition
    from hetctl.app.run.status import RunWatch
    from hetctl.app.run.tracking import Forwarder
    from hetctl.cli.live_table import LiveTable
    from hetctl.model.run_status import RunStatus

ADVANCED = (BETWEEN_JOBS, IN_DOUBT)
"""States that only a job's script or another command ends."""
FORWARD_EVERY_S = 5.0
"""Seconds between two looks for epochs that a run's tracker lacks."""


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
    goes_on = f"run {run} goes on; `hetctl status` shows it, `hetctl cancel` ends it"
    try:
        status = _watch(project, run, advancing)
    except KeyboardInterrupt:
        click.echo(f"\n{goes_on}", err=True)
        raise
    if status is None:
        click.echo(goes_on, err=True)
    else:
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

    show(fields, lambda _: [_table(status), *comparison_lines(status)], _failure(status))


def forward(
    project: Project, status: RunStatus | RunTransition, forwarder: Forwarder | None = None
) -> Forwarder | None:
    """Send new epochs of a run to its tracker, if it has one; warn if that fails.

    Parameters
    ----------
    forwarder : Forwarder or None
        What an earlier call returned.
    """
    if not status.track:
        return None
    # Imported here since most runs are tracked by nobody.
    from hetctl.app.run.tracking import Forwarder

    forwarder = forwarder or Forwarder(project, status.run)
    if warning := forwarder.send(status.state):
        click.echo(f"warning: {warning}", err=True)
    return forwarder


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
        "correct the cause, then `hetctl retry MEMBER..`, or start another run with `hetctl submit --new`",
    )


def _watch(project: Project, run: str, advancing: bool) -> RunStatus | None:
    """Return the last status of the run; None if the user has quit before."""
    from hetctl.app.run.status import RunWatch

    watch = RunWatch(project, run)
    status = watch.poll(0)
    forwarder, forwarded_at = None, -FORWARD_EVERY_S
    if status.state in UNDER_WAY:
        with _display(project, watch) as shown:
            status = shown.poll()
            while status.state in UNDER_WAY:
                if not shown.rest(project.waits.run_poll_s):
                    return None
                if advancing and status.state in ADVANCED and not watch.silent:
                    _advance(project, run)
                status = shown.poll()
                if time.monotonic() - forwarded_at >= FORWARD_EVERY_S:
                    forwarder, forwarded_at = forward(project, status, forwarder), time.monotonic()
    forward(project, status, forwarder)
    # Earlier statuses had only the members that fit the terminal, or none.
    # Who waited for the run is told what it gained, unless that takes long.
    last = watch.compared if advancing and len(status.states) <= MOST_SIMULATED else watch.poll
    return last(most_shown())


@dataclass(frozen=True)
class Display:
    """Display of a run without keys; without `live` nothing is shown."""

    watch: RunWatch
    live: Live | None = None

    def poll(self) -> RunStatus:
        """Read the status, with the members that fit the terminal, whose size may change, and show it."""
        if self.live is None:
            return self.watch.poll(0)
        status = self.watch.poll(console().height)
        self.live.update(_table(status))
        return status

    def rest(self, seconds: float) -> bool:
        """Wait; return true."""
        time.sleep(seconds)
        return True


@contextmanager
def _display(project: Project, watch: RunWatch) -> Iterator[Display | LiveTable]:
    is_terminal = sys.stdout.isatty()
    if as_json() or not (is_terminal or console().is_jupyter):
        yield Display(watch)
    elif is_terminal and sys.stdin.isatty():
        from hetctl.cli.live_table import LiveTable

        with LiveTable(project, watch).open() as shown:
            yield shown
    else:
        from rich.live import Live

        with Live(console=console(), transient=True) as live:
            yield Display(watch, live)


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
