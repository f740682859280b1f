"""Batch systems: one entry each, with all differences outside of the clients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from hetctl.model.values import dataclass


@dataclass(frozen=True)
class NodeList:
    """Method by which a driver obtains the nodes of its job.

    Parameters
    ----------
    variable : str
        Environment variable that is set inside a job.
    script : str
        Script for ``sh -c`` that prints the names of the nodes, one per line.
    """

    variable: str
    script: str


@dataclass(frozen=True)
class BatchSystemEntry:
    """Properties of one batch system.

    Parameters
    ----------
    name : str
        Value of `batch_system` in a site file; its job script is the template ``<name>.sh.j2``.
    title : str
        Name in the batch system's own documentation.
    client : str
        ``module:class`` of its `hetctl.cluster.batch.base.BatchSystem`, imported on first use.
    submit : tuple of str
        Command that submits a script.
    checks : str or None
        ``module:function`` that queries it for ``hetctl doctor``, imported on first use; None: there is none.
    node_list : NodeList or None
        Source of the job's nodes; None: jobs run on the machine that submits them.
    job_variable : str or None
        Environment variable that has the number of the job inside it.
    cancel : tuple of str
        Command that ends the job whose number follows; empty: agents without a driver cannot end theirs.
    node_variable : str or None
        Environment variable that may contain the name of the node on which a process runs.
    device_variables : tuple of str
        Environment variables that show which GPUs a step has, beside those of the GPUs' makers.
    remote_shell : str or None
        Command that Open MPI uses like ssh to reach the nodes of a job; None: Open MPI needs or can use none.
    commands : tuple of str
        Commands that must be on the PATH to submit jobs.
    optional_commands : mapping of str to str
        Optional commands, with the information that they provide.
    time_unit_s : int
        Unit of its time limits in seconds.
    least_query_interval_s : float
        Least interval in seconds between queries while a run is watched.
    dry_run : tuple of str
        Command that tests a script from standard input, and prints the start that `parse_start` reads; empty:
        there is none.
    job_options : mapping of str to str
        Its options for jobs, up to their values, by the names that they have in `job_options` of a site file.
    """

    name: str
    title: str
    client: str
    submit: tuple[str, ...]
    checks: str | None = None
    node_list: NodeList | None = None
    job_variable: str | None = None
    cancel: tuple[str, ...] = ()
    node_variable: str | None = None
    device_variables: tuple[str, ...] = ()
    remote_shell: str | None = None
    commands: tuple[str, ...] = ()
    optional_commands: Mapping[str, str] = field(default_factory=dict)
    time_unit_s: int = 1
    least_query_interval_s: float = 10.0
    dry_run: tuple[str, ...] = ()
    job_options: Mapping[str, str] = field(default_factory=dict)

    @property
    def runs_here(self) -> bool:
        """True if jobs run on the machine that submits them."""
        return self.node_list is None


LOCAL = BatchSystemEntry(
    name="local",
    title="this machine",
    client="hetctl.cluster.batch.local:LocalBatch",
    submit=("bash",),
    checks="hetctl.app.doctor.site_checks:local_checks",
    least_query_interval_s=0.0,
)
SLURM = BatchSystemEntry(
    name="slurm",
    title="Slurm",
    client="hetctl.cluster.batch.slurm:SlurmBatch",
    submit=("sbatch", "--parsable"),
    checks="hetctl.app.doctor.site_checks:slurm_checks",
    # The variable is compressed, such as n[1-4,7]: Slurm itself expands it.
    node_list=NodeList("SLURM_JOB_NODELIST", 'exec scontrol show hostnames "$SLURM_JOB_NODELIST"'),
    job_variable="SLURM_JOB_ID",
    cancel=("scancel",),
    node_variable="SLURMD_NODENAME",
    device_variables=("SLURM_STEP_GPUS",),
    commands=("sbatch", "squeue", "scancel", "scontrol", "sinfo"),
    optional_commands={
        "sacct": "states of jobs that squeue no longer lists",
        "sacctmgr": "accounts and QOSes",
    },
    dry_run=("sbatch", "--test-only"),
    # https://slurm.schedmd.com/sbatch.html
    job_options={
        name: f"--{name.replace('_', '-')}="
        for name in (
            *("begin", "comment", "constraint", "licenses", "mail_type", "mail_user"),
            *("nodelist", "qos", "reservation"),
        )
    },
)
LSF = BatchSystemEntry(
    name="lsf",
    title="LSF",
    client="hetctl.cluster.batch.lsf:LsfBatch",
    submit=("bsub",),
    checks="hetctl.app.doctor.site_checks:lsf_checks",
    # The file has a line for each core; at sites with jsrun the launch node is the first.
    node_list=NodeList("LSB_DJOB_HOSTFILE", 'exec cat "$LSB_DJOB_HOSTFILE"'),
    job_variable="LSB_JOBID",
    cancel=("bkill",),
    remote_shell="blaunch",
    commands=("bsub", "bjobs", "bkill", "bqueues"),
    optional_commands={"bhist": "states of jobs that bjobs no longer lists"},
    time_unit_s=60,
    # https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=bsub-options
    job_options={
        "begin": "-b ",
        "comment": "-Jd ",
        "mail_user": "-u ",
        "qos": "-sla ",
        "reservation": "-U ",
    },
)
PBS = BatchSystemEntry(
    name="pbs",
    title="PBS",
    client="hetctl.cluster.batch.pbs:PbsBatch",
    submit=("qsub",),
    checks="hetctl.app.doctor.site_checks:pbs_checks",
    # The file has a line for each chunk, of which jobs have one on each node.
    node_list=NodeList("PBS_NODEFILE", 'exec cat "$PBS_NODEFILE"'),
    job_variable="PBS_JOBID",
    cancel=("qdel",),
    # pbs_tmrsh is no remote shell for Open MPI: a program gets the quotes around its words.
    commands=("qsub", "qstat", "qselect", "qdel"),
    # qsub(1B), as in https://github.com/openpbs/openpbs/blob/master/doc/man1/qsub.1B
    job_options={"begin": "-a ", "mail_type": "-m ", "mail_user": "-M "},
)
FLUX = BatchSystemEntry(
    name="flux",
    title="Flux",
    client="hetctl.cluster.batch.flux:FluxBatch",
    submit=("flux", "batch"),
    checks="hetctl.app.doctor.site_checks:flux_checks",
    node_list=NodeList(
        "FLUX_ENCLOSING_ID",
        "exec flux hostlist --expand $(flux resource list --states=all --no-header --format={nodelist})",
    ),
    job_variable="FLUX_ENCLOSING_ID",
    cancel=("flux", "--parent", "cancel"),
    commands=("flux",),
    # https://flux-framework.readthedocs.io/projects/flux-core/en/latest/man1/flux-batch.html
    job_options={
        "begin": "--begin-time=",
        "constraint": "--requires=",
        "nodelist": "--requires=hosts:",
    },
)
BATCH_SYSTEMS: dict[str, BatchSystemEntry] = {entry.name: entry for entry in (LOCAL, SLURM, LSF, PBS, FLUX)}
