"""Local batch system: detached processes on this machine, each under a supervisor that records its result."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from hetctl.cluster.batch.base import JobRequest, SubmissionInDoubtError
from hetctl.cluster.batch.command import USUAL_COMMANDS, CommandRunner
from hetctl.model.errors import BatchSystemError, is_transient
from hetctl.model.job import JobState, JobStatus
from hetctl.model.serialization import encode
from hetctl.model.values import dataclass
from hetctl.storage.atomic_io import make_private_folder, read_json, write_json
from hetctl.storage.patience import PATIENT
from hetctl.storage.processes import HostBoot, Process

FOLDER_VARIABLE = "HETCTL_SLOT_LOCKS"


def lock_folder() -> Path:
    """Return the folder of the locks, common to all of a user's projects on this machine."""
    return Path(os.environ.get(FOLDER_VARIABLE) or f"/tmp/hetctl-{os.getuid()}")


class Slots:
    """GPUs or slots of a machine that one job holds.

    A lock on a file holds each. The kernel releases it with the last process that inherited it, so that
    no cleanup is needed, even after a crash.

    Parameters
    ----------
    folder : Path
        Folder of the locks, on a local file system of this machine.
    kind : str
        Kind of the slots; different kinds are independent.
    count : int
        Number of slots of the machine.
    """

    def __init__(self, folder: Path, kind: str, count: int) -> None:
        self._turn = folder / f"{kind}-turn"
        self._locks = {number: folder / f"{kind}-{number}" for number in range(count)}
        self._turn_held: int | None = None
        self._held: dict[int, int] = {}

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers of the held slots, in order."""
        return tuple(sorted(self._held))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """File descriptors that a process must inherit to hold the slots, too."""
        return tuple(self._held.values())

    def acquire(self, wanted: int) -> bool:
        """Acquire free slots until `wanted` are held; return False if the call must be repeated.

        Only one waiting job at a time takes slots, so that a large job does not starve.
        """
        if self._turn_held is None:
            self._turn_held = _lock(self._turn)
        if self._turn_held is None:
            return False
        for number, path in self._locks.items():
            if number not in self._held and len(self._held) < wanted:
                descriptor = _lock(path)
                if descriptor is not None:
                    self._held[number] = descriptor
        if len(self._held) < wanted:
            return False
        os.close(self._turn_held)
        return True


def _lock(path: Path) -> int | None:
    """Return the descriptor of the file with the lock; None if another process holds it."""
    # By default the folder lies in /tmp, where another user could place a link (O_NOFOLLOW).
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        # flock(2) rather than fcntl(2): it belongs to the open file, and so to all processes that inherit it.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


ENDED_BY = {"timeout": JobState.TIMEOUT, "cancelled": JobState.CANCELLED}
WAITS = "for another job, or for free slots"
START_S = 30.0
"""Time limit in seconds for a supervisor to claim its job, which takes a fraction of a second."""


class LocalBatch:
    """Local batch system; a job is known by its name, and run by the one supervisor that claims the name.

    A job waits until enough of the machine's slots are free for it, and then has them exclusively.

    Parameters
    ----------
    folder : Path
        Folder in which supervisors store their identities and the results of their jobs.
    """

    def __init__(self, folder: Path, _commands: CommandRunner = USUAL_COMMANDS) -> None:
        self._folder = folder

    def submit(self, request: JobRequest) -> str:
        """Start the script's supervisor in a new session, with its output in the log beside the script."""
        if not request.script.is_file():
            raise BatchSystemError(f"cannot start {request.script}: there is no such file")
        make_private_folder(self._folder)
        _make_lock_folder()
        log = request.script.with_suffix(".log")
        command = [
            *(sys.executable, "-m", "hetctl.cluster.batch.supervisor", str(self._folder), request.name),
            *(str(request.script), f"--wall={request.wall_s}", f"--gpus={request.gpus}"),
            *(f"--of={request.site.gpus}", f"--device={request.site.device}"),
            *([f"--after={request.after}"] if request.after else []),
        ]
        try:
            descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "ab") as output:
                supervisor = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    # Ctrl-C and the loss of the terminal do not reach a session of its own (setsid(2)).
                    start_new_session=True,
                )
        except OSError as error:
            raise BatchSystemError(f"cannot start {request.script}: {error}") from None
        self._wait_for_claim(request.name, supervisor, log)
        return request.name

    def statuses(self, ids: Sequence[str]) -> Mapping[str, JobStatus]:
        """Return the states of jobs according to their processes and to the files of their supervisors."""
        return {job: status_of(self._folder, job) for job in ids}

    def find(self, names: Sequence[str], *, recorded: bool = True) -> Mapping[str, str]:  # noqa: ARG002
        """Return the jobs that a supervisor has claimed, by name."""
        return {name: name for name in names if claim_file(self._folder, name).exists()}

    def cancel(self, ids: Sequence[str]) -> None:
        """Signal the supervisors; they give the scripts 20 s to write a checkpoint."""
        for job in ids:
            claimed = read_claim(self._folder, job)
            # The numbers of processes are valid on one machine, between two boots.
            if claimed and claimed.machine == HostBoot.this():
                _end(claimed)

    def _wait_for_claim(self, job: str, supervisor: subprocess.Popen[bytes], log: Path) -> None:
        """Return when the job can be found, whichever supervisor has claimed it."""
        limit = time.monotonic() + START_S
        while not self._is_claimed(job):
            # Another supervisor may have claimed the job while this one ended.
            if supervisor.poll() is not None and not PATIENT.call(claim_file(self._folder, job).exists):
                raise BatchSystemError(f"the supervisor of {job} did not start", f"see {log}")
            if time.monotonic() > limit:
                raise SubmissionInDoubtError(f"the supervisor of {job} did not start in {START_S:g} s")
            time.sleep(0.01)

    def _is_claimed(self, job: str) -> bool:
        """Return true if a job is known to be claimed; false also if the disk does not answer."""
        try:
            return claim_file(self._folder, job).exists()
        except OSError as error:
            if is_transient(error):
                return False
            raise


def _make_lock_folder() -> None:
    """Make the lock folder, which lies in a folder that is writable for all users.

    Raises
    ------
    BatchSystemError
        If another user owns a folder of that name.
    """
    folder = lock_folder()
    make_private_folder(folder)
    if folder.stat().st_uid != os.getuid():
        raise BatchSystemError(
            f"{folder}, the folder of the locks of this machine's slots, belongs to another user",
            f"set {FOLDER_VARIABLE} to a folder of your own",
        )


def status_of(folder: Path, job: str) -> JobStatus:
    """Return the state of a local job."""
    claimed = read_claim(folder, job)
    if claimed is None:
        return JobStatus(JobState.UNKNOWN)
    alive = _state_alive(claimed)  # read first: the job may end now, but only after its result is written
    end = read_end(folder, job)
    if end is not None:
        by_code = JobState.FINISHED if end.exit_code == 0 else JobState.FAILED
        return JobStatus(ENDED_BY.get(end.ended_by or "", by_code), end.exit_code, end.reason)
    return alive


def _state_alive(claimed: Claim) -> JobStatus:
    """Return the state of a job without a recorded end."""
    here = HostBoot.this()
    if claimed.machine.host != here.host:
        return JobStatus(JobState.UNKNOWN, reason=f"runs on {claimed.machine.host}")
    if claimed.machine != here:
        return JobStatus(JobState.NODE_FAILED, reason="the machine was restarted")
    if claimed.supervisor.alive:
        return JobStatus(JobState.RUNNING) if claimed.script else JobStatus(JobState.PENDING, reason=WAITS)
    if claimed.script and claimed.script.group_alive:
        return JobStatus(JobState.RUNNING, reason="its supervisor was killed")
    return JobStatus(JobState.FAILED, reason="its supervisor was killed")


def _end(claimed: Claim) -> None:
    """End a job by its supervisor; if the supervisor has ended, directly."""
    with contextlib.suppress(ProcessLookupError):
        if claimed.supervisor.alive:
            os.kill(claimed.supervisor.pid, signal.SIGTERM)
        elif claimed.script and claimed.script.group_alive:
            os.killpg(claimed.script.pid, signal.SIGKILL)


T = TypeVar("T")


@dataclass(frozen=True)
class Claim:
    """Claim of a job by a supervisor; of all supervisors that try, only one writes it.

    Parameters
    ----------
    script : Process or None
        First process of the job, leader of its process group; None while the job is pending.
    """

    machine: HostBoot
    supervisor: Process
    script: Process | None = None


@dataclass(frozen=True)
class End:
    """Result of a job that has ended.

    Parameters
    ----------
    exit_code : int or None
        Exit code; None if the job never started; 128 + n if signal n ended it.
    ended_by : str or None
        Cause of the end: ``timeout`` or ``cancelled``; None if the job ended by itself.
    reason : str
        Reason in words.
    """

    exit_code: int | None
    ended_by: str | None = None
    reason: str = ""


def claim(folder: Path, job: str, claimed: Claim) -> bool:
    """Claim a job atomically; return False if another supervisor has claimed it."""
    temporary = folder / f".{job}.{os.getpid()}.claim"
    write_json(temporary, encode(claimed))
    try:
        os.link(temporary, claim_file(folder, job))
    except FileExistsError:
        # On NFS the reply to a successful link can be lost; the repeated call then fails.
        return read_claim(folder, job) == claimed
    finally:
        temporary.unlink()
    return True


def claim_file(folder: Path, job: str) -> Path:
    """Return the path of the claim of a job."""
    return folder / f"{job}.claim"


def end_file(folder: Path, job: str) -> Path:
    """Return the path of the result of a job."""
    return folder / f"{job}.end"


def read_claim(folder: Path, job: str) -> Claim | None:
    """Return the claim of a job; None if it is not claimed."""
    return _read(claim_file(folder, job), Claim)


def read_end(folder: Path, job: str) -> End | None:
    """Return the result of a job; None if its supervisor has not written it."""
    return _read(end_file(folder, job), End)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return read_json(path, kind, "delete it once no process of the job is left")
    except FileNotFoundError:
        return None
