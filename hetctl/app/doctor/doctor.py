"""``hetctl doctor``: check of a site from this machine, and with a short job on its nodes."""

from __future__ import annotations

import getpass
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hetctl.app.doctor.probe_job import probed
from hetctl.app.doctor.sample_jobs import cases_of, script_of
from hetctl.app.doctor.site_checks import (
    ability_finding,
    account_finding,
    command_findings,
    filesystem_of,
    node_finding,
    place_finding,
    queue_finding,
)
from hetctl.app.plan.job_request import job_size
from hetctl.app.project import Project
from hetctl.cluster.batch import queue_info
from hetctl.cluster.batch.command import Answer, CommandRunner
from hetctl.cluster.batch.queue_info import QueueFacts
from hetctl.cluster.render import render_job
from hetctl.model.check_result import CheckResult, CheckStatus, FaultDomain, first_failure
from hetctl.model.errors import BadInputError, BatchSystemError, HetctlError
from hetctl.model.site import Site
from hetctl.runtime.worker.all_reduce import AllReduce

MOUNTS = Path("/proc/self/mountinfo")
PACKAGES = {
    "hetctl": "nothing runs without it",
    "tensorflow": "members need it, unless their ensemble names another framework",
    "horovod": "TensorFlow members with more than one GPU need it",
    "mpi4py": "lockstep on several nodes needs it",
}
# find_spec imports nothing, which for TensorFlow would take seconds.
IMPORTABLE = """
import importlib.util, json, platform
found = {{name: importlib.util.find_spec(name) is not None for name in {names!r}}}
print(json.dumps({{"version": platform.python_version(), "found": found}}))
"""
ERRORS: dict[FaultDomain, type[HetctlError]] = {
    FaultDomain.SITE: BadInputError,
    FaultDomain.BATCH_SYSTEM: BatchSystemError,
}


@dataclass(frozen=True)
class Examination:
    """Findings about a site, causes before consequences.

    Parameters
    ----------
    all_reduce : tuple of AllReduce
        All-reduce speeds of the groups that a job formed.
    """

    site: str
    findings: tuple[CheckResult, ...]
    all_reduce: tuple[AllReduce, ...] = ()

    @property
    def failure(self) -> HetctlError | None:
        """Error of the first failure, which may have caused the others; None if nothing failed."""
        failed = first_failure(self.findings)
        if failed is None:
            return None
        return ERRORS[failed.blame](f"site {self.site}: {failed.check}: {failed.found}", failed.fix)


def examine(
    project: Project,
    name: str | None,
    account: str | None,
    queue: str | None,
    *,
    job: bool,
    framework: str | None = None,
) -> Examination:
    """Check a site; with `job`, run a job there and wait for it.

    Parameters
    ----------
    framework : str or None
        Framework of the groups that all-reduce in that job; None: the first one found on the nodes.

    Raises
    ------
    BadInputError
        If there is no such site, or its file is wrong.
    """
    site = project.site(name)
    site = replace(site, account=account or site.account, queue=queue or site.queue)
    job_size(site, None, None, None)
    findings = [CheckResult("site file", CheckStatus.OK, f"site {site.name} is well formed")]
    findings += command_findings(site, shutil.which)
    reachable = first_failure(tuple(findings)) is None
    if reachable:
        findings += BATCH_CHECKS.get(site.batch_system, no_checks)(project, site)
    home = project.home.path
    findings.append(place_finding(site, home, filesystem_of(home, MOUNTS.read_text(encoding="utf-8"))))
    findings.append(ability_finding(home))
    findings += python_findings(site)
    if not job or first_failure(tuple(findings)) is not None:
        return Examination(site.name, tuple(findings))
    found = probed(project, site, framework)
    return Examination(site.name, (*findings, *found.findings), found.all_reduce)


def local_checks(project: Project, site: Site) -> Iterator[CheckResult]:  # noqa: ARG001
    """Yield the finding for local jobs, which are processes."""
    yield CheckResult("batch system", CheckStatus.OK, "jobs are local processes")


def slurm_checks(project: Project, site: Site) -> Iterator[CheckResult]:
    """Query Slurm about itself, its queues, its nodes and the user's accounts, and test a script."""
    answers = _answers(site, ["scontrol", "ping"], "Slurm's controller answers")
    yield answers
    if answers.outcome is CheckStatus.FAILED:
        return
    qos = site.queue_option == "qos"
    ask, read = (
        (queue_info.qos_command, queue_info.parse_qos)
        if qos
        else (queue_info.partition_command, queue_info.parse_partition)
    )
    yield from _queues(site, ask, read)
    used = _used_queue(site)
    nodes = _run(site, queue_info.nodes_command(None if qos else used))
    groups = queue_info.parse_nodes_of_partition(nodes.stdout)
    yield node_finding(site, used, groups)
    yield _account(site)
    yield dry_run(project, site)


def lsf_checks(project: Project, site: Site) -> Iterator[CheckResult]:  # noqa: ARG001
    """Query LSF about itself and its queues; it cannot test a script without submitting it."""
    answers = _answers(site, ["bqueues"], "LSF answers")
    yield answers
    if answers.outcome is not CheckStatus.FAILED:
        yield from _queues(site, queue_info.lsf_queue_command, queue_info.parse_lsf_queue)


def no_checks(_project: Project, _site: Site) -> Iterator[CheckResult]:
    """Yield no findings, for a batch system without known queries."""
    yield from ()


BATCH_CHECKS: dict[str, Callable[[Project, Site], Iterator[CheckResult]]] = {
    "local": local_checks,
    "slurm": slurm_checks,
    "lsf": lsf_checks,
}


def dry_run(project: Project, site: Site) -> CheckResult:
    """Test the script of a job on one node with sbatch, without submitting it."""
    script = render_job(script_of(site, cases_of(site)[0]), project.template_folders)
    with tempfile.NamedTemporaryFile("w", prefix="hetctl-", suffix=".sh", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        answer = _run(site, queue_info.dry_run_command(), Path(file.name))
    if answer.code != 0:
        fix = "correct in the site file what Slurm's message names, or ask your administrators"
        return CheckResult("dry run", CheckStatus.FAILED, answer.error_tail, fix, FaultDomain.BATCH_SYSTEM)
    return CheckResult("dry run", CheckStatus.OK, answer.error_tail.removeprefix("sbatch: "))


def python_findings(site: Site) -> Iterator[CheckResult]:
    """Check that the compute nodes' Python imports what members need, as far as visible from this machine."""
    python = site.python or sys.executable
    code = IMPORTABLE.format(names=list(PACKAGES))
    script = "\n".join([*site.setup, 'exec "$@"'])
    answer = _run(site, ["bash", "-c", script, "hetctl", python, "-c", code])
    try:
        # Lines of `setup` may print before Python does.
        seen = json.loads(answer.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        found = f"{python} does not run here: {answer.error_tail}"
        fix = "correct `python` and `setup`; if it is on the compute nodes only, --job tries it"
        yield CheckResult("python", CheckStatus.WARNING, found, fix)
        return
    yield CheckResult("python", CheckStatus.OK, f"{python} is Python {seen['version']}")
    for name, use in PACKAGES.items():
        if seen["found"][name]:
            yield CheckResult(f"package {name}", CheckStatus.OK, "there")
        else:
            outcome = CheckStatus.FAILED if name == "hetctl" else CheckStatus.WARNING
            fix = f"{use}: install it for {python}, or name its module in `setup`"
            yield CheckResult(f"package {name}", outcome, "cannot be imported", fix)


def _queues(
    site: Site,
    ask: Callable[[str], list[str]],
    read: Callable[[str, str], QueueFacts | None],
) -> Iterator[CheckResult]:
    for name in dict.fromkeys(queue.name for queue in site.queues):
        # A query that fails gives output without facts.
        yield queue_finding(site, name, name == _used_queue(site), read(_run(site, ask(name)).stdout, name))


def _used_queue(site: Site) -> str:
    return site.queue or site.queues[0].name


def _account(site: Site) -> CheckResult:
    if shutil.which("sacctmgr") is None:
        return CheckResult(
            "account", CheckStatus.WARNING, "not checked: there is no sacctmgr", "try a dry run"
        )
    answer = _run(site, queue_info.accounts_command(getpass.getuser()))
    if answer.code != 0:
        found = f"not checked: {answer.error_tail}"
        return CheckResult("account", CheckStatus.WARNING, found, "a site without accounting has no accounts")
    return account_finding(site.account, queue_info.parse_accounts(answer.stdout))


def _answers(site: Site, command: Sequence[str], well: str) -> CheckResult:
    try:
        answer = _run(site, command)
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


def _run(site: Site, command: Sequence[str], stdin: Path | None = None) -> Answer:
    """Run a command within the site's time limit."""
    return CommandRunner(site.timeouts.command_s).run(command, stdin)
