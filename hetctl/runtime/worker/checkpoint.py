"""Checkpoints that are complete or do not exist: temporary file, fsync, rename, checksum."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from hetctl.model.serialization import decode, encode
from hetctl.model.training_progress import EpochResult
from hetctl.storage.atomic_io import make_private_folder, write_json

if TYPE_CHECKING:
    import numpy.typing as npt

KEPT = 2
UNFINISHED = (".npz", ".tmp")
"""Endings of the files of a checkpoint that are there before its manifest."""
PART = "{}.part-{:03d}.npz"
"""Name of the file of a stage, from the checkpoint's name and the number of the part."""
SHARDS = "{}.shards"
"""Name of the folder of a divided network, from the checkpoint's name."""
PARENT = "parent.json"
"""Name of the file that says how many epochs of a trial's checkpoint are those of its parent."""
TENSORBOARD = "events.out.tfevents.*"
VISIT = 4
"""Place of the number of the visit in the name of a checkpoint."""

Arrays = Mapping[str, "npt.NDArray[Any]"]


@dataclass(frozen=True)
class TrainingState:
    """State of a member's training without its arrays.

    Parameters
    ----------
    epochs : tuple of EpochResult
        The finished epochs.
    gpus : int
        GPUs for which the learning rate is scaled; 1 before the first step.
    part_samples : int
        Trained samples of the unfinished epoch: the position in its order.
    part_order : tuple of int
        Key from which that order is computed; empty if there is no unfinished epoch.
    part_loss, part_s : float
        Sum of the training loss over those samples, and their time in seconds.
    random_state : Any
        States of NumPy's and Python's global generators, as plain values.
    visited : tuple of int
        Partitions that a member that hops has visited in the present pass, in order: to train the unfinished
        epoch, or, if `evaluating`, to evaluate it.
    scores : mapping of str to float
        Sums of the validation metrics times their samples over the evaluated partitions.
    scored : int
        Number of these samples.
    visit : int
        Number of the newest visit; -1 if there was none.
    """

    epochs: tuple[EpochResult, ...] = ()
    gpus: int = 1
    part_samples: int = 0
    part_order: tuple[int, ...] = ()
    part_loss: float = 0.0
    part_s: float = 0.0
    random_state: Any = None
    visited: tuple[int, ...] = ()
    evaluating: bool = False
    scores: Mapping[str, float] = field(default_factory=dict)
    scored: int = 0
    visit: int = -1

    @property
    def is_within_epoch(self) -> bool:
        """True in the middle of an epoch of data-parallel training, in which members cannot hop."""
        return self.part_samples > 0 and not self.visited

    @property
    def order(self) -> tuple[int, int, int]:
        """Progress as finished epochs, samples and evaluated partitions: later states compare greater."""
        return len(self.epochs), self.part_samples, len(self.visited) if self.evaluating else 0


@dataclass(frozen=True)
class ArrayFile:
    """File with arrays of a checkpoint.

    Parameters
    ----------
    names : tuple of str
        Names of the arrays, for the stage of a pipeline; else empty.
    """

    file: str
    bytes: int
    sha256: str
    names: tuple[str, ...] = ()

    def has(self, needs: Callable[[str], bool]) -> bool:
        """Return true if it may have arrays that are needed."""
        return not self.names or any(map(needs, self.names))


@dataclass(frozen=True)
class Manifest:
    """Metadata in a small file beside a checkpoint's arrays; this file alone makes the checkpoint valid.

    Parameters
    ----------
    file : str
        File of the arrays; for a pipeline the manifest itself.
    bytes : int
        Size of all files.
    parts : tuple of ArrayFile
        Files of the stages of a pipeline; `sha256` is then that of their checksums. Empty for others.
    shards : tuple of ArrayFile
        Files of a divided network in the format of PyTorch, beside the arrays. Empty for others.
    """

    file: str
    bytes: int
    sha256: str
    state: TrainingState = field(default_factory=TrainingState)
    parts: tuple[ArrayFile, ...] = ()
    shards: tuple[ArrayFile, ...] = ()

    @property
    def files(self) -> tuple[ArrayFile, ...]:
        """All files without the manifest."""
        return (*self.arrays, *self.shards)

    @property
    def arrays(self) -> tuple[ArrayFile, ...]:
        """Files of the arrays."""
        own = self.bytes - sum(shard.bytes for shard in self.shards)
        return self.parts or (ArrayFile(self.file, own, self.sha256),)


@dataclass(frozen=True)
class Loaded:
    """Start of a member's training; `arrays` is None for a member that starts anew."""

    arrays: dict[str, npt.NDArray[Any]] | None
    state: TrainingState
    invalid: tuple[str, ...]


class CheckpointFolder:
    """Checkpoints of a member; only rank 0 of its group writes them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._invalid: set[str] = set()

    def save(
        self,
        arrays: Arrays,
        state: TrainingState,
        since: int | None = None,
        shards: Sequence[ArrayFile] = (),
    ) -> Manifest:
        """Write a checkpoint and delete all but the last two.

        The manifest is written after the arrays are on the disk: a checkpoint without a manifest, or with one
        that does not match, counts as nonexistent.

        Parameters
        ----------
        since : int or None
            Number of a visit; checkpoints with it or later ones are not deleted either. A node that was given
            up may write states of visits that were undone, and others continue from an earlier one.
        shards : sequence of ArrayFile
            Files in `shards_of` this state, which are on the disk.

        Raises
        ------
        OSError
            If the disk is full or read-only; the earlier checkpoints stay intact.
        """
        make_private_folder(self.path)
        name = _name_of(state)
        file = self.path / f"{name}.npz"
        size, digest = _write_arrays(file, arrays)
        total = size + sum(shard.bytes for shard in shards)
        manifest = Manifest(file.name, total, digest, state, shards=tuple(shards))
        write_json(self.path / f"{name}.json", encode(manifest))
        self._drop_old(name, since)
        return manifest

    def save_part(self, arrays: Arrays, state: TrainingState, part: int) -> ArrayFile:
        """Write the arrays of a stage of a pipeline; they count once `join_parts` has been called.

        Parameters
        ----------
        part : int
            Number of the part in the checkpoint.

        Raises
        ------
        OSError
            If the disk is full or read-only.
        """
        make_private_folder(self.path)
        file = self.path / PART.format(_name_of(state), part)
        size, digest = _write_arrays(file, arrays)
        return ArrayFile(file.name, size, digest, tuple(arrays))

    def join_parts(self, parts: Sequence[ArrayFile], state: TrainingState) -> Manifest:
        """Write the manifest of a checkpoint whose parts are on the disk; delete all but the last two."""
        name = _name_of(state)
        file = f"{name}.json"
        digest = hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest()
        manifest = Manifest(file, sum(part.bytes for part in parts), digest, state, tuple(parts))
        write_json(self.path / file, encode(manifest))
        self._drop_old(name, None)
        return manifest

    def shards_of(self, state: TrainingState) -> Path:
        """Return the folder of a checkpoint's files in the format of PyTorch."""
        return self.path / SHARDS.format(_name_of(state))

    def load(
        self,
        fits: Callable[[TrainingState], bool] = lambda _: True,
        needs: Callable[[str], bool] = lambda _: True,
    ) -> Loaded:
        """Return the newest valid checkpoint, and the names of newer, invalid ones.

        Parameters
        ----------
        fits : callable
            Function that returns false for the state of a checkpoint that is to be left out.
        needs : callable
            Function that returns true for the names of arrays to read.
        """
        invalid: list[str] = []
        for path in self._manifests():
            try:
                manifest = decode(Manifest, json.loads(path.read_text(encoding="utf-8")))
                if not fits(manifest.state):
                    continue
                arrays = _read_files(self.path, manifest, needs)
            except (OSError, ValueError):
                invalid.append(path.stem)
                self._invalid.add(path.stem)
            else:
                return Loaded(arrays, manifest.state, tuple(invalid))
        return Loaded(None, TrainingState(), tuple(invalid))

    def newest_state(self, fits: Callable[[TrainingState], bool] = lambda _: True) -> TrainingState:
        """Return the state of the newest checkpoint without its arrays; a fresh state if there is none.

        Parameters
        ----------
        fits : callable
            Same as in `load`.
        """
        for path in self._manifests():
            with suppress(OSError, ValueError):
                manifest = decode(Manifest, json.loads(path.read_text(encoding="utf-8")))
                sizes = [(self.path / file.file).stat().st_size for file in manifest.files]
                if sizes == [file.bytes for file in manifest.files] and fits(manifest.state):
                    return manifest.state
        return TrainingState()

    def inherit(self, origin: CheckpointFolder) -> None:
        """Copy the files of another member's folder, unless this folder has any: all of them or none.

        Raises
        ------
        OSError
            If the disk is full or read-only.
        """
        if self.path.exists() or not origin.path.exists():
            return
        copy = self.path.with_name(f".{self.path.name}.copy")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(origin.path, copy, ignore=shutil.ignore_patterns(TENSORBOARD, PARENT))
        write_json(copy / PARENT, {"epochs": len(origin.newest_state().epochs)})
        copy.rename(self.path)

    def is_of_parent(self, state: TrainingState) -> bool:
        """Return true for a state that another member has trained, from which this one begins."""
        path = self.path / PARENT
        if not path.exists() or state.part_samples:
            return False
        return bool(json.loads(path.read_text(encoding="utf-8"))["epochs"] == len(state.epochs))

    def newest_visit(self) -> int:
        """Return the largest number of a visit in the checkpoints, valid or not; -1 if there is none."""
        return max((_visit_in(path.stem) for path in self._manifests()), default=-1)

    def _manifests(self) -> list[Path]:
        # Numbers in the names have fixed widths, so the order of names is that of training.
        return sorted(self.path.glob("epoch-*.json"), key=lambda path: path.stem, reverse=True)

    def _drop_old(self, new: str, since: int | None) -> None:
        """Delete checkpoints, but not the one just written, whatever damaged ones are named after it."""
        manifests = self._manifests()
        valid = [path for path in manifests if path.stem not in self._invalid]
        kept = {new, *(path.stem for path in valid[:KEPT])}
        old = (path for path in manifests if path.stem not in kept and path.stem < max(kept))
        for manifest in (path for path in old if since is None or _visit_in(path.stem) < since):
            # The manifest first: an archive without one counts as nonexistent
            # if the process is killed in between. Of members that hop, ranks of other nodes delete, too.
            manifest.unlink(missing_ok=True)
            for file in self.path.glob(f"{manifest.stem}.*npz"):
                file.unlink(missing_ok=True)
        # Those of processes that were killed, too.
        for folder in self.path.glob(SHARDS.format("epoch-*") + "*"):
            if not (self.path / f"{folder.name.split('.')[0]}.json").exists():
                shutil.rmtree(folder, ignore_errors=True)
        if since is None:
            self.drop_unfinished()

    def drop_unfinished(self) -> None:
        """Delete what killed processes have left of checkpoints before those that are kept.

        Not while the member hops: ranks of other nodes may still be writing states of earlier visits.
        """
        kept = {path.stem for path in self._manifests()}
        for file in self.path.glob("epoch-*"):
            name = file.name.partition(".")[0]
            if file.suffix in UNFINISHED and name not in kept and name < min(kept, default=""):
                file.unlink(missing_ok=True)


def file_in(root: Path, path: Path, names: Sequence[str]) -> ArrayFile:
    """Return the description of a file below the folder `root`, with its checksum."""
    with path.open("rb") as stream:
        digest = _digest(stream)
    return ArrayFile(str(path.relative_to(root)), path.stat().st_size, digest, tuple(names))


def _name_of(state: TrainingState) -> str:
    epochs, samples, evaluated = state.order
    name = f"epoch-{epochs:05d}-{samples:012d}"
    # With the number of the visit no two ranks ever write the same file, even if one was given up.
    return name if state.visit < 0 else f"{name}-{evaluated:05d}-{state.visit:09d}"


def _visit_in(name: str) -> int:
    """Return the number of the visit in the name of a checkpoint; -1 if it is of another mode."""
    fields = name.split("-")
    return int(fields[VISIT]) if len(fields) > VISIT else -1


def _digest(stream: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _write_arrays(file: Path, arrays: Arrays) -> tuple[int, str]:
    import numpy as np  # Not for the driver, which reads no arrays.

    temporary = file.with_suffix(".tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "w+b") as stream:
            os.fchmod(stream.fileno(), 0o600)
            np.savez(stream, **dict(arrays))
            stream.flush()
            # Before the rename, which does not order data: after a crash
            # the new name could have an empty file.
            os.fsync(stream.fileno())
            # Read again, because np.savez goes back to complete the headers of the archive.
            stream.seek(0)
            digest = _digest(stream)
            size = stream.tell()
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size, digest


def _read_files(
    folder: Path, manifest: Manifest, needs: Callable[[str], bool]
) -> dict[str, npt.NDArray[Any]]:
    found: dict[str, npt.NDArray[Any]] = {}
    for part in manifest.arrays:
        if part.has(needs):
            found.update(_read_arrays(folder / part.file, part, needs))
    for shard in manifest.shards:
        if shard.has(needs):
            with (folder / shard.file).open("rb") as stream:
                _check(stream, shard)
    return found


def _check(stream: BinaryIO, file: ArrayFile) -> None:
    if _digest(stream) != file.sha256:
        raise ValueError(f"{file.file} does not have the checksum of its manifest")


def _read_arrays(file: Path, part: ArrayFile, needs: Callable[[str], bool]) -> dict[str, npt.NDArray[Any]]:
    import numpy as np

    with file.open("rb") as stream:
        _check(stream, part)
        stream.seek(0)
        # A pickle could run any program as this user.
        with np.load(stream, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in filter(needs, arrays.files)}
