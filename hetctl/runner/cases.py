"""What a site makes of typical jobs: the script, and the ranks that the driver starts in it.

The files in ``tests/render/golden`` are these, and ``hetctl sites check`` tries them with any site.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetctl.core.layout import Home
from hetctl.core.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.core.site import Site
from hetctl.launchers import LAUNCHERS, Step
from hetctl.launchers.seats import rank_command, seat_of
from hetctl.render import JobScript, render_job
from hetctl.runner.jobs import job_size

RUN = "digits-001"
HOME = Path("/shared/ann/digits/.hetctl")
PYTHON = "/shared/ann/venv/bin/python"


@dataclass(frozen=True)
class Case:
    """A job that stands for many.

    Parameters
    ----------
    shares : tuple of tuple of int
        For each member, how many GPUs it has on each of its nodes.
    """

    name: str
    nodes: int
    shares: tuple[tuple[int, ...], ...]
    job: int = 0
    first_round: int = 0
    after: str | None = None
    exclude: tuple[str, ...] = ()


def cases_of(site: Site) -> tuple[Case, ...]:
    """Return one member, packed members, a member over two nodes, and a resumed round.

    A site of one node has no member over two.
    """
    each = site.gpus_per_node
    packed = ((max(1, each // 2),), *[(1,)] * (each - max(1, each // 2)))
    whole = ((each,),) * min(2, site.nodes)
    cases = (
        Case("one-member", 1, ((1,),)),
        Case("packed-members", 1, packed),
        Case("two-nodes", 2, ((each, each),)),
        Case("resumed-round", len(whole), whole, 3, 7, "4711", ("node-8", "node-9")),
    )
    return tuple(case for case in cases if case.nodes <= site.nodes)


def script_of(site: Site, case: Case) -> JobScript:
    """Return the job of a case, of the length that hetctl would choose.

    Raises
    ------
    InfeasibleError
        If no queue of the site takes it.
    """
    size = job_size(site, case.nodes * site.gpus_per_node, None, None)
    home = Home(HOME)
    run = home.run(RUN)
    return JobScript(
        run=RUN,
        job=case.job,
        name=f"hetctl-{RUN}-{case.job}-0a1b2c",
        run_folder=run.path,
        first_round=run.round(case.first_round),
        site=site,
        queue=size.queue,
        nodes=case.nodes,
        wall_s=size.wall_s,
        grace_s=size.grace_s,
        python=PYTHON,
        home=home.path,
        after=case.after,
        exclude=case.exclude,
    )


def steps_of(site: Site, case: Case) -> tuple[Step, ...]:
    """Return the steps of each member's first rank on each node, on nodes ``node-1``, ``node-2``, ..

    The other ranks differ from them in the number of their GPU alone.

    Raises
    ------
    InfeasibleError
        If the site's launcher cannot start one of them.
    """
    launch = LAUNCHERS[site.launcher]
    folder = Home(HOME).run(RUN).round(case.first_round).path
    placements = (place for allocation in allocations_of(case, site) for place in allocation.placement)
    gpus = ((place.node, place.gpus[0]) for place in placements)
    return tuple(
        launch(site, seat_of(gpu), rank_command(gpu, folder, site.device, site.python or PYTHON))
        for gpu in gpus
    )


def allocations_of(case: Case, site: Site) -> Iterator[Allocation]:
    """Place the members of a case one after the other, none on a node without room for its share."""
    node, free = 0, 0
    for number, share in enumerate(case.shares, start=1):
        placements = []
        for gpus in share:
            if gpus > free:
                node, free = node + 1, site.gpus_per_node
            start = site.gpus_per_node - free
            placements.append(Placement(_node(site, node), tuple(range(start, start + gpus))))
            free -= gpus
        yield Allocation(f"member-{number}", sum(share), DATA_PARALLEL, 0.0, tuple(placements))


def case_text(site: Site, case: Case, template_folders: Sequence[Path] = ()) -> str:
    """Write a case out: the script, and behind its end each rank as a shell would start it."""
    script = render_job(script_of(site, case), template_folders)
    return script + "".join(_step_text(step) for step in steps_of(site, case))


def _node(site: Site, number: int) -> str:
    return "localhost" if site.batch_system == "local" else f"node-{number}"


def _step_text(step: Step) -> str:
    lines = [f"\n# The driver starts {step.member}:"]
    if step.file is not None:
        lines += [f"# {step.file_variable} names a file with", *(f"#   {line}" for line in step.file)]
    variables = (f"{name}={shlex.quote(value)}" for name, value in step.environment.items())
    return "\n".join([*lines, " \\\n    ".join([*variables, *map(shlex.quote, step.argv)])]) + "\n"
