"""Incremental reader of a run's events: each read returns only what was appended since the last one."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hetctl.model.events import DRIVER, REQUESTS, Event
from hetctl.storage.event_files import parse_events, read_events
from hetctl.storage.paths import RunFolder
from hetctl.storage.snapshot import StaleSnapshotError

CHUNK = 1 << 16
"""Bytes per read; most files are shorter."""
SUFFIX = ".jsonl"
# File names have at most 255 bytes on Linux (NAME_MAX), and the suffix needs some of them.
LONGEST_NAME = 240


class EventFile:
    """Event file, with the position up to which it was read: the end of its last complete line.

    Parameters
    ----------
    path : str
        Path of the file, which may not exist yet. The file is appended to, and never rewritten.
    offset, lines : int
        Bytes and lines that were read before.
    """

    __slots__ = ("_path", "_source", "lines", "offset")

    def __init__(self, path: str, source: str, offset: int = 0, lines: int = 0) -> None:
        self._path, self._source = path, source
        self.offset = offset
        self.lines = lines

    def read_new(self) -> list[Event]:
        """Read the lines completed since the last call as events; an OSError leaves all unread."""
        try:
            # Opened each time, because an NFS client checks on opening whether the file has grown.
            descriptor = os.open(self._path, os.O_RDONLY)
        except (FileNotFoundError, NotADirectoryError):
            return []
        try:
            text = _from(descriptor, self.offset)
        finally:
            os.close(descriptor)
        *lines, rest = text.split(b"\n")
        first = self.lines
        self.offset += len(text) - len(rest)
        self.lines += len(lines)
        return list(parse_events(lines, self._source, first)) if lines else []


def end_of_file(path: Path, source: str) -> EventFile:
    """Return an event file positioned at its end, as if all of it had been read."""
    try:
        return EventFile(str(path), source, path.stat().st_size)
    except FileNotFoundError:
        return EventFile(str(path), source)


def _from(descriptor: int, offset: int) -> bytes:
    chunks = [os.pread(descriptor, CHUNK, offset)]
    if len(chunks[0]) < CHUNK:
        return chunks[0]
    while len(chunks[-1]) == CHUNK:
        chunks.append(os.pread(descriptor, CHUNK, offset + CHUNK * len(chunks)))
    return b"".join(chunks)


class EventLog:
    """Events of a run, from its first job to the newest line.

    A member's file grows from the start of its step to the end. The first call lists the folder, unless that
    was done before `restore`. Later calls find files by the drivers' events: they read a member's file when
    its step starts or ends. In between they read the files of all members in training or, if trainers report
    lengths, those that have grown. A killed driver leaves tasks open. A trainer may outlive it for a moment,
    so their files count as in training until the member's next step has ended.
    """

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder.events
        self._driver, self._requests = self._file(DRIVER), self._file(REQUESTS)
        self._files: dict[str, EventFile] = {}
        self._in_training: dict[str, None] = {}
        self._lengths: dict[str, int] = {}
        self._due: dict[str, None] = {}
        """Writers of the files that are yet to be read."""
        self._read: list[Event] = []
        self._asked: list[Event] = []
        """Users' requests that were read and not yielded yet."""
        self._listed = False

    @property
    def common_bytes(self) -> int:
        """Length of what was read of the files of drivers and of requests."""
        return self._driver.offset + self._requests.offset

    def rows(self) -> list[Any]:
        """Return the argument of `restore`: the position in each file, and the members in training."""
        files = {DRIVER: self._driver, REQUESTS: self._requests, **self._files}
        return [{source: (f.offset, f.lines) for source, f in files.items()}, list(self._in_training)]

    def restore(self, rows: list[Any], *, listed: bool = False) -> None:
        """Continue from these positions, before the first read.

        Parameters
        ----------
        listed : bool
            True to read as in later calls, which ask the file system for the sizes of few files.
        """
        read, in_training = rows
        self._listed = listed
        self._files = {source: self._file(source, *place) for source, place in read.items()}
        self._driver = self._files.pop(DRIVER, self._driver)
        self._requests = self._files.pop(REQUESTS, self._requests)
        self._in_training = dict.fromkeys(in_training)

    def read_new(self, lengths: Mapping[str, int] | None = None) -> list[Event]:
        """Read all new events as `read_new_by_file` does; after an OSError the next call returns them all."""
        for events in self.read_new_by_file(lengths):
            self._read += events
        read, self._read = self._read, []
        return read

    def read_new_by_file(self, lengths: Mapping[str, int] | None = None) -> Iterator[list[Event]]:
        """Read new events file by file, since all together may be many.

        The drivers' file is first, with users' requests: the end of a task is never read without the member's
        last events.

        Parameters
        ----------
        lengths : mapping of str to int or None
            Lengths of files in bytes by member, as trainers reported since the last call; no other file in
            training is opened. None: trainers report no lengths.

        Raises
        ------
        StaleSnapshotError
            If a file is shorter than the part that was read.
        OSError
            If a file cannot be read; the next call begins with it.
        """
        self._lengths |= lengths or {}
        # Once: listing asks the metadata server of a shared file system for the size of every file.
        sources = [] if self._listed else list(self._grown())
        self._asked += self._requests.read_new()
        driver_events = self._driver.read_new()
        changed = self._update_in_training(driver_events)
        # Opening the files of 1,000 members takes 20 ms, and as many requests to a metadata server.
        grown = self._in_training if lengths is None else self._expected()
        self._due |= dict.fromkeys(filter(_may_name_a_file, [*sources, *changed, *grown]))
        self._listed = True
        asked, self._asked = self._asked, []
        yield [*driver_events, *asked]
        for source in list(self._due):
            events = self._file_of(source).read_new()
            del self._due[source]
            yield events

    def read_again(self, source: str, kinds: Collection[str] | None = None) -> list[Event]:
        """Read the events of a file again that were read before: all, or those of some kinds."""
        file = {DRIVER: self._driver, REQUESTS: self._requests}.get(source) or self._file_of(source)
        path = self._folder / f"{source}{SUFFIX}"
        return [event for event in read_events(path, kinds) if event.seq < file.lines]

    def _expected(self) -> list[str]:
        """Return sources with grown files; one whose growth is not visible yet (NFS) is tried again."""
        unread = [source for source, length in self._lengths.items() if length > self._file_of(source).offset]
        self._lengths = {source: self._lengths[source] for source in unread}
        return unread

    def _update_in_training(self, driver_events: Iterable[Event]) -> list[str]:
        """Update the set of members in training; return the members whose tasks have started or ended."""
        changed = []
        for event in driver_events:
            if event.kind == "task_started":
                self._in_training[event.record.member] = None
            elif event.kind == "task_ended":
                self._in_training.pop(event.record.member, None)
            else:
                continue
            changed.append(event.record.member)
        return changed

    def _grown(self) -> Iterator[str]:
        """List the folder; yield sources whose files are longer than the part that was read, by name."""
        sizes = _sizes_in(self._folder)
        for source, file in {DRIVER: self._driver, REQUESTS: self._requests, **self._files}.items():
            if sizes.get(source, 0) < file.offset:
                raise StaleSnapshotError
        read = {source: file.offset for source, file in self._files.items()}
        yield from sorted(source for source, size in sizes.items() if size > read.get(source, -1))

    def _file_of(self, source: str) -> EventFile:
        if source not in self._files:
            self._files[source] = self._file(source)
        return self._files[source]

    def _file(self, source: str, offset: int = 0, lines: int = 0) -> EventFile:
        return EventFile(f"{self._folder}/{source}{SUFFIX}", source, offset, lines)


def _sizes_in(folder: Path) -> dict[str, int]:
    try:
        with os.scandir(folder) as entries:
            return {
                entry.name.removesuffix(SUFFIX): entry.stat().st_size
                for entry in entries
                if entry.name.endswith(SUFFIX)
            }
    except FileNotFoundError:
        return {}


def _may_name_a_file(source: str) -> bool:
    """Return true if a name is a member's and valid in a path; a corrupt name may contain anything."""
    usable = source.isprintable() and "/" not in source and 0 < len(source.encode()) < LONGEST_NAME
    return usable and source not in (DRIVER, REQUESTS)
