"""``hetctl doctor``: check of a site from this machine, and with a short job on its nodes."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from hetctl.app.doctor.probe_job import probed
from hetctl.app.doctor.site_checks import (
    ability_check,
    command_checks,
    filesystem_of,
    place_check,
    podman_check,
    purge_check,
    run_command,
)
from hetctl.app.plan.job_request import job_size
from hetctl.app.project import Project
from hetctl.cluster.batch_systems import BATCH_SYSTEMS
from hetctl.model.check_result import CheckResult, CheckStatus, FaultDomain, first_failure
from hetctl.model.errors import BadInputError, BatchSystemError, HetctlError
from hetctl.model.interpreter import load_entry
from hetctl.model.site import Site
from hetctl.model.training_settings import FRAMEWORKS
from hetctl.model.values import dataclass
from hetctl.runtime.driver.broadcast import archive_of
from hetctl.storage.probe_files import AllReduce

MOUNTS = Path("/proc/self/mountinfo")
# find_spec imports nothing, which for TensorFlow would take seconds.
IMPORTABLE = """
import importlib.util, json, platform
found = {{name: importlib.util.find_spec(name) is not None for name in {names!r}}}
print(json.dumps({{"version": platform.python_version(), "found": found}}))
"""
SETUP_FAILED = "hetctl: command of setup failed: "
TELL_FAILURE = f'printf \'{SETUP_FAILED}%s (exit code %s)\\n\' "$BASH_COMMAND" "$?" >&2'
"""Trap of Bash for commands that fail: it prints them, and the shell goes on, as in a job script."""
ERRORS: dict[FaultDomain, type[HetctlError]] = {
    FaultDomain.SITE: BadInputError,
    FaultDomain.BATCH_SYSTEM: BatchSystemError,
}


@dataclass(frozen=True)
class Examination:
    """Results of the checks of a site, causes before consequences.

    Parameters
    ----------
    all_reduce : tuple of AllReduce
        All-reduce speeds of the groups that a job formed.
    """

    site: str
    checks: tuple[CheckResult, ...]
    all_reduce: tuple[AllReduce, ...] = ()

    @property
    def failure(self) -> HetctlError | None:
        """Error of the first failure, which may have caused the others; None if nothing failed."""
        failed = first_failure(self.checks)
        if failed is None:
            return None
        return ERRORS[failed.fault_domain](f"site {self.site}: {failed.name}: {failed.message}", failed.hint)


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
    checks = [CheckResult("site file", CheckStatus.OK, f"site {site.name} is well formed")]
    checks += command_checks(site, shutil.which)
    if site.container and site.container.engine == "podman" and shutil.which("podman"):
        driver = run_command(site, ["podman", "info", "--format={{.Store.GraphDriverName}}"]).stdout
        checks.append(podman_check(driver.strip()))
    of_batch_system = BATCH_SYSTEMS[site.batch_system].checks
    if of_batch_system and first_failure(tuple(checks)) is None:
        checks += load_entry(of_batch_system)(project, site)
    home = project.home.path
    checks.append(place_check(site, home, filesystem_of(home, MOUNTS.read_text(encoding="utf-8"))))
    checks.append(ability_check(home))
    if site.purge:
        checks.append(purge_check(site.purge, home))
    if site.stage:
        checks.append(stage_check(site, home))
    checks += python_checks(site)
    if not job or first_failure(tuple(checks)) is not None:
        return Examination(site.name, tuple(checks))
    of_job, all_reduce = probed(project, site, framework)
    return Examination(site.name, (*checks, *of_job), all_reduce)


def packages_of_nodes() -> dict[str, str]:
    """Return the packages that compute nodes may need, each with its use."""
    uses = {"hetctl": "nothing runs without it"}
    for entry in FRAMEWORKS.values():
        own, *of_groups = entry.packages
        uses.setdefault(own, f"members with framework {entry.name} need it")
        for package in of_groups:
            uses.setdefault(package, f"members with framework {entry.name} get one GPU each without it")
    return {**uses, "mpi4py": "lockstep on several nodes needs it"}


def stage_check(site: Site, home: Path) -> CheckResult:
    """Check that the archive of the agents' environment is there."""
    try:
        archive = archive_of(site, home / "runs" / "doctor")
    except BadInputError as error:
        return CheckResult("stage", CheckStatus.FAILED, error.message, error.hint)
    size = f"{archive.bytes / 2**20:.0f} MiB" if archive else "none"
    return CheckResult("stage", CheckStatus.OK, f"{site.stage} has {size}")


def _setup_checks(site: Site, errors: str) -> Iterator[CheckResult]:
    """Report the commands of `setup` that failed, by the errors of a shell that ran them all."""
    fix = "correct `setup` in the site file: jobs go on after a command that fails"
    failed, output = False, "no output"
    for line in errors.splitlines():
        if line.startswith(SETUP_FAILED):
            found = f"{line.removeprefix(SETUP_FAILED)}: {output}"
            yield CheckResult("setup", CheckStatus.WARNING, found, fix)
            failed, output = True, "no output"
        else:
            output = line
    if site.setup and not failed:
        yield CheckResult("setup", CheckStatus.OK, "its commands run without errors")


def python_checks(site: Site) -> Iterator[CheckResult]:
    """Check that the compute nodes' Python imports what members need, as far as visible from this machine."""
    python = site.python or sys.executable
    # Frameworks are in the image or archive.
    is_elsewhere = site.container or site.stage
    packages = {"hetctl": "nothing runs without it"} if is_elsewhere else packages_of_nodes()
    code = IMPORTABLE.format(names=list(packages))
    script = "\n".join(
        [f"trap {shlex.quote(TELL_FAILURE)} ERR", *site.shell_setup, "trap - ERR", 'exec "$@"']
    )
    answer = run_command(site, ["bash", "-c", script, "hetctl", python, "-c", code])
    yield from _setup_checks(site, answer.stderr)
    try:
        # Lines of `setup` may print before Python does.
        seen = json.loads(answer.stdout.strip().splitlines()[-1])
    except (IndexError, json.JSONDecodeError):
        found = f"{python} does not run here: {answer.error_tail}"
        fix = "correct `python` and `setup`; if it is on the compute nodes only, --job tries it"
        yield CheckResult("python", CheckStatus.WARNING, found, fix)
        return
    yield CheckResult("python", CheckStatus.OK, f"{python} is Python {seen['version']}")
    for name, use in packages.items():
        if seen["found"][name]:
            yield CheckResult(f"package {name}", CheckStatus.OK, "there")
        else:
            status = CheckStatus.FAILED if name == "hetctl" else CheckStatus.WARNING
            fix = f"{use}: install it for {python}, or name its module in `setup`"
            yield CheckResult(f"package {name}", status, "cannot be imported", fix)
