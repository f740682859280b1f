"""Division of samples into partitions."""

from __future__ import annotations

import numpy as np
import pytest

from hetctl.model.errors import BadInputError
from hetctl.runtime.data.write_partitions import split


@pytest.mark.parametrize(("samples", "count"), [(1, 1), (10, 3), (1000, 7), (16, 16)])
def test_each_sample_is_in_one_partition_of_even_size(samples, count):
    partitions = split("training", samples, count, 3)
    assert sorted(np.concatenate(partitions).tolist()) == list(range(samples))
    assert max(map(len, partitions)) - min(map(len, partitions)) <= 1
    assert all((np.diff(partition) > 0).all() for partition in partitions)


def test_a_division_depends_on_seed_and_kind_alone():
    def first(name, seed):
        return split(name, 1000, 4, seed)[0].tolist()

    assert first("training", 1) == first("training", 1)
    assert len({tuple(first(*each)) for each in [("training", 1), ("training", 2), ("validation", 1)]}) == 3


def test_sorted_samples_are_mixed():
    labels = np.repeat(np.arange(10), 100)
    for partition in split("training", 1000, 5, 0):
        assert np.bincount(labels[partition]).min() >= 5


def test_a_partition_without_samples_is_refused():
    rule = "3 validation samples cannot be divided into 4 partitions"
    with pytest.raises(BadInputError, match=rule) as told:
        split("validation", 3, 4, 0)
    assert "lower --count to 3" in told.value.hint
