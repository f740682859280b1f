"""``hetctl simulate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetctl.cli.options import (
    command_line_options,
    ensemble_option,
    json_option,
    planner_options,
    this_project,
)
from hetctl.cli.output import print_json, print_table, write_text
from hetctl.cli.parameter_types import Duration, GpusByType, OutputFile, Seconds

if TYPE_CHECKING:
    from hetctl.app.project import Project
    from hetctl.app.simulate import SimulateRequest, SimulationResult

MOST_GPUS = MOST_MEMBERS = 1_000_000
LEAST_MTBF_S = 600
"""Least mean time between failures in seconds: with less than a checkpoint interval no work is kept."""


@click.command("simulate")
@click.argument("name", required=False)
@ensemble_option
@click.option("--search", "search_file", metavar="FILE", help="Simulate the search of this ensemble file.")
@click.option(
    "--rates-of", "site", metavar="SITE", help="Use the rates of this site, if they were measured at several."
)
@click.option(
    "--gpus",
    type=GpusByType(),
    required=True,
    help="Simulate a cluster with so many GPUs, such as 80 or v100:40,p100:40.",
)
@click.option(
    "--gpus-per-node",
    metavar="N",
    type=click.IntRange(1, MOST_GPUS),
    help="Give each node N GPUs.  [default: the site's, or 4]",
)
@planner_options
@click.option(
    "--restart-seconds",
    "restart_s",
    type=Seconds(least=0),
    help="Charge each restart this time, instead of the measured start-up, evaluation and checkpoints.",
)
@click.option(
    "--time",
    "--round-limit",
    "wall_s",
    type=Duration(),
    help="Limit each job to this wall-clock time, such as 2h.",
)
@click.option(
    "--sample-members",
    "sample_members",
    metavar="N",
    type=click.IntRange(1, MOST_MEMBERS),
    help="Simulate N members, drawn at random.",
)
@click.option(
    "--arrival-mean",
    "arrival_mean_s",
    type=Seconds(),
    help="Let members arrive at this mean interval, such as 500 or 10m.",
)
@click.option(
    "--sharing",
    type=click.Choice(["none", "cached", "lockstep", "independent"]),
    default="independent",
    show_default=True,
    help="Share prepared samples; with lockstep a flotilla trains at the rate of its slowest member.",
)
@click.option(
    "--node-mtbf",
    "node_mtbf_s",
    type=Seconds(least=LEAST_MTBF_S),
    help="Let each node fail after this mean time, such as 30d.",
)
@click.option(
    "--work",
    type=click.Choice(["clairvoyant", "predicted"]),
    default="clairvoyant",
    show_default=True,
    help="Tell planners the work left exactly, or as predicted from the loss so far.",
)
@click.option("--report", type=OutputFile(), help="Write a page with a Gantt chart.")
@click.option("--trace", type=OutputFile(), help="Write a line of JSON for each interval of each member.")
@json_option
@click.pass_context
def command(
    context: click.Context, /, report: Path | None, trace: Path | None, as_json: bool, **options: Any
) -> None:
    """Simulate a planner on ensemble NAME of the catalog.

    \b
    Example: hetctl simulate zoo --gpus 80 --gpus-per-node 4 --planner auto --restart-seconds 10

    NAME may be left out: then it is the project's ensemble. Seconds are plain numbers, or 90s, 10m, 2h, 30d.
    """
    given = {"name", "ensemble", "search_file"}.intersection(command_line_options(context))
    if len(given) > 1:
        raise click.UsageError(
            "an ensemble is given twice: give one of NAME, --ensemble and --search", context
        )
    if report and trace and report.absolute() == trace.absolute():
        raise click.UsageError("--report and --trace name the same file", context)
    from hetctl.app.simulate import run_simulation

    project = this_project()
    request = _request(project, **options)
    outcome = run_simulation(project, request)
    _write(report, trace, request.ensemble.name, outcome)
    if as_json:
        print_json(_fields(request, outcome))
    else:
        _print(request, outcome, [path for path in (report, trace) if path])


def _request(
    project: Project,
    name: str | None,
    ensemble: str | None,
    search_file: str | None,
    sharing: str,
    work: str,
    **options: Any,
) -> SimulateRequest:
    from hetctl.app.simulate import SimulateRequest, searched

    names = set(SimulateRequest.__dataclass_fields__)
    found = project.ensemble(search_file or name or ensemble)
    return SimulateRequest(
        ensemble=searched(found) if search_file else found,
        lockstep=sharing == "lockstep",
        predicted=work == "predicted",
        options={key: value for key, value in options.items() if key not in names and value is not None},
        **{key: value for key, value in options.items() if key in names},
    )


def _write(report: Path | None, trace: Path | None, ensemble: str, outcome: SimulationResult) -> None:
    if trace:
        from hetctl.app.simulate import trace_of

        write_text(trace, trace_of(outcome.simulation))
    if report:
        from hetctl.reports.simulation_page import render_simulation

        write_text(report, render_simulation(ensemble, outcome.simulation, outcome.arrivals))


def _fields(request: SimulateRequest, outcome: SimulationResult) -> dict[str, Any]:
    from dataclasses import replace

    from hetctl.model.serialization import encode

    fields: dict[str, Any] = encode(replace(outcome.simulation, intervals=()))
    del fields["intervals"]
    of_scenario = ("restart_s", "wall_s", "sample_members", "arrival_mean_s", "node_mtbf_s")
    return {
        "ensemble": request.ensemble.name,
        "site": outcome.site,
        **fields,
        **{name: getattr(request, name) for name in of_scenario},
        "work_errors": encode(outcome.work_errors),
        "search": encode(outcome.search),
    }


def _print(request: SimulateRequest, outcome: SimulationResult, written: list[Path]) -> None:
    from hetctl.reports.simulation_tables import simulation_table

    source = f"{request.ensemble.name}, rates of {outcome.site}"
    print_table(simulation_table(outcome.simulation, source, outcome.work_errors))
    if outcome.search:
        from hetctl.app.simulated_search import describe_search

        click.echo(describe_search(outcome.search, outcome.simulation))
    for path in written:
        click.echo(f"wrote {path}")
