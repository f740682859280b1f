"""Launcher for Flux: a job of the batch job's own instance, with an agent for each resource set."""

from __future__ import annotations

import shlex
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
from hetctl.model.events import ExitReason
from hetctl.model.site import NODES, Site

ALL_OF_A_NODE = (
    "--exclusive",
    *("--setopt=exit-timeout=none", "--setopt=cpu-affinity=off", "--setopt=gpu-affinity=off"),
)
"""Options of a step of whole nodes: it goes on when an agent is lost, and every agent sees all GPUs."""

ONE_CRITICAL = """\
import os, flux, flux.job
asked = {"id": int(flux.job.JobID(os.environ["FLUX_JOB_ID"])), "ranks": "0"}
flux.Flux().rpc("job-exec.critical-ranks", asked).get()
"""
SURVIVING = f'[ "$FLUX_TASK_RANK" != 0 ] || flux python -c {shlex.quote(ONE_CRITICAL)}; exec "$@"'
"""Script of each agent of whole nodes: the loss of a node, save the driver's, does not end the step.

flux-core 0.80, 2 nodes, one without power: by default, where all ranks are critical, the step was ended. The
broker of a batch job asks its parent for the same by this request.
"""
# Steps ask only for what the job has: if that is not there, a node must be lost.
MESSAGES = (("(node failure on|unsatisfiable request)", ExitReason.NODE_FAILURE),)
"""Exceptions of Flux in the output of a step."""


def start_agents(site: Site, name: str, sets: Sequence[ResourceSet], command: tuple[str, ...]) -> LaunchSpec:
    """Start an agent for each set with ``flux run``; a member's step has only its own GPUs and cores.

    Flux names the node of each agent (``{{node.name}}``). It chooses a member's GPUs among those of a node;
    a step of whole nodes gets those that no other step has.
    Sources: flux-run(1), flux-shell(1), flux-broker-attributes(7).
    """
    share, count = share_of(site, sets), len(sets)
    hosts = f"--requires=hosts:{hostlist(each.node for each in sets)}"
    gpus = (f"--gpus-per-node={share.gpus}",) if site.requests_gpus else ()
    surviving = ("sh", "-c", SURVIVING, "agent") if site.launch == NODES and count > 1 else ()
    argv = (
        *("flux", "run", f"--job-name={name}", f"--nodes={count}", "--tasks-per-node=1"),
        *(ALL_OF_A_NODE if site.launch == NODES else (hosts, f"--cores={count * share.cores}", *gpus)),
        *("--unbuffered", *((f"--setopt=pmi={site.mpi}",) if site.mpi else ())),
        *("env", f"{NODE_VARIABLE}={{{{node.name}}}}", *surviving, *command),
    )
    return LaunchSpec(name, argv, common_environment(site))


# It starts no leaders: the step of the agents holds the nodes.
FLUX = Launcher(
    "flux",
    start_agents,
    mpi_fix="check `mpi`: `flux run -o pmi=..` has pmix and cray-pals",
    exit_lines=r"^[\d.]+s: (?:job\.exception|flux-shell)\S* .*",
    exit_messages=MESSAGES,
)
