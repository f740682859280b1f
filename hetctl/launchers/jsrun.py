"""LSF with IBM's Job Step Manager: one ``jsrun`` per member."""

from __future__ import annotations

from collections.abc import Iterator

from hetctl.core.plan import Allocation
from hetctl.core.site import Site
from hetctl.launchers.step import Step, common_environment


def jsrun(site: Site, allocation: Allocation, command: tuple[str, ...]) -> Step:
    """Start one rank per GPU with ``jsrun``, in one resource set per node where these are alike.

    A resource set never spans nodes, so a set with all the GPUs that a member has on a node keeps these
    together, which separate sets of one GPU would not; and as a set is a control group, ranks in separate
    sets cannot reach one another's GPUs (CUDA IPC). Every rank sees all GPUs of its set and takes the
    one of its local rank. All resource sets of one ``jsrun`` are alike, so where a node holds more ranks
    than another, each rank has a set of its own. No flag names the nodes (explicit resource files do, but
    were broken on Summit): JSM takes free ones, hence the placement is a promise about how many GPUs lie
    together, not about where.
    Sources: OLCF's Summit user guide, "Job Launcher (jsrun)"; IBM's ``jsrun`` reference.
    """
    counts = [len(placement.gpus) for placement in allocation.placement]
    even = len(set(counts)) == 1
    sets, ranks = (len(counts), counts[0]) if even else (allocation.gpus, 1)
    argv = (
        "jsrun",
        f"--nrs={sets}",
        f"--rs_per_host={1 if even else max(counts)}",
        f"--tasks_per_rs={ranks}",
        f"--cpu_per_rs={ranks * site.cores_per_gpu}",
        f"--gpu_per_rs={ranks if site.device == 'gpu' else 0}",
        "--launch_distribution=packed",
        f"--bind=packed:{site.cores_per_gpu}",
        "--latency_priority=gpu-cpu",
        "-X",
        "1",
        *command,
    )
    return Step(allocation.member, argv, common_environment(site))


def jsrun_erf(site: Site, allocation: Allocation, command: tuple[str, ...]) -> Step:
    """Start one rank per GPU with ``jsrun`` and an explicit resource file, just where it was placed.

    Each rank has its own cores, and sees all GPUs that the member has on its node, hence the resource
    sets overlap. The file's path is known only when the step starts, so a shell puts it in.
    Sources: IBM's "Explicit Resource File (ERF) format"; Horovod's ``horovod/runner/js_run.py``.
    """
    argv = (
        *("sh", "-c", 'exec jsrun --erf_input="$HETCTL_STEP_FILE" "$@"', "jsrun", "-X", "1"),
        *command,
    )
    return Step(allocation.member, argv, common_environment(site), tuple(_resource_file(site, allocation)))


def _resource_file(site: Site, allocation: Allocation) -> Iterator[str]:
    yield from ("overlapping_rs: allow", "oversubscribe_gpu: allow", "cpu_index_using: logical")
    rank, width = 0, site.cores_per_gpu
    for placement in allocation.placement:
        gpus = f" ; gpu: {{{','.join(map(str, placement.gpus))}}}" if site.device == "gpu" else ""
        for gpu in placement.gpus:
            cores = f"{gpu * width}-{(gpu + 1) * width - 1}"
            yield f"rank: {rank}: {{ hostname: {placement.node}; cpu: {{{cores}}}{gpus} }}"
            rank += 1
