"""Gain of better first estimates of rates, which the operations of networks not yet started would give.

    python tests/benchmarks/bench.py estimates      (HETCTL_DATA names the folder of the tables)

Members scale as rows of ElasticFlow's table; their rates on one GPU are lognormal with sigma 1.2, and they
train for 3 to 30 epochs of 2,000 samples. Configs tell nothing of the rates, or have a number like the
operations of a sample: the rate is in inverse proportion to it, but for a lognormal factor.
"""

from __future__ import annotations

import math
import os
import random
import statistics
from collections.abc import Mapping
from pathlib import Path

import fleet
import static_bench
from tables import Table

from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.perf.rate_extrapolation import rate_curve
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import Options
from hetctl.scheduling.simulate.rate_learner import RateLearner
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate

TITLE = "Makespan over the fluid bound, by what first estimates go by"
SIZES = ((9, 2), (12, 4), (12, 16), (20, 8))
"""Numbers of members and of GPUs."""
ERRORS: Mapping[str, float | None] = {"nothing": None, "operations": 0.3, "true rates": 0.0}
"""Standard deviation of the logarithm of that factor, which configs cannot tell; None: they tell nothing."""
EPOCHS, EPOCH, SIGMA, RESTART_S = (3, 30), 2000, 1.2, 5.0


def ratio(curves: list[dict[int, float]], count: int, gpus: int, error: float | None, seed: int) -> float:
    """Return the makespan over the bound."""
    draw, members, workloads = random.Random(seed), list[Member](), list[Workload]()
    for number in range(1, count + 1):
        curve, epochs, noise = draw.choice(curves), draw.randint(*EPOCHS), draw.gauss(0.0, 1.0)
        factor = 100.0 * math.exp(draw.gauss(0.0, SIGMA)) / curve[1]
        rates = rate_curve({m: factor * rate for m, rate in curve.items()}, max(curve)).rates
        name, left = f"d{number:02}", float(epochs * EPOCH)
        workloads.append(Workload(name, rates, left, EPOCH, startup_s=RESTART_S, restart_s=RESTART_S))
        known = number if error is None else 1e9 / rates[1] * math.exp(error * noise)
        members.append(Member(name, {"operations": known}, max_gpus=max(rates)))
    ensemble = Ensemble("estimates", "pytorch", Functions("m:i", "m:m"), tuple(members), "/nowhere")
    scenario = Scenario(Cluster.of(gpus, fleet.GPUS_PER_NODE), rate_learner=RateLearner(ensemble, gpus))
    return simulate(planner_named("fluid"), list(map(Arrival, workloads)), scenario, Options()).ratio


def table(quick: bool = False) -> Table:
    """Compare what first estimates go by."""
    folder = Path(os.environ.get("HETCTL_DATA") or os.devnull)
    data = static_bench.SETS[0]
    if not any(folder.glob(f"{data}*")):
        return Table(TITLE, (), (), note=f"Not run: HETCTL_DATA names no folder with the table {data}.")
    curves, seeds = static_bench.tables(folder, data), range(2 if quick else 10)
    rows, means = [], {name: list[float]() for name in ERRORS}
    for count, gpus in SIZES:
        found = {name: [ratio(curves, count, gpus, e, seed) for seed in seeds] for name, e in ERRORS.items()}
        cells = (f"{statistics.median(own):.3f} / {max(own):.3f}" for own in found.values())
        rows.append((f"{count} members, {gpus} GPUs", *cells))
        for name, own in found.items():
            means[name] += own
        print(rows[-1], flush=True)
    rows.append(("mean of all runs", *(f"{statistics.fmean(own):.3f}" for own in means.values())))
    return Table(
        TITLE,
        ("", *ERRORS),
        tuple(rows),
        (),
        f"`fluid`, no rate known before training; medians / worst of {len(seeds)} seeds. A number in the"
        " config tells the rate on one GPU within 30 %, exactly, or not at all.",
    )
