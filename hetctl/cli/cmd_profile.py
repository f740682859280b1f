"""``hetctl profile`` and its sub-commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetctl.cli.options import (
    ensemble_and_site,
    ensemble_option,
    given_options,
    refuse_given,
    site_option,
    site_options,
    this_project,
)
from hetctl.cli.output import as_json, json_option, show
from hetctl.cli.parameter_types import seconds
from hetctl.model.errors import MembersFailedError

if TYPE_CHECKING:
    from hetctl.app.profile.profiling import LayerOutcome
    from hetctl.app.profile.session import ProfileOutcome
    from hetctl.model.ensemble import Ensemble
    from hetctl.model.site import Site


@click.group("profile", invoke_without_command=True)
@ensemble_option
@site_options
@click.option(
    "--jobs",
    metavar="N",
    type=click.IntRange(1),
    default=1,
    help="Spread the points over N jobs.  [default: 1]",
)
@click.option(
    "--max-concurrent",
    metavar="K",
    type=click.IntRange(1),
    help="Run at most K of the jobs at the same time.",
)
@click.option(
    "--layers",
    "members",
    metavar="MEMBER",
    multiple=True,
    help="Measure the layers of MEMBER on each type of GPU, and the links if the site file has none, instead"
    " of rates. May be given several times.",
)
@click.option("--links", is_flag=True, help="Measure the links between GPUs, instead of rates.")
@click.option(
    "--for",
    "command_s",
    metavar="TIME",
    type=seconds(),
    help="Run the command of a member for TIME at most, on each number of GPUs.  [default: 1m]",
)
@click.option(
    "--beyond",
    is_flag=True,
    help="Measure also on twice, four times, .. as many GPUs as usual, up to --gpus, where a member may be"
    " faster than on fewer.",
)
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="Measure every number of GPUs up to two nodes, also where the rate cannot change the plan.",
)
@click.option("--force", is_flag=True, help="Measure known points again.")
@click.option("--detach", is_flag=True, help="Submit and return; the next `hetctl profile` follows the job.")
@click.option("--dry-run", is_flag=True, help="Print what measuring rates will cost; submit nothing.")
@json_option
@click.pass_context
def profile_command(
    context: click.Context,
    /,
    jobs: int,
    max_concurrent: int | None,
    members: tuple[str, ...],
    links: bool,
    command_s: float | None,
    beyond: bool,
    every: bool,
    force: bool,
    detach: bool,
    dry_run: bool,
    ensemble: str | None,
    site: str | None,
    gpus: int | None,
    time: int | None,
    queue: str | None,
    account: str | None,
    job_options: dict[str, str] | None,
    launch: str | None,
) -> None:
    """Measure the training rate of every member on 1, 2, .. GPUs, with many points per job.

    \b
    Example: hetctl profile --site slurm --gpus 8 --jobs 4 --max-concurrent 2

    Without --gpus no point has more GPUs than two nodes. Numbers of GPUs that cannot change a plan are left
    out. Measurements are kept in the
    catalog, also when this is interrupted, and are not repeated. A job of an earlier command that is still
    measuring is followed. With --layers or --links, what plans of pipelines need is measured instead.
    """
    # Click would silently drop options that stand before a sub-command.
    if name := context.invoked_subcommand:
        refuse_given(context, f"goes after the sub-command: {context.command_path} {name} ..")
        return
    from hetctl.app.plan.job_request import job_size
    from hetctl.app.profile.jobs import ProfileCommand
    from hetctl.app.profile.profiling import cost_of, profile, profile_layers
    from hetctl.cli.profile_display import ProfileDisplay, describe_cost

    project = this_project()
    known, machine = ensemble_and_site(
        project, ensemble, site, account=account, job_options=job_options, launch=launch
    )
    # The usual size, since nothing is known of the work.
    size = job_size(machine, gpus, time, queue)
    # A time in the environment is meant for jobs of runs, which end with checkpoints.
    wall_s = time if "time" in given_options(context) else None
    asked = ProfileCommand(
        *(known, machine, size, jobs, max_concurrent, force, command_s, wall_s, beyond, every, detach),
        sized=gpus is not None,
    )
    of_rates = not (members or links)
    if dry_run and not of_rates:
        raise click.UsageError("--dry-run does not go with --layers or --links", context)
    cost = cost_of(project, asked) if of_rates else None
    if cost and dry_run:
        show(cost, describe_cost)
        return
    if cost and not as_json():
        click.echo(describe_cost(cost), err=True)
    outcome: ProfileOutcome | LayerOutcome
    with ProfileDisplay(quiet=as_json()) as display:
        if of_rates:
            outcome = profile(project, asked, display)
        else:
            outcome = profile_layers(project, asked, members, links=links, observer=display)
    _show(known, machine, outcome)


@profile_command.command("show")
@click.option(
    "--layers",
    "members",
    metavar="MEMBER",
    multiple=True,
    help="Show the layers of MEMBER and the links instead. May be given several times.",
)
@ensemble_option
@site_option
@json_option
def show_known(members: tuple[str, ...], **options: Any) -> None:
    """Show the known points, and the jobs that are measuring; stale points are marked.

    \b
    Example: hetctl profile show
    """
    from hetctl.app.profile.profiling import known_layers
    from hetctl.app.profile.session import known_profile

    project = this_project()
    ensemble, site = ensemble_and_site(project, **options)
    if members:
        _show(ensemble, site, known_layers(project, ensemble, site, members))
    else:
        _show(ensemble, site, known_profile(project, ensemble, site))


@profile_command.command("import")
@click.argument("table", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--name", metavar="NAME", help="Create an ensemble of this name from the table alone, for simulations."
)
@ensemble_option
@site_option
@json_option
@click.pass_context
def import_table(context: click.Context, /, table: Path, name: str | None, **options: Any) -> None:
    """Import rates from TABLE, a CSV file with the columns member, gpus, rate[, gpu_type, samples].

    \b
    Example: hetctl profile import rates.csv

    With --name neither ensemble nor site is needed, and the column samples is each member's work.
    """
    from hetctl.app.profile.catalog_profiles import IMPORTED
    from hetctl.app.profile.profiling import import_ensemble, import_rates

    project = this_project()
    if name is not None:
        refuse_given(context, "does not go with --name, which makes an ensemble without a site", set(options))
        made, count = import_ensemble(project, name, table)
        members = len(made.members)
        lines = [
            f"imported {count} rates of {members} members as ensemble {name}",
            f"next: hetctl simulate {name} --gpus N",
        ]
        fields = {"ensemble": name, "site": IMPORTED, "imported": count, "members": members}
    else:
        ensemble, site = ensemble_and_site(project, **options)
        count = import_rates(project, ensemble, site, table)
        lines = [f"imported {count} rates of {ensemble.name} at {site.name}"]
        fields = {"ensemble": ensemble.name, "site": site.name, "imported": count}
    show(fields, lines)


@profile_command.command("export")
@ensemble_option
@site_option
@click.option(
    "--layers",
    "member",
    metavar="MEMBER",
    help="Write the layers of MEMBER instead, for `layers` in the ensemble file and `hetctl simulate`.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.File("w", lazy=True),
    default="-",
    help="Write this file.  [default: stdout]",
)
def export_table(member: str | None, output: Any, **options: Any) -> None:
    """Write the rates as a CSV table that `hetctl profile import` reads.

    \b
    Example: hetctl profile export -o rates.csv
    """
    from hetctl.app.profile.profiling import export_layers, export_rates

    project = this_project()
    ensemble, site = ensemble_and_site(project, **options)
    if member:
        export_layers(project, ensemble, site, member, output)
    else:
        export_rates(project, ensemble, site, output)


def _show(ensemble: Ensemble, site: Site, outcome: ProfileOutcome | LayerOutcome) -> None:
    from hetctl.app.profile.catalog_profiles import stale_points
    from hetctl.app.profile.session import ProfileOutcome
    from hetctl.model.serialization import encode
    from hetctl.reports.profile_tables import layers_table, profile_table, shapes_text

    fields: dict[str, Any] = {"ensemble": ensemble.name, "site": site.name, **encode(outcome)}
    if isinstance(outcome, ProfileOutcome):
        stale = stale_points(outcome.points, ensemble, site)
        fields["stale"] = sorted(map(list, stale))
        tables = [
            profile_table(outcome.points, stale, outcome.preprocess, site.device),
            shapes_text(outcome.shapes),
        ]
    else:
        tables = [layers_table(outcome.layers, outcome.links, site.device)]
    show(fields, lambda _: [*tables, *_lines(outcome)], _failure(outcome))


def _lines(outcome: ProfileOutcome | LayerOutcome) -> Iterator[str]:
    from hetctl.reports.summary import FailureGroup, grouped, names_text

    yield f"{outcome.measured} points measured now, {outcome.known} known before"
    for job in outcome.under_way:
        state = f"{job.state}: {job.reason}" if job.reason else job.state
        yield f"job {job.job} ({state}) has measured {job.measured} of {job.points} points"
    for group in grouped(
        FailureGroup((failure.point.title,), failure.error, failure.log_tail, failure.log)
        for failure in outcome.failures
    ):
        yield f"\n{names_text(group.names)}: {group.reason}"
        yield from (f"    {line}" for line in (*group.log_tail, group.log))


def _failure(outcome: ProfileOutcome | LayerOutcome) -> MembersFailedError | None:
    if not outcome.failures:
        return None
    names = ", ".join(sorted({failure.point.member for failure in outcome.failures}))
    failed = len(outcome.failures)
    return MembersFailedError(
        f"{failed} of {outcome.measured + failed} points could not be measured ({names})",
        "correct these members and run `hetctl profile` again; measured points are kept",
    )
