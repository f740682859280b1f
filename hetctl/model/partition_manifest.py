"""Manifest of the partitions that ``hetctl partition`` has made of the training data."""

from __future__ import annotations

from dataclasses import dataclass

MANIFEST_FILE = "partitions.json"
PARTITION_FILE = "{partition}.npz"
"""Name of a partition, with its number from 0; it lies beside the manifest."""


@dataclass(frozen=True)
class PartitionFile:
    """One partition, as a file.

    Parameters
    ----------
    samples, validation_samples : int
        Number of its training and validation samples.
    bytes : int
        Length of the file.
    sha256 : str
        Digest of the file's content, in hexadecimal digits.
    """

    samples: int
    validation_samples: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class PartitionManifest:
    """All partitions of the same data; the position of a partition is its number.

    Parameters
    ----------
    seed : int
        Seed of the random order in which the samples were divided.
    """

    seed: int
    partitions: tuple[PartitionFile, ...]

    @property
    def samples(self) -> int:
        """Training samples of all partitions."""
        return sum(partition.samples for partition in self.partitions)

    @property
    def validation_samples(self) -> int:
        """Validation samples of all partitions."""
        return sum(partition.validation_samples for partition in self.partitions)

    def difference(self, other: PartitionManifest) -> str | None:
        """Return in words what another manifest has instead; None if both are equal."""
        if len(other.partitions) != len(self.partitions):
            return f"{len(other.partitions)} partitions, not {len(self.partitions)}"
        if other.seed != self.seed:
            return f"partitions of seed {other.seed}, not {self.seed}"
        return None if other == self else "partitions of other data than input_fn returns now"
