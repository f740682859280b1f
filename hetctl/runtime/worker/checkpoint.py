"""Checkpoints that are complete or do not exist: temporary file, fsync, rename, checksum."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from hetctl.model.serialization import decode, encode
from hetctl.model.training_progress import EpochResult
from hetctl.storage.atomic_io import make_private_folder, write_json

KEPT = 2

Arrays = Mapping[str, npt.NDArray[Any]]


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
    part_loss, part_seconds : float
        Sum of the training loss over those samples, and their time in seconds.
    random_state : Any
        States of NumPy's and Python's global generators, as plain values.
    """

    epochs: tuple[EpochResult, ...] = ()
    gpus: int = 1
    part_samples: int = 0
    part_order: tuple[int, ...] = ()
    part_loss: float = 0.0
    part_seconds: float = 0.0
    random_state: Any = None

    @property
    def order(self) -> tuple[int, int]:
        """Progress of training as finished epochs and samples: later states compare greater."""
        return len(self.epochs), self.part_samples


@dataclass(frozen=True)
class Manifest:
    """Metadata in a small file beside a checkpoint's arrays; this file alone makes the checkpoint valid."""

    file: str
    bytes: int
    sha256: str
    state: TrainingState = field(default_factory=TrainingState)


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

    def save(self, arrays: Arrays, state: TrainingState) -> Manifest:
        """Write a checkpoint and delete all but the last two.

        The manifest is written after the arrays are on the disk: a checkpoint without a manifest, or with one
        that does not match, counts as nonexistent.

        Raises
        ------
        OSError
            If the disk is full or read-only; the earlier checkpoints stay intact.
        """
        make_private_folder(self.path)
        epochs, samples = state.order
        name = f"epoch-{epochs:05d}-{samples:012d}"
        file = self.path / f"{name}.npz"
        size, digest = _write_arrays(file, arrays)
        manifest = Manifest(file.name, size, digest, state)
        write_json(self.path / f"{name}.json", encode(manifest))
        self._drop_old()
        return manifest

    def load(self) -> Loaded:
        """Return the newest valid checkpoint, and the names of newer, invalid ones."""
        invalid: list[str] = []
        for path in self._manifests():
            try:
                manifest = decode(Manifest, json.loads(path.read_text(encoding="utf-8")))
                arrays = _read_arrays(self.path / manifest.file, manifest)
            except (OSError, ValueError):
                invalid.append(path.stem)
            else:
                return Loaded(arrays, manifest.state, tuple(invalid))
        return Loaded(None, TrainingState(), tuple(invalid))

    def _manifests(self) -> list[Path]:
        return sorted(self.path.glob("epoch-*.json"), reverse=True)

    def _drop_old(self) -> None:
        for manifest in self._manifests()[KEPT:]:
            manifest.unlink()
            manifest.with_suffix(".npz").unlink(missing_ok=True)


def _digest(stream: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


def _write_arrays(file: Path, arrays: Arrays) -> tuple[int, str]:
    temporary = file.with_suffix(".tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "w+b") as stream:
            os.fchmod(stream.fileno(), 0o600)
            np.savez(stream, **dict(arrays))
            stream.flush()
            os.fsync(stream.fileno())
            stream.seek(0)
            digest = _digest(stream)
            size = stream.tell()
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return size, digest


def _read_arrays(file: Path, manifest: Manifest) -> dict[str, npt.NDArray[Any]]:
    with file.open("rb") as stream:
        if _digest(stream) != manifest.sha256:
            raise ValueError(f"{file} does not have the checksum of its manifest")
        stream.seek(0)
        with np.load(stream, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
