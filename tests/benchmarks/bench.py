"""Distance of decisions and of the feeding of trainers from the limits, and bars for it.

    python tests/benchmarks/bench.py [SECTION ..] [--quick]

Some sections read tables of others from the folder that HETCTL_DATA names. Exit code 1: a bar is passed.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import accuracy_bench
import agent_bench
import away_bench
import balance_bench
import balanced_bench
import capes
import cerebro_bench
import checkpoint_bench
import commands_bench
import coordination_bench
import demo_bench
import doubling_exact
import edits_bench
import ensemble_bench
import environment_bench
import estimates_bench
import fleet
import fused_bench
import fused_search_bench
import hetpipe_bench
import hoho_bench
import hop_state_bench
import hop_transfer_bench
import hopper_bench
import learning_bench
import loss_curves
import outage_bench
import overlap_bench
import pace_bench
import paced_bench
import parallelism_bench
import partition_bench
import pipeline_bench
import planning_time
import predictor_bench
import replay
import ring_bench
import round_bench
import scaling_bench
import script_bench
import script_search_bench
import search_bench
import search_variants
import shares_bench
import sharing_bench
import stage_accuracy_bench
import stage_memory_bench
import stages_bench
import state_bench
import static_bench
import transport_bench
import types_bench
import visits_bench
import waiting_bench
from tables import Figure, Table

from hetctl.model.simulation import Simulation
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.perf.epoch_timeline import allotment_bound, allotments_of
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import Options
from hetctl.scheduling.planners.doubling import allot, double
from hetctl.scheduling.planners.static_schedule import Problem, list_schedule, placeable
from hetctl.scheduling.simulate.scenario import Arrival, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate
from hetctl.scheduling.simulate.work_estimator import SHARES, LossCurveFamily, WorkEstimator

Epochs = tuple[int, int]
PLAN_SECONDS = 2.0
EVENTS = 1_000_000
CURVES_ON = (60, 160)
"""GPUs on which work is predicted from losses of several forms."""


def clairvoyant(quick: bool = False, epochs: Epochs = fleet.EPOCHS) -> Table:
    """FLEET's set-up, the work left known."""
    seeds = _seeds(quick, 10)
    rows, medians, worst = [], [], []
    for gpus in fleet.SIZES:
        found = ratios("fluid", gpus, seeds, epochs)
        others = [f"{statistics.median(ratios(planner, gpus, seeds, epochs)):.3f}" for planner in RIVALS]
        medians.append(statistics.median(found))
        worst.append(max(found))
        rows.append((str(gpus), *others, f"{medians[-1]:.4f}", f"{worst[-1]:.4f}"))
    return Table(
        f"Makespan over the fluid bound, work known, {_range(epochs)} epochs",
        ("GPUs", *RIVALS, "fluid", "fluid, worst"),
        tuple(rows),
        (
            Figure("fluid, median of the worst size", max(medians), 1.03),
            Figure("fluid, worst of all runs", max(worst), 1.05),
        ),
        f"FLEET's set-up, {_count(seeds)}, medians.",
    )


RIVALS = ("independent", "flotilla")


def ratios(planner: str, gpus: int, seeds: Sequence[int], epochs: Epochs = fleet.EPOCHS) -> list[float]:
    """Return makespans over the fluid bound."""
    return [replay.run(planner, gpus, seed, epochs=epochs).ratio for seed in seeds]


def predicted(quick: bool = False) -> Table:
    """FLEET's set-up, the work left predicted from noisy losses."""
    seeds = _seeds(quick, 3)
    rows, medians = [], []
    for gpus in fleet.SIZES:
        runs = [predicted_run(fleet.members(seed, gpus), gpus, seed) for seed in seeds]
        found = [result.ratio for result, _ in runs]
        errors = [f"{statistics.median(error[share] for _, error in runs):.1%}" for share in SHARES]
        medians.append(statistics.median(found))
        rows.append((str(gpus), f"{medians[-1]:.4f}", f"{max(found):.4f}", *errors))
    return Table(
        f"Makespan over the fluid bound, work predicted, {_range(fleet.EPOCHS)} epochs",
        ("GPUs", "fluid", "fluid, worst", *(f"error at {share:.0%}" for share in SHARES)),
        tuple(rows),
        (Figure("fluid, median of the worst size", max(medians), 1.08),),
        f"FLEET's set-up, {_count(seeds)}, medians. Errors are those of the predicted work when that share "
        "of a member's run is over.",
    )


def predicted_run(
    members: Sequence[Workload], gpus: int, seed: int, curve_family: LossCurveFamily | None = None
) -> tuple[Simulation, dict[float, float]]:
    """Simulate `fluid` where losses are all that is seen; return errors by share of a run, too."""
    sight = WorkEstimator(members, seed, curve_family)
    scenario = Scenario(Cluster.of(gpus, fleet.GPUS_PER_NODE), work_estimator=sight)
    options = Options(delta=replay.DELTA, seed=seed)
    result = simulate(planner_named("fluid"), [Arrival(member) for member in members], scenario, options)
    return result, sight.errors()


def curves(quick: bool = False) -> Table:
    """FLEET's set-up, the work left predicted from losses of other forms and noises than the fit's."""
    seeds = _seeds(quick, 5)
    rows = []
    for name, curve_family in loss_curves.FAMILIES.items():
        runs = {
            gpus: [predicted_run(_members(seed, gpus, name), gpus, seed, curve_family) for seed in seeds]
            for gpus in CURVES_ON
        }
        found = [[result.ratio for result, _ in runs[gpus]] for gpus in CURVES_ON]
        of_all = [error for some in runs.values() for _, error in some]
        errors = [f"{statistics.median(error[share] for error in of_all):.1%}" for share in SHARES]
        rows.append(
            (name, *(f"{of(some):.4f}" for some in found for of in (statistics.median, max)), *errors)
        )
    return Table(
        "Makespan over the fluid bound, work predicted, by the form of the losses",
        (
            "losses",
            *(cell for gpus in CURVES_ON for cell in (f"fluid, {gpus} GPUs", "worst")),
            *(f"error at {share:.0%}" for share in SHARES),
        ),
        tuple(rows),
        note=f"FLEET's set-up with {_range(fleet.WIDE_EPOCHS)} epochs, {_count(seeds)}, medians. The work is "
        "predicted by Equation 1, whatever the losses are. Their form and noise are inputs; those of the "
        f"last row are validation losses of {loss_curves.NETWORKS} networks that were trained on "
        "scikit-learn's digits until their stop rule held, and their epochs the members'.",
    )


def _members(seed: int, gpus: int, losses: str) -> list[Workload]:
    """Return FLEET's members, with the epochs of trained networks if these show their losses."""
    members = fleet.members(seed, gpus, fleet.WIDE_EPOCHS)
    if losses != loss_curves.TRAINED:
        return members
    draw = random.Random(seed)
    epochs = [len(draw.choice(loss_curves.measured())) for _ in members]
    return [
        replace(member, samples_left=float(count * fleet.SAMPLES_PER_EPOCH))
        for member, count in zip(members, epochs, strict=True)
    ]


def static(quick: bool = False) -> Table:
    """Constant allotments on measured rates."""
    title = "`static`: makespan over the bound of constant allotments"
    folder = data_folder()
    if folder is None:
        sets = " and ".join(static_bench.SETS)
        return Table(title, (), (), note=f"Not run: HETCTL_DATA names no folder with the tables {sets}.")
    seeds = _seeds(quick, 20)
    results = static_bench.rows(seeds, folder, PLAN_SECONDS)
    groups = [
        [row for row in results if (row.data, row.gpus_per_node) == (data, size)]
        for data in static_bench.SETS
        for size in static_bench.NODE_SIZES
    ]
    medians = [statistics.median(row.ratio for row in group) for group in groups]
    over_plain = [max(_over_plain(row, folder) for row in group) for group in groups]
    rows = [
        (
            group[0].data,
            str(group[0].gpus_per_node),
            f"{median:.4f}",
            f"{max(row.ratio for row in group):.4f}",
            f"{statistics.median(row.packing for row in group):.4f}",
            f"{over:.4f}",
            f"{max(row.first_s for row in group):.1f}",
        )
        for group, median, over in zip(groups, medians, over_plain, strict=True)
    ]
    return Table(
        title,
        (
            "tables",
            "GPUs per node",
            "median",
            "worst",
            "over one node",
            "over plain lists, worst",
            "seconds, most",
        ),
        tuple(rows),
        (
            Figure("median of the worst group", max(medians), 1.06),
            Figure("over the better of `independent` and a plain list", max(over_plain), 1.0),
            Figure(
                "seconds of planning, median", statistics.median(r.first_s for r in results), PLAN_SECONDS
            ),
        ),
        f"{static_bench.MEMBERS} members, {static_bench.GPUS} GPUs, {_count(seeds)}.",
    )


def data_folder() -> Path | None:
    """Return the folder of the tables, if all are there."""
    folder = Path(os.environ.get("HETCTL_DATA") or os.devnull)
    return folder if all(any(folder.glob(f"{data}*")) for data in static_bench.SETS) else None


def _over_plain(row: static_bench.Row, folder: Path) -> float:
    """Return the makespan over the better one of the baseline's and of a longest-first list's."""
    size = row.gpus_per_node
    members = static_bench.instance(static_bench.tables(folder, row.data), row.seed)
    alone = static_bench.planned(members, size, row.seed, PLAN_SECONDS, "independent").makespan_s
    sizes = [len(node.gpus) for node in Cluster.of(static_bench.GPUS, size).nodes]
    allotments = tuple(allotments_of(member, placeable(sizes)) for member in members)
    bound_s = allotment_bound(allotments, static_bench.GPUS)
    problem = Problem(allotments, tuple((0.0,) * size for size in sizes), bound_s, False)
    runs = [problem.run(i, member.within(bound_s)) for i, member in enumerate(allotments)]
    listed, _ = list_schedule(sorted(runs, key=lambda run: -run.seconds), problem.heads)
    return row.makespan_s / min(alone, problem.cost(listed))


def doubling(quick: bool = False) -> Table:
    """The sum of times that `doubling` makes small, over its exact optimum."""
    seeds = _seeds(quick, 30)
    rows, worst = [], []
    for curve in doubling_exact.CURVES:
        heuristic, exchanged = [], []
        for gpus in doubling_exact.GPUS:
            nodes = Cluster.of(gpus, 1).nodes
            for seed in seeds:
                jobs = doubling_exact.instance(curve, gpus, seed)
                exact_s = doubling_exact.exact_s(jobs, gpus)
                heuristic.append(doubling_exact.total_s(jobs, allot(jobs, nodes)) / exact_s)
                exchanged.append(doubling_exact.total_s(jobs, double(jobs, nodes)) / exact_s)
        worst.append(max(exchanged))
        cells = [f"{of(found):.5f}" for found in (heuristic, exchanged) for of in (statistics.median, max)]
        rows.append((curve.__name__, str(len(exchanged)), *cells))
    return Table(
        "`doubling`: sum of times over the exact optimum",
        ("rates", "instances", "the paper's heuristic", "its worst", "with exchange", "its worst"),
        tuple(rows),
        (Figure("worst of all instances, with exchange", max(worst), 1.005),),
        f"{', '.join(map(str, doubling_exact.GPUS))} GPUs, {_count(seeds)}, medians; optima by dynamic"
        " programming. The exchange of GPUs after the heuristic is hetctl's own.",
    )


def mean_jct(quick: bool = False) -> Table:
    """Capes' arrivals: mean time to completion of hetctl's planners over that of `doubling`."""
    seeds = _seeds(quick, 10)
    over = {strategy: over_doubling(strategy, tuple(seeds)) for strategy in ("fluid", "doubling-exploratory")}
    rows = [(name, *(f"{found[column]:.4f}" for column in capes.CONTENTION)) for name, found in over.items()]
    return Table(
        "Mean time to completion over that of `doubling`",
        ("planner", *capes.CONTENTION),
        tuple(rows),
        (
            Figure("fluid, largest of the columns", max(over["fluid"].values()), 1.0),
            Figure("fluid, smallest of the columns", min(over["fluid"].values()), 0.95),
            Figure("doubling-exploratory, extreme", over["doubling-exploratory"]["extreme"], 1.15),
            Figure(
                "doubling-exploratory, largest of the columns",
                max(over["doubling-exploratory"].values()),
                1.15,
            ),
        ),
        f"The arrivals of Capes et al., {_count(seeds)}; ratios of the mean over all.",
    )


def over_doubling(strategy: str, seeds: tuple[int, ...]) -> dict[str, float]:
    """Return by column the mean hours over those of `doubling`."""
    hours, doubled = (replay.hours(name, seeds) for name in (strategy, "doubling"))
    return {column: hours[column] / doubled[column] for column in hours}


def planning(quick: bool = False) -> Table:
    """Time of a decision about a cluster on which nobody trains."""
    sizes = planning_time.SIZES[: 3 if quick else None]
    found = plan_times(sizes)
    names = dict.fromkeys(row.planner for row in found)
    ms = {(row.planner, (row.members, row.gpus)): row.milliseconds for row in found}
    rows = [(name, *(f"{ms[name, size]:,.1f}" for size in sizes)) for name in names]
    usual, largest = planning_time.SIZES[1], planning_time.SIZES[-1]
    figures = [
        Figure(
            "100 on 160, slowest but `static`, ms", max(ms[n, usual] for n in names if n != "static"), 10.0
        ),
        Figure("100 on 160, `static`, ms", ms["static", usual], 1000 * PLAN_SECONDS),
    ]
    if largest in sizes:
        figures += [
            Figure(
                "10,000 on 100,000, slowest but `static`, s",
                max(ms[n, largest] for n in names if n != "static") / 1000,
                10.0,
            ),
            Figure("10,000 on 100,000, `static`, s", ms["static", largest] / 1000, 10.0),
        ]
    return Table(
        "Milliseconds of a decision",
        ("planner", *(f"{members:,} on {gpus:,}" for members, gpus in sizes)),
        tuple(rows),
        tuple(figures),
        f"Processor time, by members and GPUs. `static` searches for up to {PLAN_SECONDS:g} s, its limit.",
    )


@cache
def plan_times(sizes: tuple[tuple[int, int], ...]) -> list[planning_time.Row]:
    """Measure every planner, after one that does not count."""
    names = [*planning_time.PLANNERS]
    list(planning_time.rows(names, planning_time.SIZES[:1], Options(solver_time_limit_s=0.1)))
    return list(planning_time.rows([*names, "fixed-4"], sizes, Options(solver_time_limit_s=PLAN_SECONDS)))


def events(quick: bool = False) -> Table:
    """A long simulation: each job arrives and ends."""
    simulated(1000)
    count = EVENTS // (10 if quick else 1)
    seconds = simulated(count // 2)
    row = (f"{count:,}", f"{seconds:.1f}", f"{seconds / count * 1e6:.1f}")
    figures = (Figure("seconds for a million", seconds * EVENTS / count, 60.0),)
    return Table("A simulation of many events", ("events", "seconds", "microseconds each"), (row,), figures)


def simulated(jobs: int) -> float:
    """Return the seconds that a simulation takes, of jobs that keep 64 GPUs half busy."""
    draw = random.Random(0)
    rates = {gpus: 100 * gpus**0.9 for gpus in range(1, 9)}
    at_s, arrivals = 0.0, []
    for number in range(jobs):
        at_s += draw.expovariate(1.0)
        arrivals.append(Arrival(Workload(f"j{number}", rates, draw.uniform(1e3, 1e4)), at_s))
    began = time.perf_counter()
    simulate(planner_named("independent"), arrivals, Scenario(Cluster.of(64, 4)), Options())
    return time.perf_counter() - began


def _seeds(quick: bool, count: int) -> range:
    return range(2 if quick else count)


def _range(epochs: Epochs) -> str:
    return f"{epochs[0]} to {epochs[1]}"


def _count(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seeds"


Section = Callable[[bool], Table]
SECTIONS: dict[str, Section] = {
    "clairvoyant": clairvoyant,
    "clairvoyant-wide": partial(clairvoyant, epochs=fleet.WIDE_EPOCHS),
    "predicted": predicted,
    "predicted-curves": curves,
    "learning": learning_bench.table,
    "estimates": estimates_bench.table,
    "scaling": scaling_bench.table,
    "static": static,
    "doubling": doubling,
    "mean-jct": mean_jct,
    "planning": planning,
    "events": events,
    "ring": ring_bench.table,
    "sharing": sharing_bench.table,
    "waiting": waiting_bench.table,
    "pace": pace_bench.table,
    "gradients": overlap_bench.table,
    "fused": fused_bench.table,
    "fused-search": fused_search_bench.table,
    "checkpoint": checkpoint_bench.table,
    "rounds": round_bench.table,
    "state": state_bench.table,
    "commands": commands_bench.table,
    "edits": edits_bench.table,
    "hop-state": hop_state_bench.table,
    "agents": agent_bench.start_table,
    "many": agent_bench.many_table,
    "environment": environment_bench.table,
    "hop": hop_transfer_bench.table,
    "paced": paced_bench.table,
    "shares": shares_bench.simulated,
    "paced-shares": shares_bench.paced,
    "search": search_bench.table,
    "variants": search_variants.table,
    "scripts": script_bench.table,
    "script-search": script_search_bench.table,
    "demo": demo_bench.table,
    "ensembles": ensemble_bench.table,
    "hopper": hopper_bench.table,
    "cerebro": cerebro_bench.table,
    "cerebro-milp": cerebro_bench.milp_table,
    "outage": outage_bench.table,
    "hop-training": visits_bench.table,
    "hop-away": away_bench.table,
    "hop-states": visits_bench.hops,
    "hop-sides": parallelism_bench.table,
    "hop-groups": hoho_bench.table,
    "stages": stages_bench.throughput,
    "stages-waiting": stages_bench.waiting,
    "stages-processors": stages_bench.processors,
    "stages-transport": transport_bench.table,
    "stages-memory": stage_memory_bench.table,
    "stages-activations": stage_memory_bench.activations,
    "stages-servers": stage_memory_bench.servers,
    "stages-accuracy": stage_accuracy_bench.table,
    "balance": balance_bench.table,
    "balance-replay": balance_bench.replay,
    "balance-training": balanced_bench.table,
    "balance-types": types_bench.table,
    "balance-hog": balanced_bench.hog,
    "balance-partitions": partition_bench.table,
    "balance-accuracy": accuracy_bench.table,
    "coordination": coordination_bench.table,
    "predictors": predictor_bench.table,
    "pipeline": pipeline_bench.table,
    "hetpipe": hetpipe_bench.table,
    "hetpipe-figure-3": hetpipe_bench.figure_3,
    "hetpipe-figure-4": hetpipe_bench.figure_4,
    "hetpipe-table-4": hetpipe_bench.table_4,
    "hetpipe-figures-5-6": hetpipe_bench.figures_5_and_6,
    "hetpipe-causes": hetpipe_bench.causes,
    "hetpipe-variation": hetpipe_bench.variation,
    "fleet-figure-5-lockstep": lambda quick: replay.figure5(_seeds(quick, 10), lockstep=True),
    "fleet-figure-5": lambda quick: replay.figure5(_seeds(quick, 10)),
    "fleet-figure-6": lambda quick: replay.figure6(_seeds(quick, 10)),
    "fleet-table-3": lambda _quick: replay.table3(),
    "fleet-table-4": lambda quick: replay.table4(_seeds(quick, 10)),
    "fleet-scheduling": lambda quick: replay.scheduling(_seeds(quick, 10)),
    "capes-table-2": lambda _quick: replay.rescaling(),
    "capes-table-3": lambda quick: replay.capes3(_seeds(quick, 10)),
    "capes-peaks": lambda quick: replay.peaks(_seeds(quick, 10)),
}


def measured(names: Iterable[str], quick: bool = False) -> list[Table]:
    """Run sections; print each table when it is there, and what it took."""
    found = []
    for name in names:
        began = time.perf_counter()
        found.append(SECTIONS[name](quick))
        print(f"{found[-1]}\n\n{name}: {time.perf_counter() - began:.0f} s\n", flush=True)
    return found


def main() -> int:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("sections", nargs="*", help=f"of: {', '.join(SECTIONS)}")
    parser.add_argument("--quick", action="store_true", help="fewer seeds, sizes and rounds")
    wishes = parser.parse_args()
    unknown = set(wishes.sections) - set(SECTIONS)
    if unknown:
        parser.error(f"unknown section {', '.join(sorted(unknown))}; one of: {', '.join(SECTIONS)}")
    figures = [f for table in measured(wishes.sections or SECTIONS, wishes.quick) for f in table.figures]
    missed = [figure for figure in figures if not figure.holds]
    print(f"{len(figures) - len(missed)} of {len(figures)} bars hold")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
