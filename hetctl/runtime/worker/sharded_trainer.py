"""Training of a member that is divided among its ranks, each of which writes its part of checkpoints."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from hetctl.model.serialization import decode, encode
from hetctl.runtime.frameworks import TrainableNetwork
from hetctl.runtime.worker.async_checkpoint import OnSaved
from hetctl.runtime.worker.checkpoint import (
    ArrayFile,
    Arrays,
    CheckpointFolder,
    Loaded,
    TrainingState,
    file_in,
)
from hetctl.runtime.worker.group import Group, all_gather
from hetctl.runtime.worker.member_trainer import load_together
from hetctl.runtime.worker.random_state import gathered_states, random_state
from hetctl.runtime.worker.trainer import Trainer
from hetctl.storage.atomic_io import sync_folder

CHECKED = "shards/{}"
"""Name of the files of a rank, which a rank with this number checks when they are read."""


class DividedNetwork(TrainableNetwork, Protocol):
    """A network of which each rank writes and reads its part."""

    def write_shards(self, folder: Path) -> None:
        """Write this rank's part; all ranks call it. OSError if a disk is full or read-only."""

    def open_shards(self, folder: Path) -> None:
        """Take the parts of later calls of `restore` and `adopt` from a folder."""


class ShardSaver:
    """Writer of checkpoints by all ranks; training goes on when they are on the disk.

    The ranks write into a folder with another name, which rank 0 renames; it then writes the other arrays and
    the manifest, so that a checkpoint without a part of it counts as nonexistent.
    """

    is_busy = False

    def __init__(self, folder: CheckpointFolder, network: DividedNetwork, group: Group) -> None:
        self._folder, self._network, self._group = folder, network, group

    def save(self, arrays: Arrays, state: TrainingState, report: OnSaved) -> None:
        """Write a checkpoint; `report` is called on rank 0.

        Raises
        ------
        OSError
            If a disk is full or read-only; the earlier checkpoints stay intact.
        """
        began = time.perf_counter()
        folder = self._folder.new_shards(state)
        if self._group.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700, parents=True)
        # The others write into it only then.
        self._group.broadcast(True)
        try:
            self._network.write_shards(folder)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        shards = self._gathered(folder)
        if self._group.rank == 0:
            final = self._folder.free_shards(state)
            sync_folder(folder)
            folder.rename(final)
            named = [replace(shard, file=f"{final.name}/{shard.file}") for shard in shards]
            manifest = self._folder.save(arrays, state, shards=named)
            report(manifest, time.perf_counter() - began)

    def check(self) -> None:
        """Do nothing: `save` has raised its errors."""

    def wait(self) -> None:
        """Do nothing: `save` has waited."""

    def call_after(self, function: Callable[[], None]) -> None:
        """Call a function now: `save` has waited."""
        function()

    def close(self) -> None:
        """Do nothing: there is no thread."""

    def _gathered(self, folder: Path) -> list[ArrayFile]:
        """Return the files of all ranks; each computes the checksums of its own."""
        rank = self._group.rank
        own = [*folder.glob(f"__{rank}_*"), *(folder.glob(".metadata") if rank == 0 else ())]
        files = [encode(file_in(folder, path, (CHECKED.format(rank),))) for path in sorted(own)]
        return [decode(ArrayFile, file) for each in all_gather(self._group, files) for file in each]


@dataclass
class ShardedTrainer(Trainer):
    """A divided member's training in one round, as in `Trainer`."""

    network: DividedNetwork

    def _new_saver(self) -> ShardSaver:
        return ShardSaver(self.checkpoints, self.network, self.group)

    def _load(self) -> Loaded:
        """Return the newest checkpoint of which all ranks together have checked all parts."""
        loaded = load_together(self.checkpoints, self.group, checked_by(self.group))
        if loaded.arrays is not None:
            self.network.open_shards(self.checkpoints.path / loaded.shards)
        return loaded

    def _save(self, report: OnSaved) -> None:
        self.state = replace(self.state, random_state=random_state())
        arrays = self.network.save() | gathered_states(self.network, self.group)
        self._saver.save(arrays, self.state, report)


def checked_by(group: Group) -> Callable[[str], bool]:
    """Return a function that is true for the names of arrays, and of the shards that this rank checks.

    There may be more shards than ranks, or fewer.
    """

    def needs(name: str) -> bool:
        kind, _, number = name.partition("/")
        return kind != "shards" or int(number) % group.size == group.rank

    return needs
