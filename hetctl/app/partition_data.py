"""Division of an ensemble's training data into partitions, by a process that runs ``input_fn``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from hetctl.model.combinations import features_of, refuse_conflicts
from hetctl.model.ensemble import Ensemble, Partitions
from hetctl.model.errors import BadInputError, HetctlError
from hetctl.model.hops import PARTITION_FILE, PartitionFile
from hetctl.model.serialization import encode, parse
from hetctl.model.values import dataclass
from hetctl.runtime.data.write_partitions import PartitionAnswer, PartitionRequest
from hetctl.storage.atomic_io import write_json
from hetctl.storage.processes import die_with_parent

STDERR = 2
NODE_PATH = f"$TMPDIR/partitions/{PARTITION_FILE}"
"""Path of partitions that are copied to nodes, in a folder that batch systems remove after the job."""
FULL_MEMORY = "if memory was full, raise --count, or let input_fn return arrays mapped from disk"


@dataclass(frozen=True)
class PartitionedFolder:
    """Result of a division.

    Parameters
    ----------
    folder : str
        Folder of the partitions.
    samples, validation_samples : int
        Number of the training and of the validation samples of all partitions.
    written : tuple of int
        Numbers of the partitions that were written; the others were there already.
    partitions : Partitions
        Value for the ensemble file, where `samples` is ``samples_per_epoch``.
    """

    ensemble: str
    folder: str
    seed: int
    samples: int
    validation_samples: int
    files: tuple[PartitionFile, ...]
    written: tuple[int, ...]
    partitions: Partitions


def partition_data(
    ensemble: Ensemble, folder: Path, count: int | None, seed: int, replicas: int | None = None
) -> PartitionedFolder:
    """Divide the data of an ensemble into partitions.

    Parameters
    ----------
    folder : Path
        Folder of the partitions.
    count : int or None
        Number of partitions; None: that of the ensemble file.
    replicas : int or None
        Number of nodes to whose disks a job copies each partition; None: nodes read it where it is.

    Raises
    ------
    BadInputError
        If no number is given, ``input_fn`` fails, its data cannot be divided, or the folder has others.
    HetctlError
        If the process ends without an answer.
    """
    refuse_conflicts(ensemble.name, "hetctl partition", *features_of(ensemble))
    number = count or (ensemble.partitions.count if ensemble.partitions else 0)
    if not number:
        raise BadInputError(
            f"ensemble {ensemble.name} has no `partitions`, so that their number is unknown",
            "give it with --count; as many as a job has GPUs, or a multiple, suit all modes",
        )
    where = folder.absolute()
    answer = _ask(PartitionRequest(ensemble, number, seed, str(where)))
    if answer.manifest is None:
        raise BadInputError(answer.error, answer.hint)
    made, path = answer.manifest, str(where / PARTITION_FILE)
    return PartitionedFolder(
        *(ensemble.name, str(where), seed, made.samples, made.validation_samples, made.partitions),
        answer.written,
        Partitions(number, path) if replicas is None else Partitions(number, NODE_PATH, path, replicas),
    )


def _ask(request: PartitionRequest) -> PartitionAnswer:
    """Run the process; what the user's code prints goes to stderr."""
    with tempfile.TemporaryDirectory(prefix="hetctl-") as folder:
        asked, answer = Path(folder, "request.json"), Path(folder, "answer.json")
        write_json(asked, encode(request))
        done = subprocess.run(
            (sys.executable, "-m", "hetctl.runtime.data.write_partitions", str(asked), str(answer)),
            stdin=subprocess.DEVNULL,
            stdout=STDERR,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            preexec_fn=die_with_parent(signal.SIGTERM),
            check=False,
        )
        if answer.exists():
            return parse(PartitionAnswer, answer.read_text(encoding="utf-8"))
    raise HetctlError(f"the process that makes the partitions ended with code {done.returncode}", FULL_MEMORY)
