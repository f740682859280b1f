"""Launcher for Flux: a job of the batch job's own instance, with an agent for each resource set."""

from __future__ import annotations

from collections.abc import Sequence

from hetctl.cluster.launchers.launch_spec import (
    NODE_VARIABLE,
    Launcher,
    LaunchSpec,
    ResourceSet,
    common_environment,
    share_of,
)
from hetctl.cluster.launchers.srun import hostlist
from hetctl.model.site import NODES, Site

ALL_OF_A_NODE = (
    "--exclusive",
    *("--setopt=exit-timeout=none", "--setopt=cpu-affinity=off", "--setopt=gpu-affinity=off"),
)
"""Options of a step of whole nodes: it goes on when an agent is lost, and every agent sees all GPUs."""


def start_agents(site: Site, name: str, sets: Sequence[ResourceSet], command: tuple[str, ...]) -> LaunchSpec:
    """Start an agent for each set with ``flux run``; a member's step has only its own GPUs and cores.

    Flux names the node of each agent (``{{node.name}}``). It chooses a member's GPUs among those of a node;
    a step of whole nodes gets those that no other step has.
    Sources: flux-run(1), flux-shell(1).
    """
    share, count = share_of(site, sets), len(sets)
    hosts = f"--requires=hosts:{hostlist(each.node for each in sets)}"
    gpus = (f"--gpus-per-node={share.gpus}",) if site.requests_gpus else ()
    argv = (
        *("flux", "run", f"--job-name={name}", f"--nodes={count}", "--tasks-per-node=1"),
        *(ALL_OF_A_NODE if site.launch == NODES else (hosts, f"--cores={count * share.cores}", *gpus)),
        *("--unbuffered", *((f"--setopt=pmi={site.mpi}",) if site.mpi else ())),
        *("env", f"{NODE_VARIABLE}={{{{node.name}}}}", *command),
    )
    return LaunchSpec(name, argv, common_environment(site))


# It starts no leaders: the step of the agents holds the nodes.
FLUX = Launcher("flux", start_agents, mpi_fix="check `mpi`: `flux run -o pmi=..` has pmix and cray-pals")
