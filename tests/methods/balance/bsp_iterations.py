"""Iterations of workers with known time curves, as a manager of batches sees them."""

import random

from hetctl.methods.balance.manager import Observation
from hetctl.methods.balance.step_time import TimeCurve

# Inception-V3 on the paper's four types of GPU: balanced at about (89, 21, 12, 6) of 128 samples.
V100 = TimeCurve(((1, 0.35), (16, 0.35), (96, 1.05)))
M60 = TimeCurve(((8, 0.62), (64, 2.19)))
K80 = TimeCurve(((8, 0.81), (64, 3.22)))
K520 = TimeCurve(((4, 0.84), (32, 2.99)))
FOUR_GPUS = (V100, M60, K80, K520)


def longest(curves, batches):
    """Return the seconds of an iteration."""
    return max(curve.seconds(batch) for curve, batch in zip(curves, batches, strict=True))


def play(manager, curves, iterations, noise=0.0, seed=0):
    """Return the batches of each iteration; `noise` is a relative standard deviation."""
    draw = random.Random(seed)
    taken = []
    for _ in range(iterations):
        taken.append(manager.batches)
        manager.update(
            [
                Observation(batch, curve.seconds(batch) * max(draw.gauss(1, noise), 0.1))
                for curve, batch in zip(curves, manager.batches, strict=True)
            ]
        )
    return taken


def changes(taken):
    """Return after which iterations the batches were changed."""
    return [at for at in range(1, len(taken)) if taken[at] != taken[at - 1]]
