"""Log of the weights that minibatches met in training, and the paper's bounds of staleness in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hetctl.methods.pipeline.wsp import Bounds


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
class Staleness:
    """Largest values in a log.

    Parameters
    ----------
    local : int
        Updates of its own virtual worker that a minibatch missed.
    overall : int
        Updates of another virtual worker that a minibatch may have missed.
    """

    local: int
    overall: int


def staleness(records: Iterable[WaveRecord], bounds: Bounds) -> Staleness:
    """Return the largest staleness of all minibatches."""
    local = overall = 0
    for record in records:
        for minibatch, completed, pulled in record.minibatches:
            local = max(local, minibatch - 1 - completed)
            overall = max(overall, minibatch - 1 - pulled * bounds.in_flight)
    return Staleness(local, overall)


def violations(records: Iterable[WaveRecord], bounds: Bounds) -> list[str]:
    """Return the minibatches that met older weights than s_local and s_global allow, one line for each."""
    found = []
    for record in records:
        for minibatch, completed, pulled in record.minibatches:
            place = f"epoch {record.epoch}, virtual worker {record.worker}, stage {record.stage}"
            if minibatch - 1 - completed > bounds.local_staleness:
                found.append(f"{place}: minibatch {minibatch} has only {completed} updates of its own")
            if pulled < bounds.waves_needed(minibatch):
                found.append(f"{place}: minibatch {minibatch} has only {pulled} waves of all")
    return found
