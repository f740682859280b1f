"""The events of a run, each read once: of every file only what has been appended since the last read."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from hetctl.core.events import DRIVER, Event, parse_events
from hetctl.core.layout import RoundFolder, RunFolder

CHUNK = 1 << 16
"""Bytes of one read; most files are shorter."""
SUFFIX = ".jsonl"
LONGEST_NAME = 240


class EventFile:
    """One event file, and how far it has been read: to the end of its last whole line.

    Parameters
    ----------
    path : str
        The file may not exist yet. It is appended to, and never rewritten.
    """

    __slots__ = ("_lines", "_offset", "_path", "_round", "_source")

    def __init__(self, path: str, source: str, round_index: int) -> None:
        self._path, self._source, self._round = path, source, round_index
        self._offset = 0
        self._lines = 0

    def fresh(self) -> list[Event]:
        """Read the events of the lines that have become whole since the last call."""
        try:
            # Opened each time: on NFS this is when a client looks whether the file has grown.
            descriptor = os.open(self._path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return []
        try:
            text = _from(descriptor, self._offset)
        finally:
            os.close(descriptor)
        if b"\n" not in text:
            return []
        *lines, torn = text.split(b"\n")
        first = self._lines
        self._offset += len(text) - len(torn)
        self._lines += len(lines)
        return list(parse_events(lines, self._source, first, self._round))


def _from(descriptor: int, offset: int) -> bytes:
    chunks = [os.pread(descriptor, CHUNK, offset)]
    if len(chunks[0]) < CHUNK:
        return chunks[0]
    while len(chunks[-1]) == CHUNK:
        chunks.append(os.pread(descriptor, CHUNK, offset + CHUNK * len(chunks)))
    return b"".join(chunks)


class RoundLog:
    """The events of one round; only those files are read again that may still grow.

    A member's file grows from its step's start to its end. Files that are there before the round has
    begun are found by listing the folder, later ones follow from the driver's events: the folder of a
    round that has begun is not listed again.
    """

    def __init__(self, folder: RoundFolder) -> None:
        self.index = folder.index
        self._events = folder.events
        self._driver = self._file(DRIVER)
        self._files: dict[str, EventFile] = {}
        self._growing: dict[str, EventFile] = {}
        self._begun = self._ended = self._has_job = False

    @property
    def growing(self) -> Collection[str]:
        """The members whose files may still grow."""
        return self._growing.keys()

    @property
    def over(self) -> bool:
        """Return true if nothing more comes here: the round has ended, and the job if it started here."""
        return self._ended and not self._has_job

    def fresh(self) -> list[Event]:
        """Read what is new, first of the driver: what members wrote before their ends is then there."""
        if not self._begun:
            self._follow(_sources_in(self._events))
        told = self._driver.fresh()
        ended = self._understand(told)
        events = [event for file in self._growing.values() for event in file.fresh()]
        self.leave(self._growing if self._ended else ended)
        return [*told, *events]

    def leave(self, members: Iterable[str]) -> None:
        """Read these members' files no more."""
        for member in list(members):
            self._growing.pop(member, None)

    def _understand(self, told: Iterable[Event]) -> list[str]:
        """Follow the members whose steps have started; return those whose steps have ended."""
        ended: dict[str, None] = {}
        for event in told:
            if event.kind == "step_started":
                self._follow([event.data["member"]])
                ended.pop(event.data["member"], None)
            elif event.kind == "step_ended":
                ended[event.data["member"]] = None
            elif event.kind in ("round_started", "round_ended"):
                self._begun, self._ended = True, event.kind == "round_ended"
            elif event.kind in ("job_started", "job_ended"):
                self._has_job = event.kind == "job_started"
        return list(ended)

    def _follow(self, sources: Iterable[str]) -> None:
        for source in sources:
            if source not in self._files and _may_name_a_file(source):
                self._files[source] = self._file(source)
            if source in self._files:
                self._growing[source] = self._files[source]

    def _file(self, source: str) -> EventFile:
        return EventFile(f"{self._events}/{source}{SUFFIX}", source, self.index)


def _sources_in(folder: Path) -> list[str]:
    try:
        names = [path.name for path in folder.iterdir()]
    except FileNotFoundError:
        return []
    return sorted(name.removesuffix(SUFFIX) for name in names if name.endswith(SUFFIX))


def _may_name_a_file(source: str) -> bool:
    """Return true if a name is a member's, fit for a path; a garbled one may be anything."""
    usable = source.isprintable() and "/" not in source and 0 < len(source.encode()) < LONGEST_NAME
    return usable and source != DRIVER


class EventLog:
    """The events of a run, from its first round to whatever is appended while somebody looks.

    Rounds that are over are not looked at again. A driver that was killed leaves its rounds open:
    their driver's files are followed until the next job has started, a member's until its next
    step has, since a trainer may outlive its driver for a moment.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._rounds: list[RoundLog] = []
        self._newest = -1
        self._job_since = -1
        self._newest_step: dict[str, int] = {}

    def fresh(self) -> list[Event]:
        """Read what is new, each file's events in their order, the driver's first."""
        self._rounds += self._new_rounds()
        events = [event for opened in self._rounds for event in opened.fresh()]
        self._rounds = [opened for opened in self._rounds if not self._is_over(opened)]
        self._learn(events)
        return events

    def _new_rounds(self) -> Iterator[RoundLog]:
        """List the run's folder once: from then on, a new round has the index after the newest."""
        found = self._folder.rounds() if self._newest < 0 else self._next_rounds()
        for folder in found:
            self._newest = folder.index
            yield RoundLog(folder)

    def _next_rounds(self) -> Iterator[RoundFolder]:
        while (folder := self._folder.round(self._newest + 1)).path.exists():
            yield folder

    def _is_over(self, opened: RoundLog) -> bool:
        """Go by what earlier looks have told: this look has read all that was written before that."""
        if opened.index >= self._job_since:
            return opened.over
        opened.leave([name for name in opened.growing if self._newest_step.get(name, -1) > opened.index])
        return not opened.growing

    def _learn(self, events: Iterable[Event]) -> None:
        for event in events:
            if event.source != DRIVER:
                continue
            if event.kind == "job_started":
                self._job_since = max(self._job_since, event.round)
            elif event.kind == "step_started":
                member = str(event.data["member"])
                self._newest_step[member] = max(self._newest_step.get(member, -1), event.round)
