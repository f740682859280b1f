"""The folder of a dataset's partitions: its manifest, and checks of its files; without NumPy."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from hetctl.model.errors import BadInputError
from hetctl.model.hops import MANIFEST_FILE, PARTITION_FILE, PartitionFile, PartitionManifest
from hetctl.model.serialization import encode, parse
from hetctl.storage.atomic_io import write_json

BLOCK_BYTES = 1 << 20


def write_manifest(folder: Path, manifest: PartitionManifest) -> None:
    """Write the manifest, after all partitions: a folder with a manifest is complete."""
    write_json(folder / MANIFEST_FILE, encode(manifest))


def lacking_partitions(folder: Path, manifest: PartitionManifest) -> tuple[int, ...]:
    """Return the numbers of the partitions that are missing in a folder, or damaged.

    Raises
    ------
    BadInputError
        If the folder has other partitions, which must not be lost.
    """
    known = read_manifest(folder)
    difference = manifest.difference(known) if known else None
    files = {number: partition_path(folder, number) for number in range(len(manifest.partitions))}
    broken = [number for number, file in files.items() if not is_whole(file, manifest.partitions[number])]
    foreign = [files[number] for number in broken if files[number].exists()]
    if known is None and foreign:
        difference = f"{foreign[0].name}, which is no partition of these data"
    if difference:
        raise BadInputError(f"{folder} has {difference}", "choose another folder, or delete this one first")
    return tuple(broken)


def read_manifest(folder: Path) -> PartitionManifest | None:
    """Return the manifest of a folder; None if there is none.

    Raises
    ------
    BadInputError
        If it cannot be read.
    """
    path = folder / MANIFEST_FILE
    try:
        return parse(PartitionManifest, path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise BadInputError(
            f"the manifest {path} cannot be read: {error}", "delete it; `hetctl partition` writes it anew"
        ) from None


def is_whole(file: Path, partition: PartitionFile) -> bool:
    """Return true if a file has the length and the digest of a partition."""
    if not file.is_file() or file.stat().st_size != partition.bytes:
        return False
    digest = hashlib.sha256()
    with file.open("rb") as content:
        while block := content.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest() == partition.sha256


def partition_path(folder: Path, number: int) -> Path:
    """Return the path of a partition."""
    return folder / PARTITION_FILE.format(partition=number)


def path_on_node(path: str) -> Path:
    """Return a path of the ensemble file on this node.

    Environment variables have this node's values, such as a job's folder on its disk.
    """
    return Path(os.path.expandvars(path))
