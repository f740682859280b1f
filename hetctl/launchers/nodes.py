"""How a driver learns which nodes its job holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetctl.core.errors import BatchSystemError


@dataclass(frozen=True)
class _Source:
    """A variable of the job, the command that makes a list of it, and how many lines to drop."""

    variable: str
    script: str
    drop: int = 0


# The first line of LSF's file is the launch node, which runs the script but no steps.
SOURCES = {
    "slurm": _Source("SLURM_JOB_NODELIST", 'exec scontrol show hostnames "$SLURM_JOB_NODELIST"'),
    "lsf": _Source("LSB_DJOB_HOSTFILE", 'exec cat "$LSB_DJOB_HOSTFILE"', drop=1),
}


def nodes_command(batch_system: str) -> tuple[str, ...] | None:
    """Return what to run inside the job to list its nodes, or None if nothing need be run."""
    source = SOURCES.get(batch_system)
    return ("sh", "-c", source.script) if source else None


def parse_nodes(batch_system: str, environ: Mapping[str, str], output: str) -> tuple[str, ...]:
    """Return the names of a job's nodes, each once and in order.

    Parameters
    ----------
    environ : mapping
        The driver's environment.
    output : str
        Of the command that `nodes_command` gave.

    Raises
    ------
    BatchSystemError
        If this is not inside a job of that batch system, or no node is listed.
    """
    source = SOURCES.get(batch_system)
    if source is None:
        return ("localhost",)
    nodes = tuple(dict.fromkeys(output.split()[source.drop :]))
    if source.variable not in environ or not nodes:
        raise BatchSystemError(
            f"{source.variable}={environ.get(source.variable)!r} names no nodes",
            f"The driver must run inside a job of {batch_system}.",
        )
    return nodes
