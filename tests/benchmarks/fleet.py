"""FLEET's evaluation (section 6.1, appendix B) as data: 100 networks, 20 to 160 GPUs at 4 a node.

The paper publishes ranges and figures, not its 100 networks. What is drawn here, by seed:

- single-GPU rates: lognormal about 75 images/s, with the slowest at 21 and the fastest at 176 (6.1);
- scaling: each GPU more costs a constant share of the efficiency, 2 to 6 %, which is the form of
  Equation 5 and of Figure 9; profiled on 1 to M_t GPUs, beyond them Equation 5;
- epochs of Caltech256 (30,606 images) to convergence: lognormal about 24, independent of the rate
  (Figure 8), so that a member trains for about 10,400 +- 4,200 s on one GPU (Table 3, baseline); but none
  for more than 22,700 s, as 160 GPUs give each network one of its own and the baseline took no longer:
  Table 4's 11,825 s times the largest speed-up, 1.92.
"""

from __future__ import annotations

import random

from hetctl.core.profile import Candidate
from hetctl.perf.scaling import largest_profile, rate_curve

SIZES = tuple(range(20, 161, 20))
MEMBERS = 100
GPUS_PER_NODE = 4
SAMPLES_PER_EPOCH = 30_606
RESTART_S = 10.0
SLOWEST, FASTEST = 21.0, 176.0
LONGEST_S = 22_700.0


def members(seed: int, gpus: int) -> list[Candidate]:
    """Return the ensemble; only how far the rate curves go depends on `gpus`."""
    draw = random.Random(seed)
    singles = [SLOWEST, *(_single_rate(draw) for _ in range(MEMBERS - 2)), FASTEST]
    profiled = largest_profile(singles, GPUS_PER_NODE)
    return [_member(index, single, profiled, gpus, draw) for index, single in enumerate(singles)]


def _single_rate(draw: random.Random) -> float:
    return min(max(draw.lognormvariate(4.317, 0.3), SLOWEST), FASTEST)


def _member(index: int, single: float, profiled: int, gpus: int, draw: random.Random) -> Candidate:
    kept = 1 - draw.uniform(0.02, 0.06)
    measured = {m: m * single * kept ** (m - 1) for m in range(1, profiled + 1)}
    rates, notes = rate_curve(measured, gpus, GPUS_PER_NODE)
    peak = max(rates, key=lambda m: rates[m])
    most = LONGEST_S * single / SAMPLES_PER_EPOCH
    epochs = max(1, int(min(draw.lognormvariate(3.178, 0.25), most)))
    return Candidate(
        name=f"d{index:03}",
        rates={m: rate for m, rate in rates.items() if m <= peak},
        samples_left=float(epochs * SAMPLES_PER_EPOCH),
        samples_per_epoch=SAMPLES_PER_EPOCH,
        notes=notes,
        restart_s=RESTART_S,
    )
