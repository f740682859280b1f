"""Terminal output of ``hetctl profile`` during its jobs, and its question after Ctrl-C."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType

import click
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from hetctl.app.profile.follow import ProfileMonitor, naming
from hetctl.app.profile.rate_targets import ProfileCost
from hetctl.reports.units import format_seconds

CANCEL, DETACH = "c", "d"


SCRATCH = "\nscripts run in a scratch copy of this folder, which is removed"
LINKED = "; too large for that, and shared with it, so that a script may replace what is there: {}"


def describe_cost(cost: ProfileCost) -> str:
    """Return a line about what a command costs, before it starts."""
    if not cost.points:
        return "no point to measure: no other rate can change the plan"
    if cost.least_points == cost.points:
        points, most = f"{cost.points}", ""
    else:
        points, most = f"{cost.least_points} to {cost.points}", "at most "
    source = "assumed" if cost.assumed else "as earlier ones took"
    note = "" if cost.linked is None else SCRATCH
    if cost.linked:
        note += LINKED.format(", ".join(cost.linked))
    return (
        f"{points} point{'s' * (cost.points != 1)} on {cost.nodes} node{'s' * (cost.nodes != 1)}: {most}"
        f"{format_seconds(cost.seconds)} and {cost.node_hours:.2g} node-hours, at"
        f" {format_seconds(cost.point_s)} a point ({source}){note}"
    )


class ProfileDisplay(ProfileMonitor):
    """Progress bar on a terminal, messages on stderr, and a question after Ctrl-C if there is a terminal."""

    def __init__(self, *, quiet: bool) -> None:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._bar = Progress(*columns, disable=quiet or not sys.stdout.isatty())
        self._task = self._bar.add_task("measuring", total=None)
        self.can_ask = sys.stdin.isatty() and sys.stderr.isatty()

    def __enter__(self) -> ProfileDisplay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def adopted(self, ids: Sequence[str], points: int) -> None:
        """Print that earlier jobs are followed instead of new ones."""
        them = "it" if len(ids) == 1 else "them"
        self._say(naming(ids, "measures", "measure") + f" {points} of these points already: following {them}")

    def progressed(self, done: int, total: int) -> None:
        """Update the progress bar."""
        self._bar.start()
        self._bar.update(self._task, completed=done, total=total)

    def cancels(self, ids: Sequence[str]) -> bool:
        """Ask on stderr; at the end of the input the jobs continue to measure."""
        what = (
            "cancel the job, or leave it measuring"
            if len(ids) == 1
            else "cancel the jobs, or leave them measuring"
        )
        while True:
            self._say(f"{what}? [{CANCEL}/{DETACH}] ", end="")
            line = sys.stdin.readline()
            # An empty text is the end of the input: no answer will come.
            if not line or line.strip().lower() in (CANCEL, DETACH):
                return line.strip().lower() == CANCEL

    def _say(self, text: str, end: str = "\n") -> None:
        self._stop()
        click.echo(f"{text}{end}", nl=False, err=True)

    def _stop(self) -> None:
        """Stop the bar in its present state; errors of a closed terminal are ignored."""
        if self._bar.live.is_started:
            with suppress(OSError):
                self._bar.stop()
