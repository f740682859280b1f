"""Manifest of the parts that ``hetctl partition`` has made of the training data."""

from __future__ import annotations

from dataclasses import dataclass

MANIFEST_FILE = "partitions.json"
PART_FILE = "{partition}.npz"
"""Name of a part, with its number from 0; it lies beside the manifest."""


@dataclass(frozen=True)
class PartFile:
    """One part, as a file.

    Parameters
    ----------
    samples, validation_samples : int
        Number of its training and validation samples.
    size_bytes : int
        Length of the file.
    sha256 : str
        Digest of the file's content, in hexadecimal digits.
    """

    samples: int
    validation_samples: int
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class PartitionManifest:
    """All parts of the same data; the position of a part is its number.

    Parameters
    ----------
    seed : int
        Seed of the random order in which the samples were divided.
    """

    seed: int
    parts: tuple[PartFile, ...]

    @property
    def samples(self) -> int:
        """Training samples of all parts."""
        return sum(part.samples for part in self.parts)

    @property
    def validation_samples(self) -> int:
        """Validation samples of all parts."""
        return sum(part.validation_samples for part in self.parts)

    def difference(self, other: PartitionManifest) -> str | None:
        """Return in words what another manifest has instead; None if both are equal."""
        if len(other.parts) != len(self.parts):
            return f"{len(other.parts)} parts, not {len(self.parts)}"
        if other.seed != self.seed:
            return f"parts of seed {other.seed}, not {self.seed}"
        return None if other == self else "parts of other data than input_fn returns now"
