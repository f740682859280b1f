"""Batches over several types of GPU: their sum, and that all take equally long."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.methods.balance.initial_batches import with_batches
from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.workload import Workload

TYPES = {"a": "V100", "b": "P100"}


def member(fast, slow):
    curves = {"V100": dict.fromkeys(range(1, 9), fast), "P100": dict.fromkeys(range(1, 9), slow)}
    return Workload("m", curves["V100"], 1000.0, rates_by_type=curves)


def on(gpus_of_a, gpus_of_b):
    parts = [("a", gpus_of_a), ("b", gpus_of_b)]
    placement = tuple(Placement(node, tuple(range(gpus))) for node, gpus in parts if gpus)
    return Allocation("m", gpus_of_a + gpus_of_b, DATA_PARALLEL, 1.0, placement)


def test_a_gpu_that_is_three_times_as_fast_has_three_times_the_samples():
    given = with_batches(on(1, 2), member(300.0, 100.0), 50, TYPES)
    assert given.batch_sizes == (90, 30, 30)


@pytest.mark.parametrize("given", [on(3, 0), on(0, 2)])
def test_a_group_on_one_type_keeps_the_members_batch(given):
    assert with_batches(given, member(300.0, 100.0), 50, TYPES) == given


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.floats(1.0, 1e4),
    st.floats(1.0, 1e4),
    st.integers(1, 512),
)
def test_the_total_is_kept_and_no_other_sample_would_help(of_a, of_b, fast, slow, batch_size):
    """LB-BSP, Algorithm 1: taking one sample from the slowest would make another slower than it was."""
    found = with_batches(on(of_a, of_b), member(fast, slow), batch_size, TYPES).batch_sizes
    rates = [fast] * of_a + [slow] * of_b
    assert sum(found) == batch_size * (of_a + of_b)
    assert min(found) >= 1
    shared = list(zip(found, rates, strict=True))
    slowest_s = max((batch / rate for batch, rate in shared if batch > 1), default=0.0)
    assert min((batch + 1) / rate for batch, rate in shared) >= slowest_s * (1 - 1e-9)
