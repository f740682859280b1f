"""How large and how long a job is: what the user asks for, within what the queues allow."""

from __future__ import annotations

from dataclasses import dataclass

from hetctl.core.errors import BadInputError, InfeasibleError
from hetctl.core.site import Queue, Site
from hetctl.files.durations import format_duration

DEFAULT_WALL_S = 2 * 3600
SHORTEST_GRACE_S, LONGEST_GRACE_S = 10, 300
GRACE_SHARE = 0.05
DEVICES = {"gpu": "GPUs", "slot": "slots"}


@dataclass(frozen=True)
class JobSize:
    """What is asked of the batch system for each job.

    Parameters
    ----------
    grace_s : int
        Trainers checkpoint this long before the limit.
    """

    queue: Queue
    gpus: int
    nodes: int
    wall_s: int
    grace_s: int


def job_size(site: Site, gpus: int | None, wall_s: int | None, queue_name: str | None) -> JobSize:
    """Choose the first queue that takes the job; without wishes, the whole site for two hours at most.

    Raises
    ------
    BadInputError
        If the site has no such queue.
    InfeasibleError
        If no queue takes so many nodes for so long.
    """
    queues = _queues_named(site, queue_name or site.queue)
    wanted = gpus or _default_gpus(site, queues)
    if wanted > site.gpus:
        raise InfeasibleError(
            f"{wanted} {DEVICES[site.device]} are more than the {site.gpus} of site {site.name}",
            "ask for fewer with --gpus, or choose another site",
        )
    nodes = -(-wanted // site.gpus_per_node)
    for queue in queues:
        wall = wall_s or min(DEFAULT_WALL_S, queue.max_wall_s or DEFAULT_WALL_S)
        if nodes <= (queue.max_nodes or nodes) and wall <= (queue.max_wall_s or wall):
            return JobSize(queue, wanted, nodes, wall, _grace(wall))
    limits = "; ".join(_describe(queue) for queue in queues)
    raise InfeasibleError(
        f"no queue of site {site.name} takes {nodes} nodes for"
        f" {format_duration(wall_s or DEFAULT_WALL_S)}: {limits}",
        "ask for less with --gpus or --time, or choose a queue with --queue",
    )


def _queues_named(site: Site, name: str | None) -> tuple[Queue, ...]:
    found = tuple(queue for queue in site.queues if name in (None, queue.name))
    if not found:
        names = ", ".join(dict.fromkeys(queue.name for queue in site.queues))
        raise BadInputError(f"site {site.name} has no queue {name!r}", f"choose one of: {names}")
    return found


def _default_gpus(site: Site, queues: tuple[Queue, ...]) -> int:
    return min(site.nodes, queues[0].max_nodes or site.nodes) * site.gpus_per_node


def _grace(wall_s: int) -> int:
    return max(SHORTEST_GRACE_S, min(LONGEST_GRACE_S, round(GRACE_SHARE * wall_s)))


def _describe(queue: Queue) -> str:
    nodes = f"{queue.max_nodes} nodes" if queue.max_nodes else "any nodes"
    time = format_duration(queue.max_wall_s) if queue.max_wall_s else "any time"
    return f"{queue.name} takes {nodes} for {time}"
