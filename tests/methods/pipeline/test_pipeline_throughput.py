"""Minibatches in flight: the sufficient number, and the period with fewer."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods.pipeline.pipeline_flow import held
from hetctl.methods.pipeline.throughput import bottleneck_s, min_depth, period_s, round_trip_s, tasks

PASSES = st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=8).map(tuple)


@settings(max_examples=30)
@given(PASSES)
def test_2k_minus_1_minibatches_suffice_for_k_stages(passes):
    assert min_depth(passes, bottleneck_s(passes)) <= 2 * len(passes) - 1


@settings(max_examples=30)
@given(PASSES, st.integers(1, 20))
def test_the_period_is_between_its_limits(passes, in_flight):
    period = period_s(passes, in_flight)
    assert period >= bottleneck_s(passes) * (1 - 1e-9)
    assert period * in_flight >= sum(map(sum, passes)) * (1 - 1e-9)


@settings(max_examples=30)
@given(PASSES)
def test_the_period_of_one_in_flight_is_the_sum_of_all_passes(passes):
    assert period_s(passes, 1) == pytest.approx(sum(map(sum, passes)))


@settings(max_examples=30)
@given(PASSES)
def test_with_enough_the_slowest_stage_is_always_busy(passes):
    in_flight = min_depth(passes, bottleneck_s(passes))
    assert period_s(passes, in_flight) == pytest.approx(bottleneck_s(passes))


@settings(max_examples=30)
@given(PASSES)
def test_passes_of_a_cycle_do_not_overlap(passes):
    """Unroll the cycle: a backward pass that waits as said is clear of all forward passes of its GPU."""
    period = bottleneck_s(passes)
    for (forward, backward), since in zip(passes[:-1], _backward_starts(passes, period), strict=True):
        phase = since % period
        assert phase >= forward * (1 - 1e-6) or phase <= 1e-6 * period or forward < 1e-6
        assert phase + backward <= period * (1 + 1e-6)


def _backward_starts(passes, period):
    """Seconds from the start of the forward to that of the backward pass, first stage first."""
    return [
        round_trip_s(passes[at:], period) - passes[at][1] + 1e-12 * period for at in range(len(passes) - 1)
    ]


def test_received_activations_and_gradients_are_separated():
    assert tasks([(1, 2, 0.5), (1, 2, 1.25), (1, 2, 0.75)]) == ((1, 2.5), (1.5, 2.75), (1.75, 2))


def test_the_last_stage_holds_one_and_the_first_all():
    assert held(((1, 1),) * 4, 4) == [4, 4, 3, 1]
    assert held(((1, 1),) * 4, 13) == [13, 5, 3, 1]
