"""LSF with IBM's Job Step Manager: one ``jsrun`` per member."""

from __future__ import annotations

from hetctl.core.errors import InfeasibleError
from hetctl.core.plan import Allocation
from hetctl.core.site import Site
from hetctl.launchers.step import Step, common_environment


def jsrun(site: Site, allocation: Allocation, command: tuple[str, ...]) -> Step:
    """Start one rank per GPU with ``jsrun``, in one resource set per node.

    A resource set never spans nodes, so a set with all the GPUs that a member has on a node keeps these
    together, which separate sets of one GPU would not; and as a set is a control group, ranks in separate
    sets could not reach one another's GPUs (CUDA IPC). Every rank sees all GPUs of its set and takes the
    one of its local rank. All resource sets of one ``jsrun`` are alike, so a node cannot hold more ranks
    than another. No flag names the nodes (explicit resource files do, but were broken on Summit): JSM
    takes free ones, hence the placement is a promise about how many GPUs lie together, not about where.
    Sources: OLCF's Summit user guide, "Job Launcher (jsrun)"; IBM's ``jsrun`` reference.

    Raises
    ------
    InfeasibleError
        If the member's GPUs are spread unevenly over its nodes.
    """
    counts = [len(placement.gpus) for placement in allocation.placement]
    if len(set(counts)) > 1:
        raise InfeasibleError(
            f"{allocation.member}: {counts} GPUs on {len(counts)} nodes; jsrun needs equally many on each",
            f"Set max_gpus of {allocation.member} to {site.gpus_per_node} or a multiple of it.",
        )
    argv = (
        "jsrun",
        f"--nrs={len(counts)}",
        "--rs_per_host=1",
        f"--tasks_per_rs={counts[0]}",
        f"--cpu_per_rs={counts[0] * site.cores_per_gpu}",
        f"--gpu_per_rs={counts[0] if site.device == 'gpu' else 0}",
        "--launch_distribution=packed",
        f"--bind=packed:{site.cores_per_gpu}",
        "--latency_priority=gpu-cpu",
        "-X",
        "1",
        *command,
    )
    return Step(allocation.member, argv, common_environment(site))
