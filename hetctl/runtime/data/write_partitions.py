"""Division of the data of ``input_fn``: ``python -m hetctl.runtime.data.write_partitions REQUEST ANSWER``.

``hetctl partition`` runs this in a process of its own, since ``input_fn`` is the user's code and may import a
framework. All partitions are composed for their digests first, so that every error shows before anything is
written; then those to be written are composed again.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError, HetctlError
from hetctl.model.hops import PartitionManifest
from hetctl.model.interpreter import skip_last_collections
from hetctl.model.serialization import encode, parse
from hetctl.model.values import dataclass
from hetctl.runtime.data.named_arrays import CollatedSource
from hetctl.runtime.data.partition_files import described, write_partition
from hetctl.runtime.data.partition_folder import lacking_partitions, write_manifest
from hetctl.runtime.data.shards import ShardSource
from hetctl.runtime.data.sources import ArraySource, ImageSource, SampleSource, Source, as_sources
from hetctl.runtime.worker.user_functions import load_functions
from hetctl.storage.atomic_io import make_private_folder, write_json

Numbers = npt.NDArray[np.int64]

STREAMS = {"training": 0, "validation": 1}
"""Numbers combined with a seed, so that both divisions are independent."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class PartitionRequest:
    """Input of the process.

    Parameters
    ----------
    count : int
        Number of partitions.
    folder : str
        Folder of the partitions and of their manifest; it need not exist.
    """

    ensemble: Ensemble
    count: int
    seed: int
    folder: str


@dataclass(frozen=True)
class PartitionAnswer:
    """Result of the process: an error, or the partitions.

    Parameters
    ----------
    written : tuple of int
        Numbers of the partitions that were not there yet, or were damaged.
    error : str
        Message, for people; empty if the partitions were made.
    hint : str
        Next step.
    """

    manifest: PartitionManifest | None = None
    written: tuple[int, ...] = ()
    error: str = ""
    hint: str = ""


@dataclass(frozen=True)
class DividedSamples:
    """Samples of any kind, and which of them each partition has."""

    source: SampleSource
    partitions: tuple[Numbers, ...]

    def of(self, partition: int) -> tuple[Array, Array]:
        """Return x and y of the samples of a partition, with a row for each."""
        numbers = self.partitions[partition]
        if isinstance(self.source, ArraySource):
            return np.asarray(self.source.x[numbers]), np.asarray(self.source.y[numbers])
        x, y = self.source.spec.empty(len(numbers))
        for row, number in enumerate(numbers.tolist()):
            x[row], y[row] = self.source.prepare(number)
        return x, y


def write_partitions(request: PartitionRequest) -> PartitionAnswer:
    """Write the partitions that are lacking, and the manifest at the end.

    Raises
    ------
    BadInputError
        If the data cannot be divided, the folder has partitions of other data, or a file cannot be written.
        Wrong data leave the folder as it was.
    """
    divided = divided_data(request)
    partitions = tuple(described(arrays_of(divided, number)) for number in range(request.count))
    manifest = PartitionManifest(request.seed, partitions)
    folder = Path(request.folder)
    lacking = lacking_partitions(folder, manifest)
    try:
        make_private_folder(folder)
        for number in lacking:
            write_partition(folder, number, arrays_of(divided, number), manifest.partitions[number])
        write_manifest(folder, manifest)
    except OSError as error:
        raise BadInputError(
            f"the partitions cannot be written to {folder}: {error.strerror}",
            "give it space and access, or choose another folder; partitions that are already there are kept",
        ) from None
    return PartitionAnswer(manifest, lacking)


def divided_data(request: PartitionRequest) -> tuple[DividedSamples, DividedSamples]:
    """Return the training and the validation samples that ``input_fn(data)`` returns, divided."""
    sources = as_sources(load_functions(request.ensemble).input_fn(request.ensemble.data))
    # Both are checked before either is divided.
    both = [(name, _divisible(name, each)) for name, each in zip(STREAMS, sources, strict=True)]
    training, validation = (
        DividedSamples(source, split(name, len(source), request.count, request.seed)) for name, source in both
    )
    return training, validation


def _divisible(name: str, source: Source) -> SampleSource:
    """Return samples that partitions can keep: those that are the same arrays in every epoch."""
    if isinstance(source, CollatedSource):
        raise BadInputError(
            f"the samples for {name} have a collate_fn, and partitions consist of arrays of one shape",
            "return arrays or a dataset of pairs (x, y), or train without partitions",
        )
    if isinstance(source, ShardSource):
        raise BadInputError(
            f"the samples for {name} are Shards, which are divided already",
            "let `partitions: file` name partitions as arrays, or train without partitions",
        )
    if isinstance(source, ImageSource) and source.is_augmented:
        raise BadInputError(
            f"the ImageFolder for {name} has an augment, which arrays cannot keep",
            "leave augment out, and augment in the network; or divide the folder of images yourself",
        )
    return source


def split(name: str, samples: int, count: int, seed: int) -> tuple[Numbers, ...]:
    """Divide samples at random into partitions whose sizes differ by 1 at most.

    Parameters
    ----------
    name : str
        ``training`` or ``validation``.
    samples, count : int
        Number of samples and of partitions.
    seed : int
        Seed of the random order.

    Returns
    -------
    tuple of arrays of int64
        Numbers of the samples of each partition, ascending: samples on a disk are read in its order, and
        those of a partition are shuffled anew in each epoch.

    Raises
    ------
    BadInputError
        If a partition would be empty.
    """
    if samples < count:
        raise BadInputError(
            f"{samples} {name} samples cannot be divided into {count} partitions: each needs at least one",
            f"lower --count to {samples} or less, or have more {name} samples",
        )
    order = np.random.default_rng([seed, STREAMS[name]]).permutation(samples)
    return tuple(np.sort(partition) for partition in np.array_split(order, count))


def arrays_of(divided: Iterable[DividedSamples], partition: int) -> dict[str, Array]:
    """Return the arrays of a partition by their names."""
    (x, y), (x_validation, y_validation) = (each.of(partition) for each in divided)
    return {"x": x, "y": y, "x_validation": x_validation, "y_validation": y_validation}


def answer_to(request: PartitionRequest) -> PartitionAnswer:
    """Make the partitions; an error becomes an answer, also one of the user's code."""
    try:
        return write_partitions(request)
    except HetctlError as error:
        return PartitionAnswer(error=error.message, hint=error.hint)
    except MemoryError as error:
        return PartitionAnswer(error=f"a partition does not fit in memory: {error}", hint="raise --count")
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f"{f.filename}:{f.lineno}" for f in frames if f.filename.startswith(request.ensemble.folder)]
        place = own[-1] if own else f"{frames[-1].filename}:{frames[-1].lineno}"
        said = f"{request.ensemble.functions.input_fn} failed: {type(error).__name__}: {error} ({place})"
        return PartitionAnswer(error=said, hint="correct it; nothing can be partitioned without its samples")


def main(request: Path, answer: Path) -> int:
    """Answer a request; signals raise SystemExit, so that temporary files are removed."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    found = answer_to(parse(PartitionRequest, request.read_text(encoding="utf-8")))
    write_json(answer, encode(found))
    return 0


if __name__ == "__main__":
    skip_last_collections()
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
