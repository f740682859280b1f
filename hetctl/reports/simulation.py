"""Results of simulations as reports for the terminal and the page, one for each kind."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hetctl.model.pipelines import PipelineSimulation, Stage
from hetctl.model.run_status import RoundSpan, TaskSpan
from hetctl.model.simulation import (
    BalanceReplay,
    BalanceSimulation,
    HopSimulation,
    Interval,
    Simulation,
    SimulationResult,
)
from hetctl.reports.sections import Note, Report, Section
from hetctl.reports.style import colours_of
from hetctl.reports.summary import Spans, one_round
from hetctl.reports.units import (
    NONE,
    counted,
    device_word,
    format_bytes,
    format_ms,
    format_percent,
    format_seconds,
)

Row = Sequence[str]
MOST_DRAWN = 20_000
"""Largest number of bars in a chart; more would be neither readable nor quick to load."""
MOST_MARKED = 20
"""Largest number of rounds whose starts are marked."""
MOST_OPEN = 40
"""Largest number of rows of a table that a page shows at first."""


def report_of(result: object) -> Report:
    """Return the report of a result of `Simulated`."""
    return REPORTS[type(result)](result)


def _report_of_members(result: SimulationResult) -> Report:
    simulation = result.simulation
    devices = f"{simulation.gpus} {device_word('gpu', simulation.gpus)}, {simulation.gpus_per_node} to a node"
    members = f"{counted(len(simulation.members), 'member')} of {result.ensemble}, rates of {result.site}"
    objective, work, sharing = simulation.objective, simulation.work, simulation.sharing
    colours = colours_of(member.member for member in simulation.members)
    return Report(
        title=f"{result.ensemble}, simulated",
        about=[
            f"{simulation.planner} on {devices}: {members}",
            f"objective {objective} · work {work} · sharing {sharing}",
        ],
        figures=[
            ("makespan", format_seconds(simulation.makespan_s), ""),
            ("mean\ncompletion", format_seconds(simulation.mean_jct_s), "from arrival"),
            ("lower\nbound", format_seconds(simulation.lower_bound_s), f"of the {objective}"),
            ("ratio", f"{simulation.ratio:.3f}", f"{objective} over its bound"),
            ("rounds", f"{simulation.rounds:,}", ""),
            ("restarts", f"{simulation.restarts:,}", ""),
            ("GPUs\nbusy", format_percent(simulation.gpu_busy_fraction), "restarts left out"),
            ("planning", f"{simulation.plan_seconds:.2f} s", f"{simulation.slowest_plan_s:.2f} s at most"),
        ],
        sections=[Section(notes=[note]) for note in _notes_of_members(result)],
        details=lambda: [
            _gantt_of_members(simulation, colours),
            _members(simulation, result.arrivals),
        ],
        colours=colours,
    )


def _notes_of_members(result: SimulationResult) -> Iterable[Note]:
    simulation, search = result.simulation, result.search
    if simulation.reason:
        yield f"chosen by auto: {simulation.reason}", ""
    if result.work_errors:
        errors = [f"{format_percent(e)} at {format_percent(done)}" for done, e in result.work_errors.items()]
        yield f"median error of the predicted work: {', '.join(errors)}", ""
    if search:
        held_s = held_gpu_s(simulation.intervals)
        trials = f"{search.trials:,} trials, of which {search.finished:,} had all epochs"
        hours = f"{search.epochs:,} epochs, {held_s / 3600:.3g} GPU-hours"
        yield f"search {search.method}: {trials}; {hours}. Losses are drawn at random.", ""


def held_gpu_s(intervals: Iterable[Interval]) -> float:
    """Return the GPU-seconds that members hold; time of a GPU that several share counts once."""
    times = defaultdict[tuple[str, int], list[tuple[float, float]]](list)
    for one in intervals:
        for part in one.allocation.placement:
            for gpu in part.gpus:
                times[part.node, gpu].append((one.start_s, one.end_s))
    total = 0.0
    for of_gpu in times.values():
        until = 0.0
        for start, end in sorted(of_gpu):
            total, until = total + max(0.0, end - max(start, until)), max(end, until)
    return total


def _gantt_of_members(simulation: Simulation, colours: Mapping[str, str]) -> Section:
    title, bars = "GPUs over time", len(simulation.intervals)
    if bars > MOST_DRAWN:
        return _too_many(title, f"{bars:,} intervals")
    from hetctl.reports.gantt import RUN, gantt_section

    marked = simulation.rounds <= MOST_MARKED
    tasks = [
        TaskSpan(i.member, i.round_index, part.node, part.gpus, i.start_s, i.end_s, 0, part.seat)
        for i in simulation.intervals
        for part in i.allocation.placement
    ]
    # Many rounds are shown as one.
    rounds = _rounds(simulation.intervals) if marked else one_round(simulation.makespan_s)
    about = (
        "One row for each GPU; a bar is a time in which a member held it, restarts included, with its name or"
        f" number.{' A thin line starts a round.' if marked else ''}"
    )
    spans = Spans("gpu", simulation.gpus, simulation.makespan_s, tasks, rounds)
    return gantt_section(title, about, spans, colours, RUN)


def _too_many(title: str, bars: str) -> Section:
    return Section(title, f"{bars} are too many for a chart; --trace writes them to a file.")


def _rounds(intervals: Iterable[Interval]) -> tuple[RoundSpan, ...]:
    starts: dict[int, list[Interval]] = {}
    for interval in intervals:
        starts.setdefault(interval.round_index, []).append(interval)
    return tuple(
        RoundSpan(index, 0, min(i.start_s for i in those), max(i.end_s for i in those), 0.0, None)
        for index, those in starts.items()
    )


def _members(simulation: Simulation, arrivals: Mapping[str, float]) -> Section:
    """Return a line for each member; trials that a search asked for later have no known arrival."""
    rows = []
    for one in simulation.members:
        arrived_s = arrivals.get(one.member)
        waited_s = None if arrived_s is None else one.done_s - arrived_s
        times_s = (arrived_s, one.done_s, waited_s, one.training_s)
        rows.append((one.member, *map(format_seconds, times_s)))
    headers = ("member", ">arrived", ">done", ">from arrival to end", ">with GPUs")
    return Section("Members", headers=headers, rows=rows, closed=len(rows) > MOST_OPEN)


def _report_of_hops(hops: HopSimulation) -> Report:
    counts = [(hops.configs, "configuration"), (hops.partitions, "partition")]
    counts += [(hops.workers, "worker"), (hops.epochs, "epoch")]
    words = [counted(count, word) for count, word in counts]
    what = f"{hops.scheduler}: {words[0]} on {words[1]} and {words[2]}, {words[3]}"
    times = ", ".join(f"{mode} {format_seconds(time_s)}" for mode, time_s in hops.makespans_s.items())
    colours = colours_of(hops.config_names)
    return Report(
        title="Hopper",
        about=[what if hops.mode == "hopper" else f"{what}, {hops.mode}"],
        figures=[
            ("makespan", format_seconds(hops.makespan_s), ""),
            ("lower\nbound", format_seconds(hops.lower_bound_s), "workers that never fail"),
            ("ratio", f"{hops.ratio:.3f}", "makespan over the bound"),
            ("workers\nbusy", format_percent(hops.gpu_busy_fraction), "until the makespan"),
            ("lost to\nfailures", format_seconds(hops.lost_s), "over all workers"),
            ("planning", f"{hops.plan_seconds:.2f} s", hops.scheduler),
        ],
        sections=[Section(notes=[(f"an epoch by mode: {times}", "")])] if len(hops.makespans_s) > 1 else [],
        details=lambda: [
            _gantt_of_hops(hops, colours),
            _visits("worker", hops.worker_names, [(task.node, task) for task in hops.tasks]),
            _visits("configuration", hops.config_names, [(task.member, task) for task in hops.tasks]),
        ],
        colours=colours,
    )


def _gantt_of_hops(hops: HopSimulation, colours: Mapping[str, str]) -> Section:
    title = "Workers over time"
    if len(hops.tasks) > MOST_DRAWN:
        return _too_many(title, f"{len(hops.tasks):,} hops")
    from hetctl.reports.gantt import HOPS, gantt_section

    about = (
        "One row for each worker; a bar is a configuration's visit to a partition, with its name or number."
    )
    spans = Spans("slot", hops.workers, hops.makespan_s, hops.tasks, one_round(hops.makespan_s))
    return gantt_section(title, about, spans, colours, HOPS)


def _visits(what: str, names: Iterable[str], tasks: Iterable[tuple[str, TaskSpan]]) -> Section:
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
    return Section(f"{what.capitalize()}s", headers=headers, rows=rows, closed=len(rows) > MOST_OPEN)


def _report_of_balance(found: BalanceSimulation) -> Report:
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
    return Report(
        title="Balanced batches",
        about=[
            f"{how}: {found.batch:,} samples on {len(found.workers)} workers",
            f"{len(found.iterations):,} iterations in {format_seconds(found.total_s)}",
        ],
        sections=[
            Section("Phases", headers=headers, rows=phases),
            Section(
                "Batches at the start, and at the end of each phase beside the best",
                headers=("worker", ">0", *ends),
                rows=_batches(found.workers, batches),
                fold="worker",
                notes=[(f"warning: {warning}", "yellow") for warning in found.warnings],
            ),
        ],
    )


def _batches(workers: Sequence[str], columns: Iterable[Sequence[int]]) -> list[Row]:
    rows = zip(workers, *columns, strict=True)
    return [(name, *(f"{batch:,}" for batch in batches)) for name, *batches in rows]


def _report_of_replay(found: BalanceReplay) -> Report:
    times = f"{found.iteration_s:.4g} s per iteration, {found.equal_batches_s:.4g} s with equal batches"
    some = found.repeated != found.iterations
    which = f"the {found.repeated:,} that can be repeated" if some else "all iterations"
    verdict = f"the same batches in {which}", "green"
    if one := found.difference:
        text = f"the log has {list(one.logged)}, repeated {list(one.repeated)}"
        verdict = f"iteration {one.iteration}: {text}", "bold red"
    rows = _batches(found.workers, (found.first_batches, found.last_batches))
    return Report(
        title="Balanced batches, repeated",
        about=[
            f"{found.manager}: {found.iterations:,} iterations on {len(found.workers)} workers",
            f"{times} as estimated: {found.gain:.2f} times as fast",
        ],
        sections=[Section(headers=("worker", ">first", ">last"), rows=rows, fold="worker", notes=[verdict])],
    )


def _report_of_pipelines(found: PipelineSimulation) -> Report:
    missing = f"{found.local_staleness} local, {found.global_staleness} global"
    slowest = f"{found.bottleneck_s * 1000:.4g} ms, {found.ratio:.4g} of the lower bound"
    share = f"{found.efficiency:.1%} of what its slowest stage allows"
    about = [
        f"{found.policy}: {counted(len(found.virtual_workers), 'virtual worker')}",
        f"minibatches in flight: {found.in_flight} (missing updates: at most {missing})",
        f"slowest stage: {slowest}",
        f"throughput: {found.throughput:.4g} minibatches/s, {share}",
        f"waiting for weights: {found.waiting_fraction:.1%} of the time, idle {found.idle_fraction:.1%}",
    ]
    if most := max(found.node_bytes):
        about.append(f"beside GPUs: up to {format_bytes(most)} of a node's memory")
    passes = [f">{name}\nms" for name in ("forward", "backward", "receive")]
    headers = (">virtual\nworker", "node:GPU", "layers", *passes, ">memory", ">of", ">busy")
    rows = [
        (str(number) if at == 0 else "", *_cells(stage))
        for number, worker in enumerate(found.virtual_workers)
        for at, stage in enumerate(worker.stages)
    ]
    return Report("Pipelines", about, sections=[Section(headers=headers, rows=rows, fold="layers")])


def _cells(stage: Stage) -> Row:
    layers = f"{stage.first}-{stage.last}: {stage.first_layer} .. {stage.last_layer}"
    return (
        f"{stage.node}:{stage.gpu} {stage.gpu_type}",
        f"{layers}, recomputed" if stage.recomputes else layers,
        *map(format_ms, (stage.forward_s, stage.backward_s, stage.receive_s)),
        *map(format_bytes, (stage.bytes, stage.memory_bytes)),
        format_percent(stage.gpu_busy_fraction),
    )


REPORTS: Mapping[type, Callable[[Any], Report]] = {
    SimulationResult: _report_of_members,
    HopSimulation: _report_of_hops,
    BalanceSimulation: _report_of_balance,
    BalanceReplay: _report_of_replay,
    PipelineSimulation: _report_of_pipelines,
}
"""Reports of results by their type."""
