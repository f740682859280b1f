"""Short job that tests a site: agents, ranks on all GPUs, speed of their links, MPI of node leaders."""

from __future__ import annotations

import math
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hetctl.app.plan.job_request import job_size
from hetctl.app.project import Project
from hetctl.app.run.submission import submit_measuring
from hetctl.cluster.batch.base import BatchSystem
from hetctl.cluster.launchers import LAUNCHERS
from hetctl.cluster.launchers.srun import in_rows
from hetctl.cluster.render import JobScript
from hetctl.model.check_result import CheckResult, CheckStatus, FaultDomain
from hetctl.model.errors import BatchSystemError
from hetctl.model.job import PROBE
from hetctl.model.serialization import encode
from hetctl.model.site import Site
from hetctl.model.training_settings import FRAMEWORKS
from hetctl.runtime.agent.binding import MIG
from hetctl.runtime.agent.gpus import parse_cpu_list
from hetctl.runtime.driver.probe import LEADERS_LOG, all_reduce_task, log_file
from hetctl.runtime.frameworks import NCCL
from hetctl.storage.atomic_io import make_private_folder, read_json, write_json
from hetctl.storage.paths import RunFolder
from hetctl.storage.probe_files import (
    END_FILE,
    GB,
    ORDER_FILE,
    REPAIR,
    AllReduce,
    ProbeEnd,
    ProbeOrder,
    RankReport,
    RankTime,
    StartCost,
    speed_of,
)

T = TypeVar("T")

WALL_S = 600
QUEUE_PATIENCE_S, POLL_S = 900.0, 1.0
TAIL = 5
FOLDERS = "doctor-"
"""Beginning of the names of the folders of tests."""


Probed = tuple[tuple[CheckResult, ...], tuple[AllReduce, ...]]
"""Results of the job, and the all-reduce speeds of the groups on each node, then of all GPUs."""


def probe(project: Project, site: Site, framework: str | None) -> Probed:
    """Run the job on two nodes, if the site has them, and wait for it.

    Parameters
    ----------
    framework : str or None
        Framework of the groups that all-reduce; None: the first one found on the nodes.

    Raises
    ------
    BatchSystemError
        If the batch system refuses it, or cannot be reached.
    """
    make_private_folder(project.home.path)
    batch = project.batch_system(site)
    _remove_leftovers(batch, project.home.path)
    folder = Path(tempfile.mkdtemp(prefix=FOLDERS, dir=project.home.path))
    job = ""
    try:
        nodes = min(2, site.nodes)
        script = JobScript(
            mode=PROBE,
            folder=RunFolder(folder),
            name=_name(folder),
            site=site,
            queue=job_size(site, nodes * site.gpus_per_node, WALL_S, None).queue,
            nodes=nodes,
            wall_s=WALL_S,
            home=project.home.path,
        )
        write_json(folder / ORDER_FILE, encode(ProbeOrder(replace(site, nodes=script.nodes), framework)))
        job = submit_measuring(project, batch, script)
        if _wait(batch, job):
            return _read(site, job, folder)
        found = f"job {job} was not over after {QUEUE_PATIENCE_S / 60:.0f} min, and is cancelled"
        return (CheckResult("job", CheckStatus.WARNING, found, "try again when the queue is shorter"),), ()
    finally:
        if job:
            batch.cancel([job])
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(batch: BatchSystem, home: Path) -> None:
    """Cancel the jobs of commands that were killed, and remove their folders."""
    # Younger jobs may belong to commands that still wait.
    oldest = time.time() - QUEUE_PATIENCE_S - WALL_S
    left = [folder for folder in home.glob(f"{FOLDERS}*") if folder.stat().st_mtime < oldest]
    batch.cancel([*batch.find([_name(folder) for folder in left]).values()])
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)


def _name(folder: Path) -> str:
    return f"hetctl-{folder.name}"


def _wait(batch: BatchSystem, job: str) -> bool:
    end = time.monotonic() + QUEUE_PATIENCE_S
    while time.monotonic() < end:
        if batch.statuses([job])[job].state.over:
            return True
        time.sleep(POLL_S)
    return False


def _read(site: Site, job: str, folder: Path) -> Probed:
    if not (folder / END_FILE).exists():
        log = RunFolder(folder).job(0).log
        fix = f"the nodes must see {folder.parent}, and Python there must import hetctl: {_tail(log)}"
        found = f"job {job} left nothing behind"
        return (CheckResult("job", CheckStatus.FAILED, found, fix, FaultDomain.BATCH_SYSTEM),), ()
    end = read_json(folder / END_FILE, ProbeEnd, REPAIR)
    ran = CheckResult(
        "job", CheckStatus.OK, f"job {job} ran on {', '.join(end.nodes)} and sees {folder.parent}"
    )
    reports = _decoded(RankReport, folder.glob("rank-*.json"))
    agents_said = _tail(log_file(folder, site.launch))
    launched = job_checks(site, end, reports, agents_said, _tail(folder / LEADERS_LOG))
    times = _decoded(RankTime, folder.glob("time-*.json"))
    ended_well = [group.name for group in end.groups if group.exit_code == 0]
    speeds = tuple(
        speed_of(end.framework or "", [rank for rank in times if rank.group == name]) for name in ended_well
    )
    error_tail = _tail(all_reduce_task(folder, end.groups[-1].name).log) if end.groups else ""
    return (ran, *launched, *link_checks(site, end, speeds, times, error_tail)), speeds


def _decoded(kind: type[T], paths: Iterable[Path]) -> list[T]:
    return [read_json(path, kind, REPAIR) for path in sorted(paths)]


def job_checks(
    site: Site, end: ProbeEnd, reports: Sequence[RankReport], agents_said: str, leaders_said: str
) -> Iterator[CheckResult]:
    """Yield results from the reports of ranks and node leaders.

    Parameters
    ----------
    agents_said, leaders_said : str
        Last lines of their logs.
    """
    yield launch_check(site, end, reports, agents_said)
    if reports and site.device == "gpu":
        yield gpu_check(site, reports)
        if site.gpu_cores:
            yield cores_check(site, reports)
    if costs := [report.start for report in reports if report.start]:
        yield start_check(site, len(end.nodes), costs)
    if len(end.nodes) > 1 and LAUNCHERS[site.launcher].leaders:
        yield mpi_check(site, end, leaders_said)


def launch_check(site: Site, end: ProbeEnd, reports: Sequence[RankReport], error_tail: str) -> CheckResult:
    """Check the start and end of every rank on the expected nodes."""
    per_node = Counter(report.node for report in reports)
    spread = ", ".join(f"{count} on {node}" for node, count in sorted(per_node.items())) or "none"
    found = f"{len(reports)} of {end.ranks} ranks, by agents that {site.launcher} started: {spread}"
    if end.exit_code == 0 and len(reports) == end.ranks:
        return CheckResult("launch", CheckStatus.OK, found)
    ending = "they hung" if end.exit_code is None else f"exit code {end.exit_code}"
    fix = f"check `launcher`, cores_per_node and memory_per_node: {error_tail}"
    return CheckResult("launch", CheckStatus.FAILED, f"{found}; {ending}", fix)


def start_check(site: Site, nodes: int, costs: Sequence[StartCost]) -> CheckResult:
    """Say from how many nodes on an archive of the environment starts agents sooner.

    An import takes its CPU time and waits for the file system, where the files of all nodes come one after
    another; unpacking takes each node as long on its own disk.
    """
    slowest = max(costs, key=lambda cost: cost.import_s)
    wait_s, unpack_s = slowest.import_s - slowest.cpu_s, max(cost.unpack_s for cost in costs)
    found = (
        f"the framework is imported in {slowest.import_s:.1f} s, {wait_s:.1f} of them waiting for files;"
        f" {slowest.files} files take {unpack_s:.1f} s to unpack in {site.stage_folder}"
    )
    if site.stage or wait_s * site.nodes <= unpack_s * nodes:
        return CheckResult("start", CheckStatus.OK, found)
    least = max(1, math.ceil(nodes * unpack_s / wait_s))
    fix = f"set `stage` in the site file for jobs of {least} nodes and more (docs/sites.md)"
    return CheckResult("start", CheckStatus.WARNING, found, fix)


def mpi_check(site: Site, end: ProbeEnd, error_tail: str) -> CheckResult:
    """Check the MPI world of the node leaders, which serve rounds in lockstep."""
    nodes = len(end.nodes)
    if end.leaders_exit_code == 0 and end.mpi_sizes == (nodes,) * nodes:
        return CheckResult("MPI", CheckStatus.OK, f"the leaders of the nodes are one world of {nodes}")
    if set(end.mpi_sizes) == {0}:
        fix = "lockstep on several nodes needs mpi4py: name its environment in `setup`"
        return CheckResult("MPI", CheckStatus.WARNING, "mpi4py cannot be imported on the nodes", fix)
    fix = LAUNCHERS[site.launcher].mpi_fix
    seen = ", ".join(map(str, sorted(end.mpi_sizes))) or f"none: {error_tail}"
    return CheckResult("MPI", CheckStatus.FAILED, f"leaders see worlds of {seen} instead of {nodes}", fix)


def gpu_check(site: Site, reports: Sequence[RankReport]) -> CheckResult:
    """Check that every rank sees all GPUs of its node, or one MIG device of its own.

    NCCL needs to see all of a node's GPUs to send over NVLink. Without the variable no GPU is hidden.
    """
    seen = "; ".join(sorted({f"{report.node}: {_visible(report)}" for report in reports}))
    found = f"{site.visible_devices} by node: {seen}"
    of_mig = [report for report in reports if (report.visible or "").startswith(MIG)]
    if of_mig and len({(report.node, report.visible) for report in of_mig}) < len(reports):
        fix = "each rank needs a MIG device of its own: request as many as gpus_per_node"
        return CheckResult("GPUs", CheckStatus.FAILED, found, fix)
    if of_mig:
        if site.has_mig:
            return CheckResult("GPUs", CheckStatus.OK, found)
        fix = "name the profile in gpu_type, such as A100-1g.10gb: members get one MIG device each"
        return CheckResult("GPUs", CheckStatus.WARNING, found, fix)
    here = Counter(report.node for report in reports)
    hidden = [r for r in reports if r.visible is not None and len(r.visible.split(",")) < here[r.node]]
    if hidden or any(report.visible == "" for report in reports):
        fix = "each rank must see all GPUs of its node: check gpus_per_node and visible_devices"
        return CheckResult("GPUs", CheckStatus.FAILED, found, fix)
    return CheckResult("GPUs", CheckStatus.OK, found)


def cores_check(site: Site, reports: Sequence[RankReport]) -> CheckResult:
    """Check that ranks run on the cores that the site file gives to their GPUs.

    They do not where NVML or AMD SMI names others, or jobs may not use these.
    """
    near = [set(parse_cpu_list(text)) for text in site.gpu_cores]
    wrong = sorted(
        f"{report.node} runs GPU {report.gpu} on {in_rows(report.cores)}, not on {site.gpu_cores[report.gpu]}"
        for report in reports
        if report.gpu < len(near) and not near[report.gpu].issuperset(report.cores)
    )
    if not wrong:
        return CheckResult("GPU cores", CheckStatus.OK, "each rank runs on the cores near its GPU")
    more = f"; {len(wrong) - 1} more" if len(wrong) > 1 else ""
    fix = "correct gpu_cores by `nvidia-smi topo -m` or `rocm-smi --showtoponuma`, or request all cores"
    return CheckResult("GPU cores", CheckStatus.FAILED, wrong[0] + more, fix)


def _visible(report: RankReport) -> str:
    return "all" if report.visible is None else report.visible or "none"


def _tail(log: Path) -> str:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        lines = []
    return " / ".join(lines[-TAIL:]) or "it has no output"


def probed(project: Project, site: Site, framework: str | None) -> Probed:
    """Run the probe job; a refusal by the batch system is a result, too."""
    try:
        return probe(project, site, framework)
    except BatchSystemError as error:
        found = CheckResult("job", CheckStatus.FAILED, error.message, error.hint, FaultDomain.BATCH_SYSTEM)
        return (found,), ()


SPEED, LINKS, NETWORK = "all-reduce", "GPU links", "network"
TCP_SHARE = 0.2
"""Share of a network's bandwidth that no all-reduce reaches over TCP, and any over its own protocol."""
MEBIBYTE = 2**20
NOT_DIRECT = (
    "ranks must see all GPUs of the node: check --gpu-bind and CUDA_VISIBLE_DEVICES, and NCCL_P2P_DISABLE"
)


def link_checks(
    site: Site, end: ProbeEnd, speeds: Sequence[AllReduce], ranks: Sequence[RankTime], error_tail: str
) -> Iterator[CheckResult]:
    """Yield results from all-reduces; none for a single GPU, for MIG devices, or if ranks did not start.

    Parameters
    ----------
    speeds, ranks
        Speeds and times of all groups that ended without error.
    error_tail : str
        Last lines of the log of the last group.
    """
    if end.exit_code != 0 or end.ranks == 1 or site.has_mig:
        return
    yield speed_check(end, speeds, error_tail)
    if speeds and site.device == "gpu":
        yield from network_checks(site, speeds)
        yield from detour_checks(speeds, ranks)


def speed_check(end: ProbeEnd, speeds: Sequence[AllReduce], error_tail: str) -> CheckResult:
    """Check the all-reduce speed of the groups."""
    if not end.groups:
        choices = " or ".join(" with ".join(entry.packages) for entry in FRAMEWORKS.values())
        found = "not measured: the Python of the nodes has no framework that trains on several GPUs"
        return CheckResult(SPEED, CheckStatus.WARNING, found, f"install {choices}, as docs/install.md says")
    seen = f"bus bandwidth {_listed(speeds)}" if speeds else "nothing measured"
    last = end.groups[-1]
    if last.exit_code != 0:
        ending = "hung" if last.exit_code is None else f"ended with exit code {last.exit_code}"
        found = f"{seen}; the {end.framework} group on {', '.join(last.nodes)} {ending}"
        return CheckResult(
            SPEED, CheckStatus.FAILED, found, f"check `network` and `environment`: {error_tail}"
        )
    size = speeds[0].bytes // MEBIBYTE
    return CheckResult(
        SPEED, CheckStatus.OK, f"{seen} ({end.framework} over {speeds[0].backend}, {size} MiB)"
    )


def network_checks(site: Site, speeds: Sequence[AllReduce]) -> Iterator[CheckResult]:
    """Yield a failure if NCCL's groups of several nodes are as slow as over TCP; nothing if unknown."""
    expected = site.network.bytes_per_s
    for between in (speed for speed in speeds if len(speed.nodes) > 1 and speed.backend == NCCL):
        if expected and between.bus_gb_per_s * GB < TCP_SHARE * expected:
            found = (
                f"{_number(between)} GB/s between nodes whose network has {expected / GB:.3g}:"
                " collectives go over TCP"
            )
            line = site.network.plugin
            fix = (
                f"add to `setup`: {line}"
                if line and line not in site.setup
                else "check `setup` and `environment`"
            )
            yield CheckResult(NETWORK, CheckStatus.FAILED, found, fix)


def detour_checks(speeds: Sequence[AllReduce], ranks: Sequence[RankTime]) -> Iterator[CheckResult]:
    """Warn about GPUs of a node that communicate through the node's memory."""
    first = speeds[0]
    if first.backend != NCCL:
        found = f"GPUs exchange through host memory ({_listed(speeds)}): {first.framework} goes over "
        yield CheckResult(
            LINKS, CheckStatus.WARNING, found + first.backend, FRAMEWORKS[first.framework].nccl_fix
        )
        return
    between = next((speed for speed in speeds if len(speed.nodes) > 1), None)
    for within in (speed for speed in speeds if speed is not between):
        here = [rank for rank in ranks if rank.node == within.nodes[0]]
        if found := _detour(within, between, here):
            yield CheckResult(LINKS, CheckStatus.WARNING, found, NOT_DIRECT)


def _detour(within: AllReduce, between: AllReduce | None, ranks: Sequence[RankTime]) -> str:
    """Return which GPUs of a node do not communicate directly, with the evidence; "" if none."""
    node = within.nodes[0]
    compared = f"{_number(within)} GB/s" + (f", and {_number(between)} between nodes" if between else "")
    if cut_off := sorted({rank.gpu for rank in ranks if rank.unreached}):
        numbers = ", ".join(map(str, cut_off))
        return f"GPUs {numbers} of node {node} exchange through host memory ({compared})"
    linked = all(rank.links for rank in ranks)
    # Over NVLink the GPUs of a node exchange faster than nodes do.
    if linked and between and within.bus_gb_per_s <= between.bus_gb_per_s:
        return f"GPUs of node {node} have NVLink, and exchange no faster than nodes do ({compared})"
    return ""


def _listed(speeds: Sequence[AllReduce]) -> str:
    places = (f"within {speed.nodes[0]}" if len(speed.nodes) == 1 else "between nodes" for speed in speeds)
    return ", ".join(f"{_number(speed)} GB/s {place}" for speed, place in zip(speeds, places, strict=True))


def _number(speed: AllReduce) -> str:
    return f"{speed.bus_gb_per_s:.3g}"
