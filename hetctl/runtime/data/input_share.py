"""Sources of a rank's batches as the driver assigns them, which does without NumPy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lockstep:
    """A stream on which all ranks of a node train together (FLEET, section 5).

    Parameters
    ----------
    name : str
        Name of the ring.
    seed : int
        Seed of the orders of its epochs, different from every member's.
    chunk, largest : int
        Samples that are prepared together, and samples of the largest batch of any member.
    reader, readers : int
        Number of this rank among the readers on the node, and the number of readers.
    has_leaders : bool
        True if a leader supplies the chunks of this node and of others.
    """

    name: str
    seed: int
    chunk: int
    largest: int
    reader: int
    readers: int
    has_leaders: bool = False


@dataclass(frozen=True)
class InputShare:
    """Source of a member's batches on this rank.

    Parameters
    ----------
    preprocessors : int or None
        Number of the rank's preprocessors that work for the member; None: all.
    """

    preprocessors: int | None = None
    lockstep: Lockstep | None = None
