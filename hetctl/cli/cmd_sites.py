"""Commands of sites: ``sites`` with its sub-commands, and ``doctor``."""

from __future__ import annotations

import click

from hetctl.cli.completions import complete_sites
from hetctl.cli.options import this_project
from hetctl.cli.output import as_json, json_option, show
from hetctl.model.training_settings import FRAMEWORKS


@click.group("sites", invoke_without_command=True)
@json_option
@click.pass_context
def sites_command(context: click.Context) -> None:
    """List the known sites, show one, or check a site file.

    \b
    Example: hetctl sites
    """
    if context.invoked_subcommand is None:
        _print_list()
    elif as_json():
        raise click.UsageError(f"--json goes after {context.invoked_subcommand}", context)


@sites_command.command("list")
@json_option
def list_() -> None:
    """List the known sites: the project's, your own, and those that come with hetctl.

    \b
    Example: hetctl sites list
    """
    _print_list()


@sites_command.command("show")
@click.argument("name", shell_complete=complete_sites)
@json_option
def show_site(name: str) -> None:
    """Show every key of site NAME with its value, and the file and line that it comes from.

    \b
    Example: hetctl sites show summit
    """
    from hetctl.app.profile.catalog_profiles import traced_site
    from hetctl.reports.setup_tables import keys_table

    site, keys = traced_site(this_project(), name)
    show({"site": site, "keys": keys}, lambda _: keys_table(keys))


@sites_command.command("check")
@click.argument("site", shell_complete=complete_sites)
@json_option
def check(site: str) -> None:
    """Check that SITE, a name or a file, is valid and that typical jobs can be rendered for it.

    \b
    Example: hetctl sites check site-configs/mycluster.yaml

    The jobs are one member, packed members, a member over two nodes, and a resumed round. No machine is
    queried; `hetctl doctor` does that.
    """
    from hetctl.app.doctor.sample_jobs import check_site

    name, cases = check_site(this_project(), site)
    show({"site": name, "cases": cases}, f"site {name} is valid; rendered for it: {', '.join(cases)}")


def _print_list() -> None:
    from hetctl.reports.setup_tables import sites_table

    project = this_project()
    sites = [(project.site(name), str(path)) for name, path in project.sites()]
    show({"sites": [{"file": path, "site": site} for site, path in sites]}, lambda _: sites_table(sites))


@click.command("doctor")
@click.option(
    "-s",
    "--site",
    metavar="NAME|FILE",
    envvar="HETCTL_SITE",
    help="Check this site: a name, or a file.  [default: the site of this machine]",
)
@click.option("--queue", metavar="NAME", envvar="HETCTL_QUEUE", help="Check this queue or partition.")
@click.option("--account", metavar="NAME", envvar="HETCTL_ACCOUNT", help="Check this account.")
@click.option("--job", is_flag=True, help="Run a short job on two nodes, too, and wait for it.")
@click.option(
    "--framework",
    type=click.Choice(tuple(FRAMEWORKS)),
    help="Measure the all-reduce of this framework with --job.  [default: the first that the nodes have]",
)
@json_option
def doctor_command(
    site: str | None, queue: str | None, account: str | None, job: bool, framework: str | None
) -> None:
    """Check a site and report what to fix: commands, queue, limits, account, folders, Python.

    \b
    Example: hetctl doctor --site slurm --job

    With --job, a short job also tests whether ranks start, get their GPUs and connect, and how fast GPUs
    exchange data within a node and between nodes.
    """
    if framework and not job:
        raise click.UsageError("--framework requires --job")
    from hetctl.app.doctor.doctor import examine
    from hetctl.reports.setup_tables import doctor_table

    found = examine(this_project(), site, account, queue, job=job, framework=framework)
    show(found, lambda _: doctor_table(found.site, found.checks), found.failure)
