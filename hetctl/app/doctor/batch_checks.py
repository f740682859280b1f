"""Queries of batch systems by ``hetctl doctor``, named by the entries of `hetctl.cluster.batch_systems`."""

from __future__ import annotations

import getpass
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from hetctl.app.doctor.sample_jobs import cases_of, script_of
from hetctl.app.doctor.site_checks import account_check, node_check, own_gpu_check, queue_check
from hetctl.app.project import Project
from hetctl.cluster.batch import lsf_queries, slurm_queries
from hetctl.cluster.batch.command import Answer, CommandRunner
from hetctl.cluster.batch.queue_info import QueueFacts
from hetctl.cluster.render import render_job
from hetctl.model.check_result import CheckResult, CheckStatus, FaultDomain
from hetctl.model.errors import BatchSystemError
from hetctl.model.site import Site
from hetctl.runtime.agent.gpus import gpus_of_node


def local_checks(project: Project, site: Site) -> Iterator[CheckResult]:  # noqa: ARG001
    """Yield the results for local jobs, which are processes on this machine and its GPUs."""
    yield CheckResult("batch system", CheckStatus.OK, "jobs are local processes")
    yield from own_gpu_check(site, [gpu.name for gpu in gpus_of_node()])


def slurm_checks(project: Project, site: Site) -> Iterator[CheckResult]:
    """Query Slurm about itself, its queues, its nodes and the user's accounts, and test a script."""
    answers = _answers(site, ["scontrol", "ping"], "Slurm's controller answers")
    yield answers
    if answers.status is CheckStatus.FAILED:
        return
    qos = site.queue_option == "qos"
    ask, read = (
        (slurm_queries.qos_command, slurm_queries.parse_qos)
        if qos
        else (slurm_queries.partition_command, slurm_queries.parse_partition)
    )
    yield from _queues(site, ask, read)
    used = _used_queue(site)
    nodes = run_command(site, slurm_queries.nodes_command(None if qos else used))
    groups = slurm_queries.parse_nodes_of_partition(nodes.stdout)
    yield node_check(site, used, groups)
    yield _account(site)
    yield dry_run(project, site)


def lsf_checks(project: Project, site: Site) -> Iterator[CheckResult]:  # noqa: ARG001
    """Query LSF about itself and its queues; it cannot test a script without submitting it."""
    answers = _answers(site, ["bqueues"], "LSF answers")
    yield answers
    if answers.status is not CheckStatus.FAILED:
        yield from _queues(site, lsf_queries.queue_command, lsf_queries.parse_queue)


def dry_run(project: Project, site: Site) -> CheckResult:
    """Test the script of a job on one node with sbatch, without submitting it."""
    script = render_job(script_of(site, cases_of(site)[0]), project.template_folders)
    with tempfile.NamedTemporaryFile("w", prefix="hetctl-", suffix=".sh", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        answer = run_command(site, slurm_queries.dry_run_command(), Path(file.name))
    if answer.code != 0:
        fix = "correct in the site file what Slurm's message names, or ask your administrators"
        return CheckResult("dry run", CheckStatus.FAILED, answer.error_tail, fix, FaultDomain.BATCH_SYSTEM)
    return CheckResult("dry run", CheckStatus.OK, answer.error_tail.removeprefix("sbatch: "))


def _queues(
    site: Site,
    ask: Callable[[str], list[str]],
    read: Callable[[str, str], QueueFacts | None],
) -> Iterator[CheckResult]:
    for name in dict.fromkeys(queue.name for queue in site.queues):
        # A query that fails gives output without facts.
        facts = read(run_command(site, ask(name)).stdout, name)
        yield queue_check(site, name, name == _used_queue(site), facts)


def _used_queue(site: Site) -> str:
    return site.queue or site.queues[0].name


def _account(site: Site) -> CheckResult:
    if shutil.which("sacctmgr") is None:
        return CheckResult(
            "account", CheckStatus.WARNING, "not checked: there is no sacctmgr", "try a dry run"
        )
    answer = run_command(site, slurm_queries.accounts_command(getpass.getuser()))
    if answer.code != 0:
        found = f"not checked: {answer.error_tail}"
        return CheckResult("account", CheckStatus.WARNING, found, "a site without accounting has no accounts")
    return account_check(site.account, slurm_queries.parse_accounts(answer.stdout))


def _answers(site: Site, command: Sequence[str], well: str) -> CheckResult:
    try:
        answer = run_command(site, command)
    except BatchSystemError as error:
        return CheckResult(
            "batch system", CheckStatus.FAILED, error.message, error.hint, FaultDomain.BATCH_SYSTEM
        )
    # A controller that is down is named in the output, whatever the exit code is.
    if answer.code != 0 or " is DOWN" in answer.stdout:
        fix = "try again later, or ask your administrators"
        return CheckResult(
            "batch system", CheckStatus.FAILED, answer.error_tail, fix, FaultDomain.BATCH_SYSTEM
        )
    return CheckResult("batch system", CheckStatus.OK, well)


def run_command(site: Site, command: Sequence[str], stdin: Path | None = None) -> Answer:
    """Run a command within the site's time limit."""
    return CommandRunner(site.timeouts.command_s).run(command, stdin)
