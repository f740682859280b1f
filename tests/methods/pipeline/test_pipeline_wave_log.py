"""Staleness in the log of a pipeline, and what violates the paper's bounds."""

from __future__ import annotations

from hetctl.methods.pipeline.wave_log import staleness, violations
from hetctl.methods.pipeline.wsp import Bounds
from hetctl.model.pipelines import WaveRecord

# Section 5's example: with D = 0 and N_m = 4, minibatch 11 needs 7 of its own and wave 0 of all.
BOUNDS = Bounds(4, 0)


def record(completed, pulled, first=9):
    return WaveRecord(1, 0, 0, 1, first, completed, pulled)


def test_minibatches_at_the_bounds_violate_nothing():
    records = [record((5, 6, 7), (1, 1, 1))]
    assert violations(records, BOUNDS) == []
    found = staleness(records, BOUNDS)
    assert (found.local, found.overall) == (BOUNDS.local_staleness, BOUNDS.global_staleness)


def test_older_weights_are_named_with_their_minibatch():
    assert violations([record((4, 6), (1, 1))], BOUNDS) == [
        "epoch 1, virtual worker 0, stage 1: minibatch 9 has only 4 updates of its own"
    ]
    assert violations([record((8,), (1,), first=12)], BOUNDS) == [
        "epoch 1, virtual worker 0, stage 1: minibatch 12 has only 1 waves of all"
    ]
