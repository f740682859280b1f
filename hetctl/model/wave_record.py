"""Weights that the minibatches of pipelines met in training, and what a check of them has found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class WaveRecord:
    """Weights of the minibatches of a wave in one stage.

    Parameters
    ----------
    epoch : int
        Epoch, counted from 1.
    position : int
        Samples of the epoch that were trained before this part of it; minibatches count from there.
    worker, stage : int
        Numbers of the virtual worker and of the stage.
    first : int
        Number of the first minibatch of the record, counted from 1.
    completed : tuple of int
        Own minibatches whose updates the weights contained, for each minibatch.
    pulled : tuple of int
        Waves of all virtual workers that they contained.
    round : int
        Round of the run.
    """

    epoch: int
    position: int
    worker: int
    stage: int
    first: int
    completed: tuple[int, ...]
    pulled: tuple[int, ...]
    round: int = 0

    @property
    def minibatches(self) -> Iterator[tuple[int, int, int]]:
        """Number, completed and pulled of each minibatch."""
        return zip(
            range(self.first, self.first + len(self.completed)), self.completed, self.pulled, strict=True
        )


@dataclass(frozen=True)
class WaveCheck:
    """Staleness of a member's weights beside the bounds of its layouts with the same N_m and D.

    Parameters
    ----------
    in_flight, distance : int
        N_m and the clock distance D.
    minibatches : int
        Minibatches of all virtual workers and stages in the logs.
    local, local_bound : int
        Most updates of its own virtual worker that a minibatch missed, and may miss, s_local.
    overall : int or None
        Most updates of another virtual worker that a minibatch may have missed; None if there is no other.
    overall_bound : int
        Most of them that it may miss, s_global.
    violations : tuple of str
        Minibatches that met older weights than the bounds allow, a line for each.
    """

    member: str
    in_flight: int
    distance: int
    minibatches: int
    local: int
    local_bound: int
    overall: int | None
    overall_bound: int
    violations: tuple[str, ...] = ()
