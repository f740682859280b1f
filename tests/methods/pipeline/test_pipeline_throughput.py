"""Minibatches in flight: the period of a pipeline by their number."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.methods.pipeline.stages import tasks
from hetctl.methods.pipeline.throughput import Pipeline, bottleneck_s, common_period_s, held

PASSES = st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=1, max_size=8).map(tuple)


@settings(max_examples=30)
@given(PASSES, st.integers(1, 20))
def test_the_period_is_between_its_limits(passes, in_flight):
    period = common_period_s([Pipeline(passes)], in_flight, 0)
    assert period >= bottleneck_s(passes) * (1 - 1e-9)
    assert period * in_flight >= sum(map(sum, passes)) * (1 - 1e-9)


@settings(max_examples=30)
@given(PASSES)
def test_the_period_of_one_in_flight_is_the_sum_of_all_passes(passes):
    assert common_period_s([Pipeline(passes)], 1, 0) == pytest.approx(sum(map(sum, passes)))


def test_received_activations_and_gradients_are_separated():
    assert tasks([(1, 2, 0.5), (1, 2, 1.25), (1, 2, 0.75)]) == ((1, 2.5), (1.5, 2.75), (1.75, 2))


def test_the_last_stage_holds_one_and_the_first_all():
    assert held(((1, 1),) * 4, 4) == [4, 4, 3, 1]
    assert held(((1, 1),) * 4, 13) == [13, 5, 3, 1]
