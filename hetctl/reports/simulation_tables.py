"""Results of simulations as text and tables, which the terminal and the page share: a view for each kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from hetctl.model.pipelines import PipelineSimulation, SimulatedStage
from hetctl.model.run_status import TaskSpan
from hetctl.model.simulation import (
    BalanceReplay,
    BalanceSimulation,
    HopSimulation,
    Simulation,
    SimulationResult,
)
from hetctl.reports.style import ruled_table
from hetctl.reports.units import (
    NONE,
    device_word,
    format_bytes,
    format_ms,
    format_percent,
    format_seconds,
    printable,
)

Row = Sequence[str]
Note = tuple[str, str]
"""A text, and its style."""


@dataclass(frozen=True)
class Grid:
    """A table; its headers are those of `ruled_table`.

    Parameters
    ----------
    fold : str
        Header of the column whose cells may be broken into lines.
    swatches : bool
        True if its rows begin with names that have colours in the chart.
    """

    headers: Sequence[str]
    rows: Sequence[Row]
    title: str = ""
    fold: str = ""
    swatches: bool = False


@dataclass(frozen=True)
class View:
    """Result of a simulation as people see it.

    Parameters
    ----------
    title : str
        Title of the page.
    figures : sequence of (str, str, str)
        Names, values and remarks; remarks are on the page alone.
    details : callable
        Function that returns the tables that are on the page alone.
    """

    title: str
    headline: str
    lines: Sequence[str] = ()
    figures: Sequence[tuple[str, str, str]] = ()
    grids: Sequence[Grid] = ()
    notes: Sequence[Note] = ()
    details: Callable[[], Sequence[Grid]] = tuple


def simulation_table(result: object) -> RenderableType:
    """Return the result of a simulation for a terminal."""
    view = view_of(result)
    parts: list[RenderableType] = [
        Text(printable(view.headline), "bold"),
        *(Text(printable(line)) for line in view.lines),
    ]
    names, values, _ = zip(*view.figures, strict=True) if view.figures else ((), (), ())
    for grid in [*([Grid([f">{name}" for name in names], [values])] if names else []), *view.grids]:
        table = ruled_table(grid.headers, grid.rows, gap=1, fold=grid.fold)
        parts += [Text(), *([Text(grid.title, "bold")] if grid.title else []), table]
    for text, style in view.notes:
        parts += [Text(), Text(printable(text), style)]
    return Group(*parts)


def view_of(result: object) -> View:
    """Return the view of a result of `Simulated`."""
    return VIEWS[type(result)](result)


def _view_of_members(result: SimulationResult) -> View:
    simulation = result.simulation
    devices = f"{simulation.gpus} {device_word('gpu', simulation.gpus)}, {simulation.gpus_per_node} to a node"
    members = f"{_counted(len(simulation.members), 'member')} of {result.ensemble}, rates of {result.site}"
    objective, work, sharing = simulation.objective, simulation.work, simulation.sharing
    return View(
        title=f"{result.ensemble}, simulated",
        headline=f"{simulation.planner} on {devices}: {members}",
        lines=[f"objective {objective} · work {work} · sharing {sharing}"],
        figures=[
            ("makespan", format_seconds(simulation.makespan_s), ""),
            ("mean\ncompletion", format_seconds(simulation.mean_jct_s), "from arrival"),
            ("lower\nbound", format_seconds(simulation.lower_bound_s), f"of the {objective}"),
            ("ratio", f"{simulation.ratio:.3f}", f"{objective} over its bound"),
            ("rounds", f"{simulation.rounds:,}", ""),
            ("restarts", f"{simulation.restarts:,}", ""),
            ("GPUs\nbusy", format_percent(simulation.gpu_busy_fraction), "restarts left out"),
            ("planning", f"{simulation.plan_seconds:.3g} s", f"{simulation.slowest_plan_s:.2g} s at most"),
        ],
        notes=list(_notes_of_members(result)),
        details=lambda: [_members(simulation, result.arrivals)],
    )


def _notes_of_members(result: SimulationResult) -> Iterable[Note]:
    simulation, search = result.simulation, result.search
    if simulation.reason:
        yield f"chosen by auto: {simulation.reason}", ""
    if result.work_errors:
        errors = [f"{format_percent(e)} at {format_percent(done)}" for done, e in result.work_errors.items()]
        yield f"median error of the predicted work: {', '.join(errors)}", ""
    if search:
        held_s = math.fsum(one.gpus * (one.end_s - one.start_s) for one in simulation.intervals)
        trials = f"{search.trials:,} trials, of which {search.finished:,} had all epochs"
        hours = f"{search.epochs:,} epochs, {held_s / 3600:.3g} GPU-hours"
        yield f"search {search.method}: {trials}; {hours}. Losses are drawn at random.", ""


def _members(simulation: Simulation, arrivals: Mapping[str, float]) -> Grid:
    """Return a line for each member; of trials that a search asked for later no arrival is known."""
    rows = []
    for one in simulation.members:
        arrived_s = arrivals.get(one.member)
        waited_s = None if arrived_s is None else one.done_s - arrived_s
        times_s = (arrived_s, one.done_s, waited_s, one.training_s)
        rows.append((one.member, *map(format_seconds, times_s)))
    headers = ("member", ">arrived", ">done", ">from arrival to end", ">with GPUs")
    return Grid(headers, rows, "Members", swatches=True)


def _view_of_hops(hops: HopSimulation) -> View:
    counts = [(hops.configs, "configuration"), (hops.partitions, "partition")]
    counts += [(hops.workers, "worker"), (hops.epochs, "epoch")]
    words = [_counted(count, word) for count, word in counts]
    what = f"{hops.scheduler}: {words[0]} on {words[1]} and {words[2]}, {words[3]}"
    times = ", ".join(f"{mode} {format_seconds(time_s)}" for mode, time_s in hops.makespans_s.items())
    return View(
        title="Hopper",
        headline=what if hops.mode == "hopper" else f"{what}, {hops.mode}",
        figures=[
            ("makespan", format_seconds(hops.makespan_s), ""),
            ("lower\nbound", format_seconds(hops.lower_bound_s), "workers that never fail"),
            ("ratio", f"{hops.ratio:.3f}", "makespan over the bound"),
            ("workers\nbusy", format_percent(hops.gpu_busy_fraction), "until the makespan"),
            ("lost to\nfailures", format_seconds(hops.lost_s), "over all workers"),
            ("planning", f"{hops.plan_seconds:.3g} s", hops.scheduler),
        ],
        notes=[(f"an epoch by mode: {times}", "")] if len(hops.makespans_s) > 1 else [],
        details=lambda: [
            _visits("worker", hops.worker_names, [(task.node, task) for task in hops.tasks]),
            _visits("configuration", hops.config_names, [(task.member, task) for task in hops.tasks]),
        ],
    )


def _visits(what: str, names: Iterable[str], tasks: Iterable[tuple[str, TaskSpan]]) -> Grid:
    """Return a line for each worker or configuration; times are missing if it has no hop."""
    by_name: dict[str, list[TaskSpan]] = {name: [] for name in names}
    for name, task in tasks:
        by_name[name].append(task)
    rows = []
    for name, own in by_name.items():
        done = [(task.start_s, task.end_s or 0.0) for task in own if task.exit_code == 0]
        times_s = (
            min((task.start_s for task in own), default=None),
            max((end_s for _, end_s in done), default=None),
            math.fsum(end_s - start_s for start_s, end_s in done),
        )
        rows.append((name, f"{len(done)}", f"{len(own) - len(done)}", *map(format_seconds, times_s)))
    headers = (what, ">hops", ">undone", ">began", ">done", ">busy")
    return Grid(headers, rows, f"{what.capitalize()}s", swatches=what == "configuration")


def _view_of_balance(found: BalanceSimulation) -> View:
    how = found.algorithm + (f" with {found.predictor}" if found.predictor else "")
    phases = [
        (
            f"{phase.first} to {phase.last}",
            *(f"{time_s:.4g} s" for time_s in (phase.equal_s, phase.steady_s, phase.t_star_s)),
            f"{phase.ratio:.3f}",
            NONE if phase.reached_at is None else str(phase.reached_at - phase.first),
        )
        for phase in found.phases
    ]
    headers = (">iterations", ">equal\nbatches", ">steady", ">t*", ">ratio", ">within 5 %\nafter")
    ends = [header for phase in found.phases for header in (f">{phase.last}", ">best")]
    batches = [found.iterations[0].batches]
    for phase in found.phases:
        batches += [found.iterations[phase.last].batches, phase.best_batches]
    title = "batches at the start, and at the end of each phase beside the best"
    warnings = "\n".join(f"warning: {warning}" for warning in found.warnings)
    return View(
        title="Balanced batches",
        headline=f"{how}: {found.batch:,} samples on {len(found.workers)} workers",
        lines=[f"{len(found.iterations):,} iterations in {format_seconds(found.total_s)}"],
        grids=[
            Grid(headers, phases),
            Grid(("worker", ">0", *ends), _batches(found.workers, batches), title, "worker"),
        ],
        notes=[(warnings, "yellow")] if warnings else [],
    )


def _batches(workers: Sequence[str], columns: Iterable[Sequence[int]]) -> list[Row]:
    rows = zip(workers, *columns, strict=True)
    return [(name, *(f"{batch:,}" for batch in batches)) for name, *batches in rows]


def _view_of_replay(found: BalanceReplay) -> View:
    times = f"{found.iteration_s:.4g} s per iteration, {found.equal_batches_s:.4g} s with equal batches"
    some = found.repeated != found.iterations
    which = f"the {found.repeated:,} that can be repeated" if some else "all iterations"
    verdict = f"the same batches in {which}", "green"
    if one := found.difference:
        text = f"the log has {list(one.logged)}, repeated {list(one.repeated)}"
        verdict = f"iteration {one.iteration}: {text}", "bold red"
    rows = _batches(found.workers, (found.first_batches, found.last_batches))
    return View(
        title="Balanced batches, repeated",
        headline=f"{found.manager}: {found.iterations:,} iterations on {len(found.workers)} workers",
        lines=[f"{times} as estimated: {found.gain:.2f} times as fast"],
        grids=[Grid(("worker", ">first", ">last"), rows, fold="worker")],
        notes=[verdict],
    )


def _view_of_pipelines(found: PipelineSimulation) -> View:
    missing = f"{found.local_staleness} local, {found.global_staleness} global"
    slowest = f"{found.bottleneck_s * 1000:.4g} ms, {found.ratio:.4g} of the lower bound"
    share = f"{found.efficiency:.1%} of what its slowest stage allows"
    lines = [
        f"minibatches in flight: {found.in_flight} (missing updates: at most {missing})",
        f"slowest stage: {slowest}",
        f"throughput: {found.throughput:.4g} minibatches/s, {share}",
        f"waiting for weights: {found.waiting_fraction:.1%} of the time, idle {found.idle_fraction:.1%}",
    ]
    if most := max(found.node_bytes):
        lines.append(f"beside GPUs: up to {format_bytes(most)} of a node's memory")
    passes = [f">{name}\nms" for name in ("forward", "backward", "receive")]
    headers = (">virtual\nworker", "node:GPU", "layers", *passes, ">memory", ">of", ">busy")
    rows = [
        (str(number) if at == 0 else "", *_cells(stage))
        for number, worker in enumerate(found.virtual_workers)
        for at, stage in enumerate(worker.stages)
    ]
    workers = _counted(len(found.virtual_workers), "virtual worker")
    return View("Pipelines", f"{found.policy}: {workers}", lines, grids=[Grid(headers, rows, fold="layers")])


def _cells(stage: SimulatedStage) -> Row:
    layers = f"{stage.first}-{stage.last}: {stage.first_layer} .. {stage.last_layer}"
    return (
        f"{stage.node}:{stage.gpu} {stage.gpu_type}",
        f"{layers}, recomputed" if stage.recomputes else layers,
        *map(format_ms, (stage.forward_s, stage.backward_s, stage.receive_s)),
        *map(format_bytes, (stage.bytes, stage.memory_bytes)),
        format_percent(stage.gpu_busy_fraction),
    )


def _counted(count: int, word: str) -> str:
    return f"{count:,} {word}{'s' * (count != 1)}"


VIEWS: Mapping[type, Callable[[Any], View]] = {
    SimulationResult: _view_of_members,
    HopSimulation: _view_of_hops,
    BalanceSimulation: _view_of_balance,
    BalanceReplay: _view_of_replay,
    PipelineSimulation: _view_of_pipelines,
}
"""Views of results by their type."""
