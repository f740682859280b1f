"""Tasks of a rank in a job that tests a site: report GPU and cores, and time all-reduces."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

from hetctl.model.serialization import encode
from hetctl.runtime.agent.binding import GPU, Binding
from hetctl.runtime.agent.gpus import active_links, gpus_of_node, visible_gpus
from hetctl.runtime.agent.rank_template import import_times
from hetctl.runtime.data.partition_folder import path_on_node
from hetctl.runtime.frameworks import GLOO, NCCL, Framework, load_framework
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.group import CollectiveBackend, join_group
from hetctl.runtime.worker.messages import Assignment
from hetctl.storage.atomic_io import write_json
from hetctl.storage.probe_files import RankReport, RankTime, StartCost, read_order

SIZE_BYTES = {NCCL: 64 * 2**20, GLOO: 8 * 2**20}
"""Bytes per rank of an all-reduce: enough to saturate links of that kind, few enough for slow ones."""
BYTES_PER_NUMBER = 4
WARM_UPS, TIMED = 2, 9
SEED = 0
SAMPLE_FILES = 200
"""Files written to tell how long those of an environment would take."""
DIRECT_IS_OFF = "NCCL_P2P_DISABLE"
"""Variable that, set to 1, disables direct transfers between GPUs in NCCL."""


def report_node(assignment: Assignment, context: WorkerContext) -> None:
    """Connect to the other ranks, and write this rank's report to the job's folder."""
    folder = Path(assignment.task.folder)
    site = read_order(folder).site
    context.group = join_group(
        assignment.rank_info,
        CollectiveBackend(),
        lambda address: context.send(master=address),
        timeouts=site.timeouts,
    )
    binding = context.binding
    visible = os.environ.get(site.visible_devices) if site.device == GPU else None
    cores = tuple(sorted(os.sched_getaffinity(0)))
    start = _start_cost(path_on_node(site.stage_folder)) if binding.gpu == 0 else None
    report = RankReport(binding.node, binding.gpu, visible, cores, start)
    write_json(folder / f"rank-{assignment.rank_info.rank:04d}.json", encode(report))
    context.group.barrier_and_close()


def _start_cost(folder: Path) -> StartCost | None:
    """Return the costs of this node's start; None if nothing can be written to the folder."""
    # The lists of the packages have the sizes: no file is looked at.
    sizes = [file.size or 0 for package in distributions() for file in package.files or ()]
    content = bytes(sum(sizes) // max(1, len(sizes)))
    try:
        with tempfile.TemporaryDirectory(prefix="hetctl-", dir=folder) as name:
            began = time.monotonic()
            for number in range(SAMPLE_FILES):
                (Path(name) / str(number)).write_bytes(content)
            each_s = (time.monotonic() - began) / SAMPLE_FILES
    except OSError:
        return None
    return StartCost(import_times["wall"], import_times["cpu"], len(sizes), each_s * len(sizes))


def time_all_reduce(assignment: Assignment, context: WorkerContext) -> None:
    """Form a group as training does, time its all-reduces, and write this rank's result.

    Raises
    ------
    BadInputError
        If the framework, or a package for its groups, cannot be imported.
    """
    folder = Path(assignment.task.folder)
    order, binding = read_order(folder), context.binding
    assert order.framework is not None
    framework = load_framework(order.framework)
    framework.prepare(binding.cores, binding.device, SEED)
    site = order.site
    context.join(assignment.rank_info, site.network, site.timeouts, framework)
    backend = framework.backend()
    size = SIZE_BYTES[backend]
    seconds = _median_seconds(framework.all_reduce(size // BYTES_PER_NUMBER), context)
    on_gpu, gpus = backend == NCCL, visible_gpus(gpus_of_node(), os.environ)[binding.device or 0 :]
    found = RankTime(
        group=assignment.task.name,
        node=binding.node,
        gpu=binding.gpu,
        backend=backend,
        bytes=size,
        median_s=seconds,
        unreached=_unreached(framework, binding, order.site.gpus_per_node) if on_gpu else (),
        links=active_links(gpus[0]) if on_gpu and gpus else None,
    )
    write_json(folder / f"time-{assignment.task.name}-{assignment.rank_info.rank:04d}.json", encode(found))
    context.group.barrier_and_close()


def _median_seconds(all_reduce: Callable[[], None], context: WorkerContext) -> float:
    # NCCL opens its connections in the first operation that needs them.
    for _ in range(WARM_UPS):
        all_reduce()
    seconds = []
    for _ in range(TIMED):
        began = time.perf_counter()
        all_reduce()
        seconds.append(time.perf_counter() - began)
        context.heartbeat()
    return statistics.median(seconds)


def _unreached(framework: Framework, binding: Binding, devices: int) -> tuple[int, ...]:
    """Return the GPUs to which NCCL cannot send directly; a job holds all GPUs of a node, in order."""
    if binding.device is None:
        return ()
    if os.environ.get(DIRECT_IS_OFF) == "1":
        return tuple(other for other in range(devices) if other != binding.device)
    return framework.without_peer_access(binding.device, devices)
