"""``hetctl pipeline`` and its sub-commands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hetctl.cli.options import Seconds, json_option
from hetctl.cli.output import print_json, print_table

if TYPE_CHECKING:
    from hetctl.app.pipeline.plan_pipelines import PlanOutcome, SimulationOutcome
    from hetctl.report.simulation_tables import StageRow

F = TypeVar("F", bound=Callable[..., Any])

MOST_IN_FLIGHT, MOST_CLOCKS, MOST_MINIBATCHES = 1000, 100, 100_000


@click.group("pipeline")
def command() -> None:
    """Split a network over the GPUs of virtual workers that train it as pipelines.

    Example: hetctl pipeline plan --layers vgg19.csv --cluster cluster.yaml
    """


def plan_options(function: F) -> F:
    """Add the options for the input and the method of planning."""
    options = [
        click.option(
            "--layers",
            type=click.Path(path_type=Path),
            required=True,
            help="Layer profile: CSV, or PipeDream's graph text.",
        ),
        click.option(
            "--cluster",
            type=click.Path(path_type=Path),
            required=True,
            help="Cluster file: GPU types, nodes and links.",
        ),
        click.option(
            "--policy",
            type=click.Choice(["np", "ed", "hd", "best"]),
            default="best",
            show_default=True,
            help="How GPUs are grouped into virtual workers.",
        ),
        click.option(
            "--in-flight",
            type=click.IntRange(1, MOST_IN_FLIGHT),
            help="Minibatches in each virtual worker at a time.  [default: as many as are best]",
        ),
        click.option(
            "--clock-distance",
            type=click.IntRange(0, MOST_CLOCKS),
            default=0,
            show_default=True,
            help="Waves by which a virtual worker may be ahead of the slowest.",
        ),
        click.option(
            "--ps-placement",
            "placement",
            type=click.Choice(["local", "round-robin"]),
            default="local",
            show_default=True,
            help="Which node's parameter server has a layer: where it is trained, or one after the other.",
        ),
        click.option(
            "--plan-seconds",
            type=Seconds(),
            default=2.0,
            show_default=True,
            help="How long the search for the best groups may take.",
        ),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@command.command("plan")
@plan_options
@json_option
def plan(as_json: bool, **wishes: Any) -> None:
    """Compute the virtual workers, and the layers of each GPU.

    Example: hetctl pipeline plan --layers vgg19.csv --cluster cluster.yaml --policy ed
    """
    from hetctl.app.pipeline.plan_pipelines import PipelineRequest, plan_pipeline

    outcome = plan_pipeline(PipelineRequest(**wishes))
    if as_json:
        print_json(outcome)
        return
    figures = [("minibatches in flight", f"{outcome.in_flight}"), _slowest(outcome)]
    figures.append(("throughput", f"{outcome.throughput:.4g} minibatches/s"))
    _print(outcome, figures)


@command.command("simulate")
@plan_options
@click.option(
    "--minibatches",
    type=click.IntRange(1, MOST_MINIBATCHES),
    help="Of each virtual worker, at least.  [default: enough for a steady state]",
)
@json_option
def simulate(as_json: bool, minibatches: int | None, **wishes: Any) -> None:
    """Plan, and simulate the plan: passes on every GPU, waves between virtual workers.

    Example: hetctl pipeline simulate --layers vgg19.csv --cluster cluster.yaml --clock-distance 4
    """
    from hetctl.app.pipeline.plan_pipelines import PipelineRequest, simulate_pipeline

    outcome = simulate_pipeline(PipelineRequest(**wishes), minibatches)
    if as_json:
        print_json(outcome)
        return
    staleness = f"{outcome.local_staleness} local, {outcome.global_staleness} global"
    share = f"{outcome.efficiency:.1%} of what its slowest stage allows"
    figures = [
        ("minibatches in flight", f"{outcome.in_flight} (missing updates: at most {staleness})"),
        _slowest(outcome),
        ("throughput", f"{outcome.throughput:.4g} minibatches/s, {share}"),
    ]
    _print(outcome, figures)


def _slowest(outcome: PlanOutcome | SimulationOutcome) -> tuple[str, str]:
    slowest = f"{outcome.bottleneck_s * 1000:.4g} ms, {outcome.ratio:.4g} of the lower bound"
    return "slowest stage", slowest


def _print(outcome: PlanOutcome | SimulationOutcome, figures: list[tuple[str, str]]) -> None:
    from hetctl.report.simulation_tables import pipeline_table

    count = len(outcome.virtual_workers)
    title = f"{outcome.policy}: {count} virtual worker{'s' * (count != 1)}"
    print_table(pipeline_table(title, figures, _rows(outcome)))


def _rows(outcome: PlanOutcome | SimulationOutcome) -> list[StageRow]:
    from hetctl.report.simulation_tables import StageRow

    return [
        StageRow(
            worker=number,
            gpu=f"{stage.node}:{stage.gpu} {stage.gpu_type}",
            layers=f"{stage.first}-{stage.last}: {stage.first_layer} .. {stage.last_layer}",
            forward_s=stage.forward_s,
            backward_s=stage.backward_s,
            receive_s=stage.receive_s,
            bytes=stage.bytes,
            memory_bytes=stage.memory_bytes,
            busy=stage.busy_fraction,
        )
        for number, worker in enumerate(outcome.virtual_workers)
        for stage in worker.stages
    ]
