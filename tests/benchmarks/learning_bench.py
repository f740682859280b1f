"""FLEET's set-up with published rate curves, none of which is known before training.

    python tests/benchmarks/bench.py learning      (HETCTL_DATA names the folder of the tables)

Each of 100 members scales as a row of ElasticFlow's or Gavel's table, drawn with replacement, between the
measured numbers of GPUs and up to the largest; its rate on one GPU, its epochs and the time of a restart are
those of `fleet`. A rate is known three seconds after the first step. Configs say nothing of the rates. Ratios
are over the fluid bound of the true curves; where that is the time of one member alone, no plan is below it.
"""

from __future__ import annotations

import os
import random
import statistics
from collections.abc import Sequence
from pathlib import Path

import fleet
import static_bench
from replays.optimus import OPTIMUS, SpeedModels, sampled
from tables import Figure, Table

from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.perf.rate_extrapolation import profiled_gpus, rate_curve
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import Options
from hetctl.scheduling.simulate.rate_learner import RATE_KNOWN_S, RateLearner
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate

TITLE = "Makespan over the fluid bound, no rate known before training"


def members(curves: Sequence[dict[int, float]], seed: int) -> list[Workload]:
    """Draw the ensemble."""
    draw = random.Random(seed)
    return [_member(number, draw.choice(curves), draw) for number in range(fleet.MEMBERS)]


def _member(number: int, curve: dict[int, float], draw: random.Random) -> Workload:
    factor = fleet.single_rate(draw) / curve[1]
    return Workload(
        f"d{number:03}",
        rate_curve({gpus: factor * rate for gpus, rate in curve.items()}, max(curve)).rates,
        float(draw.randint(*fleet.EPOCHS) * fleet.SAMPLES_PER_EPOCH),
        fleet.SAMPLES_PER_EPOCH,
        restart_s=fleet.RESTART_S,
    )


def learner(workloads: Sequence[Workload], gpus: int) -> RateLearner:
    """Return what a driver without profiles knows at first."""
    own = tuple(Member(w.name, {"number": n}, max_gpus=max(w.rates)) for n, w in enumerate(workloads, 1))
    return RateLearner(Ensemble("learning", "pytorch", Functions("m:i", "m:m"), own, "/nowhere"), gpus)


def ratio(planner: str, workloads: Sequence[Workload], gpus: int, *, learns: bool) -> float:
    """Return the makespan over the bound."""
    scenario = Scenario(
        Cluster.of(gpus, fleet.GPUS_PER_NODE), rate_learner=learner(workloads, gpus) if learns else None
    )
    options = Options(delta=20.0, exploration="each")
    return simulate(planner_named(planner), list(map(Arrival, workloads)), scenario, options).ratio


def profiled_ratio(workloads: Sequence[Workload], gpus: int) -> float:
    """Return that of FLEET's planner, with the profile before it on all GPUs.

    Each member is measured on 1 to M_b GPUs, for as long as a rate takes to be known, and restarts between.
    """
    scenario = Scenario(Cluster.of(gpus, fleet.GPUS_PER_NODE))
    found = simulate(planner_named("flotilla"), list(map(Arrival, workloads)), scenario, Options(delta=20.0))
    counts = (range(1, min(profiled_gpus(fleet.GPUS_PER_NODE), max(w.rates)) + 1) for w in workloads)
    gpu_s = sum(sum(own) * (RATE_KNOWN_S + fleet.RESTART_S) for own in counts)
    return (found.makespan_s + gpu_s / gpus) / found.lower_bound_s


def optimus_ratio(workloads: Sequence[Workload], gpus: int) -> float:
    """Return that of Optimus, with its sample runs before it on all GPUs, which take as FLEET's points do."""
    scenario = Scenario(Cluster.of(gpus, fleet.GPUS_PER_NODE), rate_learner=SpeedModels(workloads))
    found = simulate(OPTIMUS, list(map(Arrival, workloads)), scenario, Options())
    gpu_s = sum(sum(sampled(each)) * (RATE_KNOWN_S + fleet.RESTART_S) for each in workloads)
    return (found.makespan_s + gpu_s / gpus) / found.lower_bound_s


def table(quick: bool = False) -> Table:
    """Compare hetctl, which learns, with those that know, explore or profile."""
    folder = Path(os.environ.get("HETCTL_DATA") or os.devnull)
    if not all(any(folder.glob(f"{data}*")) for data in static_bench.SETS):
        sets = " and ".join(static_bench.SETS)
        return Table(TITLE, (), (), note=f"Not run: HETCTL_DATA names no folder with the tables {sets}.")
    rows, found = [], []
    for data in static_bench.SETS:
        curves = static_bench.tables(folder, data)
        for gpus in fleet.SIZES[:: 4 if quick else 1]:
            drawn = [members(curves, seed) for seed in range(1 if quick else 2)]
            learned = [ratio("fluid", each, gpus, learns=True) for each in drawn]
            others = (
                [ratio("fluid", each, gpus, learns=False) for each in drawn],
                [ratio("doubling-exploratory", each, gpus, learns=False) for each in drawn],
                [optimus_ratio(each, gpus) for each in drawn],
                [profiled_ratio(each, gpus) for each in drawn],
            )
            found += learned
            medians = (f"{statistics.median(ratios):.3f}" for ratios in (learned, *others))
            rows.append((f"{data}, {gpus}", *medians, f"{max(learned):.3f}"))
            print(rows[-1], flush=True)
    return Table(
        TITLE,
        (
            "curves, GPUs",
            "fluid",
            "all rates known",
            "Capes",
            "Optimus",
            "FLEET and its profile",
            "fluid, worst",
        ),
        tuple(rows),
        (
            Figure("fluid, median of all runs", statistics.median(found), 1.05),
            Figure("fluid, worst of all runs", max(found), 1.10),
        ),
        "100 members of FLEET's set-up with curves of ElasticFlow and Gavel, medians of 2 seeds. A rate is"
        " known 3 s after the first step. `all rates known` is `fluid`, too; Capes is `doubling-exploratory`"
        " with `--exploration each`. Optimus (Peng et al., 2018) measures each member on 1, 2, 4 and 8 GPUs"
        " before the training and distributes the GPUs every 10 minutes by its fits. FLEET's profile measures"
        " each member on 1 to 8 GPUs. Both take 3 s and a restart for each measurement. All know the work"
        " that is left.",
    )
