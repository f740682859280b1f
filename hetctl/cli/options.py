"""Options that several commands share. A flag comes before its ``HETCTL_*`` variable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hetctl.core.errors import BadInputError

if TYPE_CHECKING:
    from hetctl.core.ensemble import Ensemble
    from hetctl.core.site import Site
    from hetctl.runner.jobs import JobSize
    from hetctl.runner.planning import PlanRequest
    from hetctl.runner.project import Project

F = TypeVar("F", bound=Callable[..., Any])


class Duration(click.ParamType):  # type: ignore[type-arg]
    """``2h``, ``90m``, ``1:30:00``: seconds as an int."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse, with the file readers' own rule."""
        from hetctl.files.durations import parse_duration

        if isinstance(value, int):
            return value
        try:
            return parse_duration(value)
        except BadInputError as error:
            self.fail("; ".join(filter(None, (error.message, error.hint))), param, ctx)


def json_option(command: F) -> F:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")(command)


def ensemble_option(command: F) -> F:
    """Add ``--ensemble``."""
    return click.option(
        "-e",
        "--ensemble",
        metavar="FILE|NAME",
        envvar="HETCTL_ENSEMBLE",
        help="Ensemble file, or a name in the catalog.  [default: ensemble.yaml]",
    )(command)


def site_options(command: F) -> F:
    """Add what chooses the machine and how much of it."""
    options = [
        click.option("-s", "--site", metavar="NAME|FILE", envvar="HETCTL_SITE", help="Where it runs."),
        click.option(
            "--gpus", type=click.IntRange(min=1), envvar="HETCTL_GPUS", help="GPUs (or slots) of each job."
        ),
        click.option(
            "--time", type=Duration(), envvar="HETCTL_TIME", help="Wall-clock limit of each job: 2h."
        ),
        click.option("--queue", envvar="HETCTL_QUEUE", help="Queue or partition."),
        click.option("--account", envvar="HETCTL_ACCOUNT", help="Project that pays."),
    ]
    return _add(options, command)


def planner_options(command: F) -> F:
    """Add the planner and its options."""
    options = [
        click.option("--planner", default="flotilla", show_default=True, help="flotilla or independent."),
        click.option(
            "--delta", type=float, help="Rates of a flotilla differ by at most this many samples/s."
        ),
        click.option(
            "--relative-delta", type=float, help="The same as a share of the fastest.  [default: 0.12]"
        ),
        click.option(
            "--alpha", type=float, help="Active share below which a flotilla stops.  [default: 0.8]"
        ),
        click.option("--max-permutations", type=int, help="Orders tried when packing.  [default: 1024]"),
        click.option("--seed", type=int, help="Of random choices.  [default: 0]"),
    ]
    return _add(options, command)


def plan_request(
    project: Project,
    ensemble: str | None,
    site: str | None,
    gpus: int | None,
    time: int | None,
    queue: str | None,
    account: str | None,
    planner: str,
    **options: Any,
) -> PlanRequest:
    """Build what is to be planned from the values of all shared options."""
    from hetctl.runner.planning import PlanRequest

    members, machine, size = resolve(project, ensemble, site, gpus, time, queue, account)
    given = {name: value for name, value in options.items() if value is not None}
    return PlanRequest(members, machine, size, planner, options=given)


def warn(project: Project, request: PlanRequest) -> None:
    """Say on stderr what is doubtful about the profile that a plan was made from."""
    from hetctl.runner.planning import warnings_of

    for warning in warnings_of(project, request.ensemble, request.site):
        click.echo(f"warning: {warning}", err=True)


def resolve(
    project: Project,
    ensemble: str | None,
    site: str | None,
    gpus: int | None,
    time: int | None,
    queue: str | None,
    account: str | None,
) -> tuple[Ensemble, Site, JobSize]:
    """Find the ensemble and the site, and choose the size of a job."""
    from dataclasses import replace

    from hetctl.runner.jobs import job_size

    machine = project.site(site)
    if account is not None:
        machine = replace(machine, account=account)
    return project.ensemble(ensemble), machine, job_size(machine, gpus, time, queue)


def _add(options: Sequence[Callable[[Any], Any]], command: F) -> F:
    for option in reversed(options):
        command = option(command)
    return command
