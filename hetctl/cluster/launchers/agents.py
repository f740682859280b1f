"""Agents of a job: their resource sets, and the steps that start them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from hetctl.cluster.batch_systems import BATCH_SYSTEMS
from hetctl.cluster.launchers import LAUNCHERS, LaunchSpec, ResourceSet
from hetctl.cluster.launchers.container import node_command
from hetctl.model.errors import InfeasibleError
from hetctl.model.plan import Allocation, Placement
from hetctl.model.site import NODES, Node, Site

NodeGpu = tuple[str, int]
"""Name of a node, and number of one of its GPUs; of a rank in a later seat, its number (`gpus_of`)."""
Sets = tuple[ResourceSet, ...]
Placements = Mapping[str, tuple[Placement, ...]]
"""Placements by name of the member."""

AGENTS = "agents"
"""Name of the step that covers all nodes."""


def gpus_of(placement: Iterable[Placement], per_node: int) -> tuple[NodeGpu, ...]:
    """Return the numbers of a group's ranks on their nodes, in the order of the ranks.

    A rank has the number of its GPU. With several members on a GPU, those in later seats have numbers beyond
    the GPUs of a node: `number % per_node` is the GPU.
    """
    return tuple(
        (place.node, gpu + max(place.seat - 1, 0) * per_node) for place in placement for gpu in place.gpus
    )


def round_prefix(index: int) -> str:
    """Return the prefix of the names of the steps of a round."""
    return f"round-{index:04d}"


def sets_by_step(site: Site, nodes: Sequence[Node], prefix: str, placements: Placements) -> dict[str, Sets]:
    """Return the resource sets that need agents, by the name of the step that starts these.

    Parameters
    ----------
    nodes : sequence of Node
        Nodes of the job.
    placements : mapping
        Placements by member.
    prefix : str
        Prefix that distinguishes several steps of one member.
    """
    if site.launch == NODES:
        return {AGENTS: tuple(ResourceSet(node.name, node.gpus) for node in nodes)}
    steps: dict[str, Sets] = {}
    for member, placement in placements.items():
        steps |= _of_member(f"{prefix}/{member}", placement)
    return steps


def _of_member(name: str, placement: Iterable[Placement]) -> dict[str, Sets]:
    """Return one step per number of GPUs on a node, since a launcher takes one number for all nodes."""
    sets = [ResourceSet(place.node, place.gpus) for place in placement]
    sizes = sorted({len(each.gpus) for each in sets}, reverse=True)
    by_size = {size: tuple(each for each in sets if len(each.gpus) == size) for size in sizes}
    return {name if len(sizes) == 1 else f"{name}/{size}": found for size, found in by_size.items()}


def agents_step(
    site: Site, name: str, sets: Sequence[ResourceSet], address: Path, frameworks: Sequence[str], python: str
) -> LaunchSpec:
    """Return the step that starts an agent for each resource set.

    Parameters
    ----------
    address, frameworks
        Same as in `agent_arguments`.
    python : str
        Interpreter of the agents, if they are in no container.
    """
    # Where hetctl chooses, most have a GPU alone, so none is limited.
    most = 1 if isinstance(site.max_per_gpu, str) else site.max_per_gpu
    threads = -(-200 // most) if site.mps else None
    words = agent_arguments(
        *(name, address, frameworks, site.cores_per_gpu), staged=bool(site.stage), mps_threads=threads
    )
    command = node_command(site, address.parent, python, *words)
    return LAUNCHERS[site.launcher].agents(site, name, sets, command)


def agent_arguments(
    step: str,
    address: Path,
    frameworks: Sequence[str],
    threads: int,
    *,
    staged: bool = False,
    mps_threads: int | None = None,
) -> tuple[str, ...]:
    """Return the arguments of the Python that runs an agent.

    Parameters
    ----------
    step : str
        Name of the step that starts it.
    address : Path
        File with the address of the driver.
    frameworks : sequence of str
        Frameworks that each agent imports once for all its ranks.
    threads : int
        Threads of the numerical libraries in each rank.
    staged : bool
        True if the agent starts from an archive that comes to its node first.
    mps_threads : int or None
        Share of a GPU's threads for each rank, in percent, with MPS; above 100 all. None: without MPS.
    """
    options = [word for framework in frameworks for word in ("--framework", framework)]
    if mps_threads is not None:
        # Twice their number, as NVIDIA recommends: what one leaves idle another uses.
        options += ["--mps", str(min(100, mps_threads))]
    module = "hetctl.runtime.agent.environment" if staged else "hetctl.runtime.agent"
    return ("-m", module, str(address), "--step", step, "--threads", str(threads), *options)


def cancel_command(site: Site, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command that ends a job without a script; empty if there is none, as on this machine.

    A job of ``sbatch --no-kill`` continues after the node of its script has failed, and a job of LSF when its
    first node does not answer. It would hold the other nodes until its limit.

    Parameters
    ----------
    environ : mapping
        Environment of a process in the job.
    """
    entry = BATCH_SYSTEMS[site.batch_system]
    job = environ.get(entry.job_variable) if entry.job_variable else None
    return (*entry.cancel, job) if entry.cancel and job else ()


def packing_lines(allocations: Sequence[Allocation], nodes: Sequence[Node]) -> Iterator[str]:
    """Return one line per node of a round, with its members and their GPUs.

    Raises
    ------
    InfeasibleError
        If a member has GPUs that its nodes do not have, GPUs of another member, or not its stated number.
    """
    _refuse_misfits(allocations, nodes)
    by_node: dict[str, list[str]] = {}
    for allocation in allocations:
        for place in allocation.placement:
            gpus = ", ".join(map(str, place.gpus))
            by_node.setdefault(place.node, []).append(f"{allocation.member} on {gpus}{_spread(allocation)}")
    return (f"{node}: {'; '.join(members)}" for node, members in by_node.items())


def hop_lines(
    members: Sequence[str], homes: Mapping[str, Collection[int]], nodes: Sequence[Node]
) -> Iterator[str]:
    """Return one line per node of a round of hops, with its partitions and the GPUs that members visit.

    Parameters
    ----------
    homes : mapping of str to collection of int
        Numbers of the partitions of each node, by its name.
    """
    for node in nodes:
        partitions, gpus = (", ".join(map(str, sorted(each))) for each in (homes[node.name], node.gpus))
        yield f"{node.name}: {len(members)} members in turn on {gpus}, with the partitions {partitions}"


def _spread(allocation: Allocation) -> str:
    """Return the GPUs on each node of a member with several nodes, in words."""
    sizes = [len(place.gpus) for place in allocation.placement]
    if len(sizes) == 1:
        return ""
    each = f"x {sizes[0]}" if len(set(sizes)) == 1 else f"with {' + '.join(map(str, sizes))}"
    return f" ({len(sizes)} nodes {each} GPUs)"


def _refuse_misfits(allocations: Sequence[Allocation], nodes: Sequence[Node]) -> None:
    free = {node.name: set(node.gpus) for node in nodes}
    shared = set[NodeGpu]()
    for allocation in allocations:
        gpus = [(place.node, gpu) for place in allocation.placement for gpu in place.gpus]
        if len(gpus) != allocation.gpus or len(set(gpus)) != len(gpus):
            raise InfeasibleError(
                f"member {allocation.member} has {allocation.gpus} GPUs, but is placed on {len(set(gpus))}",
                "choose another --planner",
            )
        for place in allocation.placement:
            if place.seat and not shared.isdisjoint(gpus):
                continue
            shared |= {*gpus} if place.seat else set()
            left = free.get(place.node, set())
            if not left.issuperset(place.gpus):
                raise InfeasibleError(
                    f"member {allocation.member} is placed on GPUs {', '.join(map(str, place.gpus))} of"
                    f" {place.node}, which has {', '.join(map(str, sorted(left))) or 'none'} left",
                    "choose another --planner",
                )
            left.difference_update(place.gpus)
