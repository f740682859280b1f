"""The agents of a job: one on each node, all started by one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hetctl.core.plan import Allocation

Gpu = tuple[str, int]
"""A node and the number of one of its GPUs."""

DRIVER_FILE = "driver.json"
"""Address of the driver for its agents; in the folder of the job's first round, or of its profiling job."""
SLURM_JOB = "SLURM_JOB_ID"


def gpus_of(allocation: Allocation) -> tuple[Gpu, ...]:
    """Return the GPUs of a group, in the order of its ranks."""
    return tuple((place.node, gpu) for place in allocation.placement for gpu in place.gpus)


def agent_command(folder: Path, framework: str | None, threads: int, python: str) -> tuple[str, ...]:
    """Return the command line of an agent.

    Parameters
    ----------
    folder : Path
        Holds `DRIVER_FILE`.
    framework : str or None
        Imported once on each node, before ranks are forked.
    threads : int
        Of the numerical libraries in each rank.
    """
    options = ("--framework", framework) if framework else ()
    driver_file = str(folder / DRIVER_FILE)
    return (python, "-m", "hetctl.runtime.agent", driver_file, "--threads", str(threads), *options)


def cancel_command(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the command that ends a job whose script is gone, or None where the batch system ends it itself.

    A job of ``sbatch --no-kill`` outlives the node of its script, and would hold the others until its limit.

    Parameters
    ----------
    environ : mapping
        Of a process in the job.
    """
    return ("scancel", environ[SLURM_JOB]) if SLURM_JOB in environ else None


def packing_lines(allocations: Sequence[Allocation]) -> Iterator[str]:
    """Yield a line for each node of a round: its members and their GPUs."""
    by_node: dict[str, list[str]] = {}
    for allocation in allocations:
        for place in allocation.placement:
            gpus = ", ".join(map(str, place.gpus))
            part = f" ({len(place.gpus)} of its {allocation.gpus})" if len(allocation.placement) > 1 else ""
            by_node.setdefault(place.node, []).append(f"{allocation.member} on {gpus}{part}")
    return (f"{node}: {'; '.join(members)}" for node, members in by_node.items())
