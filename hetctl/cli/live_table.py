"""Table of a run on a terminal whose keys choose a member and act on it."""

from __future__ import annotations

import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.text import Text

from hetctl.app.run.edit_run import request
from hetctl.app.run.logs import member_log, text_of
from hetctl.cli.output import console
from hetctl.model.errors import HetctlError
from hetctl.model.events import Request
from hetctl.model.run_status import ORDERS, RunStatus
from hetctl.reports.status_table import status_table
from hetctl.reports.units import printable

if TYPE_CHECKING:
    from hetctl.app.project import Project
    from hetctl.app.run.status import RunWatch

UP, DOWN, ESCAPE = "up", "down", "escape"
NAMES = {"\x1b[A": UP, "\x1bOA": UP, "\x1b[B": DOWN, "\x1bOB": DOWN, "\x1b": ESCAPE}
"""Names of keys by what a terminal sends for them (ECMA-48, and xterm's application mode)."""
KEY = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
OTHER_LINES = 14
"""Lines of the table beside those of members: of the run, the headers, notes and keys."""
HELP = "↑↓ member  l log  c cancel  p pause or resume  s sort (by {order})  q quit"
LOG_HELP = "log of {name}  l back  q quit"
SURE = "cancel {name} for good? y: yes, any other key: no"


class LiveTable:
    """Display of a run that heeds keys while it waits.

    Parameters
    ----------
    watch : RunWatch
        Reader of the run's status.
    """

    def __init__(self, project: Project, watch: RunWatch) -> None:
        self._project, self._watch, self._console = project, watch, console()
        self._order, self._first, self._at, self._chosen = ORDERS[0], 0, 0, ""
        self._note, self._sure, self._log = "", False, False
        self._live = Live(console=self._console, screen=True, auto_refresh=False)
        self.has_quit = False

    @contextmanager
    def open(self) -> Iterator[LiveTable]:
        """Take over the terminal; it is as before at the end."""
        fd = sys.stdin.fileno()
        before = termios.tcgetattr(fd)
        try:
            # Signals of keys, such as Ctrl-C, stay.
            tty.setcbreak(fd)
            with self._live:
                yield self
        finally:
            termios.tcsetattr(fd, termios.TCSADRAIN, before)

    def poll(self) -> RunStatus:
        """Read the status, with the members down to the last one on the terminal, and show it."""
        self._status = self._watch.poll(self._first + self._rows, self._order)
        # The choice stays with the member, wherever it moves: a key must not act on another.
        names = [each.member for each in self._status.members]
        if self._chosen in names:
            self._at = names.index(self._chosen)
        elif not self._chosen:
            self._choose()
        self._draw()
        return self._status

    def rest(self, seconds: float) -> bool:
        """Heed keys for some time; return false if the user quits."""
        until = time.monotonic() + seconds
        while not self.has_quit and (left := until - time.monotonic()) > 0:
            for key in _keys_within(left):
                self._press(key)
        return not self.has_quit

    @property
    def _rows(self) -> int:
        return max(self._console.height - OTHER_LINES, 1)

    def _choose(self) -> None:
        """Choose the member at the present place; a search may have none yet."""
        members = self._status.members
        self._at = max(min(self._at, len(members) - 1), 0)
        self._chosen = members[self._at].member if members else ""

    def _press(self, key: str) -> None:
        self._note, was_sure = "", self._sure
        self._sure = False
        if was_sure:
            if key == "y":
                self._request(Request.CANCEL)
        elif key == "q":
            self.has_quit = True
        elif key == "l" or (key == ESCAPE and self._log):
            self._log = not self._log and bool(self._chosen)
        elif key == "c" and self._chosen:
            self._sure, self._note = True, SURE.format(name=self._chosen)
        elif key == "p" and self._chosen:
            is_out = self._status.states[self._chosen] in ("paused", "cancelled")
            self._request(Request.RESUME if is_out else Request.PAUSE)
        elif key == "s":
            self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]
            self._first, self._chosen, self._at = 0, "", 0
            self.poll()
        elif key in (UP, DOWN):
            self._at = min(max(self._at + (1 if key == DOWN else -1), 0), len(self._status.states) - 1)
            self._first = min(max(self._first, self._at - self._rows + 1), self._at)
            if self._at >= len(self._status.members):
                self._chosen = ""
                self.poll()
            self._choose()
        self._draw()

    def _request(self, want: Request) -> None:
        try:
            self._note = request(self._project, [self._status.run, self._chosen], want).reason
        except HetctlError as error:
            self._note = f"{error.message}; {error.hint}"
        self.poll()

    def _draw(self) -> None:
        if self._log:
            body, keys = self._log_text(), LOG_HELP.format(name=self._chosen)
        else:
            body, keys = self._table(), HELP.format(order=self._order)
        page = Layout()
        foot = Group(
            Text(printable(self._note), "yellow", overflow="ellipsis", no_wrap=True), Text(keys, "dim")
        )
        page.split_column(Layout(body), Layout(foot, size=2))
        self._live.update(page, refresh=True)

    def _table(self) -> RenderableType:
        is_shown = self._chosen in {each.member for each in self._status.members[self._first :]}
        at = self._at if is_shown else None
        return status_table(self._status, self._console.width, first=self._first, chosen=at)

    def _log_text(self) -> RenderableType:
        room = self._console.height - 2
        try:
            part = member_log(self._project, self._status.run, self._chosen, None, every=False)
            lines = "".join(text_of(part, room)).splitlines()
        except HetctlError as error:
            lines = [error.message]
        shown = "\n".join(map(printable, lines[-room:]))
        return Text(shown or "no line yet", overflow="ellipsis", no_wrap=True)


def _keys_within(seconds: float) -> list[str]:
    """Wait for keys; return their names, and ``q`` if the terminal is gone."""
    fd = sys.stdin.fileno()
    if not select.select([fd], [], [], seconds)[0]:
        return []
    text = os.read(fd, 64).decode(errors="ignore")
    return [NAMES.get(key, key) for key in KEY.findall(text)] or ["q"]
