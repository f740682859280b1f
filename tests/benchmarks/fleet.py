"""FLEET's evaluation (section 6.1, appendix B) as data: 100 networks, 20 to 160 GPUs at 4 a node.

The paper publishes ranges, totals and figures, not its 100 networks. What is drawn here, by seed, was
chosen once, from what its tables say together:

- Epochs of Caltech256 (30,606 images) to convergence: a whole number from 12 to 16, independent of the
  rate (Figure 8). They cannot differ by much more. Where GPUs are more than networks, `homogeneous` is as
  fast as the baseline (Figure 5: 1.92 / 1.97 of it), although all go at the slowest one's rate there; so
  none has many more epochs than that one. The baseline's longest is 22,700 s then (160 GPUs: 1.92 times
  11,825 s), which is 15.6 epochs at 21 images/s. And the first flotilla of Table 3, led at 176 images/s,
  is stopped after 11.9 epochs, when the first of its members have converged, which differ by 55 s.
- Single-GPU rates: the slowest 21, the fastest 176 images/s (6.1), the others lognormal about 44 with
  sigma 0.4, half of them DenseNets and half ResNets, which differ in nothing here. So members train for
  10,400 +- 4,300 s on one GPU; in the paper 10,372 +- 4,179 (Table 3, baseline).
- Scaling: each GPU more costs a constant share of the efficiency, 2 to 6 %, which is the form of Equation
  5 and of Figure 9; no step between nodes. Planners know all rates exactly: none of these simulations has an
  error of prediction in a rate.
"""

from __future__ import annotations

import math
import random

from hetctl.model.workload import Workload

SIZES = tuple(range(20, 161, 20))
MEMBERS = 100
GPUS_PER_NODE = 4
SAMPLES_PER_EPOCH = 30_606
EPOCHS = (12, 16)
WIDE_EPOCHS = (10, 40)
"""More unequal than the paper's can have been: harder to plan, and to predict."""
RESTART_S = 34.0
"""Table 4: its overheads of checkpointing are whole multiples, 20 at 120 GPUs and 22 at 160, the flotillas of
6.2. All of it counts as the restart of each member that has trained before."""
SLOWEST, FASTEST = 21.0, 176.0
MEDIAN, SIGMA = 44.0, 0.4
LOSSES = (0.02, 0.06)


def members(seed: int, gpus: int, epochs: tuple[int, int] = EPOCHS) -> list[Workload]:
    """Return the ensemble; only how far the rate curves go depends on `gpus`."""
    draw = random.Random(seed)
    singles = [SLOWEST, *(single_rate(draw) for _ in range(MEMBERS - 2)), FASTEST]
    return [_member(index, single, gpus, epochs, draw) for index, single in enumerate(singles)]


def single_rate(draw: random.Random) -> float:
    """Draw the rate of a member on one GPU."""
    return min(max(draw.lognormvariate(math.log(MEDIAN), SIGMA), SLOWEST), FASTEST)


def _member(index: int, single: float, gpus: int, epochs: tuple[int, int], draw: random.Random) -> Workload:
    kept = 1 - draw.uniform(*LOSSES)
    rates = {m: m * single * kept ** (m - 1) for m in range(1, gpus + 1)}
    peak = max(rates, key=lambda m: rates[m])
    return Workload(
        name=f"d{index:03}",
        rates={m: rate for m, rate in rates.items() if m <= peak},
        samples_left=float(draw.randint(*epochs) * SAMPLES_PER_EPOCH),
        samples_per_epoch=SAMPLES_PER_EPOCH,
        restart_s=RESTART_S,
    )
