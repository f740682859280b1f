"""A short job that tests a site: ranks on all its GPUs, their links, and node leaders in lockstep.

``python -m hetctl.runtime.driver.probe FOLDER`` is one of the leaders.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from hetctl.cluster.launchers import LAUNCHERS
from hetctl.cluster.launchers.container import node_command
from hetctl.cluster.launchers.nodes import node_named
from hetctl.model.plan import Placement
from hetctl.model.serialization import encode
from hetctl.model.site import NODES, Node, Site
from hetctl.runtime.driver.launched_steps import StepPool, nodes_of_this_job
from hetctl.runtime.driver.rank_pool import RankPool
from hetctl.runtime.frameworks import framework_of_groups
from hetctl.runtime.worker.messages import ALL_REDUCE, PROBE, TaskMessage
from hetctl.storage.atomic_io import make_private_folder, write_json
from hetctl.storage.paths import AgentFiles
from hetctl.storage.probe_files import END_FILE, ORDER_FILE, GroupEnd, ProbeEnd, ProbeOrder, read_order

NAME = "probe"
LEADERS_LOG = "logs/leaders.log"
START_S, ALL_REDUCE_S, LEADERS_S = 240.0, 150.0, 120.0
"""Time limits in seconds: start of ranks and their framework, all-reduces of all groups, leaders."""
POLL_S = 0.2


def log_file(folder: Path, launch: str) -> Path:
    """Return the log file of agents and launcher for a site's way to launch."""
    return AgentFiles.within(folder).log if launch == NODES else folder / "logs" / f"{NAME}.log"


def groups_on(nodes: Sequence[Node]) -> Iterator[tuple[str, tuple[Placement, ...]]]:
    """Yield, with names, a group for each node with several GPUs, and one of all GPUs of several nodes."""
    for node in nodes:
        if len(node.gpus) > 1:
            yield f"{ALL_REDUCE}-{node.name}", all_gpus([node])
    if len(nodes) > 1:
        yield ALL_REDUCE, all_gpus(nodes)


def all_gpus(nodes: Sequence[Node]) -> tuple[Placement, ...]:
    """Return all GPUs of some nodes."""
    return tuple(Placement(node.name, node.gpus) for node in nodes)


def all_reduce_task(folder: Path, group: str) -> TaskMessage:
    """Return a group's all-reduce task."""
    return TaskMessage(ALL_REDUCE, str(folder), group)


def run_probe_job(folder: Path) -> None:
    """Run an all-reduce on the GPUs of each node, then on all; start the leaders of several nodes."""
    order = read_order(folder)
    order = replace(order, framework=order.framework or framework_of_groups())
    write_json(folder / ORDER_FILE, encode(order))
    site, nodes = order.site, nodes_of_this_job(order.site)
    make_private_folder(folder / "logs")
    exit_code, groups = _start_ranks(order, nodes, folder)
    leaders_exit_code = _start_leaders(site, nodes, folder) if len(nodes) > 1 else None
    sizes = [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("leader-*.json")]
    end = ProbeEnd(
        nodes=tuple(node.name for node in nodes),
        ranks=sum(len(node.gpus) for node in nodes),
        exit_code=exit_code,
        leaders_exit_code=leaders_exit_code,
        mpi_sizes=tuple(sizes),
        framework=order.framework,
        groups=groups,
    )
    write_json(folder / END_FILE, encode(end))


def _start_ranks(
    order: ProbeOrder, nodes: Sequence[Node], folder: Path
) -> tuple[int | None, tuple[GroupEnd, ...]]:
    """Run a task on all GPUs, then, if it succeeds, all-reduces of groups; return the results."""
    frameworks = (order.framework,) if order.framework else ()
    rank_pool = RankPool(order.site, nodes, AgentFiles.within(folder), frameworks)
    try:
        until = time.monotonic() + START_S
        exit_code = _work(rank_pool, TaskMessage(PROBE, str(folder), NAME), all_gpus(nodes), until)
        # MIG devices do not reach each other.
        can_continue = exit_code == 0 and order.framework is not None and not order.site.has_mig
        groups = tuple(_all_reduce(rank_pool, nodes, folder)) if can_continue else ()
    finally:
        rank_pool.shutdown()
    return exit_code, groups


def _all_reduce(rank_pool: RankPool, nodes: Sequence[Node], folder: Path) -> Iterator[GroupEnd]:
    until = time.monotonic() + ALL_REDUCE_S
    for name, placement in groups_on(nodes):
        exit_code = _work(rank_pool, all_reduce_task(folder, name), placement, until)
        yield GroupEnd(name, tuple(place.node for place in placement), exit_code)
        if exit_code != 0:
            return


def _work(
    rank_pool: RankPool, task: TaskMessage, placement: tuple[Placement, ...], until: float
) -> int | None:
    """Run a task on a group; return its exit code, or None if it still runs at time `until`."""
    rank_pool.start(task, placement)
    while not (over := rank_pool.reap()) and time.monotonic() < until:
        rank_pool.wait(POLL_S)
    return over[0].exit_code if over else None


def _start_leaders(site: Site, nodes: Sequence[Node], folder: Path) -> int | None:
    start = LAUNCHERS[site.launcher].leaders
    if start is None:
        return None
    pool = StepPool()
    command = node_command(site, folder, sys.executable, "-m", "hetctl.runtime.driver.probe", str(folder))
    step = start(site, NAME, [node.name for node in nodes], command)
    pool.launch(step, folder / LEADERS_LOG)
    end = time.monotonic() + LEADERS_S
    while not (over := pool.reap()) and time.monotonic() < end:
        time.sleep(POLL_S)
    pool.end(POLL_S)
    return over.get(NAME)


def lead(folder: Path) -> None:
    """Write the size of this leader's MPI world to a file, 0 without MPI."""
    node = node_named(os.environ) or os.uname().nodename
    size = 0
    with suppress(ImportError, RuntimeError):
        from mpi4py import MPI

        size = int(MPI.COMM_WORLD.Get_size())
    write_json(folder / f"leader-{node}-{os.getpid()}.json", size)


if __name__ == "__main__":
    lead(Path(sys.argv[1]))
