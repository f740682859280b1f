"""What a crash of a node may leave on its disk, from a record of all that a program does to files.

The model: what was written to a file and not synced is lost, or there in part or as a whole. A name that was
made, changed or removed in a folder that was not synced since is so on the disk or not, each independently of
the others and of what the files contain.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

Tree = tuple[tuple[str, bytes | None], ...]
"""Content of each file by its path; None for a folder."""


MOST_FREE = 6


@dataclass
class Crash:
    """Moment of a crash: what is on the disk, and what may be.

    Parameters
    ----------
    names : dict of str to int
        Files and folders on the disk, with their numbers.
    pending : list of (str or None, str or None, int)
        Changes of names that may be on the disk: old name, new name, number.
    contents : dict of int to list of bytes
        What a file may contain.
    promised : int
        Number of promises made so far.
    """

    names: dict[str, int]
    pending: list[tuple[str | None, str | None, int]]
    contents: dict[int, list[bytes]]
    promised: int

    def trees(self) -> Iterator[Tree]:
        """Return what may be on the disk; of many changes of names, the early ones are all there or none."""
        early = max(0, len(self.pending) - MOST_FREE)
        free = itertools.product((False, True), repeat=len(self.pending) - early)
        for kept in [(*(is_there,) * early, *each) for each in free for is_there in {False, early > 0}]:
            names = dict(self.names)
            for (old, new, number), is_kept in zip(self.pending, kept, strict=True):
                if is_kept and old is not None and names.get(old) == number:
                    del names[old]
                if is_kept and new is not None:
                    names[new] = number
            there = {name: number for name, number in names.items() if self._has_parents(name, names)}
            files = sorted(there)
            for contents in itertools.product(*(self.contents.get(there[name], [None]) for name in files)):
                yield tuple(zip(files, contents, strict=True))

    def _has_parents(self, name: str, names: dict[str, int]) -> bool:
        parents = [str(parent) for parent in Path(name).parents if str(parent) != "."]
        return all(parent in names for parent in parents)


@dataclass
class Recorder:
    """Record of the changes below a folder, which exists at the start; patches ``os`` while it is open."""

    root: Path
    crashes: list[Crash] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._durable: dict[str, int] = {}
        self._pending: list[tuple[str | None, str | None, int]] = []
        self._synced: dict[int, bytes] = {}
        self._last: dict[int, bytes] = {}
        self._folders: set[int] = set()
        self._held: list[int] = []
        self._promised = 0

    def promise(self) -> None:
        """Note that what has been written up to now counts from now on."""
        self._promised += 1
        self._note()

    def install(self, monkeypatch) -> None:
        self._really_open = os.open
        for name in ("open", "mkdir", "fsync", "rename", "replace", "unlink"):
            monkeypatch.setattr(os, name, self._recorded(getattr(self, f"_{name}"), getattr(os, name)))

    def _recorded(self, note, really):
        def call(*arguments, **options):
            self._note()
            before = self._number(arguments[0])
            result = really(*arguments, **options)
            note(before, *arguments)
            self._note()
            return result

        return call

    def _note(self) -> None:
        numbers = {**dict(self._names()), **self._durable}
        contents = {number: self._variants(number) for number in set(numbers.values())}
        contents |= {number: self._variants(number) for _, _, number in self._pending}
        contents = {number: found for number, found in contents.items() if found}
        self.crashes.append(Crash(dict(self._durable), list(self._pending), contents, self._promised))

    def _names(self) -> Iterator[tuple[str, int]]:
        for path in self.root.rglob("*"):
            yield str(path.relative_to(self.root)), path.stat().st_ino

    def _variants(self, number: int) -> list[bytes]:
        if number in self._folders:
            return []
        synced, now = self._synced.get(number, b""), self._content(number)
        middle = now[: (len(synced) + len(now)) // 2]
        return list(dict.fromkeys([synced, middle, now]))

    def _content(self, number: int) -> bytes:
        for name, found in self._names():
            if found == number:
                self._last[number] = (self.root / name).read_bytes()
        return self._last.get(number, b"")

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)

    def _relative(self, path) -> str | None:
        is_below = not isinstance(path, int) and Path(path).is_relative_to(self.root)
        return str(Path(path).relative_to(self.root)) if is_below else None

    def _number(self, path) -> int | None:
        if isinstance(path, int):
            return os.fstat(path).st_ino
        found = Path(path)
        return found.stat().st_ino if found.exists() else None

    def _open(self, before, path, flags=0, *_mode) -> None:
        name = self._relative(path)
        if name and before is None and flags & os.O_CREAT:
            # Its number must not become another file's when it is removed.
            self._held.append(self._really_open(path, os.O_RDONLY))
            self._pending.append((None, name, self._number(path)))

    def _mkdir(self, _before, path, *_mode) -> None:
        if name := self._relative(path):
            self._folders.add(self._number(path))
            self._pending.append((None, name, self._number(path)))

    def _rename(self, before, old, new) -> None:
        if self._relative(new):
            self._pending.append((self._relative(old), self._relative(new), before))

    _replace = _rename

    def _unlink(self, before, path, *_where) -> None:
        if (name := self._relative(path)) and before is not None:
            self._pending.append((name, None, before))

    def _fsync(self, number, _descriptor) -> None:
        folder = next((name for name, found in self._names() if found == number), None)
        if number == self.root.stat().st_ino:
            folder = "."
        if folder is None:
            return
        if folder != "." and number not in self._folders:
            self._synced[number] = self._content(number)
            return
        rest = []
        for old, new, changed in self._pending:
            if str(Path(new or old or "").parent) != folder:
                rest.append((old, new, changed))
                continue
            if old is not None and self._durable.get(old) == changed:
                del self._durable[old]
            if new is not None:
                self._durable[new] = changed
        self._pending = rest


def materialize(tree: Tree, folder: Path) -> None:
    """Make the files of a tree."""
    folder.mkdir()
    for name, content in tree:
        path = folder / name
        if content is None:
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
