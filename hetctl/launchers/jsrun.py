"""LSF with IBM's Job Step Manager: one ``jsrun`` with an agent on each node."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.core.site import Node, Site
from hetctl.launchers.step import AGENTS, Step, common_environment


def jsrun(site: Site, nodes: Sequence[Node], command: tuple[str, ...]) -> Step:
    """Start an agent on each node with ``jsrun``, in one resource set that is the whole node.

    No flag names the nodes (explicit resource files do, but were broken on Summit): a set of all of a
    node's GPUs fits on each node once. ``--bind=none``: the agent binds its ranks to cores.
    ``--exit_on_error=0`` lets the other agents go on when one is lost.
    Sources: OLCF's Summit user guide, "Job Launcher (jsrun)"; IBM's ``jsrun`` reference.
    """
    argv = (
        *("jsrun", f"--nrs={len(nodes)}", "--rs_per_host=1", "--tasks_per_rs=1"),
        f"--cpu_per_rs={site.gpus_per_node * site.cores_per_gpu}",
        f"--gpu_per_rs={site.gpus_per_node if site.device == 'gpu' else 0}",
        *("--launch_distribution=packed", "--bind=none", "--latency_priority=gpu-cpu", "--exit_on_error=0"),
        *command,
    )
    return Step(AGENTS, argv, common_environment(site))
