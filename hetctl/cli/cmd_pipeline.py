"""``hetctl pipeline`` and its sub-commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hetctl.cli.options import json_option, this_project
from hetctl.cli.output import exit_on_failure, print_json, print_table
from hetctl.cli.parameter_types import Seconds
from hetctl.model.errors import HetctlError

if TYPE_CHECKING:
    from hetctl.app.pipeline.plan_pipelines import PlanOutcome, SimulationOutcome
    from hetctl.reports.simulation_tables import StageRow

F = TypeVar("F", bound=Callable[..., Any])

MOST_IN_FLIGHT, MOST_CLOCKS, MOST_MINIBATCHES = 1000, 100, 100_000


@click.group("pipeline")
def command() -> None:
    """Plan, simulate or check networks that are split over the GPUs of virtual workers as pipelines.

    \b
    Example: hetctl pipeline plan --layer-table vgg19.csv --cluster cluster.yaml
    """


def plan_options(function: F) -> F:
    """Add the options for the input and the method of planning."""
    options = [
        click.option(
            "--layer-table",
            metavar="FILE",
            type=click.Path(path_type=Path),
            required=True,
            help="Read the layer profile: CSV, or PipeDream's graph text.",
        ),
        click.option(
            "--cluster",
            metavar="FILE",
            type=click.Path(path_type=Path),
            required=True,
            help="Read GPU types, nodes and links from this file.",
        ),
        click.option(
            "--policy",
            type=click.Choice(["np", "ed", "hd", "best"]),
            default="best",
            show_default=True,
            help="Form virtual workers of one node (np), equal parts of all (ed), two types (hd), or best.",
        ),
        click.option(
            "--in-flight",
            metavar="N",
            type=click.IntRange(1, MOST_IN_FLIGHT),
            help="Keep N minibatches in each virtual worker at a time.  [default: the best number]",
        ),
        click.option(
            "--clock-distance",
            metavar="N",
            type=click.IntRange(0, MOST_CLOCKS),
            default=0,
            show_default=True,
            help="Let a virtual worker be N waves ahead of the slowest.",
        ),
        click.option(
            "--ps-placement",
            "ps_placement",
            type=click.Choice(["local", "round-robin"]),
            default="local",
            show_default=True,
            help="Serve the parameters of a layer where it is trained, or on the nodes in turn.",
        ),
        click.option(
            "--solver-time-limit",
            "solver_time_limit_s",
            metavar="SECONDS",
            type=Seconds(),
            default=2.0,
            show_default=True,
            help="Stop the search for the best groups after this time.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@command.command("plan")
@plan_options
@json_option
def plan(as_json: bool, **options: Any) -> None:
    """Compute the virtual workers, and the layers of each GPU.

    \b
    Example: hetctl pipeline plan --layer-table vgg19.csv --cluster cluster.yaml --policy ed
    """
    from hetctl.app.pipeline.plan_pipelines import PipelineRequest, plan_pipeline
    from hetctl.reports.units import format_bytes

    outcome = plan_pipeline(PipelineRequest(**options))
    if as_json:
        print_json(outcome)
        return
    figures = [("minibatches in flight", f"{outcome.in_flight}"), _slowest(outcome)]
    figures.append(("throughput", f"{outcome.throughput:.4g} minibatches/s"))
    if most := max(outcome.node_bytes):
        figures.append(("beside GPUs", f"up to {format_bytes(most)} of a node's memory"))
    _print(outcome, figures)


@command.command("simulate")
@plan_options
@click.option(
    "--minibatches",
    metavar="N",
    type=click.IntRange(1, MOST_MINIBATCHES),
    help="Simulate N minibatches of each virtual worker at least.  [default: enough for a steady state]",
)
@json_option
def simulate(as_json: bool, minibatches: int | None, **options: Any) -> None:
    """Plan, and simulate the plan: passes on every GPU, waves between virtual workers.

    \b
    Example: hetctl pipeline simulate --layer-table vgg19.csv --cluster cluster.yaml --clock-distance 4
    """
    from hetctl.app.pipeline.plan_pipelines import PipelineRequest, simulate_pipeline

    outcome = simulate_pipeline(PipelineRequest(**options), minibatches)
    if as_json:
        print_json(outcome)
        return
    staleness = f"{outcome.local_staleness} local, {outcome.global_staleness} global"
    share = f"{outcome.efficiency:.1%} of what its slowest stage allows"
    figures = [
        ("minibatches in flight", f"{outcome.in_flight} (missing updates: at most {staleness})"),
        _slowest(outcome),
        ("throughput", f"{outcome.throughput:.4g} minibatches/s, {share}"),
        (
            "waiting for weights",
            f"{outcome.waiting_fraction:.1%} of the time, idle {outcome.idle_fraction:.1%}",
        ),
    ]
    _print(outcome, figures)


@command.command("check")
@click.argument("run", required=False)
@json_option
def check(run: str | None, as_json: bool) -> None:
    """Compare the staleness of the weights that minibatches of RUN (default: the newest) met with its bounds.

    \b
    Example: hetctl pipeline check vgg-001
    """
    from hetctl.app.run.wave_checks import check_run
    from hetctl.reports.pipeline_tables import wave_check_table

    checked = check_run(this_project(), run)
    count = sum(len(one.violations) for one in checked.checks)
    failure = HetctlError(
        f"{count:,} passes of run {checked.run} met older weights than the bounds allow",
        "keep its folder `waves`, and report the defect",
    )
    if as_json:
        print_json(checked, failure if count else None)
    else:
        print_table(wave_check_table(checked.checks))
    exit_on_failure(failure if count else None, as_json=as_json)


def _slowest(outcome: PlanOutcome | SimulationOutcome) -> tuple[str, str]:
    slowest = f"{outcome.bottleneck_s * 1000:.4g} ms, {outcome.ratio:.4g} of the lower bound"
    return "slowest stage", slowest


def _print(outcome: PlanOutcome | SimulationOutcome, figures: list[tuple[str, str]]) -> None:
    from hetctl.reports.simulation_tables import pipeline_table

    count = len(outcome.virtual_workers)
    title = f"{outcome.policy}: {count} virtual worker{'s' * (count != 1)}"
    print_table(pipeline_table(title, figures, _rows(outcome)))


def _rows(outcome: PlanOutcome | SimulationOutcome) -> list[StageRow]:
    from hetctl.reports.simulation_tables import StageRow

    return [
        StageRow(
            worker=number,
            gpu=f"{stage.node}:{stage.gpu} {stage.gpu_type}",
            layers=f"{stage.first}-{stage.last}: {stage.first_layer} .. {stage.last_layer}"
            + (", recomputed" if stage.recomputes else ""),
            forward_s=stage.forward_s,
            backward_s=stage.backward_s,
            receive_s=stage.receive_s,
            bytes=stage.bytes,
            memory_bytes=stage.memory_bytes,
            gpu_busy_fraction=stage.gpu_busy_fraction,
        )
        for number, worker in enumerate(outcome.virtual_workers)
        for stage in worker.stages
    ]
