"""Launcher for HPE's PALS, as under PBS on Aurora and Polaris: an ``mpiexec`` with an agent on each node."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from hetctl.cluster.launchers.child_process import visible_gpus
from hetctl.cluster.launchers.launch_spec import Launcher, LaunchSpec, ResourceSet, common_environment
from hetctl.model.site import Site


def start_agents(site: Site, name: str, sets: Sequence[ResourceSet], command: tuple[str, ...]) -> LaunchSpec:
    """Start an agent for each set with ``mpiexec``, which confines it only by the variable of visible GPUs.

    Sets with the same GPUs are one program. Each is started by ``env``: PALS would copy a program to the
    nodes, and a copied Python does not find its packages. ``--no-abort-on-failure`` keeps the other agents
    running when one is lost; PALS leaves their binding to the agents.
    Sources: mpiexec(1) of PALS; ALCF's "Running Jobs on Aurora".
    """
    programs = [
        ("-n", str(len(list(alike))), *_started(visible_gpus(site, gpus), command))
        for gpus, alike in groupby(sets, key=lambda each: each.gpus)
    ]
    return _step(site, name, [each.node for each in sets], ("--no-abort-on-failure",), programs)


def start_leaders(site: Site, name: str, nodes: Sequence[str], command: tuple[str, ...]) -> LaunchSpec:
    """Start leaders with ``mpiexec``, independently of the ranks."""
    return _step(site, name, nodes, (), [("-n", str(len(nodes)), *_started({}, command))])


def _started(variables: dict[str, str], command: tuple[str, ...]) -> tuple[str, ...]:
    return ("env", *(f"{name}={value}" for name, value in variables.items()), *command)


def _step(
    site: Site, name: str, nodes: Sequence[str], options: tuple[str, ...], programs: Sequence[tuple[str, ...]]
) -> LaunchSpec:
    first, *others = programs
    argv = (
        *("mpiexec", "--ppn", "1", "--hosts", ",".join(nodes), "--cpu-bind", "none", "--no-transfer"),
        *("--line-buffer", *options, *((f"--pmi={site.mpi}",) if site.mpi else ())),
        *first,
        *(word for program in others for word in (":", *program)),
    )
    return LaunchSpec(name, argv, common_environment(site))


# The names of all nodes are one argument, which has at most 128 KiB: 3,000 names of 43 letters.
MPIEXEC = Launcher(
    "mpiexec", start_agents, start_leaders, most_nodes=3000, mpi_fix="check `mpi`, such as pmix or cray"
)
