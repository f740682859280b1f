"""``hetctl simulate``: an ensemble, or a table of unit times, layers or workers."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetctl.cli.options import (
    ensemble_option,
    given_options,
    planner_options,
    refuse_given,
    this_project,
)
from hetctl.cli.output import json_option, show, write_text
from hetctl.cli.parameter_types import FiniteRange, OutputFile, duration, gpus_by_type, seconds
from hetctl.inputs.visit_times import MOST_EPOCHS
from hetctl.model.interpreter import load_entry
from hetctl.model.plan import PIPELINE_POLICIES, PS_PLACEMENTS
from hetctl.model.training_settings import MANAGERS, PREDICTORS

if TYPE_CHECKING:
    from hetctl.model.simulation import Simulated

TABLES = {
    ("unit_times", "replay"): "hetctl.app.hopper:repeated_hops",
    ("unit_times",): "hetctl.app.hopper:simulated_hops",
    ("layer_table",): "hetctl.app.pipeline:simulated_pipelines",
    ("workers",): "hetctl.app.balance:simulated_batches",
    ("replay",): "hetctl.app.balance:repeated_decisions",
}
"""Functions by the options that select them; the first whose options are all given counts.

The parameters of a function are the options that go with it. Without any match an ensemble is simulated.
"""
MOST_GPUS = MOST_MEMBERS = 1_000_000
LEAST_MTBF_S = 600
"""Least mean time between failures in seconds: below a checkpoint interval no work is kept."""
MOST_SAMPLES, MOST_ITERATIONS = 1_000_000_000, 100_000
MOST_IN_FLIGHT, MOST_CLOCKS, MOST_MINIBATCHES = 1000, 100, 100_000
OUTAGE = re.compile(r"(.+)@([^@-]+)(?:-([^@-]+))?")


def outage(value: str) -> tuple[str, float, float]:
    """Parse ``WORKER@START-END``, or ``WORKER@START`` without return: a worker's absence."""
    match = OUTAGE.fullmatch(value)
    if match is None:
        raise click.BadParameter(f"{value} is not of the form WORKER@START-END, such as w3@600-1200")
    start_s, end_s = seconds(least=0)(match[2]), seconds()(match[3]) if match[3] else math.inf
    if end_s <= start_s:
        raise click.BadParameter(f"{value}: END must be after START")
    return match[1], start_s, end_s


def change(value: str) -> tuple[int, Path]:
    """Parse ``150:slower.csv``: from iteration 150 on, workers have the times in that file."""
    number, colon, path = value.partition(":")
    if not (colon and path and number.isascii() and number.isdecimal() and len(number) < 10):
        raise click.BadParameter(f"{value} is not ITERATION:FILE, as in 150:slower.csv")
    return int(number), Path(path)


FILE = click.Path(path_type=Path)
OF_TABLES = [
    click.Option(
        ["--unit-times"],
        type=FILE,
        metavar="FILE",
        help="Simulate hops: read the seconds of each configuration on each partition from this file.",
    ),
    click.Option(
        ["--scheduler"],
        metavar="NAME",
        help="Schedule hops with randomized, milp, approximate, or best.  [default: best]",
    ),
    click.Option(
        ["--parallelism"],
        type=click.Choice(["hopper", "hybrid", "data-parallel", "auto"]),
        help="Train a configuration on one worker at a time, on some together, or on all; auto: on the"
        " cheapest that the rule for few configurations permits.  [default: hopper]",
    ),
    click.Option(
        ["--efficiency"],
        metavar="SHARE",
        type=FiniteRange(0, 1, min_open=True),
        help="Assume that workers that train together reach this share of the ideal rate.  [default: 1]",
    ),
    click.Option(
        ["--epochs"],
        metavar="N",
        type=click.IntRange(1, MOST_EPOCHS),
        help="Train every configuration for N epochs.  [default: 1, or those of --replay]",
    ),
    click.Option(
        ["--outage", "outages"],
        type=outage,
        metavar="WORKER@START-END",
        multiple=True,
        help="Take a worker away from START to END, such as w3@600-1200; w3@0-600 joins late, w3@600"
        " never returns. May be given several times.",
    ),
    click.Option(
        ["--layer-table"],
        type=FILE,
        metavar="FILE",
        help="Simulate pipelines: read the layer profile, CSV or PipeDream's graph text.",
    ),
    click.Option(
        ["--cluster"],
        type=FILE,
        metavar="FILE",
        help="Read GPU types, nodes and links from this file.",
    ),
    click.Option(
        ["--policy"],
        type=click.Choice(PIPELINE_POLICIES),
        help="Form virtual workers of one node (np), equal parts of all (ed), two types (hd), or best."
        "  [default: best]",
    ),
    click.Option(
        ["--in-flight"],
        metavar="N",
        type=click.IntRange(1, MOST_IN_FLIGHT),
        help="Keep N minibatches in each virtual worker at a time.  [default: the best number]",
    ),
    click.Option(
        ["--clock-distance"],
        metavar="N",
        type=click.IntRange(0, MOST_CLOCKS),
        help="Let a virtual worker be N waves ahead of the slowest.  [default: 0]",
    ),
    click.Option(
        ["--ps-placement"],
        type=click.Choice(PS_PLACEMENTS),
        help="Serve the parameters of a layer where it is trained, or on the nodes in turn."
        "  [default: local]",
    ),
    click.Option(
        ["--minibatches"],
        metavar="N",
        type=click.IntRange(1, MOST_MINIBATCHES),
        help="Simulate N minibatches of each virtual worker at least.  [default: enough for a steady state]",
    ),
    click.Option(
        ["--workers"],
        type=FILE,
        metavar="FILE",
        help="Simulate balanced batches: read step times from a CSV file with the columns"
        " worker,batch,seconds[,max_batch].",
    ),
    click.Option(
        ["--batch"],
        metavar="N",
        type=click.IntRange(1, MOST_SAMPLES),
        help="Train on N samples in each iteration, on all workers together.",
    ),
    click.Option(
        ["--iterations"],
        metavar="N",
        type=click.IntRange(1, MOST_ITERATIONS),
        help="Simulate N iterations.  [default: 100]",
    ),
    click.Option(
        ["--algorithm"],
        type=click.Choice(MANAGERS),
        help="Set the batches with this algorithm.  [default: curve]",
    ),
    click.Option(
        ["--predictor"],
        type=click.Choice(PREDICTORS),
        help="Predict speeds with this predictor, for --algorithm cpu.  [default: narx]",
    ),
    click.Option(
        ["--change", "changes"],
        type=change,
        metavar="ITERATION:FILE",
        multiple=True,
        help="Use the step times in FILE from an iteration on. May be given several times.",
    ),
    click.Option(
        ["--jitter"],
        metavar="SHARE",
        type=FiniteRange(0, 1),
        help="Vary each worker's step time with this standard deviation, as a share of it.  [default: 0]",
    ),
    click.Option(
        ["--replay"],
        type=FILE,
        metavar="FILE",
        help="Repeat the visits of a file that --trace wrote, with --unit-times; without it the decisions"
        " that a real run's log of balanced batches has.",
    ),
]
"""Options that an ensemble does not have."""


@click.command("simulate")
@click.argument("name", required=False)
@ensemble_option
@click.option("--search", "search_file", metavar="FILE", help="Simulate the search of this ensemble file.")
@click.option(
    "--rates-of", "site", metavar="SITE", help="Use the rates of this site, if they were measured at several."
)
@click.option(
    "--gpus",
    type=gpus_by_type,
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
    type=seconds(least=0),
    help="Charge each restart this time, instead of the measured start-up, evaluation and checkpoints.",
)
@click.option(
    "--time",
    "--round-limit",
    "wall_s",
    type=duration,
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
    type=seconds(),
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
    type=seconds(least=LEAST_MTBF_S),
    help="Let each node fail after this mean time, such as 30d.",
)
@click.option(
    "--work",
    type=click.Choice(["clairvoyant", "predicted"]),
    default="clairvoyant",
    show_default=True,
    help="Tell planners the work left exactly, or as predicted from the loss so far.",
)
@click.option(
    "--learn-rates",
    "learn_rates_s",
    type=seconds(least=0),
    help="Tell planners a rate only once a member has trained for this time on that number of GPUs.",
)
@click.option("--report", type=OutputFile(), help="Write a page, with a Gantt chart of members or hops.")
@click.option(
    "--trace", type=OutputFile(), help="Write a line of JSON for each interval of a member, or hop."
)
@json_option
@click.pass_context
def simulate_command(
    context: click.Context, /, report: Path | None, trace: Path | None, **options: Any
) -> None:
    """Simulate a planner on ensemble NAME of the catalog; or hops, pipelines or batches from a table.

    \b
    Example: hetctl simulate zoo --gpus 80 --gpus-per-node 4 --planner auto --restart-seconds 10
      hetctl simulate --unit-times times.csv --epochs 5 --outage w3@10m-30m
      hetctl simulate --layer-table vgg19.csv --cluster cluster.yaml
      hetctl simulate --workers workers.csv --batch 128

    NAME may be left out: then it is the project's ensemble. Seconds are plain numbers, or 90s, 10m, 2h, 30d.
    """
    from hetctl.reports.simulation import report_of

    if report and trace and report.absolute() == trace.absolute():
        raise click.UsageError("--report and --trace name the same file", context)
    found = _of_table(context, options) or _of_ensemble(context, **options)
    if trace and found.trace is None:
        raise click.UsageError("--trace goes with members and hops: the result has no intervals", context)
    if trace and found.trace:
        write_text(trace, found.trace())
    if report:
        from hetctl.reports.page import render

        write_text(report, render(report_of(found.result)))
    written = [f"wrote {path}" for path in filter(None, (report, trace))]
    show(found.fields, lambda _: [report_of(found.result), *written])
    if getattr(found.result, "difference", None):
        context.exit(1)


simulate_command.params.extend(OF_TABLES)


def _of_table(context: click.Context, options: dict[str, Any]) -> Simulated | None:
    """Return the result of the table that was given; None if there is none.

    Raises
    ------
    UsageError
        If an option that was given does not go with the table, or one is missing.
    """
    given = {name: options[name] for name in given_options(context) if name in options}
    names = next((names for names in TABLES if given.keys() >= set(names)), None)
    if names is None:
        refuse_given(context, "does not go with an ensemble", {option.name for option in OF_TABLES})
        return None
    simulate = load_entry(TABLES[names])
    parameters = inspect.signature(simulate).parameters
    others = given.keys() - parameters.keys()
    refuse_given(context, f"does not go with {_option(context, names[-1])}", others)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in given:
            raise click.UsageError(f"Missing option '{_option(context, name)}'.", context)
    found: Simulated = simulate(**given)
    return found


def _option(context: click.Context, name: str) -> str:
    """Return a parameter as it is written on the command line."""
    return next(one.opts[0] for one in context.command.params if one.name == name)


def _of_ensemble(
    context: click.Context,
    /,
    name: str | None,
    ensemble: str | None,
    search_file: str | None,
    sharing: str,
    work: str,
    **options: Any,
) -> Simulated:
    from hetctl.app.simulate import SimulateRequest, searched, simulated

    if len({"name", "ensemble", "search_file"}.intersection(given_options(context))) > 1:
        raise click.UsageError(
            "an ensemble is given twice: give one of NAME, --ensemble and --search", context
        )
    if options["gpus"] is None:
        raise click.UsageError("Missing option '--gpus'.", context)
    project = this_project()
    found = project.ensemble(search_file or name or ensemble)
    names = set(SimulateRequest.__dataclass_fields__)
    others = names.union(option.name or "" for option in OF_TABLES)
    request = SimulateRequest(
        ensemble=searched(found) if search_file else found,
        lockstep=sharing == "lockstep",
        predicted=work == "predicted",
        options={key: value for key, value in options.items() if key not in others and value is not None},
        **{key: value for key, value in options.items() if key in names},
    )
    return simulated(project, request)
