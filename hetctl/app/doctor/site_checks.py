"""Checks of a site by this machine and by queries of its batch system, and of the project folder."""

from __future__ import annotations

import fcntl
import getpass
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from hetctl.app.doctor.sample_jobs import cases_of, script_of
from hetctl.app.project import Project
from hetctl.cluster.batch import queues
from hetctl.cluster.batch.command import Answer, CommandRunner
from hetctl.cluster.batch.queues import NodeClass, QueueFacts
from hetctl.cluster.batch_systems import BATCH_SYSTEMS
from hetctl.cluster.launchers import LAUNCHERS
from hetctl.cluster.launchers.container import ENGINES
from hetctl.cluster.render import render_job
from hetctl.inputs.quantities import format_duration
from hetctl.model.check_result import CheckResult, CheckStatus, FaultDomain
from hetctl.model.errors import BatchSystemError
from hetctl.model.site import Purge, Queue, Site
from hetctl.runtime.agent.gpus import gpus_of_node

MEBIBYTE = 2**20

SHARED = (
    "afs",
    "beegfs",
    "ceph",
    "cifs",
    "fuse.",
    "glusterfs",
    "gpfs",
    "lustre",
    "nfs",
    "panfs",
    "wekafs",
    "9p",
)
"""Prefixes of the names of file systems that several machines share."""
FOLDER = "shared folder"
ABILITIES = "file system"


def command_checks(site: Site, which: Callable[[str], str | None]) -> Iterator[CheckResult]:
    """Check the commands of the batch system."""
    entry = BATCH_SYSTEMS[site.batch_system]
    missing = [name for name in entry.commands if not which(name)]
    if missing:
        found = f"not on the PATH of this machine: {', '.join(missing)}"
        fix = f"log in to the machine of site {site.name}, or load its {entry.title} module"
        yield CheckResult("commands", CheckStatus.FAILED, found, fix, FaultDomain.BATCH_SYSTEM)
    elif entry.commands:
        yield CheckResult("commands", CheckStatus.OK, ", ".join(entry.commands))
    for name, use in entry.optional_commands.items():
        if not which(name):
            yield CheckResult(f"command {name}", CheckStatus.WARNING, "not on the PATH", f"it reports {use}")
    if LAUNCHERS[site.launcher].on_path:
        yield _program_check("launcher", site.launcher, which)
    for program in ENGINES[site.container.engine].command[:1] if site.container else ():
        yield _program_check("container", program, which)


def _program_check(name: str, program: str, which: Callable[[str], str | None]) -> CheckResult:
    if found := which(program):
        return CheckResult(name, CheckStatus.OK, f"{program}: {found}")
    fix = "jobs need it on the compute nodes; name a module in `setup`, and try it with --job"
    return CheckResult(name, CheckStatus.WARNING, f"{program} is not on the PATH here", fix)


def podman_check(driver: str) -> CheckResult:
    """Judge Podman's storage driver, by its name."""
    found = f"podman stores images by {driver or 'an unknown driver'}"
    if driver != "vfs":
        return CheckResult("image storage", CheckStatus.OK, found)
    fix = 'set driver = "overlay" in ~/.config/containers/storage.conf, and pull the image again'
    return CheckResult("image storage", CheckStatus.WARNING, f"{found}: each start copies the image", fix)


def queue_check(site: Site, name: str, used: bool, facts: QueueFacts | None) -> CheckResult:
    """Compare a queue's limits with the site file's; problems with a queue not in use are only warnings."""
    check = f"{'QOS' if site.queue_option == 'qos' else 'queue'} {name}"
    bad = CheckStatus.FAILED if used else CheckStatus.WARNING
    if facts is None:
        return CheckResult(check, bad, f"{site.batch_system} has none of this name", "correct `queues`")
    problems = list(_beyond(facts, [queue for queue in site.queues if queue.name == name]))
    if problems:
        return CheckResult(check, bad, "; ".join(problems), "correct max_nodes and max_wall in `queues`")
    if not facts.open:
        return CheckResult(check, CheckStatus.WARNING, "it is closed", "jobs wait until it is opened again")
    return CheckResult(check, CheckStatus.OK, f"open, {_limits(facts)}, no less than in the site file")


def node_check(site: Site, name: str, groups: Sequence[NodeClass]) -> CheckResult:
    """Compare the nodes of a partition, or of all queues, with the site file."""
    check = f"nodes of {name}"
    cores, memory = site.gpus_per_node * site.cores_per_gpu, site.memory_per_node // MEBIBYTE
    gpus = site.gpus_per_node if site.requests_gpus else 0
    wanted = f"{cores} cores, {memory} MiB" + (f" and {gpus} GPUs" if gpus else "")
    fitting = [g for g in groups if g.cores >= cores and g.memory_mib >= memory and g.gpus >= gpus]
    count = sum(group.nodes for group in fitting)
    keys = "correct cores_per_node, memory_per_node and gpus_per_node"
    if not groups:
        return CheckResult(check, CheckStatus.WARNING, "none are listed", "ask your administrators")
    if not fitting:
        return CheckResult(check, CheckStatus.FAILED, f"none has {wanted}: {_groups(groups)}", keys)
    if count < site.nodes:
        found = f"{count} have {wanted}, the site file says {site.nodes}: {_groups(groups)}"
        return CheckResult(check, CheckStatus.WARNING, found, "correct nodes")
    return CheckResult(check, CheckStatus.OK, f"{count} with at least {wanted}: {_groups(groups)}")


def own_gpu_check(site: Site, names: Sequence[str]) -> Iterator[CheckResult]:
    """Compare this machine's GPUs with the site file; without a management library they are unknown.

    Parameters
    ----------
    names : sequence of str
        Names of the GPUs.
    """
    if not names:
        return
    found = ", ".join(f"{count} x {name}" for name, count in Counter(names).items())
    if site.device != "gpu":
        message = f"slots are shares of the cores: no rank sees the GPUs of this machine ({found})"
        fix = f"to train on them, set `device: gpu` and `gpus_per_node: {len(names)}` in a site file"
        yield CheckResult("GPUs here", CheckStatus.WARNING, message, fix)
    elif len(names) < site.gpus_per_node:
        message = f"this machine has {found}, the site file says {site.gpus_per_node} GPUs"
        yield CheckResult("GPUs here", CheckStatus.FAILED, message, "correct gpus_per_node")
    else:
        yield CheckResult("GPUs here", CheckStatus.OK, found)


def account_check(account: str | None, accounts: Sequence[str]) -> CheckResult:
    """Check the account: one of the user's, or not."""
    yours = f"yours: {', '.join(accounts) or 'none'}"
    if account is None:
        return CheckResult(
            "account", CheckStatus.OK, f"none is named, so Slurm takes your default one; {yours}"
        )
    if accounts and account not in accounts:
        return CheckResult(
            "account", CheckStatus.FAILED, f"'{account}' is none of {yours}", "correct `account`"
        )
    if not accounts:
        fix = "ask your administrators, or look at the dry run below"
        return CheckResult(
            "account", CheckStatus.WARNING, f"Slurm lists no accounts for you, '{account}' neither", fix
        )
    return CheckResult("account", CheckStatus.OK, f"'{account}' is one of {yours}")


def _beyond(facts: QueueFacts, bins: Iterable[Queue]) -> Iterator[str]:
    bins = list(bins)
    nodes = [queue.max_nodes for queue in bins]
    if facts.max_nodes and any(each is not None and each > facts.max_nodes for each in nodes):
        yield f"takes {facts.max_nodes} nodes, but the site file says {max(filter(None, nodes))}"
    walls = [queue.max_wall_s for queue in bins]
    if facts.max_wall_s and any(wall is None or wall > facts.max_wall_s for wall in walls):
        said = "no limit" if None in walls else format_duration(max(filter(None, walls)))
        yield f"takes {format_duration(facts.max_wall_s)}, but the site file says {said}"


def _limits(facts: QueueFacts) -> str:
    nodes = f"{facts.max_nodes} nodes" if facts.max_nodes else "any nodes"
    return f"{nodes} for {format_duration(facts.max_wall_s) if facts.max_wall_s else 'any time'}"


def _groups(groups: Sequence[NodeClass]) -> str:
    return "; ".join(f"{g.nodes} x {g.cores} cores, {g.memory_mib} MiB, {g.gpus} GPUs" for g in groups)


def filesystem_of(path: Path, mounts: str) -> str:
    """Return the type of the file system that holds a path, by the text of ``/proc/self/mountinfo``."""
    best = (-1, "unknown")
    for line in mounts.splitlines():
        left, _, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if len(fields) < 5 or not kinds:
            continue
        # The kernel writes blanks in mount points as octal escapes.
        point = Path(fields[4].replace("\\040", " "))
        # The innermost mount counts. Of several on one point, the last covers the others.
        if path.is_relative_to(point) and len(point.parts) >= best[0]:
            best = (len(point.parts), kinds[0])
    return best[1]


def place_check(site: Site, path: Path, kind: str) -> CheckResult:
    """Judge the access from compute nodes by the file system; only a job can verify it."""
    found = f"{path} is on {kind}"
    if BATCH_SYSTEMS[site.batch_system].runs_here or kind.startswith(SHARED):
        return CheckResult(FOLDER, CheckStatus.OK, found)
    fix = "compute nodes must see it: set HETCTL_HOME to a shared folder, or let --job show that they do"
    return CheckResult(FOLDER, CheckStatus.WARNING, f"{found}, which seems to be local to this machine", fix)


def ability_check(path: Path) -> CheckResult:
    """Test writing, renaming, linking and locking in a temporary folder beside the future one."""
    # The home may not exist yet, and checks must not create it.
    parent = next(each for each in (path, *path.parents) if each.is_dir())
    try:
        folder = Path(tempfile.mkdtemp(prefix=".hetctl-doctor-", dir=parent))
    except OSError as error:
        fix = "make it writable, or set HETCTL_HOME to another folder"
        return CheckResult(ABILITIES, CheckStatus.FAILED, f"{parent}: {error.strerror}", fix)
    try:
        failures = list(_failures(folder))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if failures:
        fix = "set HETCTL_HOME to a folder on another file system"
        return CheckResult(ABILITIES, CheckStatus.FAILED, f"{parent} cannot {'; '.join(failures)}", fix)
    return CheckResult(ABILITIES, CheckStatus.OK, f"{parent} can write, rename, link and lock")


def purge_check(purge: Purge, path: Path) -> CheckResult:
    """Tell whether the site deletes unused files of a folder."""
    if not purge.takes(str(path)):
        return CheckResult("purge", CheckStatus.OK, f"{path} is not in {', '.join(purge.folders)}")
    found = f"files in {path} that nobody has used for {purge.days} days are deleted"
    renewed = "`hetctl advance` renews their times" if purge.touch else "`hetctl status` says when"
    return CheckResult("purge", CheckStatus.OK, f"{found}; {renewed}")


def _failures(folder: Path) -> Iterator[str]:
    first, second, third = folder / "first", folder / "second", folder / "third"
    deeds: dict[str, Callable[[], object]] = {
        "write": lambda: first.write_text("hetctl\n"),
        "rename": lambda: first.replace(second),
        # The lock of a project needs hard links, which not every file system has.
        "link": lambda: os.link(second, third),
        "lock": lambda: _lock(third),
    }
    for name, deed in deeds.items():
        try:
            deed()
        except OSError as error:
            yield f"{name} ({error.strerror})"
            return


def _lock(path: Path) -> None:
    with path.open("r+") as file:
        # SQLite uses POSIX locks of this kind.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


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
        (queues.qos_command, queues.parse_qos) if qos else (queues.partition_command, queues.parse_partition)
    )
    yield from _queues(site, ask, read)
    used = _used_queue(site)
    nodes = run_command(site, queues.nodes_command(None if qos else used))
    yield node_check(site, used, queues.parse_nodes_of_partition(nodes.stdout))
    yield _account(site)
    yield dry_run(project, site)


def lsf_checks(project: Project, site: Site) -> Iterator[CheckResult]:  # noqa: ARG001
    """Query LSF about itself and its queues; it cannot test a script without submitting it."""
    answers = _answers(site, ["bqueues"], "LSF answers")
    yield answers
    if answers.status is not CheckStatus.FAILED:
        yield from _queues(site, queues.queue_command, queues.parse_queue)


def pbs_checks(project: Project, site: Site) -> Iterator[CheckResult]:  # noqa: ARG001
    """Query PBS about itself, its queues and nodes; it cannot test a script without submitting it."""
    answers = _answers(site, queues.pbs_server_command(), "PBS answers")
    yield answers
    if answers.status is CheckStatus.FAILED:
        return
    if not queues.keeps_history(run_command(site, queues.pbs_server_command()).stdout):
        found, fix = (
            "PBS keeps no states of jobs that are over",
            "administrators set job_history_enable = True",
        )
        yield CheckResult("job history", CheckStatus.FAILED, found, fix, FaultDomain.BATCH_SYSTEM)
    yield from _queues(site, queues.pbs_queue_command, queues.parse_pbs_queue)
    groups = queues.parse_pbs_nodes(run_command(site, queues.pbs_nodes_command()).stdout)
    yield node_check(site, BATCH_SYSTEMS[site.batch_system].title, groups)


def flux_checks(project: Project, site: Site) -> Iterator[CheckResult]:  # noqa: ARG001
    """Query Flux about itself and its queues; it cannot test a script without submitting it."""
    answers = _answers(site, queues.flux_queues_command(), "Flux answers")
    yield answers
    if answers.status is not CheckStatus.FAILED:
        yield from _queues(site, lambda _: queues.flux_queues_command(), queues.parse_flux_queue)


def dry_run(project: Project, site: Site) -> CheckResult:
    """Test the script of a job on one node with sbatch, without submitting it."""
    script = render_job(script_of(site, cases_of(site)[0]), project.template_folders)
    with tempfile.NamedTemporaryFile("w", prefix="hetctl-", suffix=".sh", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        answer = run_command(site, BATCH_SYSTEMS[site.batch_system].dry_run, Path(file.name))
    if answer.code != 0:
        fix = (
            "correct in the site file what Slurm's message names (`request` leaves out --gres and --mem),"
            " or ask your administrators"
        )
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
        yield queue_check(site, name, name in (*site.wanted_queues, _used_queue(site)), facts)


def _used_queue(site: Site) -> str:
    return next(iter(site.wanted_queues), site.queues[0].name)


def _account(site: Site) -> CheckResult:
    if shutil.which("sacctmgr") is None:
        return CheckResult(
            "account", CheckStatus.WARNING, "not checked: there is no sacctmgr", "try a dry run"
        )
    answer = run_command(site, queues.accounts_command(getpass.getuser()))
    if answer.code != 0:
        found = f"not checked: {answer.error_tail}"
        return CheckResult("account", CheckStatus.WARNING, found, "a site without accounting has no accounts")
    return account_check(site.account, queues.parse_accounts(answer.stdout))


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
