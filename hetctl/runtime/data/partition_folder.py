"""The folder of a dataset's partitions: its manifest, checks of its files, and their stage-in; without NumPy.

In a stage-in a node's partitions are copied from a shared file system to the node's own disk.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hetctl.model.ensemble import Partitions
from hetctl.model.errors import BadInputError
from hetctl.model.hops import MANIFEST_FILE, PARTITION_FILE, PartitionFile, PartitionManifest
from hetctl.model.serialization import encode, parse
from hetctl.runtime.agent.messages import PartitionToStage, StagedPartitions, StageOrder
from hetctl.runtime.job_logs import log_line
from hetctl.storage.atomic_io import make_private_folder, private_file, write_json

BLOCK_BYTES = 1 << 20
REMAKE = "make the partitions anew with `hetctl partition`"

END_S = 2.0
"""Seconds to wait for a read or a write in progress."""


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


class StagingStoppedError(Exception):
    """The job ended while partitions were being copied."""


def stage_orders(partitions: Partitions | None, nodes: Sequence[str]) -> dict[str, StageOrder]:
    """Return the partitions that each node of a job copies; empty if nothing is to be copied.

    A partition goes to the nodes on which plans expect it, as `Partitions.homes` says.

    Parameters
    ----------
    nodes : sequence of str
        Names of the nodes in the order of the job.
    """
    if partitions is None or not (sources := partitions.sources()):
        return {}
    to_stage = [
        PartitionToStage(number, *paths)
        for number, paths in enumerate(zip(sources, partitions.paths(), strict=True))
    ]
    return {
        node: StageOrder(partitions.count, tuple(to_stage[n] for n in sorted(own) if sources[n]))
        for node, own in partitions.homes(nodes).items()
    }


def stage(node: str, order: StageOrder, on_bytes: Callable[[int], None]) -> StagedPartitions:
    """Copy a node's partitions; keep those that are there with the right digest.

    Errors are part of the result: the other partitions are still copied, and ranks use these.

    Parameters
    ----------
    on_bytes : callable
        Function called with the number of bytes of each copied block; its exceptions end the copying.
    """
    began, copied, kept, errors, size_bytes = time.monotonic(), [], [], [], 0
    for each in order.partitions:
        number, source, target = each.number, path_on_node(each.source), path_on_node(each.path)
        try:
            partition = _manifest(source.parent, order.count).partitions[number]
            if is_whole(target, partition):
                kept.append(number)
                log_line(f"partition {number} is at {target} already")
                continue
            _copy(source, target, partition, on_bytes)
        except (OSError, BadInputError) as failure:
            errors.append(f"partition {number} cannot be copied to {target} of {node}: {_reason(failure)}")
            log_line(errors[-1])
        else:
            copied.append(number)
            size_bytes += partition.bytes
            log_line(f"partition {number} was copied to {target}, {partition.bytes} bytes")
    seconds = time.monotonic() - began
    return StagedPartitions(node, tuple(copied), tuple(kept), size_bytes, seconds, tuple(errors))


def unstage(order: StageOrder) -> None:
    """Remove copied partitions, also an earlier job's, but none that the user has placed."""
    for partition in order.partitions:
        target = path_on_node(partition.path)
        if (mark := mark_of(target)).exists():
            target.unlink(missing_ok=True)
            mark.unlink()


def mark_of(target: Path) -> Path:
    """Return the empty file that tells a copied partition from one that the user has placed."""
    return target.with_name(f".{target.name}.staged")


def _manifest(folder: Path, count: int) -> PartitionManifest:
    found = read_manifest(folder)
    if found is None:
        raise BadInputError(f"{folder} has no manifest", REMAKE)
    if len(found.partitions) != count:
        raise BadInputError(
            f"{folder} has {len(found.partitions)} partitions, but `partitions` of the ensemble {count}",
            "correct the ensemble file, or " + REMAKE,
        )
    return found


def _reason(failure: OSError | BadInputError) -> str:
    if isinstance(failure, BadInputError):
        return f"{failure.message}; {failure.hint}"
    place = f" ({failure.filename})" if failure.filename else ""
    return f"{failure.strerror}{place}; give it space and access, or correct `partitions`"


def _copy(source: Path, target: Path, partition: PartitionFile, on_bytes: Callable[[int], None]) -> None:
    make_private_folder(target.parent)
    mark_of(target).touch()
    digest = hashlib.sha256()
    # Unbuffered: a read returns what there is, so that a slow file system shows as progress.
    with source.open("rb", buffering=0) as content, private_file(target) as file:
        while block := content.read(BLOCK_BYTES):
            file.write(block)
            digest.update(block)
            on_bytes(len(block))
        if digest.hexdigest() != partition.sha256:
            raise BadInputError(
                f"{source} has SHA-256 {digest.hexdigest()}, its manifest {partition.sha256}", REMAKE
            )


class Staging:
    """Thread that copies a node's partitions beside an agent's main loop, which goes on sending heartbeats.

    Attributes
    ----------
    bytes_read : int
        Bytes copied so far, for heartbeats.
    """

    def __init__(self, node: str, order: StageOrder) -> None:
        self.bytes_read = 0
        self._order = order
        self._result = StagedPartitions(node)
        self._stopped = threading.Event()
        self._woken, self._wake = os.pipe()
        self._thread = threading.Thread(target=self._run, args=(node,), name="stage-in", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `result` would not block."""
        return self._woken

    def result(self) -> StagedPartitions:
        """Wait for the end of the copying; return what was copied."""
        self._thread.join()
        return self._result

    def end(self) -> None:
        """Stop the copying, and remove what was copied."""
        self._stopped.set()
        # A read from a file system that does not answer cannot be stopped; the thread ends with the process.
        self._thread.join(END_S)
        unstage(self._order)

    def _run(self, node: str) -> None:
        try:
            self._result = stage(node, self._order, self._count)
        except StagingStoppedError:
            pass
        finally:
            os.write(self._wake, b".")

    def _count(self, size_bytes: int) -> None:
        if self._stopped.is_set():
            raise StagingStoppedError
        self.bytes_read += size_bytes
