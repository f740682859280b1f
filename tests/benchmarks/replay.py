"""The papers' evaluations simulated: FLEET's figures 5 and 6 and tables 3 and 4, Capes' table 3."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path

import capes
import fleet
from tables import Row, Table

sys.path.insert(0, str(Path(__file__).parent.parent))
from replays.rival_planners import planner_named

from hetctl.model.simulation import Simulation
from hetctl.model.site import Cluster
from hetctl.scheduling.planners.base import Options
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate

SEEDS = range(10)
DELTA = 20.0
"""Images/s between the rates in a flotilla."""

BASELINE = "independent"
SHARING = ("flotilla", "flotilla-local", "homogeneous")
OURS = ("fluid", "static")

SECONDS = dict(
    zip(fleet.SIZES, (55200.1, 30204.8, 24495.0, 21891.0, 18359.1, 15323.9, 13366.3, 11825.2), strict=True)
)
SCHEDULING_S = dict(zip(fleet.SIZES, (20.1, 15.8, 14.0, 12.0, 10.1, 9.9, 9.3, 10.2), strict=True))
CHECKPOINTING_S = dict(
    zip(fleet.SIZES, (1496.0, 1156.0, 986.0, 816.0, 782.0, 680.0, 680.0, 748.0), strict=True)
)
"""Table 4: FLEET-G's total training time, and what scheduling and checkpointing take of it."""

GAIN_AT_160 = 1.92
"""Section 6.2, FLEET-G: with as many GPUs as networks, or more, the baseline takes as long on any number of
them, so that Table 4 gives the speed-ups of the sizes in between, too."""
GAINS_BELOW = "1.12 to 1.20"
"""Section 6.2, with fewer GPUs than networks: the least of all sizes, and 113 to 120 % on three of four."""

SPREAD_GPUS, SPREAD_FLOTILLAS = 80, 6
SPREAD: dict[str, tuple[float, float]] = {
    "independent": (10372.2, 4178.9),
    "flotilla-local": (6213.0, 3580.0),
    "flotilla 0": (2067.9, 54.7),
    "flotilla 1": (335.6, 48.4),
    "flotilla 2": (2291.9, 26.0),
    "flotilla 3": (415.5, 51.9),
    "flotilla 4": (1072.2, 364.0),
    "flotilla 5": (2322.3, 216.0),
}
"""Table 3: mean and standard deviation of the seconds that networks run."""

FITTED = (BASELINE, "flotilla 0")
"""Rows of Table 3 from which the rates and epochs of `fleet` were chosen: they agree by construction."""

PEAKS = (125, 59, 20)
"""Capes, section 7: simultaneous jobs by column."""


@cache
def run(
    planner: str, gpus: int, seed: int, lockstep: bool = False, epochs: tuple[int, int] = fleet.EPOCHS
) -> Simulation:
    """Simulate one run of FLEET's evaluation."""
    arrivals = [Arrival(member) for member in fleet.members(seed, gpus, epochs)]
    scenario = Scenario(Cluster.of(gpus, fleet.GPUS_PER_NODE), lockstep=lockstep)
    return simulate(planner_named(planner), arrivals, scenario, Options(delta=DELTA, seed=seed))


def speedups(planner: str, gpus: int, seeds: Sequence[int], lockstep: bool = False) -> list[float]:
    """Return the baseline's makespan over the planner's by seed; members of the baseline share nothing."""
    return [
        run(BASELINE, gpus, seed).makespan_s / run(planner, gpus, seed, lockstep).makespan_s for seed in seeds
    ]


def paper_gain(gpus: int) -> str:
    """Return what the paper says of FLEET-G's speed-up over its baseline."""
    most = max(fleet.SIZES)
    return GAINS_BELOW if gpus < fleet.MEMBERS else f"{GAIN_AT_160 * SECONDS[most] / SECONDS[gpus]:.2f}"


def idle_s(result: Simulation) -> float:
    """Return the mean seconds until the makespan in which a GPU is given to no member."""
    held = sum(i.gpus * (i.end_s - i.start_s) for i in result.intervals)
    return result.makespan_s - held / result.gpus


def spread(result: Simulation, round_index: int | None = None) -> tuple[float, float]:
    """Return mean and standard deviation of the seconds of intervals, of one round or of all."""
    lengths = [i.end_s - i.start_s for i in result.intervals if round_index in (None, i.round_index)]
    return statistics.fmean(lengths), statistics.pstdev(lengths)


def figure5(seeds: Sequence[int] = SEEDS, lockstep: bool = False) -> Table:
    """Speed-ups over the baseline; hetctl's planners share nothing, so lockstep does not affect them."""
    planners = SHARING if lockstep else (*SHARING, *OURS)
    rows = [
        (
            str(gpus),
            *(_with_spread(speedups(planner, gpus, seeds, lockstep), 2) for planner in planners),
            paper_gain(gpus),
        )
        for gpus in fleet.SIZES
    ]
    pace = (
        "every member of a flotilla at the slowest one's pace" if lockstep else "each member at its own pace"
    )
    return Table(
        f"FLEET, Figure 5: speed-up over `{BASELINE}`, {pace}",
        ("GPUs", *planners, "paper: FLEET-G"),
        tuple(rows),
    )


def figure6(seeds: Sequence[int] = SEEDS) -> Table:
    """Idle time."""
    planners = (BASELINE, *SHARING, *OURS)
    rows = [
        (
            str(gpus),
            *(_with_spread([idle_s(run(planner, gpus, seed)) for seed in seeds], 0) for planner in planners),
        )
        for gpus in fleet.SIZES
    ]
    return Table("FLEET, Figure 6: seconds that a GPU waits", ("GPUs", *planners), tuple(rows))


def table3(seed: int = SEEDS[0]) -> Table:
    """Running lengths of one ensemble."""
    whole = {planner: spread(run(planner, SPREAD_GPUS, seed)) for planner in (BASELINE, "flotilla-local")}
    flotillas = run("flotilla", SPREAD_GPUS, seed)
    rounds = {f"flotilla {i}": spread(flotillas, i) for i in range(SPREAD_FLOTILLAS)}
    rows = [
        (f"{name}{', an input' * (name in FITTED)}", *_numbers(found), *_numbers(SPREAD[name]))
        for name, found in (whole | rounds).items()
    ]
    header = ("", "mean", "standard deviation", "paper: mean", "paper: standard deviation")
    return Table(f"FLEET, Table 3: seconds that a network runs, {SPREAD_GPUS} GPUs", header, tuple(rows))


def table4(seeds: Sequence[int] = SEEDS) -> Table:
    """Total time and flotillas."""
    rows = []
    for gpus in fleet.SIZES:
        results = [run("flotilla", gpus, seed) for seed in seeds]
        rows.append(
            (
                str(gpus),
                _with_spread([result.makespan_s for result in results], 0),
                f"{SECONDS[gpus]:.0f}",
                _with_spread([result.rounds for result in results], 0),
                f"{CHECKPOINTING_S[gpus] / fleet.RESTART_S:.0f}",
            )
        )
    header = ("GPUs", "seconds", "paper: seconds", "flotillas", "paper: flotillas")
    return Table("FLEET, Table 4: total time of `flotilla`, and flotillas", header, tuple(rows))


def scheduling(seeds: Sequence[int] = SEEDS) -> Table:
    """Time that all decisions of a run take: real time of this machine."""
    rows = []
    for gpus in fleet.SIZES:
        ms = [
            f"{1000 * statistics.median(run(planner, gpus, seed).plan_seconds for seed in seeds):.0f}"
            for planner in ("flotilla", "fluid")
        ]
        rows.append((str(gpus), *ms, f"{1000 * SCHEDULING_S[gpus]:.0f}"))
    header = ("GPUs", "flotilla", "fluid", "paper: FLEET-G")
    return Table("FLEET, Table 4: milliseconds of scheduling in a whole run", header, tuple(rows))


@cache
def hours(strategy: str, seeds: tuple[int, ...]) -> dict[str, float]:
    """Return a strategy's mean hours from arrival to completion by column of Capes' table 3."""
    (row,) = capes.table3([strategy], seeds)
    return row.means


def capes3(seeds: Sequence[int] = SEEDS) -> Table:
    """Capes' strategies and hetctl's, with the paper's hours."""
    rows = []
    for strategy in (*capes.STRATEGIES, "fluid"):
        found = [f"{mean:.2f}" for mean in hours(strategy, tuple(seeds)).values()]
        paper = [f"{mean:.2f}" for mean in capes.PAPER.get(strategy, ())] or [""] * len(found)
        rows.append((strategy, *found, *paper))
    header = ("strategy", *capes.CONTENTION, *(f"paper: {column}" for column in capes.CONTENTION))
    return Table("Capes et al., Table 3: mean hours from arrival to completion", header, tuple(rows))


def rescaling() -> Table:
    """Capes' jobs that continue on more GPUs, with the paper's minutes."""
    rows = []
    for stop, (epochs, minutes) in capes.RESCALED.items():
        found, restarts = capes.rescaled(stop)
        rows.append(
            (f"4, and 8 after {stop} of {epochs} epochs", f"{found:.0f}", str(minutes), str(restarts))
        )
    header = ("GPUs", "minutes", "paper: minutes", "restarts")
    return Table("Capes et al., Table 2: minutes of a job that is rescaled", header, tuple(rows))


def peaks(seeds: Sequence[int] = SEEDS) -> Table:
    """Jobs that are there at once, at most."""
    fixed = [strategy for strategy in capes.STRATEGIES if strategy.startswith("fixed")]
    found = [
        _with_spread([max(_peak(strategy, column, seed) for strategy in fixed) for seed in seeds], 0)
        for column in capes.CONTENTION
    ]
    rows = (("simulated", *found), ("paper", *(str(jobs) for jobs in PEAKS)))
    return Table("Capes et al., section 7: peaks of simultaneous jobs", ("", *capes.CONTENTION), rows)


def _peak(strategy: str, column: str, seed: int) -> int:
    came = [(arrival.at_s, 1) for arrival in capes.arrivals(*capes.CONTENTION[column], seed)]
    gone = [(member.done_s, -1) for member in capes.run(strategy, column, seed).members]
    return max(accumulate(change for _, change in sorted(came + gone)))


def _with_spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.pstdev(values):.{digits}f}"


def _numbers(values: Sequence[float]) -> Row:
    return tuple(f"{value:.0f}" for value in values)
