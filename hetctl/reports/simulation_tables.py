"""Terminal output of simulations: of planners, hops, balanced batches, and pipelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetctl.model.simulation import Simulation
from hetctl.reports.table_style import ruled_table
from hetctl.reports.units import (
    NONE,
    device_word,
    format_bytes,
    format_ms,
    format_percent,
    format_seconds,
    printable,
)


def simulation_table(
    simulation: Simulation, source: str, work_errors: Mapping[float, float]
) -> RenderableType:
    """Return a table of the figures of a simulation.

    Parameters
    ----------
    source : str
        Name of the ensemble and source of its rates.
    work_errors : mapping
        Relative errors of the predicted work, by the share of it that was done.
    """
    table = ruled_table(
        ">makespan",
        ">mean\ncompletion",
        ">lower\nbound",
        ">ratio",
        ">rounds",
        ">restarts",
        ">GPUs\nbusy",
        ">planning",
        gap=1,
    )
    table.add_row(
        format_seconds(simulation.makespan_s),
        format_seconds(simulation.mean_jct_s),
        format_seconds(simulation.lower_bound_s),
        f"{simulation.ratio:.3f}",
        f"{simulation.rounds:,}",
        f"{simulation.restarts:,}",
        format_percent(simulation.gpu_busy_fraction),
        f"{simulation.plan_seconds:.3g} s",
    )
    parts: list[RenderableType] = [_simulation_header(simulation, source), Text(), table]
    if simulation.reason:
        parts += [Text(), Text(f"chosen by auto: {simulation.reason}")]
    if work_errors:
        errors = ", ".join(
            f"{format_percent(e)} at {format_percent(done)}" for done, e in work_errors.items()
        )
        parts += [Text(), Text(f"median error of the predicted work: {errors}")]
    return Group(*parts)


def _simulation_header(simulation: Simulation, source: str) -> Text:
    devices = f"{simulation.gpus} {device_word('gpu', simulation.gpus)}, {simulation.gpus_per_node} to a node"
    members = f"{len(simulation.members)} member{'s' * (len(simulation.members) != 1)}"
    return Text.assemble(
        (printable(f"{simulation.planner} on {devices}: {members} of {source}\n"), "bold"),
        f"objective {simulation.objective} · work {simulation.work} · sharing {simulation.sharing}",
    )


@dataclass(frozen=True)
class HopperFigures:
    """Figures of a schedule of hops, or of its simulation; ``--json`` prints exactly these.

    Parameters
    ----------
    mode : str
        Mode of training: ``hopper``, ``hybrid`` or ``data-parallel``.
    configs, partitions, workers : int
        Numbers of each; groups of workers that train together count as one.
    makespan_s, lower_bound_s : float
        Times of all epochs, in seconds.
    ratio : float
        Makespan divided by the bound; 1 is optimal.
    gpu_busy_fraction : float
        Share of all workers' time until the makespan that was spent on completed units.
    lost_s : float
        Seconds of units whose results were lost by failures of workers, over all workers.
    plan_seconds : float
        Time that the scheduler took, in seconds.
    makespans_s : mapping of str to float
        Planned makespan of an epoch in seconds, by mode, of all modes considered.
    """

    scheduler: str
    mode: str
    configs: int
    partitions: int
    workers: int
    epochs: int
    seed: int
    makespan_s: float
    lower_bound_s: float
    ratio: float
    gpu_busy_fraction: float
    lost_s: float
    plan_seconds: float
    makespans_s: Mapping[str, float] = field(default_factory=dict)


def hopper_table(figures: HopperFigures) -> RenderableType:
    """Return a table of the figures."""
    table = ruled_table(
        ">makespan", ">lower\nbound", ">ratio", ">workers\nbusy", ">lost to\nfailures", ">planning", gap=1
    )
    table.add_row(
        format_seconds(figures.makespan_s),
        format_seconds(figures.lower_bound_s),
        f"{figures.ratio:.3f}",
        format_percent(figures.gpu_busy_fraction),
        format_seconds(figures.lost_s),
        f"{figures.plan_seconds:.3g} s",
    )
    parts: list[RenderableType] = [Text(printable(hops_headline(figures)), "bold"), Text(), table]
    if len(figures.makespans_s) > 1:
        modes = ", ".join(f"{mode} {format_seconds(time_s)}" for mode, time_s in figures.makespans_s.items())
        parts += [Text(), Text(f"an epoch by mode: {modes}")]
    return Group(*parts)


def hops_headline(figures: HopperFigures) -> str:
    """Return a description of the scheduled work and the scheduler."""
    counts = [(figures.configs, "configuration"), (figures.partitions, "partition")]
    counts += [(figures.workers, "worker"), (figures.epochs, "epoch")]
    words = [f"{count:,} {word}{'s' * (count != 1)}" for count, word in counts]
    what = f"{figures.scheduler}: {words[0]} on {words[1]} and {words[2]}, {words[3]}"
    return what if figures.mode == "hopper" else f"{what}, {figures.mode}"


class PhaseFields(TypedDict):
    """Fields of a phase to display, as in the JSON."""

    first: int
    last: int
    t_star_s: float
    best_batches: Sequence[int]
    equal_s: float
    steady_s: float
    ratio: float
    reached_at: int | None


class IterationFields(TypedDict):
    """Fields of an iteration to display, as in the JSON."""

    batches: Sequence[int]


class DifferenceFields(TypedDict):
    """Encoded `AnswerDifference`."""

    iteration: int
    logged: Sequence[int]
    repeated: Sequence[int]


class ReplayFields(TypedDict):
    """Encoded `BalanceReplay`."""

    manager: str
    workers: Sequence[str]
    iterations: int
    repeated: int
    difference: DifferenceFields | None
    first_batches: Sequence[int]
    last_batches: Sequence[int]
    iteration_s: float
    equal_batches_s: float
    gain: float


class BalanceFields(TypedDict):
    """Fields of a simulation to display, as in the JSON."""

    algorithm: str
    predictor: str | None
    batch: int
    workers: Sequence[str]
    total_s: float
    phases: Sequence[PhaseFields]
    iterations: Sequence[IterationFields]
    warnings: Sequence[str]


def balance_table(fields: BalanceFields) -> RenderableType:
    """Return a table of the phases, and of the batches at their ends beside the best ones."""
    parts: list[RenderableType] = [_balance_header(fields), Text(), _phase_table(fields["phases"])]
    parts += [Text(), Text("batches at the start, and at the end of each phase beside the best", "bold")]
    parts += [_batch_table(fields)]
    parts += [Text(printable(f"warning: {warning}"), "yellow") for warning in fields["warnings"]]
    return Group(*parts)


def replay_table(fields: ReplayFields) -> RenderableType:
    """Return a table of the first and last batches of a real run, and whether they are repeated."""
    title = f"{fields['manager']}: {fields['iterations']:,} iterations on {len(fields['workers'])} workers"
    times = (
        f"{fields['iteration_s']:.4g} s per iteration, {fields['equal_batches_s']:.4g} s with equal batches "
        f"as estimated: {fields['gain']:.2f} times as fast"
    )
    table = ruled_table("worker", ">first", ">last", gap=1, fold="worker")
    for worker, *batches in zip(
        fields["workers"], fields["first_batches"], fields["last_batches"], strict=True
    ):
        table.add_row(Text(printable(worker)), *(f"{batch:,}" for batch in batches))
    difference, repeated = fields["difference"], fields["repeated"]
    which = "all iterations" if repeated == fields["iterations"] else f"the {repeated:,} that can be repeated"
    verdict = (
        Text(f"the same batches in {which}", "green")
        if difference is None
        else Text(
            f"iteration {difference['iteration']}: the log has {difference['logged']}, "
            f"repeated {difference['repeated']}",
            "bold red",
        )
    )
    return Group(Text(title, "bold"), Text(times), Text(), table, Text(), verdict)


def _balance_header(fields: BalanceFields) -> Text:
    how = fields["algorithm"] + (f" with {fields['predictor']}" if fields["predictor"] else "")
    count = len(fields["iterations"])
    return Text.assemble(
        (f"{how}: {fields['batch']:,} samples on {len(fields['workers'])} workers", "bold"),
        f"\n{count:,} iterations in {format_seconds(fields['total_s'])}",
    )


def _phase_table(phases: Sequence[PhaseFields]) -> Table:
    table = ruled_table(
        ">iterations", ">equal\nbatches", ">steady", ">t*", ">ratio", ">within 5 %\nafter", gap=1
    )
    for phase in phases:
        reached = phase["reached_at"]
        table.add_row(
            f"{phase['first']} to {phase['last']}",
            f"{phase['equal_s']:.4g} s",
            f"{phase['steady_s']:.4g} s",
            f"{phase['t_star_s']:.4g} s",
            f"{phase['ratio']:.3f}",
            NONE if reached is None else str(reached - phase["first"]),
        )
    return table


def _batch_table(fields: BalanceFields) -> Table:
    phases, iterations = fields["phases"], fields["iterations"]
    headers = [header for phase in phases for header in (f">{phase['last']}", ">best")]
    table = ruled_table("worker", ">0", *headers, gap=1, fold="worker")
    columns = [iterations[0]["batches"]]
    for phase in phases:
        columns += [iterations[phase["last"]]["batches"], phase["best_batches"]]
    for name, *batches in zip(fields["workers"], *columns, strict=True):
        table.add_row(Text(printable(name)), *(f"{batch:,}" for batch in batches))
    return table


PASSES = ("forward", "backward", "receive")


@dataclass(frozen=True)
class StageRow:
    """Row of the table for a stage of a virtual worker.

    Parameters
    ----------
    layers : str
        Names of the first and the last layer.
    memory_bytes : int
        Memory of its GPU in bytes.
    busy : float or None
        Share of the time in which it was busy; None without simulation.
    """

    worker: int
    gpu: str
    layers: str
    forward_s: float
    backward_s: float
    receive_s: float
    bytes: int
    memory_bytes: int
    gpu_busy_fraction: float | None


def pipeline_table(
    title: str, figures: Sequence[tuple[str, str]], rows: Sequence[StageRow]
) -> RenderableType:
    """Return a table of a plan or of its simulation.

    Parameters
    ----------
    figures : sequence of (str, str)
        Names and values of the figures of all virtual workers.
    """
    simulated = any(row.gpu_busy_fraction is not None for row in rows)
    headers = [
        ">virtual\nworker",
        "node:GPU",
        "layers",
        *(f">{name}\nms" for name in PASSES),
        ">memory",
        ">of",
    ]
    table = ruled_table(*headers, *([">busy"] if simulated else []), gap=1, fold="layers")
    before = None
    for row in rows:
        cells = [format_ms(row.forward_s), format_ms(row.backward_s), format_ms(row.receive_s)]
        cells += [format_bytes(row.bytes), format_bytes(row.memory_bytes)]
        cells += [format_percent(row.gpu_busy_fraction)] if simulated else []
        number = str(row.worker) if row.worker != before else ""
        table.add_row(number, Text(printable(row.gpu)), Text(printable(row.layers)), *cells)
        before = row.worker
    lines = Text("\n".join(f"{name}: {value}" for name, value in figures))
    return Group(Text(printable(title), "bold"), lines, Text(), table)
