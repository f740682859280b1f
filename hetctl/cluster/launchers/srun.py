"""Launcher for Slurm: a job step with an agent for each resource set, and one with the leaders of nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from hetctl.cluster.launchers.launch_spec import (
    Launcher,
    LaunchSpec,
    ResourceSet,
    common_environment,
    share_of,
)
from hetctl.model.events import ExitReason
from hetctl.model.site import LEFT_OUT, MEMBERS, NODES, Site

# Slurm 22.05, 4 nodes, one without power: the agents of the other three went on, the job stayed RUNNING, and
# srun exited with 0 when they had ended.
BY_LAUNCH = {
    NODES: ("--no-kill", "--kill-on-bad-exit=0", "--wait=0"),
    MEMBERS: ("--exact", "--kill-on-bad-exit=1"),
}
"""Options by mode: a step of all nodes survives the loss of a node or agent; a member's step ends with it."""

OUT_OF_MEMORY_CODE = 253
"""Exit code for a step that ran out of memory."""
MESSAGES = (
    ("DUE TO TIME LIMIT", ExitReason.TIME),
    ("DUE TO PREEMPTION", ExitReason.PREEMPTED),
    ("DUE TO JOB REQUEUE", ExitReason.CANCELLED),
    # If a job ends with one of its nodes, the steps on its other nodes print this.
    ("DUE TO NODE FAILURE", ExitReason.CANCELLED),
    (r"(already completing or completed|Job \d+ has expired|Invalid job id specified)", ExitReason.CANCELLED),
    ("Job is pending execution", ExitReason.CANCELLED),
    ("(Node fail|Required node not available)", ExitReason.NODE_FAILURE),
    # Steps ask only for what was reserved, so one of the nodes must be lost.
    ("Requested node configuration is not available", ExitReason.NODE_FAILURE),
    (r"(oom.?kill|Out Of Memory|exceeded memory limit)", ExitReason.OUT_OF_MEMORY),
    ("(Unable to contact slurm controller|Socket timed out|connect failure)", ExitReason.NOT_LAUNCHED),
)
"""Messages of ``srun``, and of Slurm's daemon on a node, in the output of a step."""


NUMBERED = re.compile(r"(.*\D)(\d{1,9})", re.ASCII)


def hostlist(nodes: Iterable[str]) -> str:
    """Return the names of nodes in Slurm's notation: ``n[1-4,7]``; an argument may have at most 128 KiB."""
    parts: list[str] = []
    numbers: dict[tuple[str, int], list[int]] = {}
    for node in dict.fromkeys(nodes):
        if match := NUMBERED.fullmatch(node):
            numbers.setdefault((match[1], len(match[2])), []).append(int(match[2]))
        else:
            parts.append(node)
    for (prefix, width), found in numbers.items():
        text = in_rows(found, width)
        parts.append(f"{prefix}[{text}]" if len(found) > 1 else f"{prefix}{text}")
    return ",".join(parts)


def in_rows(numbers: Iterable[int], width: int = 0) -> str:
    """Return numbers such as ``0-3,8,10-11``, each with so many digits at least."""
    # Numbers in a row have equal differences from their positions.
    rows = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ends = [(row[0][1], row[-1][1]) for row in (list(group) for _, group in rows)]
    return ",".join(f"{a:0{width}}" if a == b else f"{a:0{width}}-{b:0{width}}" for a, b in ends)


def start_agents(site: Site, name: str, sets: Sequence[ResourceSet], command: tuple[str, ...]) -> LaunchSpec:
    """Start an agent for each set with ``srun``; it holds the set's GPUs, cores and memory.

    All agents share one step, because on Slingshot each step has its own network identifier (VNI), and
    because a step's control group hides the other GPUs of a node from NCCL. ``--gpu-bind=none``: each
    process sees all GPUs of the step. ``--mem=0`` requests all memory of the job on the node. A member's
    step takes only the resources that it requests (``--exact``), its memory included; otherwise no other
    step could run beside it. Slurm chooses its GPUs among those of a node.
    Source: srun(1).
    """
    share = share_of(site, sets)
    argv = (
        *("srun", f"--job-name={name}", *BY_LAUNCH[site.launch]),
        *(f"--nodes={len(sets)}", f"--ntasks={len(sets)}", "--ntasks-per-node=1"),
        *(f"--nodelist={hostlist(each.node for each in sets)}", f"--cpus-per-task={share.cores}"),
        # A control group for each rank costs NCCL its paths over NVLink (NVIDIA/nccl#1066,
        # #129; open-mpi/ompi#11949).
        *((f"--gpus-per-node={share.gpus}", "--gpu-bind=none") if site.requests_gpus else ()),
        *((f"--mem={share.memory_mib}",) if site.request.memory != LEFT_OUT else ()),
        "--unbuffered",
        # On Slingshot --mpi=none would lose the credentials of the step (openpmix/prrte#2004).
        *((f"--mpi={site.mpi}",) if site.mpi else ()),
        *command,
    )
    return LaunchSpec(name, argv, common_environment(site))


def start_leaders(site: Site, name: str, nodes: Sequence[str], command: tuple[str, ...]) -> LaunchSpec:
    """Start leaders with ``srun`` on cores and memory that are also the agents', and without GPUs.

    ``--overlap`` lets this step begin although the agents' step holds the whole job.
    Sources: Slurm's srun(1), ``--overlap`` and ``--gres=none``.
    """
    argv = (
        # --overlap is for steps without GPUs only: four steps with it all got GPU 0.
        *("srun", "--overlap", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"),
        f"--cpus-per-task={site.requested_cores}",
        *(("--gres=none",) if site.request.gpus != LEFT_OUT else ()),
        *(
            f"--nodelist={hostlist(nodes)}",
            "--kill-on-bad-exit=1",
            "--unbuffered",
            *((f"--mpi={site.mpi}",) if site.mpi else ()),
        ),
        *command,
    )
    return LaunchSpec(name, argv, common_environment(site))


SRUN = Launcher(
    "srun",
    start_agents,
    start_leaders,
    mpi_fix="check `mpi`: `srun --mpi=list` shows what there is",
    exit_lines=r"^(?:\S+: )?(?:srun|slurmstepd)\S*: .*",
    exit_messages=MESSAGES,
    exit_codes={OUT_OF_MEMORY_CODE: ExitReason.OUT_OF_MEMORY},
    broadcast=("sbcast", "--force"),
)
