"""``hetctl plan``."""

from __future__ import annotations

from typing import Any

import click

from hetctl.cli.options import (
    ensemble_option,
    mode_options,
    plan_request,
    planner_options,
    sharing_option,
    site_options,
    this_project,
    warn,
)
from hetctl.cli.output import json_option, show


@click.command("plan")
@ensemble_option
@site_options
@planner_options
@sharing_option
@mode_options
@click.option("--explain", is_flag=True, help="Show why each member gets its GPUs, and why others wait.")
@json_option
def plan_command(ensemble: str | None, **options: Any) -> None:
    """Compute the rounds until every member has converged, and store the plan in the catalog.

    \b
    Example: hetctl plan --site perlmutter --gpus 64 --time 2h
    """
    from hetctl.app.plan.planning import plan_and_save
    from hetctl.model.serialization import encode
    from hetctl.reports.plan_tables import plan_tables

    project = this_project()
    request, sized = plan_request(project, project.ensemble(ensemble), **options)
    plan = plan_and_save(project, request)
    warn(project, request)
    device, others, cost = request.site.device, sized.job_sizes, request.cost(plan)
    show(
        {**encode(plan), "cost": encode(cost)},
        lambda _: plan_tables(
            *(plan, sized.size, sized.chosen, others, device),
            cost=cost,
            explain=request.explain,
            per_gpu=request.planner_options.max_per_gpu,
        ),
    )
