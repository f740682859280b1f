"""The batch systems: one entry for each has all by which they differ, but for what its client does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class NodeList:
    """How a driver learns which nodes its job holds.

    Parameters
    ----------
    variable : str
        Set inside a job.
    script : str
        For ``sh -c``; prints the nodes' names, one in a line.
    """

    variable: str
    script: str


@dataclass(frozen=True)
class BatchSystemEntry:
    """One batch system.

    Parameters
    ----------
    name : str
        As `batch_system` of a site file; the template ``<name>.sh.j2`` is its job script.
    title : str
        As its own documentation writes it.
    client : str
        ``module:class`` of its `hetctl.cluster.batch.base.BatchSystem`, imported when it is first asked.
    submit : tuple of str
        Command that submits a script.
    node_list : NodeList or None
        None: jobs run on the machine that submits them.
    commands : tuple of str
        Without these on the PATH, nothing can be submitted.
    helpful : mapping of str to str
        Commands that it can do without, and what they would tell.
    time_unit_s : int
        Its limits are counted in.
    asked_every_s : float
        While a run is watched, it is not asked again sooner than that.
    """

    name: str
    title: str
    client: str
    submit: tuple[str, ...]
    node_list: NodeList | None = None
    commands: tuple[str, ...] = ()
    helpful: Mapping[str, str] = field(default_factory=dict)
    time_unit_s: int = 1
    asked_every_s: float = 10.0


LOCAL = BatchSystemEntry(
    name="local",
    title="this machine",
    client="hetctl.cluster.batch.local:LocalBatch",
    submit=("bash",),
    asked_every_s=0.0,
)
SLURM = BatchSystemEntry(
    name="slurm",
    title="Slurm",
    client="hetctl.cluster.batch.slurm:SlurmBatch",
    submit=("sbatch", "--parsable"),
    node_list=NodeList("SLURM_JOB_NODELIST", 'exec scontrol show hostnames "$SLURM_JOB_NODELIST"'),
    commands=("sbatch", "squeue", "scancel", "scontrol", "sinfo"),
    helpful={"sacct": "what became of jobs that squeue has forgotten", "sacctmgr": "accounts and QOSes"},
)
LSF = BatchSystemEntry(
    name="lsf",
    title="LSF",
    client="hetctl.cluster.batch.lsf:LsfBatch",
    submit=("bsub",),
    node_list=NodeList("LSB_DJOB_HOSTFILE", 'exec cat "$LSB_DJOB_HOSTFILE"'),
    commands=("bsub", "bjobs", "bkill", "bqueues"),
    helpful={"bhist": "what became of jobs that bjobs has forgotten"},
    time_unit_s=60,
)
BATCH_SYSTEMS: dict[str, BatchSystemEntry] = {entry.name: entry for entry in (LOCAL, SLURM, LSF)}
