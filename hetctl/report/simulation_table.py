"""Terminal output of a simulation: times, distance from the bound, and cost."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from hetctl.model.simulation import Simulation
from hetctl.report.table_style import ruled_table
from hetctl.report.units import device_word, format_percent, format_seconds, printable


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
    parts: list[RenderableType] = [_header(simulation, source), Text(), table]
    if simulation.why:
        parts += [Text(), Text(f"chosen by auto: {simulation.why}")]
    if work_errors:
        errors = ", ".join(
            f"{format_percent(e)} at {format_percent(done)}" for done, e in work_errors.items()
        )
        parts += [Text(), Text(f"median error of the predicted work: {errors}")]
    return Group(*parts)


def _header(simulation: Simulation, source: str) -> Text:
    devices = f"{simulation.gpus} {device_word('gpu', simulation.gpus)}, {simulation.gpus_per_node} to a node"
    members = f"{len(simulation.members)} member{'s' * (len(simulation.members) != 1)}"
    return Text.assemble(
        (printable(f"{simulation.planner} on {devices}: {members} of {source}\n"), "bold"),
        f"objective {simulation.objective} · work {simulation.work} · sharing {simulation.sharing}",
    )
