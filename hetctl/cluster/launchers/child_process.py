"""Launcher for one machine: an agent is a child process of the driver."""

from __future__ import annotations

import os
from collections.abc import Sequence

from hetctl.cluster.launchers.launch_spec import (
    NODE_VARIABLE,
    Launcher,
    LaunchSpec,
    ResourceSet,
    common_environment,
)
from hetctl.model.errors import InfeasibleError
from hetctl.model.site import Site


def start_agents(site: Site, name: str, sets: Sequence[ResourceSet], command: tuple[str, ...]) -> LaunchSpec:
    """Start an agent on this machine that sees only the GPUs of its set, as other jobs may share the machine.

    Their numbers count the GPUs that the user's own value of the variable names, if there is one.

    Raises
    ------
    InfeasibleError
        If there are several sets, and therefore several nodes, or the user's value names too few GPUs.
    """
    if len(sets) != 1:
        raise InfeasibleError(
            f"{len(sets)} nodes; the launcher 'local' has one",
            "set nodes to 1 in the site file, or choose another launcher",
        )
    common = common_environment(site)
    variables = {**common, **variables_of(site, sets[0])}
    given = {**os.environ, **common}.get(site.visible_devices, "")
    if given and site.device == "gpu":
        entries = given.split(",")
        if max(sets[0].gpus) >= len(entries):
            raise InfeasibleError(
                f"{site.visible_devices}={given} leaves {len(entries)} of {site.gpus_per_node} GPUs",
                f"set gpus_per_node to {len(entries)} in the site file, or unset {site.visible_devices}",
            )
        variables[site.visible_devices] = ",".join(entries[gpu] for gpu in sets[0].gpus)
    return LaunchSpec(name, command, variables)


def variables_of(site: Site, held: ResourceSet) -> dict[str, str]:
    """Return the variables specific to a set: the name of its node, and its GPUs there."""
    return {NODE_VARIABLE: held.node, **visible_gpus(site, held.gpus)}


def visible_gpus(site: Site, gpus: Sequence[int]) -> dict[str, str]:
    """Return the variable that shows a process these GPUs of its node alone; none for slots."""
    return {site.visible_devices: ",".join(map(str, gpus))} if site.device == "gpu" else {}


LOCAL = Launcher("local", start_agents, starts_here=True, most_nodes=1, on_path=False)
