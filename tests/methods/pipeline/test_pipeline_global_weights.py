"""Global weights: versions of whole waves, whatever the order of their arrival."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.methods.pipeline.global_weights import GlobalWeights


@given(st.data(), st.integers(1, 3), st.integers(1, 4))
def test_a_version_has_its_waves_of_all_in_any_order(data, workers, waves):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    updates = {(w, c): [rng.standard_normal(3)] for w in range(workers) for c in range(waves)}
    sent = [0] * workers
    held = GlobalWeights([np.zeros(3)], workers)
    while any(count < waves for count in sent):
        worker = data.draw(st.sampled_from([w for w in range(workers) if sent[w] < waves]))
        held.push(worker, sent[worker], updates[worker, sent[worker]])
        sent[worker] += 1
        assert held.at(min(sent) + 1) is None
    expected = np.zeros(3)
    for wave in range(waves):
        assert np.array_equal(held.at(wave)[0], expected)
        for worker in range(workers):
            expected = expected + updates[worker, wave][0]
    assert np.array_equal(held.at(waves)[0], expected)


def test_versions_that_all_have_left_behind_are_forgotten():
    held = GlobalWeights([np.zeros(2)], 2)
    for wave in range(3):
        for worker in (0, 1):
            held.push(worker, wave, [np.ones(2)])
    held.note_read(0, 2)
    assert held.at(0) is not None
    held.note_read(1, 1)
    with pytest.raises(KeyError):
        held.at(0)
    assert np.array_equal(held.at(1)[0], [2.0, 2.0])


def test_a_wave_may_be_empty_but_not_missing():
    held = GlobalWeights([np.zeros(2)], 2)
    held.push(0, 0, [])
    held.push(1, 0, [np.ones(2)])
    assert np.array_equal(held.at(1)[0], [1.0, 1.0])
    with pytest.raises(ValueError, match="after 1 waves"):
        held.push(0, 2, [])
