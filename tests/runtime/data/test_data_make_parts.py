"""Division of samples into parts."""

from __future__ import annotations

import numpy as np
import pytest

from hetctl.model.errors import BadInputError
from hetctl.runtime.data.make_parts import split


@pytest.mark.parametrize(("samples", "count"), [(1, 1), (10, 3), (1000, 7), (16, 16)])
def test_each_sample_is_in_one_part_of_even_size(samples, count):
    parts = split("training", samples, count, 3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(samples))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all((np.diff(part) > 0).all() for part in parts)


def test_a_division_depends_on_seed_and_kind_alone():
    def first(name, seed):
        return split(name, 1000, 4, seed)[0].tolist()

    assert first("training", 1) == first("training", 1)
    assert len({tuple(first(*each)) for each in [("training", 1), ("training", 2), ("validation", 1)]}) == 3


def test_sorted_samples_are_mixed():
    labels = np.repeat(np.arange(10), 100)
    for part in split("training", 1000, 5, 0):
        assert np.bincount(labels[part]).min() >= 5


def test_a_part_without_samples_is_refused():
    with pytest.raises(BadInputError, match="3 validation samples cannot be divided into 4 parts") as told:
        split("validation", 3, 4, 0)
    assert "lower --count to 3" in told.value.hint
