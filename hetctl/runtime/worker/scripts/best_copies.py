"""Copies of what a command has named at the ends of its best epochs: checkpoints, or predictions.

The script itself may delete or replace what it names. A copy is whole, or it does not exist: it gets its name
once it is on the disk, and only then are worse ones deleted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from hetctl.model.ensemble import Member
from hetctl.model.training_progress import NO_BEST, BestCheckpoint, EpochResult
from hetctl.runtime.worker.checkpoint import TENSORBOARD
from hetctl.storage.atomic_io import make_private_folder, new_folder, sync_folder

COPIES, PREDICTIONS = "best-epochs", "best-predictions"
"""Folders of the copies of checkpoints and of predictions, in the member's folder of checkpoints."""
NOT_COPIED = frozenset({COPIES, PREDICTIONS})
COPY = "epoch-{:05d}"
"""Name of the folder with a copy, from the number of its epoch."""
UNFINISHED = ".copy"
BLOCK_BYTES = 2**24


def copied_epochs(folder: Path, kind: str = COPIES) -> dict[int, Path]:
    """Return the copies in a member's folder of checkpoints, files or folders, by epoch."""
    copies = (folder / kind).glob("epoch-*[0-9]")
    return {int(copy.name.partition("-")[2]): path for copy in copies for path in copy.iterdir()}


class ChangedMeanwhileError(Exception):
    """A file changed while it was copied."""


class BestCopies:
    """Copies of a member's best epochs.

    Parameters
    ----------
    folder : Path
        Folder of the member's checkpoints.
    heartbeat : callable
        Function called after each part of a copy, which may take minutes.
    kind : str
        `COPIES` or `PREDICTIONS`.
    """

    def __init__(
        self, folder: Path, member: Member, heartbeat: Callable[[], None] = lambda: None, kind: str = COPIES
    ) -> None:
        self._folder, self._member, self._heartbeat = folder / kind, member, heartbeat

    def copied(self) -> dict[int, Path]:
        """Return the copies by epoch."""
        return copied_epochs(self._folder.parent, self._folder.name)

    def best(self, epochs: Sequence[EpochResult]) -> BestCheckpoint:
        """Return the best epoch that has a copy."""
        copied = self.copied()
        ranked = self._member.stop.ranked([done for done in epochs if done.epoch in copied])
        return next((BestCheckpoint(done.epoch, str(copied[done.epoch])) for done in ranked), NO_BEST)

    def take(self, named: Path, epoch: int, epochs: Sequence[EpochResult]) -> None:
        """Copy what was named for an epoch if it is one of the best; then delete the copies of worse ones.

        Raises
        ------
        ChangedMeanwhileError
            If the script has changed it meanwhile; there is no copy then.
        OSError
            If it cannot be read, or the disk is full or does not answer.
        """
        copied = {*self.copied(), epoch}
        ranked = self._member.stop.ranked([done for done in epochs if done.epoch in copied])
        best = {done.epoch for done in ranked[: self._member.keep.best]}
        if epoch in best:
            self._copy(named, self._copy_of(epoch))
            for worse in copied - best:
                shutil.rmtree(self._copy_of(worse), ignore_errors=True)

    def _copy_of(self, epoch: int) -> Path:
        return self._folder / COPY.format(epoch)

    def _copy(self, source: Path, target: Path) -> None:
        make_private_folder(self._folder)
        unfinished = target.with_suffix(UNFINISHED)
        shutil.rmtree(unfinished, ignore_errors=True)
        new_folder(unfinished)
        before = _state_of(source)
        copy = unfinished / source.name
        try:
            if source.is_dir():
                left_out = shutil.ignore_patterns(*NOT_COPIED, TENSORBOARD)
                shutil.copytree(source, copy, copy_function=self._copy_file, ignore=left_out)
            else:
                self._copy_file(str(source), str(copy))
            if _state_of(source) != before:
                raise ChangedMeanwhileError
        except (ChangedMeanwhileError, OSError, shutil.Error):
            shutil.rmtree(unfinished, ignore_errors=True)
            raise
        for folder, _, _ in os.walk(unfinished):
            sync_folder(Path(folder))
        shutil.rmtree(target, ignore_errors=True)
        unfinished.rename(target)
        sync_folder(self._folder)

    def _copy_file(self, source: str, target: str) -> None:
        with Path(source).open("rb") as reader, Path(target).open("xb") as writer:
            while block := reader.read(BLOCK_BYTES):
                writer.write(block)
                self._heartbeat()
            writer.flush()
            os.fsync(writer.fileno())


def _state_of(source: Path) -> list[tuple[str, int, int, int]]:
    """Return the inode, size and time of change of each file that is copied."""
    paths = sorted(source.rglob("*")) if source.is_dir() else [source]
    copied = [p for p in paths if NOT_COPIED.isdisjoint(p.parts) and not p.match(TENSORBOARD) and p.is_file()]
    stats = zip(copied, map(Path.stat, copied), strict=True)
    return [(str(path), found.st_ino, found.st_size, found.st_mtime_ns) for path, found in stats]
