"""Options shared by several commands; a flag takes precedence over its ``HETCTL_*`` variable."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from hetctl.cli.completions import complete_runs, complete_sites
from hetctl.cli.parameter_types import duration, number_or_auto, seconds
from hetctl.model.combinations import features_of, refuse_conflicts
from hetctl.model.errors import BadInputError
from hetctl.model.plan import (
    HOP_SCHEDULERS,
    HOPPER,
    PIPELINE_POLICIES,
    PS_PLACEMENTS,
    USUAL_PLANNER,
)
from hetctl.model.training_settings import BALANCE_MODES

if TYPE_CHECKING:
    from hetctl.app.plan.job_request import JobSizeChoice
    from hetctl.app.plan.planning import PlanRequest
    from hetctl.app.project import Project
    from hetctl.model.ensemble import Ensemble
    from hetctl.model.run import Budget
    from hetctl.model.site import Site

F = TypeVar("F", bound=Callable[..., Any])


def this_project() -> Project:
    """Return the project of the working directory, with the waits that `main` was given."""
    from hetctl.app.project import Project

    return Project.here(click.get_current_context().obj)


def given_options(context: click.Context, *, also_variables: bool = False) -> list[str]:
    """Return the names of parameters given on the command line or, if asked, by a variable; no defaults."""
    said = (ParameterSource.COMMANDLINE, *([ParameterSource.ENVIRONMENT] if also_variables else []))
    names = (parameter.name or "" for parameter in context.command.params)
    return [name for name in names if context.get_parameter_source(name) in said]


def refuse_given(context: click.Context, reason: str, names: Container[str | None] | None = None) -> None:
    """Raise UsageError if options were given on the command line; with `names`, only for these."""
    given = given_options(context)
    for option in context.command.params:
        if option.name in given and (names is None or option.name in names):
            raise click.UsageError(f"{max(option.opts, key=len)} {reason}", context)


def _job_options(
    _context: click.Context, _parameter: click.Parameter, words: tuple[str, ...]
) -> dict[str, str] | None:
    """Return the options of ``NAME=VALUE``; None, which means not given, without any."""
    pairs = [word.partition("=") for word in words]
    if wrong := [name for name, _, value in pairs if not (name and value)]:
        raise click.BadParameter(f"{wrong[0]!r} is not NAME=VALUE, such as qos=debug")
    return {name.replace("-", "_"): value for name, _, value in pairs} or None


@contextmanager
def called(command: click.Command, options: Mapping[str, Any]) -> Iterator[click.Context]:
    """Enter the context of a command that Python calls with options, whose names have ``_`` for ``-``.

    Raises
    ------
    BadInputError
        If there is no such option, or its value is wrong.
    """
    given = {f"--{name.replace('_', '-')}": value for name, value in options.items()}
    off = {one.opts[0]: one.secondary_opts[0] for one in command.params if one.secondary_opts}
    words = [
        flag if value is True else off[flag] if value is False else f"{flag}={value}"
        for flag, value in given.items()
        if value is not None and (value is not False or flag in off)
    ]
    try:
        with command.make_context("hetctl", words) as context:
            yield context
    except click.ClickException as error:
        raise BadInputError(error.format_message()) from None


class PlannerOption(click.Option):
    """``--planner``; its help names the planners."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option with its help; only this imports the planners, which takes 0.1 s."""
        from hetctl.app.plan.planner_names import planner_names

        self.help = f"Plan with {', '.join(planner_names())}, or auto (the best of all in a simulation)."
        return super().get_help_record(ctx)


def _together(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    def decorate(command: F) -> F:
        # Click lists options of decorators from the last one applied to the first.
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


run_argument = click.argument("run", required=False, shell_complete=complete_runs)
"""Argument for a run; by default the newest."""
ensemble_option = click.option(
    "-e",
    "--ensemble",
    metavar="FILE|NAME",
    envvar="HETCTL_ENSEMBLE",
    help="Use this ensemble file, or a name in the catalog.  [default: ensemble.yaml]",
)
site_option = click.option(
    "-s",
    "--site",
    metavar="NAME|FILE",
    envvar="HETCTL_SITE",
    shell_complete=complete_sites,
    help="Use this site: a name, or a file.  [default: the site of this machine]",
)
job_option = click.option(
    "--job-option",
    "job_options",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_job_options,
    help="Submit jobs with this option, such as qos=debug. May be given several times.",
)
"""Options of the batch system for jobs, by name."""
site_options = _together(
    site_option,
    click.option(
        "--gpus",
        metavar="N",
        type=click.IntRange(min=1),
        envvar="HETCTL_GPUS",
        help="Request N GPUs (or slots) for each job.",
    ),
    click.option(
        "--time",
        type=duration,
        envvar="HETCTL_TIME",
        help="Limit each job to this wall-clock time, such as 2h, 90m or 1:30:00.",
    ),
    click.option("--queue", metavar="NAME", envvar="HETCTL_QUEUE", help="Use this queue or partition."),
    click.option("--account", metavar="NAME", envvar="HETCTL_ACCOUNT", help="Charge this account."),
    job_option,
    click.option(
        "--launch",
        type=click.Choice(["nodes", "members"]),
        envvar="HETCTL_LAUNCH",
        help="Start one step on all nodes, or one for each member and round.  [default: the site's]",
    ),
)
"""The options for the site and the size of its jobs."""
planner_options = _together(
    click.option(
        "--planner",
        cls=PlannerOption,
        metavar="NAME",
        default=USUAL_PLANNER,
        show_default=True,
        help="Plan with this planner.",
    ),
    click.option(
        "--objective",
        type=click.Choice(["makespan", "mean-jct"]),
        help="Minimise the time of the whole run, or of members on average.  [default: makespan]",
    ),
    click.option(
        "--delta",
        metavar="RATE",
        type=float,
        help="Allow this difference of rates in a flotilla, in samples/s.",
    ),
    click.option(
        "--relative-delta",
        metavar="SHARE",
        type=float,
        help="Allow this difference, as a share of the fastest rate.  [default: 0.12]",
    ),
    click.option(
        "--alpha",
        metavar="SHARE",
        type=float,
        help="Stop a flotilla below this share of active GPUs.  [default: 0.8]",
    ),
    click.option(
        "--max-permutations",
        metavar="N",
        type=int,
        help="Try N orders when packing members.  [default: 1024]",
    ),
    click.option(
        "--solver-time-limit",
        "solver_time_limit_s",
        metavar="SECONDS",
        type=seconds(),
        help="Stop a planner that searches after this time.  [default: 2]",
    ),
    click.option(
        "--exploration",
        type=click.Choice(["shared", "each"]),
        help="Explore rates once for alike members, or for each by itself.  [default: shared]",
    ),
    click.option(
        "--mix-types",
        is_flag=True,
        # None means not given, which for an unfinished run differs from false.
        default=None,
        help="Let a member train on several types of GPU at once.",
    ),
    click.option(
        "--balance",
        type=click.Choice(BALANCE_MODES),
        help="Let batch sizes follow the speeds of a member's GPUs.  [default: the ensemble's]",
    ),
    click.option(
        "--max-per-gpu",
        metavar="N|auto",
        type=number_or_auto,
        help="Let up to N members share a GPU, each with a process of its own; auto: as its memory permits."
        "  [default: the site's]",
    ),
    click.option(
        "--fuse/--no-fuse",
        default=None,
        help="Let members of one shape that wait for a GPU train as one computation with others of it, if"
        " that is faster.  [default: the ensemble's with fluid and auto]",
    ),
    click.option("--seed", metavar="N", type=int, help="Seed random choices.  [default: 0]"),
)
"""The planner and its options."""
sharing_option = click.option(
    "--sharing",
    type=click.Choice(["cached", "lockstep", "none"]),
    help="Share prepared samples on a node.  [default: cached; none with --mode hopper]",
)
mode_options = _together(
    click.option(
        "--mode",
        type=click.Choice(["data-parallel", "hopper", "pipeline", "auto"]),
        default="data-parallel",
        show_default=True,
        help="Train all members data-parallel, all hopping over partitions, or all as pipelines;"
        " auto: each in the mode that suits it.",
    ),
    click.option(
        "--hop-scheduler",
        type=click.Choice(HOP_SCHEDULERS),
        help="Schedule members that hop with this algorithm.  [default: best]",
    ),
    click.option(
        "--policy",
        type=click.Choice(PIPELINE_POLICIES),
        help="Form virtual workers of one node (np), equal parts of all (ed), two types (hd), or best."
        "  [default: best]",
    ),
    click.option(
        "--in-flight",
        metavar="N",
        type=click.IntRange(1),
        help="Keep N minibatches in each virtual worker at a time.  [default: the best number]",
    ),
    click.option(
        "--clock-distance",
        metavar="N",
        type=click.IntRange(0),
        help="Let a virtual worker be N waves ahead of the slowest.  [default: 0]",
    ),
    click.option(
        "--ps-placement",
        type=click.Choice(PS_PLACEMENTS),
        help="Serve the parameters of a layer where it is trained, or on the nodes in turn."
        "  [default: local]",
    ),
)
"""``--mode``, and the options of single modes."""


def plan_request(
    project: Project,
    members: Ensemble,
    site: str | None,
    gpus: int | None,
    time: int | None,
    queue: str | None,
    account: str | None,
    job_options: Mapping[str, str] | None,
    launch: str | None,
    planner: str,
    sharing: str | None,
    explain: bool = False,
    mode: str = "data-parallel",
    budget: Budget | None = None,
    **options: Any,
) -> tuple[PlanRequest, JobSizeChoice]:
    """Return the input of planning from the ensemble and the values of all other shared options."""
    from hetctl.app.plan.job_request import sizing
    from hetctl.app.plan.planning import PlanRequest, with_defaults
    from hetctl.model.run import CACHED, NONE, Budget

    machine = site_of(project, members, site, account=account, job_options=job_options, launch=launch)
    given = {name: value for name, value in options.items() if value is not None}
    refuse_conflicts(members.name, *(f"--{name.replace('_', '-')}" for name in given), mode=mode)
    shared = sharing or (NONE if mode == HOPPER else CACHED)
    chosen = with_defaults(given, members, machine, planner, shared, mode)
    sized = sizing(project, members, machine, gpus, time, queue, budget or Budget(), shared, chosen)
    return PlanRequest(members, machine, sized.size, planner, chosen, explain, shared, mode), sized


def warn(project: Project, request: PlanRequest) -> None:
    """Print warnings on stderr about the profile that a plan uses."""
    from hetctl.app.plan.planning import warnings_about

    for warning in warnings_about(project, request):
        click.echo(f"warning: {warning}", err=True)


def ensemble_and_site(
    project: Project, ensemble: str | None, site: str | None, **keys: Any
) -> tuple[Ensemble, Site]:
    """Return the ensemble, and the site with the given keys of its file; errors as of `site_of`."""
    members = project.ensemble(ensemble)
    return members, site_of(project, members, site, **keys)


def site_of(
    project: Project,
    members: Ensemble,
    site: str | None,
    *,
    job_options: Mapping[str, str] | None = None,
    **keys: str | None,
) -> Site:
    """Return the site of an ensemble's jobs, with the given keys of its file, and options of jobs.

    Raises
    ------
    BadInputError
        If the ensemble is a rate table, which cannot be measured, planned or run at a site, or its data are
        to be copied to nodes with several agents each.
    """
    from dataclasses import replace

    from hetctl.app.profile.catalog_profiles import IMPORTED

    named: dict[str, Any] = {key: value for key, value in keys.items() if value is not None}
    machine = project.site(site)
    machine = replace(machine, job_options={**machine.job_options, **(job_options or {})}, **named)
    if members.framework == IMPORTED:
        raise BadInputError(
            f"ensemble {members.name} is an imported rate table: it has no networks to train",
            f"`hetctl simulate {members.name} --gpus N` simulates it; --ensemble names another",
        )
    refuse_conflicts(members.name, *features_of(members), launch=machine.launch)
    return machine
