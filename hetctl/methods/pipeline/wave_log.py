"""Staleness of the weights that minibatches met in training, beside the paper's bounds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hetctl.methods.pipeline.wsp import Bounds
from hetctl.model.pipelines import WaveRecord


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
