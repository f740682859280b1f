"""The agents of a job: for which resource sets, and by which steps, they are started."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hetctl.cluster.launchers import LAUNCHERS
from hetctl.cluster.launchers.launch_spec import LaunchSpec, ResourceSet
from hetctl.model.errors import InfeasibleError
from hetctl.model.plan import Allocation, Placement
from hetctl.model.site import NODES, Node, Site

Gpu = tuple[str, int]
"""A node and the number of one of its GPUs."""
Sets = tuple[ResourceSet, ...]
Placements = Mapping[str, tuple[Placement, ...]]
"""Placements of members, by their names."""

AGENTS = "agents"
"""Name of the step of all nodes."""
CHOOSE_NODES = frozenset({"jsrun"})
"""Launchers that cannot be told on which nodes to start a step."""
SLURM_JOB = "SLURM_JOB_ID"


def gpus_of(placement: Iterable[Placement]) -> tuple[Gpu, ...]:
    """Return the GPUs of a group, in the order of its ranks."""
    return tuple((place.node, gpu) for place in placement for gpu in place.gpus)


def round_prefix(index: int) -> str:
    """Return the beginning of the names of the steps of a round."""
    return f"round-{index:04d}"


def sets_by_step(site: Site, nodes: Sequence[Node], prefix: str, placements: Placements) -> dict[str, Sets]:
    """Return the resource sets that members need agents for, by the names of the steps that start those.

    Parameters
    ----------
    nodes : sequence of Node
        Of the job.
    placements : mapping
        By member.
    prefix : str
        Tells steps of one member apart.
    """
    if site.launch == NODES:
        return {AGENTS: tuple(ResourceSet(node.name, node.gpus) for node in nodes)}
    steps: dict[str, Sets] = {}
    for member, placement in placements.items():
        steps |= _of_member(f"{prefix}/{member}", placement)
    return steps


def _of_member(name: str, placement: Iterable[Placement]) -> dict[str, Sets]:
    """Return a step for each number of GPUs on a node: a launcher asks for equally many on each."""
    sets = [ResourceSet(place.node, place.gpus) for place in placement]
    sizes = sorted({len(each.gpus) for each in sets}, reverse=True)
    by_size = {size: tuple(each for each in sets if len(each.gpus) == size) for size in sizes}
    return {name if len(sizes) == 1 else f"{name}/{size}": found for size, found in by_size.items()}


def agents_step(
    site: Site, name: str, sets: Sequence[ResourceSet], address: Path, framework: str | None, python: str
) -> LaunchSpec:
    """Return the step that starts an agent for each resource set.

    Parameters
    ----------
    address, framework, python
        As in `agent_command`.
    """
    command = agent_command(name, address, framework, site.cores_per_gpu, python)
    return LAUNCHERS[site.launcher](site, name, sets, command)


def agent_command(
    step: str, address: Path, framework: str | None, threads: int, python: str
) -> tuple[str, ...]:
    """Return the command line of an agent.

    Parameters
    ----------
    step : str
        That starts it.
    address : Path
        File that says where the driver is.
    framework : str or None
        Imported once by each agent, for all its ranks.
    threads : int
        Of the numerical libraries in each rank.
    """
    options = ("--framework", framework) if framework else ()
    words = ("--step", step, "--threads", str(threads), *options)
    return (python, "-m", "hetctl.runtime.agent", str(address), *words)


def cancel_command(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the command that ends a job whose script is gone, or None where the batch system ends it itself.

    A job of ``sbatch --no-kill`` outlives the node of its script, and would hold the others until its limit.

    Parameters
    ----------
    environ : mapping
        Of a process in the job.
    """
    return ("scancel", environ[SLURM_JOB]) if SLURM_JOB in environ else None


def packing_lines(allocations: Sequence[Allocation], nodes: Sequence[Node]) -> Iterator[str]:
    """Return a line for each node of a round: its members and their GPUs.

    Raises
    ------
    InfeasibleError
        If a member has GPUs that its nodes do not have or another one has, or not as many as it says.
    """
    _refuse_misfits(allocations, nodes)
    by_node: dict[str, list[str]] = {}
    for allocation in allocations:
        for place in allocation.placement:
            gpus = ", ".join(map(str, place.gpus))
            by_node.setdefault(place.node, []).append(f"{allocation.member} on {gpus}{_spread(allocation)}")
    return (f"{node}: {'; '.join(members)}" for node, members in by_node.items())


def _spread(allocation: Allocation) -> str:
    """Say of a member on several nodes how many GPUs it has on each."""
    sizes = [len(place.gpus) for place in allocation.placement]
    if len(sizes) == 1:
        return ""
    each = f"x {sizes[0]}" if len(set(sizes)) == 1 else f"with {' + '.join(map(str, sizes))}"
    return f" ({len(sizes)} nodes {each} GPUs)"


def _refuse_misfits(allocations: Sequence[Allocation], nodes: Sequence[Node]) -> None:
    free = {node.name: set(node.gpus) for node in nodes}
    for allocation in allocations:
        gpus = gpus_of(allocation.placement)
        if len(gpus) != allocation.gpus or len(set(gpus)) != len(gpus):
            raise InfeasibleError(
                f"member {allocation.member} has {allocation.gpus} GPUs, and is placed on {len(set(gpus))}",
                "It would straddle nodes without saying so: choose another --planner.",
            )
        for place in allocation.placement:
            left = free.get(place.node, set())
            if not left.issuperset(place.gpus):
                raise InfeasibleError(
                    f"member {allocation.member} is placed on GPUs {', '.join(map(str, place.gpus))} of"
                    f" {place.node}, which has {', '.join(map(str, sorted(left))) or 'none'} left",
                    "It would straddle nodes without saying so: choose another --planner.",
                )
            left.difference_update(place.gpus)
