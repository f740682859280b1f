"""``hetctl hopper`` and its sub-commands."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hetctl.cli.options import command_line_options, json_option, this_project
from hetctl.cli.output import print_json, print_table, write_text
from hetctl.cli.parameter_types import FiniteRange, OutputFile, Seconds
from hetctl.inputs.visit_log import MOST_EPOCHS

if TYPE_CHECKING:
    from hetctl.app.hopper import HopperOutcome, HopperRequest
    from hetctl.reports.simulation_tables import HopperFigures

F = TypeVar("F", bound=Callable[..., Any])

PLANNING = {"scheduler", "solver_time_limit_s", "mode", "efficiency"}
OUTAGE = re.compile(r"(.+)@([^@-]+)(?:-([^@-]+))?")


class OutageType(click.ParamType):  # type: ignore[type-arg]
    """Option ``WORKER@START-END``, or ``WORKER@START`` without return: a worker's absence."""

    name = "outage"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, float, float]:
        """Parse both times as any other time."""
        match = OUTAGE.fullmatch(value)
        if match is None:
            self.fail(f"{value} is not of the form WORKER@START-END, such as w3@600-1200", param, ctx)
        start_s = Seconds(least=0).convert(match[2], param, ctx)
        end_s = Seconds().convert(match[3], param, ctx) if match[3] else math.inf
        if end_s <= start_s:
            self.fail(f"{value}: END must be after START", param, ctx)
        return match[1], start_s, end_s


@click.group("hopper")
def command() -> None:
    """Plan or simulate configurations that hop over partitioned data.

    \b
    Example: hetctl hopper plan --unit-times times.csv
    """


def _shared_options(command: F) -> F:
    """Add the options of both sub-commands."""
    options = [
        click.option(
            "--unit-times",
            type=click.Path(path_type=Path),
            metavar="FILE",
            required=True,
            help="Read the seconds of each configuration on each partition from this file.",
        ),
        click.option(
            "--scheduler",
            metavar="NAME",
            default="best",
            show_default=True,
            help="Schedule with randomized, milp, approximate, or best.",
        ),
        click.option(
            "--solver-time-limit",
            "solver_time_limit_s",
            metavar="SECONDS",
            type=Seconds(),
            default=0.8,
            show_default=True,
            help="Stop a scheduler that searches after this time.",
        ),
        click.option(
            "--seed", metavar="N", type=int, default=0, show_default=True, help="Seed random choices."
        ),
        click.option(
            "--parallelism",
            "mode",
            type=click.Choice(["hopper", "hybrid", "data-parallel", "auto"]),
            default="hopper",
            show_default=True,
            help="Train a configuration on one worker at a time, on some together, or on all; auto: on the"
            " cheapest that the rule for few configurations permits.",
        ),
        click.option(
            "--efficiency",
            metavar="SHARE",
            type=FiniteRange(0, 1, min_open=True),
            default=1.0,
            show_default=True,
            help="Assume that workers that train together reach this share of the ideal rate.",
        ),
        click.option("--trace", type=OutputFile(), help="Write a line of JSON for each hop."),
        click.option("--report", type=OutputFile(), help="Write a page with a Gantt chart."),
        json_option,
    ]
    for option in reversed(options):
        command = option(command)
    return command


@command.command("plan")
@_shared_options
def plan(trace: Path | None, report: Path | None, as_json: bool, **options: Any) -> None:
    """Schedule one epoch: every configuration visits every partition once.

    \b
    Example: hetctl hopper plan --unit-times times.csv --scheduler best --trace hops.jsonl
    """
    from hetctl.app.hopper import plan_hops

    _show(plan_hops(_request(**options)), trace, report, as_json=as_json)


@command.command("simulate")
@_shared_options
@click.option(
    "--epochs",
    metavar="N",
    type=click.IntRange(1, MOST_EPOCHS),
    help="Train every configuration for N epochs.  [default: 1, or those of --replay]",
)
@click.option(
    "--outage",
    "outages",
    type=OutageType(),
    metavar="WORKER@START-END",
    multiple=True,
    help="Take a worker away from START to END, such as w3@600-1200; w3@0-600 joins late, w3@600"
    " never returns. May be given several times.",
)
@click.option(
    "--replay",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Repeat the completed visits of a file that --trace wrote, instead of a schedule.",
)
@click.pass_context
def simulate(
    context: click.Context,
    /,
    epochs: int | None,
    outages: Sequence[tuple[str, float, float]],
    replay: Path | None,
    trace: Path | None,
    report: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Simulate hops along a plan; with `randomized` each hop is drawn when it is due.

    \b
    Example: hetctl hopper simulate --unit-times times.csv --epochs 5 --outage w3@10m-30m --report hops.html
    """
    from hetctl.app.hopper import replay_hops, run_hops

    if replay:
        _refuse_planning(context)
        outcome = replay_hops(
            options["unit_times"], replay, epochs=epochs, seed=options["seed"], outages=outages
        )
    else:
        outcome = run_hops(_request(**options), epochs or 1, outages)
    _show(outcome, trace, report, as_json=as_json)


@command.command("trace")
@click.argument("run", required=False)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=OutputFile(),
    default="hops.jsonl",
    show_default=True,
    help="Write this file.",
)
@json_option
def trace(run: str | None, output: Path, as_json: bool) -> None:
    """Write the visits of RUN (default: the newest) as a trace, which --replay repeats.

    \b
    Example: hetctl hopper trace digits-001 -o hops.jsonl
    """
    from hetctl.app.run.hop_trace import trace_of_run

    found = trace_of_run(this_project(), run)
    write_text(output, found.text)
    if as_json:
        print_json({"run": found.run, "path": str(output.resolve()), "visits": found.visits})
    else:
        click.echo(f"wrote {output}: {found.visits:,} visits of run {found.run}")


def _refuse_planning(context: click.Context) -> None:
    """Raise UsageError on options of planning: a replay plans nothing, and its workers form no groups."""
    given = PLANNING.intersection(command_line_options(context))
    if context.params["mode"] == "hopper":
        given -= {"mode"}
    for option in context.command.params:
        if option.name in given:
            raise click.UsageError(
                f"{option.opts[0]} does not go with --replay, which plans nothing", context
            )


def _request(**options: Any) -> HopperRequest:
    from hetctl.app.hopper import HopperRequest

    return HopperRequest(**options)


def _show(outcome: HopperOutcome, trace: Path | None, report: Path | None, *, as_json: bool) -> None:
    from hetctl.app.hopper import trace_of
    from hetctl.reports.simulation_tables import hopper_table

    figures, units = _figures(outcome), outcome.units
    if trace:
        write_text(trace, trace_of(outcome))
    if report:
        from hetctl.reports.simulation_page import render_hopper

        write_text(report, render_hopper(figures, units.configs, units.workers, outcome.tasks))
    if as_json:
        print_json(figures)
        return
    print_table(hopper_table(figures))
    for path in filter(None, (trace, report)):
        click.echo(f"wrote {path}")


def _figures(outcome: HopperOutcome) -> HopperFigures:
    from hetctl.reports.simulation_tables import HopperFigures

    units = outcome.units
    return HopperFigures(
        scheduler=outcome.scheduler,
        mode=outcome.mode,
        configs=len(units.configs),
        partitions=len(units.partitions),
        workers=len(units.workers),
        epochs=outcome.epochs,
        seed=outcome.seed,
        makespan_s=outcome.makespan_s,
        lower_bound_s=outcome.lower_bound_s,
        ratio=outcome.ratio,
        gpu_busy_fraction=outcome.gpu_busy_fraction,
        lost_s=outcome.lost_s,
        plan_seconds=outcome.plan_seconds,
        makespans_s=outcome.makespans_s,
    )
