import numpy as np
from bsp_iterations import play

from hetctl.methods.balance.cpu_manager import CpuManager
from hetctl.methods.balance.manager import Observation
from hetctl.methods.balance.predictors.memoryless import Memoryless
from hetctl.methods.balance.step_time import TimeCurve


class Foretold:
    """A predictor that knows, and remembers what it is told."""

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


def test_the_predictor_is_told_speed_processors_and_memory():
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


def test_linear_curves_are_balanced_after_one_iteration():
    curves = [TimeCurve(((1, seconds),)) for seconds in (0.01, 0.02, 0.04)]
    taken = play(CpuManager((70, 70, 70), Memoryless(3)), curves, 3)
    assert taken == [(70, 70, 70), (120, 60, 30), (120, 60, 30)]
