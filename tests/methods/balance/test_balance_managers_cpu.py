import numpy as np
import pytest
from bsp_iterations import play
from hypothesis import given
from hypothesis import strategies as st

from hetctl.methods.balance.manager import Observation
from hetctl.methods.balance.managers import CpuManager, first_batches
from hetctl.methods.balance.predictors.learner import Memoryless
from hetctl.methods.balance.step_time import TimeCurve
from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement

TYPES = {"a": "V100", "b": "P100"}


class Foretold:
    """Predictor with given speeds that records its observations."""

    def __init__(self, speeds):
        self.speeds = speeds
        self.told = []

    def observe(self, speed, cpu, memory):
        self.told.append((speed.tolist(), cpu.tolist(), memory.tolist()))

    def predict(self):
        return np.array(self.speeds, dtype=float)


def test_batches_are_in_proportion_to_predicted_speed():
    manager = CpuManager((20, 20, 20), Foretold([1.0, 2.0, 3.0]))
    assert manager.update([Observation(20, 1.0)] * 3) == (10, 20, 30)


def test_the_predictor_observes_speed_cpu_and_memory():
    predictor = Foretold([1.0, 1.0])
    CpuManager((8, 8), predictor).update([Observation(8, 2.0, 0.5, 0.25), Observation(8, 4.0, 1.0, 0.75)])
    assert predictor.told == [([4.0, 2.0], [0.5, 1.0], [0.25, 0.75])]


def test_shares_are_rounded_for_the_slowest_worker():
    # 1.5 : 8.5 samples; two samples would keep the slow worker for longer than nine the fast one.
    assert CpuManager((5, 5), Foretold([15.0, 85.0])).update([Observation(5, 1.0)] * 2) == (1, 9)


def test_a_worker_that_stands_still_keeps_one_sample():
    assert CpuManager((5, 5), Foretold([1e-9, 85.0])).update([Observation(5, 1.0)] * 2) == (1, 9)


def test_a_full_worker_is_given_no_more():
    assert CpuManager((5, 15), Foretold([3.0, 1.0]), (6, None)).update([Observation(5, 1.0)] * 2) == (6, 14)


def test_a_worker_without_free_memory_is_given_no_more():
    manager = CpuManager((20, 20, 20), Foretold([3.0, 2.0, 1.0]))
    seen = [Observation(20, 1.0, memory=0.96), Observation(20, 1.0, memory=0.95), Observation(20, 1.0)]
    assert manager.update(seen) == (20, 27, 13)


def test_linear_curves_are_balanced_after_one_iteration():
    curves = [TimeCurve(((1, seconds),)) for seconds in (0.01, 0.02, 0.04)]
    taken = play(CpuManager((70, 70, 70), Memoryless(3)), curves, 3)
    assert taken == [(70, 70, 70), (120, 60, 30), (120, 60, 30)]


def on(gpus_of_a, gpus_of_b):
    parts = [("a", gpus_of_a), ("b", gpus_of_b)]
    placement = tuple(Placement(node, tuple(range(gpus))) for node, gpus in parts if gpus)
    return Allocation("m", gpus_of_a + gpus_of_b, DATA_PARALLEL, 1.0, placement)


def batches(allocation, fast, slow, batch_size):
    return first_batches(
        allocation, allocation.gpus * batch_size, TYPES, {"V100": fast, "P100": slow}.__getitem__
    )


def test_a_gpu_three_times_as_fast_gets_three_times_the_samples():
    assert batches(on(1, 2), 300.0, 100.0, 50) == (90, 30, 30)


@pytest.mark.parametrize("given", [on(3, 0), on(0, 2)])
def test_a_group_on_one_type_keeps_the_members_batch(given):
    assert batches(given, 300.0, 100.0, 50) == ()


@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.floats(1.0, 1e4),
    st.floats(1.0, 1e4),
    st.integers(1, 512),
)
def test_the_total_is_kept_and_no_other_sample_would_help(of_a, of_b, fast, slow, batch_size):
    """LB-BSP, Algorithm 1: taking one sample from the slowest would make another slower than it was."""
    found = batches(on(of_a, of_b), fast, slow, batch_size)
    rates = [fast] * of_a + [slow] * of_b
    assert sum(found) == batch_size * (of_a + of_b)
    assert min(found) >= 1
    shared = list(zip(found, rates, strict=True))
    slowest_s = max((batch / rate for batch, rate in shared if batch > 1), default=0.0)
    assert min((batch + 1) / rate for batch, rate in shared) >= slowest_s * (1 - 1e-9)
