"""Launcher for LSF with IBM's Job Step Manager: a ``jsrun`` with an agent in each resource set."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.cluster.launchers.launch_spec import (
    Launcher,
    LaunchSpec,
    ResourceSet,
    common_environment,
    share_of,
)
from hetctl.model.site import MEMBERS, NODES, Site

BIND = {NODES: "none", MEMBERS: "rs"}
"""Binding by mode: a member's agent is bound to the cores of its set; any agent binds its ranks itself."""


def start_agents(site: Site, name: str, sets: Sequence[ResourceSet], command: tuple[str, ...]) -> LaunchSpec:
    """Start an agent for each set with ``jsrun``.

    No flag names the nodes (explicit resource files do, but did not work on Summit): a set of all GPUs of a
    node fits on each node once; jsrun chooses the nodes of smaller sets.
    A resource set never spans nodes, and ``--rs_per_host=1`` puts each on a separate node.
    ``--exit_on_error=0`` keeps the other agents running when one is lost.
    Sources: OLCF's Summit user guide, "Job Launcher (jsrun)"; IBM's ``jsrun`` reference.
    """
    share = share_of(site, sets)
    argv = (
        *("jsrun", f"--nrs={len(sets)}", "--rs_per_host=1", "--tasks_per_rs=1"),
        *(f"--cpu_per_rs={share.cores}", f"--gpu_per_rs={share.gpus if site.device == 'gpu' else 0}"),
        *("--launch_distribution=packed", f"--bind={BIND[site.launch]}", "--latency_priority=gpu-cpu"),
        *("--exit_on_error=0", *command),
    )
    return LaunchSpec(name, argv, common_environment(site))


# It starts no leaders: resource sets never share cores.
JSRUN = Launcher(
    name="jsrun",
    agents=start_agents,
    chooses_nodes=True,
    script_nodes=1,
    whole_nodes=True,
    forbidden_variables=("TMPDIR",),
)
