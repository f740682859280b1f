"""``hetctl plan``."""

from __future__ import annotations

from typing import Any

import click

from hetctl.cli.options import (
    ensemble_option,
    json_option,
    mode_options,
    plan_request,
    planner_options,
    predict_option,
    sharing_option,
    site_options,
    this_project,
    warn,
)
from hetctl.cli.output import print_json, print_table


@click.command("plan")
@ensemble_option
@site_options
@planner_options
@sharing_option
@mode_options
@predict_option
@click.option("--explain", is_flag=True, help="Show why each member gets its GPUs, and why others wait.")
@json_option
def plan_command(ensemble: str | None, as_json: bool, **options: Any) -> None:
    """Compute the rounds until every member has converged, and store the plan in the catalog.

    \b
    Example: hetctl plan --site perlmutter --gpus 64 --time 2h
    """
    from hetctl.app.plan.planning import plan_and_save
    from hetctl.reports.plan_tables import explain_table, plan_table, size_line, size_table

    project = this_project()
    request, sized = plan_request(project, project.ensemble(ensemble), **options)
    plan = plan_and_save(project, request)
    warn(project, request)
    if as_json:
        print_json(plan)
        return
    device = request.site.device
    print_table(plan_table(plan, device))
    click.echo(size_line(sized.size, sized.chosen, device))
    if request.explain:
        click.echo()
        print_table(explain_table(plan))
        if sized.chosen:
            click.echo()
            print_table(size_table(sized.chosen, sized.job_sizes, device))
