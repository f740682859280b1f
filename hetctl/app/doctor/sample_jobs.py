"""Typical jobs on a site, with their scripts and steps, and the check of a site file that renders them.

The files in ``tests/cluster/render/golden`` show these, and ``hetctl sites check`` renders them for a site.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hetctl.app.plan.job_request import job_size
from hetctl.app.project import Project
from hetctl.cluster.batch_systems import BATCH_SYSTEMS
from hetctl.cluster.launchers import LaunchSpec
from hetctl.cluster.launchers.agents import agents_step, packing_lines, round_prefix, sets_by_step
from hetctl.cluster.launchers.nodes import THIS_MACHINE
from hetctl.cluster.render import JobScript, render_job
from hetctl.model.errors import BadInputError, HetctlError
from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.site import MEMBERS, NODES, Node, Site
from hetctl.model.training_settings import USUAL_FRAMEWORK
from hetctl.model.values import dataclass
from hetctl.storage.paths import Home

RUN = "digits-001"
HOME = Path("/shared/ann/digits/.hetctl")
PYTHON = "/shared/ann/venv/bin/python"
WHAT_STARTS = {
    NODES: "The driver starts one step: an agent on each node, which forks the ranks there.",
    MEMBERS: "The driver starts a step for each member: an agent on each node, which forks its ranks.",
}


@dataclass(frozen=True)
class Case:
    """A typical job.

    Parameters
    ----------
    shares : tuple of tuple of int
        GPUs of each member on each of its nodes.
    """

    name: str
    nodes: int
    shares: tuple[tuple[int, ...], ...]
    job: int = 0
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
        Case("resumed-round", len(whole), whole, 3, "4711", ("node-8", "node-9")),
    )
    return tuple(case for case in cases if case.nodes <= site.nodes)


def script_of(site: Site, case: Case) -> JobScript:
    """Return the job of a case, with the length that hetctl would choose.

    Raises
    ------
    InfeasibleError
        If no queue of the site accepts it.
    """
    size = job_size(site, case.nodes * site.gpus_per_node, None, None)
    home = Home(HOME)
    return JobScript(
        folder=home.run(RUN),
        job=case.job,
        name=f"hetctl-{RUN}-{case.job}-0a1b2c",
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


def steps_of(site: Site, case: Case) -> Iterator[LaunchSpec]:
    """Yield the steps that start the agents of a case.

    Raises
    ------
    InfeasibleError
        If the site's launcher cannot start one.
    """
    address = Home(HOME).run(RUN).job(case.job).agents.address
    placements = {allocation.member: allocation.placement for allocation in allocations_of(case, site)}
    for name, sets in sets_by_step(site, nodes_of(site, case), round_prefix(0), placements).items():
        yield agents_step(site, name, sets, address, (USUAL_FRAMEWORK,), site.python or PYTHON)


def nodes_of(site: Site, case: Case) -> list[Node]:
    """Return the nodes of a case: ``node-1``, ``node-2``, .."""
    gpus = tuple(range(site.gpus_per_node))
    return [Node(_node(site, number), gpus) for number in range(1, case.nodes + 1)]


def allocations_of(case: Case, site: Site) -> Iterator[Allocation]:
    """Place the members of a case one after the other, each share on a node with enough room."""
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
    """Return a case as text: the script, then the agents' steps and the packing of a round."""
    script = render_job(script_of(site, case), template_folders)
    steps = "".join(map(_step_text, steps_of(site, case)))
    packing = packing_lines(tuple(allocations_of(case, site)), nodes_of(site, case))
    return f"{script}\n# {WHAT_STARTS[site.launch]}\n{steps}" + "".join(f"# {line}\n" for line in packing)


def _node(site: Site, number: int) -> str:
    return THIS_MACHINE if BATCH_SYSTEMS[site.batch_system].runs_here else f"node-{number}"


def _step_text(step: LaunchSpec) -> str:
    variables = (f"{name}={shlex.quote(value)}" for name, value in step.environment.items())
    words = " \\\n    ".join([*variables, *map(shlex.quote, step.argv)])
    return f"{words}\n"


def check_site(project: Project, name: str) -> tuple[str, list[str]]:
    """Read a site by name or file, and render every case for it; return its name and those of the cases.

    Raises
    ------
    BadInputError
        If anything in its file is wrong, with a line for each problem: ``FILE:LINE: key: rule``; or if a
        case cannot be rendered, with the case, the most likely key, and its place.
    """
    site, keys = project.traced_site(name)
    where = {key.key: f"{key.file}:{key.line}: " for key in keys if key.file}
    problems: dict[str, list[str]] = {}
    for case in cases_of(site):
        try:
            case_text(site, case, project.template_folders)
        except HetctlError as error:
            problems.setdefault(_placed(error.message, where), []).append(case.name)
    if problems:
        lines = (f"{problem} (rendering {', '.join(names)})" for problem, names in problems.items())
        raise BadInputError("\n".join(lines), "`hetctl sites show` says where each key comes from")
    return site.name, [case.name for case in cases_of(site)]


CAUSES = {
    "template": "template",
    "TMPDIR": "environment",
    "the environment": "environment",
    "a directive": "directives",
    "job option": "job_options",
    "launch: members": "request",
    "no queue": "queues",
    "nodes; the launcher": "launcher",
    "jsrun needs equally": "launcher",
}
"""Keys of the site file that cause errors, by words in the message."""


def _placed(message: str, where: Mapping[str, str]) -> str:
    key = next((key for words, key in CAUSES.items() if words in message), "")
    return f"{where.get(key, '')}{key}: {message}" if key else message
