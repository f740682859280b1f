"""Checkpoints that are complete or do not exist: temporary file, fsync, rename, sync of the folder, checksum.

The last reported checkpoint survives a crash of the node at any moment. A crash may lose any combination of
unsynced changes, also an earlier rename without a later one. So the arrays' names are synced before the
manifest gets its name, the manifest's name is synced before the checkpoint is reported, and a file that a
manifest names is never replaced.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from functools import lru_cache, wraps
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Concatenate, ParamSpec, TypeVar

from hetctl.model.ensemble import Member
from hetctl.model.errors import is_transient
from hetctl.model.serialization import encode, parse
from hetctl.model.training_progress import NO_BEST, BestCheckpoint, EpochResult
from hetctl.model.values import dataclass
from hetctl.storage.atomic_io import (
    make_private_folder,
    read_json,
    sync_and_rename,
    sync_folder,
    unfinished_file,
    write_json,
)
from hetctl.storage.patience import NO_RETRY, Patience

if TYPE_CHECKING:
    import numpy.typing as npt

P = ParamSpec("P")
T = TypeVar("T")

NEWEST = 2
"""Number of newest checkpoints that are kept to go on from: the second if the newest is damaged."""
UNFINISHED = (".npz", ".tmp")
"""Endings of a checkpoint's files that exist before its manifest."""
PART = "{}.part-{:03d}.npz"
"""Name of a stage's file, from the checkpoint's name and the part's number."""
SHARDS = "shards"
"""Ending of the folder of a sharded network."""
SHARDS_NAMES = f"{{}}.{SHARDS}", f"{{}}.again.{SHARDS}"
"""Names of that folder, from the checkpoint's name: a state saved again takes the other one."""
SHARDS_PART = f"{{}}.{SHARDS}-part"
"""Name of that folder while ranks write into it."""
PARENT = "parent.json"
"""Name of the file with the number of epochs that a trial inherits from its parent."""
TENSORBOARD = "events.out.tfevents.*"
VISIT = 4
"""Index of the visit's number in the name of a checkpoint."""
OF_EPOCH = re.compile(r"epoch-(\d+)-0+(-0+-\d+)?")
"""Name of a checkpoint that was written at the end of an epoch: no samples, no evaluated partitions."""

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
        Partitions, in order, that a member that hops has visited in the present pass. A pass trains an epoch
        or, if `evaluating`, evaluates it.
    scores : mapping of str to float
        Sums over the evaluated partitions of each validation metric times its samples.
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
        """Progress as finished epochs, samples and evaluated partitions; later states compare greater."""
        return len(self.epochs), self.part_samples, len(self.visited) if self.evaluating else 0


@dataclass(frozen=True)
class ArrayFile:
    """File with arrays of a checkpoint.

    Parameters
    ----------
    names : tuple of str
        Names of the arrays of a pipeline's stage; else empty.
    """

    file: str
    bytes: int
    sha256: str
    names: tuple[str, ...] = ()


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
        Files of a pipeline's stages; `sha256` is then the checksum of their checksums. Empty for others.
    shards : tuple of ArrayFile
        Files of a sharded network in PyTorch's format, beside the arrays. Empty for others.
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
        own = self.bytes - sum(shard.bytes for shard in self.shards)
        return (*(self.parts or (ArrayFile(self.file, own, self.sha256),)), *self.shards)

    @property
    def names(self) -> set[str]:
        """Names of the files, and of the folder of shards."""
        return {Path(file.file).parts[0] for file in self.files}


@dataclass(frozen=True)
class Loaded:
    """Start of a member's training.

    Parameters
    ----------
    arrays : dict of str to array, or None
        None for a member that starts anew.
    invalid : tuple of str
        Names of newer checkpoints that are damaged.
    shards : str
        Name of a sharded network's folder; empty for others.
    """

    arrays: dict[str, npt.NDArray[Any]] | None
    state: TrainingState
    invalid: tuple[str, ...]
    shards: str = ""


@dataclass(frozen=True)
class Inherited:
    """Content of the file `PARENT`: the number of epochs that a trial inherits."""

    epochs: int


def _with_patience(
    method: Callable[Concatenate[CheckpointFolder, P], T],
) -> Callable[Concatenate[CheckpointFolder, P], T]:
    """Repeat a method while the file system does not answer, within the folder's patience."""

    @wraps(method)
    def repeated(folder: CheckpointFolder, /, *arguments: P.args, **options: P.kwargs) -> T:
        return folder._patience.call(method, folder, *arguments, **options)

    return repeated


class CheckpointFolder:
    """Checkpoints of a member; only rank 0 of its group writes them.

    Parameters
    ----------
    patience : Patience
        Patience with a file system that does not answer.
    member : Member or None
        Member whose finished epochs are kept as it says; None: only the newest checkpoints are.

    Attributes
    ----------
    best : BestCheckpoint
        Best epoch after the last `save`, `join_parts` or `look_for_best`; `NO_BEST` if none is kept.
    """

    def __init__(self, path: Path, patience: Patience = NO_RETRY, member: Member | None = None) -> None:
        self.path = path
        self.best = NO_BEST
        self._patience = patience
        self._member = member
        self._invalid: set[str] = set()
        self._noticed: list[str] = []

    @_with_patience
    def save(
        self,
        arrays: Arrays,
        state: TrainingState,
        since: int | None = None,
        shards: Sequence[ArrayFile] = (),
    ) -> Manifest:
        """Write a checkpoint, and delete all but the last two and those of the epochs to keep.

        The manifest is written after the arrays are on the disk: a checkpoint without a manifest, or with one
        that does not match, counts as nonexistent.

        Parameters
        ----------
        since : int or None
            Number of a visit; checkpoints of this visit and later ones are kept, too. A node that was given
            up may write states of undone visits, and other ranks continue from an earlier one.
        shards : sequence of ArrayFile
            Files of this state in its folder of shards, which are on the disk.

        Raises
        ------
        OSError
            If the disk is full, or does not answer; the earlier checkpoints stay intact.
        """
        make_private_folder(self.path)
        file = self._write_arrays(f"{_name_of(state)}.npz", arrays, state)
        total = file.bytes + sum(shard.bytes for shard in shards)
        manifest = Manifest(file.file, total, file.sha256, state, shards=tuple(shards))
        self._finish(manifest, since)
        return manifest

    @_with_patience
    def save_part(self, arrays: Arrays, state: TrainingState, part: int) -> ArrayFile:
        """Write the arrays of a pipeline's stage; they count after `join_parts`.

        Parameters
        ----------
        part : int
            Number of the part in the checkpoint.

        Raises
        ------
        OSError
            If the disk is full, or does not answer.
        """
        make_private_folder(self.path)
        file = self._write_arrays(PART.format(_name_of(state), part), arrays, state)
        return replace(file, names=tuple(arrays))

    @_with_patience
    def join_parts(self, parts: Sequence[ArrayFile], state: TrainingState) -> Manifest:
        """Write the manifest for parts on the disk; delete checkpoints as `save` does."""
        file = f"{_name_of(state)}.json"
        digest = hashlib.sha256("".join(part.sha256 for part in parts).encode()).hexdigest()
        manifest = Manifest(file, sum(part.bytes for part in parts), digest, state, tuple(parts))
        self._finish(manifest, None)
        return manifest

    def _write_arrays(self, name: str, arrays: Arrays, state: TrainingState) -> ArrayFile:
        """Write arrays into a file of that name, or of a similar one."""
        import numpy as np  # Not for the driver, which reads no arrays.

        file = self.path / name
        with unfinished_file(file.with_suffix(".tmp")) as stream:
            archive = _Archive(stream)
            np.savez(archive, **dict(arrays))
            digest, size = archive.digest.hexdigest(), stream.tell()
            # An earlier checkpoint counts until the new manifest is there.
            if name in self._named(state):
                file = file.with_suffix(f".{digest[:8]}.npz")
            sync_and_rename(stream, file)
        # Before the manifest, which may replace a valid one.
        sync_folder(self.path)
        return ArrayFile(file.name, size, digest)

    def _finish(self, manifest: Manifest, since: int | None) -> None:
        """Write the manifest for files on the disk, and delete old checkpoints."""
        # Checked again, since arrays take long to write.
        self._patience.before_attempt()
        write_json(self.path / f"{_name_of(manifest.state)}.json", encode(manifest))
        self._drop_old(manifest, since)

    @_with_patience
    def look_for_best(self, state: TrainingState) -> None:
        """Set `best` to the best epoch of a state's history; its size is checked, its checksum is not."""
        self._epochs_to_keep(state, self._names(), {})

    def take_damaged(self) -> list[str]:
        """Return, once, the names of damaged checkpoints of best epochs."""
        noticed, self._noticed = self._noticed, []
        return noticed

    def finished_epochs(self) -> list[int]:
        """Return the finished epochs with a checkpoint, whole or damaged, in their order."""
        return sorted(filter(None, set(map(_finished_epoch, self._names()))))

    def new_shards(self, state: TrainingState) -> Path:
        """Return the folder into which ranks write a checkpoint's files in PyTorch's format."""
        return self.path / SHARDS_PART.format(_name_of(state))

    def free_shards(self, state: TrainingState) -> Path:
        """Return the final path of that folder, which no earlier checkpoint uses."""
        name, named = _name_of(state), self._named(state)
        path = self.path / next(n for n in (each.format(name) for each in SHARDS_NAMES) if n not in named)
        # A process that was killed before it wrote its manifest may have left it.
        shutil.rmtree(path, ignore_errors=True)
        return path

    def _named(self, state: TrainingState) -> set[str]:
        """Return the files and folders that the manifest of an earlier checkpoint of the same state names."""
        manifest = self._manifest(_name_of(state))
        return manifest.names if manifest else set()

    @_with_patience
    def load(
        self,
        fits: Callable[[TrainingState], bool] = lambda _: True,
        needs: Callable[[str], bool] = lambda _: True,
    ) -> Loaded:
        """Return the newest valid checkpoint, and the names of newer, invalid ones.

        Parameters
        ----------
        fits : callable
            Function that returns false for the state of a checkpoint to leave out.
        needs : callable
            Function that returns true for the names of arrays to read.
        """
        invalid: list[str] = []
        for name in self._names():
            manifest = self._manifest(name)
            if manifest and not fits(manifest.state):
                continue
            # Any other error of the file system says nothing about the checkpoint.
            with suppress(FileNotFoundError, ValueError):
                if manifest:
                    arrays = _read_files(self.path, manifest, needs)
                    shards = next((Path(shard.file).parts[0] for shard in manifest.shards), "")
                    return Loaded(arrays, manifest.state, tuple(invalid), shards)
            invalid.append(name)
            self._invalid.add(name)
        return Loaded(None, TrainingState(), tuple(invalid))

    @_with_patience
    def newest_state(self, fits: Callable[[TrainingState], bool] = lambda _: True) -> TrainingState:
        """Return the state of the newest checkpoint without its arrays; a fresh state if there is none.

        Parameters
        ----------
        fits : callable
            Same as in `load`.

        Raises
        ------
        OSError
            If the disk does not answer.
        """
        whole = filter(None, map(self._whole, self._names()))
        return next((found.state for found in whole if fits(found.state)), TrainingState())

    def inherit(self, origin: CheckpointFolder) -> None:
        """Take all files of another member's folder, or none; do nothing if this folder has files.

        Files of checkpoints never change: they are linked, since copies of large ones take minutes. Other
        files, such as those of commands, are copied.

        Raises
        ------
        OSError
            If the disk is full, or does not answer.
        """
        if self.path.exists() or not origin.path.exists():
            return
        copy = self.path.with_name(f".{self.path.name}.copy")
        shutil.rmtree(copy, ignore_errors=True)
        left_out = shutil.ignore_patterns(TENSORBOARD, PARENT)
        manifests = {name: origin._manifest(name) for name in origin._names()}
        finished = {
            file for name, found in manifests.items() if found for file in (f"{name}.json", *found.names)
        }

        def take(source: str, target: str) -> None:
            is_finished = Path(source).relative_to(origin.path).parts[0] in finished
            (_link_or_copy if is_finished else _copy_durably)(source, target)

        shutil.copytree(origin.path, copy, ignore=left_out, copy_function=take)
        for folder, _, _ in os.walk(copy):
            sync_folder(Path(folder))
        write_json(copy / PARENT, encode(Inherited(len(origin.newest_state().epochs))))
        copy.rename(self.path)
        sync_folder(self.path.parent)

    def is_of_parent(self, state: TrainingState) -> bool:
        """Return true for a state that the parent has trained."""
        repair = 'write {"epochs": N} into it, with the number of epochs that the parent had trained'
        try:
            inherited = self._patience.call(read_json, self.path / PARENT, Inherited, repair)
        except FileNotFoundError:
            return False
        return not state.part_samples and inherited.epochs == len(state.epochs)

    def newest_visit(self) -> int:
        """Return the largest number of a visit in the checkpoints, valid or not; -1 if there is none."""
        return max(map(visit_in, self._names()), default=-1)

    def _names(self) -> list[str]:
        """Return the names of all checkpoints, the newest first."""
        return _names_of(self._entries())

    def _manifest(self, name: str) -> Manifest | None:
        """Return the manifest of a checkpoint; None if it is damaged, or there is none."""
        try:
            return _parsed((self.path / f"{name}.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def _whole(self, name: str, manifest: Manifest | None = None) -> Manifest | None:
        """Return the manifest of a checkpoint all of whose files have their sizes; None for another.

        Parameters
        ----------
        manifest : Manifest or None
            Its manifest; None: it has to be read.
        """
        manifest = manifest or self._manifest(name)
        with suppress(FileNotFoundError):
            if manifest and all((self.path / f.file).stat().st_size == f.bytes for f in manifest.files):
                return manifest
        return None

    def _entries(self) -> list[str]:
        """Return the names of all checkpoints' files and folders; none if there is no folder."""
        # Not by `glob`, which takes an unreadable folder for an empty one.
        try:
            return [path.name for path in self.path.iterdir() if path.name.startswith("epoch-")]
        except FileNotFoundError:
            return []

    def _drop_old(self, manifest: Manifest, since: int | None) -> None:
        """Delete what a new checkpoint replaces, and older ones; keep damaged ones with later names."""
        new, epochs = _name_of(manifest.state), len(manifest.state.epochs)
        self._invalid.discard(new)
        entries = self._entries()
        names = _names_of(entries)
        kept = {new, *[name for name in names if name not in self._invalid][:NEWEST]}
        newest = max(kept)
        kept |= self._epochs_to_keep(manifest.state, names, {new: manifest})
        old = {
            name
            for name in names
            if name not in kept
            and name < newest
            and (since is None or visit_in(name) < since)
            # The rank of an earlier visit knows nothing of later epochs.
            and _finished_epoch(name) <= epochs
        }
        own = manifest.names | {f"{new}.json"}

        def is_old(entry: str) -> bool:
            name, _, ending = entry.partition(".")
            # Shards of processes that were killed, too.
            is_left = SHARDS in ending and name not in names
            return name in old or is_left or (name == new and entry not in own)

        self._delete(old, filter(is_old, entries))
        if since is None:
            self._drop_unfinished([name for name in names if name not in old], entries)

    def _epochs_to_keep(
        self, state: TrainingState, names: Sequence[str], manifests: Mapping[str, Manifest]
    ) -> set[str]:
        """Return which checkpoints are those of the best and the last epochs in a history; set `best`.

        Parameters
        ----------
        names : sequence of str
            Names of all checkpoints, the newest first.
        manifests : mapping of str to Manifest
            Those that need not be read.
        """
        if self._member is None:
            return set()
        keep, rule = self._member.keep, self._member.stop
        ends = range(1, len(state.epochs) + 1)
        whole = [name for name in names if _finished_epoch(name) in ends and name not in self._invalid]
        # Members that hop may have several of one epoch, all but one of undone visits.
        by_epoch: defaultdict[int, list[str]] = defaultdict(list)
        for name in whole:
            by_epoch[_finished_epoch(name)].append(name)
        ranked = (name for done in rule.ranked(state.epochs) for name in by_epoch[done.epoch])
        found = ((name, self._part_of(state, name, manifests.get(name))) for name in ranked)
        best = list(islice(((name, manifest) for name, manifest in found if manifest), keep.best))
        self.best = NO_BEST
        if best:
            name, manifest = best[0]
            self.best = BestCheckpoint(_finished_epoch(name), str(self.path / manifest.file))
        return {*(name for name, _ in best), *whole[: keep.last]}

    def _part_of(self, state: TrainingState, name: str, known: Manifest | None) -> Manifest | None:
        """Return the manifest of a finished epoch's checkpoint with a state's history; None for another."""
        manifest = self._whole(name, known)
        if manifest is None:
            self._invalid.add(name)
            self._noticed.append(name)
            return None
        epochs = manifest.state.epochs
        return manifest if epochs == state.epochs[: len(epochs)] else None

    def _delete(self, names: Iterable[str], entries: Iterable[str]) -> None:
        """Delete the manifests of checkpoints, then files and folders."""
        # In this order, in case the process is killed: without a manifest an archive counts as nonexistent.
        # If the member hops, ranks of other nodes delete, too.
        for entry in (*(f"{name}.json" for name in names), *entries):
            path = self.path / entry
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def keep_best_alone(self) -> bool:
        """Delete all checkpoints but that of the best epoch; return false, and delete none, if there is none.

        Do not call it while the member may train.
        """
        self.look_for_best(self.newest_state())
        if self.best == NO_BEST:
            return False
        kept = Path(self.best.path).name.partition(".")[0]
        others = [entry for entry in self._entries() if entry.partition(".")[0] != kept]
        self._delete(set(_names_of(others)), others)
        return True

    def drop_unfinished(self) -> None:
        """Delete what killed processes have left of checkpoints older than the newest ones.

        Do not call it while the member hops: ranks of other nodes may still write states of earlier visits.
        """
        entries = self._entries()
        self._drop_unfinished(_names_of(entries), entries)

    def _drop_unfinished(self, kept: Sequence[str], entries: Sequence[str]) -> None:
        for entry in entries:
            name = entry.partition(".")[0]
            if entry.endswith(UNFINISHED) and name not in kept and name < min(kept[:NEWEST], default=""):
                (self.path / entry).unlink(missing_ok=True)


@lru_cache(maxsize=32)
def _parsed(text: str) -> Manifest:
    # That of the best epoch is read with each checkpoint; to parse it takes ten times as long.
    return parse(Manifest, text)


class _Archive:
    """Stream for `np.savez`; without `tell`, it does not go back, which takes longer than small arrays.

    Attributes
    ----------
    digest
        Checksum of all that was written.
    """

    # Otherwise it counts as a path.
    read = None

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.flush = stream.flush
        self.digest = hashlib.sha256()

    def write(self, data: bytes) -> int:
        """Write data behind the earlier."""
        self.digest.update(data)
        return self._stream.write(data)


def file_in(root: Path, path: Path, names: Sequence[str]) -> ArrayFile:
    """Return the description of a file below `root`, with its checksum."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return ArrayFile(str(path.relative_to(root)), path.stat().st_size, digest, tuple(names))


def _name_of(state: TrainingState) -> str:
    epochs, samples, evaluated = state.order
    name = f"epoch-{epochs:05d}-{samples:012d}"
    # The visit's number keeps two ranks, one of them given up, from writing the same file.
    return name if state.visit < 0 else f"{name}-{evaluated:05d}-{state.visit:09d}"


def _names_of(entries: Sequence[str]) -> list[str]:
    """Return the names of the checkpoints that have a manifest, the newest first."""
    # Numbers in the names have fixed widths, so the order of names is that of training.
    return sorted((each.removesuffix(".json") for each in entries if each.endswith(".json")), reverse=True)


def visit_in(name: str) -> int:
    """Return the number of the visit in the name of a checkpoint; -1 if the member has not hopped."""
    fields = name.split("-")
    return int(fields[VISIT]) if len(fields) > VISIT else -1


def _finished_epoch(name: str) -> int:
    """Return the number of the epoch at whose end a checkpoint was written; 0 within an epoch."""
    found = OF_EPOCH.fullmatch(name)
    return int(found[1]) if found else 0


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError as error:
        if is_transient(error):
            raise
        _copy_durably(source, target)


def _copy_durably(source: str, target: str) -> None:
    shutil.copy2(source, target)
    with Path(target).open("rb") as file:
        os.fsync(file.fileno())


def _read_files(
    folder: Path, manifest: Manifest, needs: Callable[[str], bool]
) -> dict[str, npt.NDArray[Any]]:
    """Return the needed arrays; ValueError if a file that may have some is damaged."""
    import numpy as np

    found: dict[str, npt.NDArray[Any]] = {}
    for file in manifest.files:
        if file.names and not any(map(needs, file.names)):
            continue
        with (folder / file.file).open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != file.sha256:
                raise ValueError(f"{file.file} does not have the checksum of its manifest")
            if file not in manifest.shards:
                stream.seek(0)
                # A pickle could run any program as this user.
                with np.load(stream, allow_pickle=False) as arrays:
                    found |= {name: arrays[name] for name in filter(needs, arrays.files)}
    return found
