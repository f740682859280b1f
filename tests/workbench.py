"""A workbench for tests of whole commands: projects, the command line, and a stand-in for training."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
from one_driver import problems

from hetctl.cluster.batch.local import FOLDER_VARIABLE
from hetctl.model.errors import BadInputError, TransientInputError
from hetctl.model.events import EXIT_CODES, ExitReason
from hetctl.model.profile import Hardware, LayerPoint, MeasuredLayer, ProfilePoint, shape_digest
from hetctl.model.serialization import encode
from hetctl.model.training_progress import EpochResult
from hetctl.runtime.worker.group import Group, join_group
from hetctl.runtime.worker.messages import TaskMessage
from hetctl.runtime.worker.reporting import report_failure
from hetctl.storage.event_files import read_events
from hetctl.storage.paths import Home
from hetctl.storage.profile_request import read_measurements
from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_files import read_spec

if TYPE_CHECKING:
    from hetctl.app.project import Waits

TINY = Path(__file__).parent / "ensembles"
TIMEOUT_S = 240

ENSEMBLE = """\
name: trio
framework: tensorflow
functions: {input_fn: nets:input_fn, model_fn: nets:model_fn}
stop: {metric: val_accuracy, mode: max, patience: 50, max_epochs: 4}
members:
  - {name: a, config: {}}
  - {name: b, config: {}}
  - {name: c, config: {}}
"""
RATES = "member,gpus,rate,samples\na,1,100,400\nb,1,100,400\nc,1,100,400\n"
MODULE = "def input_fn(path): ...\ndef model_fn(config): ...\n"


def pretending(name: str = "trio", most_epochs: int = 60, **configs: str) -> str:
    """Return an ensemble of members on a GPU each, whose ranks pretend what their configurations say."""
    return (
        f"name: {name}\nframework: tensorflow\n"
        "functions: {input_fn: nets:input_fn, model_fn: nets:model_fn}\n"
        f"stop: {{metric: val_accuracy, mode: max, patience: 50, max_epochs: {most_epochs}}}\n"
        "members:\n"
        + "".join(f"  - {{name: {one}, max_gpus: 1, config: {config}}}\n" for one, config in configs.items())
    )


def greedy_slurm(folder: Path) -> str:
    """Write the commands of a Slurm that takes every job and knows of none; return a path with them."""
    folder.mkdir()
    for name, text in {"sbatch": "echo 17", "squeue": "exit 0", "sacct": "exit 0"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def python_without_training(folder: Path) -> Path:
    """Write an executable that stands for Python, in this process and those it starts: see `trainless`."""
    path = folder / "python"
    here = os.fspath(Path(__file__).parent)
    text = f"import sys\nsys.path.insert(0, {here!r})\nimport trainless\ntrainless.main(__file__)\n"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return path


def small_environment(folder: Path, filler_bytes: int = 0) -> Path:
    """Make an archive of a Python environment that has this one's packages; return its path.

    Parameters
    ----------
    filler_bytes : int
        Bytes beside it, which no compression makes smaller.
    """
    root = folder / "environment"
    packages = root / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    packages.mkdir(parents=True)
    (root / "bin").mkdir()
    base = Path(sys.base_prefix) / "bin"
    (root / "bin" / "python").symlink_to(base / f"python{sys.version_info[0]}.{sys.version_info[1]}")
    (root / "pyvenv.cfg").write_text(f"home = {base}\n", encoding="utf-8")
    (packages / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n", encoding="utf-8")
    for number, start in enumerate(range(0, filler_bytes, 10**7)):
        (packages / f"filler-{number}").write_bytes(os.urandom(min(10**7, filler_bytes - start)))
    archive = folder / "environment.tar.zst"
    subprocess.run(["tar", "--zstd", "-cf", archive, "-C", root, "."], check=True)
    return archive


@dataclass
class Result:
    """What a command printed, and its exit code."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self):
        return json.loads(self.stdout)

    @property
    def error(self):
        return self.json["error"]


@dataclass
class ProjectFolder:
    """A folder with an ensemble, and commands that are run in it.

    Parameters
    ----------
    waits : Waits or None
        Waits of the commands that are run in this process; None: the usual ones.
    timeout_s : float
        Seconds within which a command in a process of its own must end.
    """

    path: Path
    python: Path | str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    waits: Waits | None = None
    timeout_s: float = TIMEOUT_S

    @property
    def home(self) -> Home:
        return Home(self.path / ".hetctl")

    def start(self, *arguments: str, prefix: tuple[str, ...] = (), **environment: str) -> subprocess.Popen:
        # Without the tests' own locks, jobs would wait for those of other tests on this machine.
        inherited = {
            k: v for k, v in os.environ.items() if not k.startswith("HETCTL_") or k == FOLDER_VARIABLE
        }
        return subprocess.Popen(
            [*prefix, str(self.python), "-m", "hetctl", *arguments],
            cwd=self.path,
            env={**inherited, **self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def hetctl(self, *arguments: str, prefix: tuple[str, ...] = (), **environment: str) -> Result:
        """Run a command in a process of its own; whatever happens, no traceback may be shown."""
        process = self.start(*arguments, prefix=prefix, **environment)
        stdout, stderr = process.communicate(timeout=self.timeout_s)
        assert "Traceback" not in stdout + stderr, stdout + stderr
        if "--wait" in arguments:
            self.check_runs()
        return Result(process.returncode, stdout, stderr)

    def here(self, *arguments: str, **environment: str) -> Result:
        """Run a command in this process, for a fifth of the processor time; its jobs have `python`."""
        from hetctl.cli.main import main

        before, folder, executable = dict(os.environ), Path.cwd(), sys.executable
        stdout, stderr = io.StringIO(), io.StringIO()
        os.environ.update(self.environment | environment)
        os.chdir(self.path)
        sys.executable = str(self.python)
        try:
            with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                main(arguments, self.waits)
        except SystemExit as end:
            code = end.code
        finally:
            sys.executable = executable
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(before)
        assert "Traceback" not in stdout.getvalue() + stderr.getvalue()
        if "--wait" in arguments:
            self.check_runs()
        return Result(int(code or 0), stdout.getvalue(), stderr.getvalue())

    def is_over(self) -> bool:
        """Do as ``hetctl submit --wait`` does: submit the next job where nobody else has; true at the end."""
        status = self.here("status", "--json").json
        state, silent = status["state"], status["reason"].startswith("state of the jobs as last seen")
        # The script of a job that is killed may leave the submission of the next one undone.
        if state in ("between-jobs", "in-doubt") and not silent:
            assert self.here("advance").code in (0, 6)
        assert state in ("queued", "in-doubt", "running", "between-jobs", "finished"), status["reason"]
        if state == "finished":
            self.check_runs()
        return state == "finished"

    def check_runs(self) -> None:
        """Nothing of hetctl may have broken down in a job, and one driver at any time trained each run.

        What users' functions do is in their own logs.
        """
        for log in self.home.runs.glob("*/job-*.log"):
            text = log.read_text(errors="replace")
            assert "Traceback" not in text, f"{log}: {text[-4000:]}"
        for run in self.home.every_run():
            # A trial that goes on with the state of another has its epochs, too.
            if read_spec(run).ensemble.search is None:
                assert problems(events_in(run)) == [], run

    def tree(self) -> dict[str, bytes | None]:
        """Every file with its content; the lock comes and goes with every command."""
        return {
            str(path.relative_to(self.path)): path.read_bytes() if path.is_file() else None
            for path in sorted(self.path.rglob("*"))
            if path.suffix != ".pyc" and path.name != "__pycache__"
        }

    def driver_events(self, run: str = "trio-001"):
        return [event for event in events_in(self.home.run(run)) if event.source == "driver"]

    def epochs(self, run: str = "trio-001") -> dict[str, list[int]]:
        """The epochs that each member was trained for, as often as they were trained."""
        trained: dict[str, list[int]] = {}
        for event in events_in(self.home.run(run)):
            if event.kind == "epoch":
                trained.setdefault(event.source, []).append(int(event.data["epoch"]))
        return trained


def new_project(folder: Path, ensemble: str = ENSEMBLE, **fields) -> ProjectFolder:
    """Make a project; its modules are there, but cannot train."""
    folder.mkdir(exist_ok=True)
    (folder / "nets.py").write_text(MODULE)
    (folder / "ensemble.yaml").write_text(ensemble)
    (folder / "rates.csv").write_text(RATES)
    return ProjectFolder(folder, **fields)


def pretending_project(folder: Path, ensemble: str = ENSEMBLE, **fields) -> ProjectFolder:
    """Make a project on the local site, unless the fields name another; its ranks only pretend to train."""
    fields.setdefault("environment", {"HETCTL_SITE": "local"})
    return new_project(folder / "project", ensemble, python=python_without_training(folder), **fields)


class Kept:
    """A project that is put back to how it was, for tests that begin alike: a run for each takes seconds."""

    def __init__(self, project: ProjectFolder) -> None:
        self._project = project
        self._copy = shutil.copytree(project.path, project.path.with_name("kept"))

    def restored(self) -> ProjectFolder:
        """Return the project as it was, in the same folder."""
        shutil.rmtree(self._project.path)
        shutil.copytree(self._copy, self._project.path)
        return replace(self._project, environment=dict(self._project.environment))


def wait_for(condition, seconds: float = 120.0, rest: float = 19.0):
    """Wait until something is true; return it.

    Parameters
    ----------
    rest : float
        Least pause between two looks, in durations of a look, up to 3 s: a look at a whole run takes a while
        itself, and looking all the time would slow the run down.
    """
    now = time.monotonic()
    limit = now + seconds
    while not (found := condition()):
        assert now < limit, "waited in vain"
        time.sleep(min(max(0.05, rest * (time.monotonic() - now)), 3.0))
        now = time.monotonic()
    return found


def states(project: ProjectFolder) -> dict[str, str]:
    """Return the state of each member of the newest run."""
    return {m["member"]: m["state"] for m in project.here("status", "--json").json["members"]}


def asked(project: ProjectFolder, *arguments: str, code: int = 0):
    """Run a command in this process; return its JSON."""
    answer = project.here(*arguments, "--json")
    assert answer.code == code, answer.stdout
    return answer.json


def cancel_all(projects):
    """Cancel the newest run of each project, and check all its runs once its processes have ended."""
    for project in projects:
        project.here("cancel")
        wait_for(lambda project=project: not alive(str(project.path)))
        project.check_runs()


def alive(text: str) -> list[int]:
    """The processes that have a text on their command line, zombies left out."""
    found = []
    for process in Path("/proc").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, NotADirectoryError):
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ")
            if process.name.isdigit() and text in words.decode(errors="replace"):
                found.append(int(process.name))
    return [pid for pid in found if pid != os.getpid()]


def kill_all(text: str) -> None:
    """Kill the processes that have a text on their command line, until there are none.

    With their groups, but for the group of this process: a test may itself have the text on its command line.
    """
    killed = set()

    def none_left():
        pids = alive(text)
        killed.update(pids)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                is_own = os.getpgid(pid) == os.getpgrp()
                (os.kill if is_own else os.killpg)(pid if is_own else os.getpgid(pid), signal.SIGKILL)
        # A process that ends gives up its command line before its locks.
        return not pids and not any(map(has_locks, killed))

    wait_for(none_left)


def has_locks(pid: int) -> bool:
    """True until a process has closed its files."""
    try:
        return any(Path(f"/proc/{pid}/fd").iterdir())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def ranks_of(folder: Path, node: str | None = None) -> list[int]:
    """The ranks whose driver has a folder, by their GPUs; those on one node, if it is named."""
    found = {}
    for pid in alive(str(folder)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
            if name.startswith("hetctl-rank-") and (not node or f"SLURMD_NODENAME={node}" in environment):
                found[pid] = name
    return sorted(found, key=lambda pid: found[pid])


def driver_of(folder: Path) -> psutil.Process:
    """The driver of the run in a folder, which is no child of this process."""
    (found,) = [
        process
        for process in psutil.process_iter(["cmdline"])
        if {"hetctl.runtime.driver", str(folder)} <= {*(process.info["cmdline"] or ())}
    ]
    return found


def processes_on(folder: Path, node: str) -> list[int]:
    """The agent's and the ranks' processes on a node, which is not the driver's, of a run in a folder."""
    found = []
    for pid in alive(str(folder)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            names = (f"{name}={node}".encode() for name in ("SLURMD_NODENAME", "PMIX_HOSTNAME"))
            found += [pid] if any(name in environment for name in names) else []
    return found


def on_leader(pretend):
    """Let rank 0 of a group pretend, while the others wait for it."""

    def work(assignment, context):
        task = assignment.task
        context.group = Group()
        context.group = join_group(
            assignment.rank_info, NoBackend(), lambda address: context.send(master=address)
        )

        def stop_requested():
            return context.stop_reason(assignment.rank_info.key)

        events = context.reporter(task)
        if context.group.rank == 0 and (code := pretend(task, events, stop_requested)):
            os._exit(code)
        context.group.barrier_and_close()

    return work


class NoBackend:
    """Ranks that pretend exchange no gradients."""

    needs = "nothing"

    def load(self):
        pass

    def initialize(self, group):
        pass

    def shutdown(self):
        pass


def measure(task: TaskMessage, events, _stop_requested) -> int:
    """Report a rate of 100 samples/s on each GPU after ``measure_s``, or once there is a file ``gate``.

    ``fail``: report an error.
    """
    measurements = read_measurements(Path(task.folder))
    point = next(point for point in measurements.points if point.source == task.name)
    member = measurements.ensemble.member(point.member)
    print("building", point.member, flush=True)
    time.sleep(member.config.get("measure_s", 0.1))
    while not Path(member.config.get("gate", "/")).exists():
        time.sleep(0.05)
    if member.config.get("fail"):
        events.write("failed", error="no such layer")
        return 1
    result = ProfilePoint(
        point.member, point.gpus, 100.0 * point.gpus, member.fingerprint, member.batch_size, time.time(),
        Hardware(task.gpu_type or "fake", "fake", "fake"), samples_per_epoch=100,
        shape=shape_digest(member, measurements.ensemble.rate_keys),
    )  # fmt: skip
    events.write("point", **encode(result))
    return 0


def measure_layers(task: TaskMessage, events, _stop_requested) -> int:
    """Report so many `layers` of equal size; without any the network cannot be cut."""
    measurements = read_measurements(Path(task.folder))
    member = measurements.ensemble.member(measurements.target(task.name).member)
    if not (count := member.config.get("layers", 3)):
        error = BadInputError(f"{member.name} cannot be cut", "return a sequence")
        return report_failure(error, events)
    mib = 2**20
    layers = tuple(MeasuredLayer(f"l{i}", 0.001, 0.002, mib, 4 * mib, 2 * mib, 3 * mib) for i in range(count))
    machine = Hardware(task.gpu_type or "fake", "fake", "fake")
    result = LayerPoint(
        *(member.name, member.fingerprint, member.batch_size, time.time(), machine, 100), 5 * mib, layers
    )
    events.write("layers", **encode(result))
    return 0


def train(task: TaskMessage, events, stop_requested) -> int:
    """Do as a trainer does, as badly as the member's configuration says.

    ``epochs``, ``epoch_s``: what it takes to converge; ``fail``: fail at once, by an error that may pass or
    ``always`` comes; ``kill_after``: die of SIGKILL once, after so many epochs; ``hang``: heed nothing;
    ``no_room``: leave at once, as a trainer does whose next epoch would not fit; ``leave_s``: what it takes
    to leave when told to; ``oom_above``: run out of memory with a larger batch; ``oom_on``: the same on these
    numbers of GPUs; ``disk_full_after``: find the disk full once, after so many epochs; ``to_the_limit``:
    converge by the `max_epochs` of the stop rule and nothing else; ``eat``: hold so many bytes of memory;
    ``held_after``, ``until``: after so many epochs train no further until there is such a file; ``rate``:
    report so many samples/s.
    """
    training = task.training
    member = training.ensemble.member(task.name)
    config = member.config
    state = Path(training.checkpoints) / "epochs"
    state.parent.mkdir(parents=True, exist_ok=True)
    done = int(state.read_text()) if state.exists() else 0
    if done and done not in _reported(task):
        # As a trainer does: the last one was killed between the checkpoint and this.
        _report_epoch(task, events, done)
    events.write("started", epochs=done, part_samples=0)
    if error := {True: TransientInputError, "always": BadInputError}.get(config.get("fail")):
        return report_failure(error("no such layer"), events)
    is_full = training.allocation.gpus in config.get("oom_on", ())
    if is_full or member.batch_size > config.get("oom_above", member.batch_size):
        events.write("failed", error="MemoryError", reason="out-of-memory", peak_memory_bytes=3 * 2**30)
        return EXIT_CODES[ExitReason.OUT_OF_MEMORY]
    if config.get("hang"):
        signal.signal(signal.SIGTERM, lambda *_: events.write("unresponsive"))
        while True:
            time.sleep(1)
    hoard = b"x" * config.get("eat", 0)
    limit = member.stop.max_epochs if config.get("to_the_limit") else config.get("epochs", 3)
    while done < limit:
        reason = (
            "deadline" if config.get("no_room") else _wait(stop_requested, training.deadline, config, done)
        )
        if reason:
            time.sleep(config.get("leave_s", 0.0))
            events.write("stopped", reason=reason, part_samples=0)
            return 0
        done += 1
        _save(task, state, done)
        _report_epoch(task, events, done, evaluate_s=0.0)
        if config.get("disk_full_after") == done and not state.with_name("full").exists():
            state.with_name("full").touch()
            return EXIT_CODES[ExitReason.DISK_FULL]
        if config.get("kill_after") == done and not state.with_name("killed").exists():
            state.with_name("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    events.write(
        "converged", reason=f"{limit} epochs done" if config.get("to_the_limit") else "all epochs done"
    )
    del hoard
    return 0


def _save(task: TaskMessage, state: Path, done: int) -> None:
    """Write a checkpoint as a trainer does: under the lease of its driver, and replaced at once."""
    assert task.training
    if task.training.lease:
        task.training.lease.check()
    # A trainer may be killed at any moment, and another one may read it.
    written = state.with_name(f"epochs.{os.getpid()}")
    written.write_text(str(done))
    written.replace(state)


def _reported(task: TaskMessage) -> set[int]:
    """The epochs of a member that are on the disk."""
    events = read_events(task.events / f"{task.name}.jsonl")
    return {event.data["epoch"] for event in events if event.kind == "epoch"}


def _report_epoch(task: TaskMessage, events, number: int, **more: float) -> None:
    metrics = {"loss": 1 / number, "val_accuracy": number / 100}
    member = task.training.ensemble.member(task.name)
    seen = (time.time(), member.config.get("rate"), member.batch_size)
    result = EpochResult(number, metrics, 0.1, task.training.allocation.gpus, *seen)
    events.write("epoch", **encode(result), **more)


def _wait(stop_requested, deadline: float, config, done: int) -> str:
    """Train one epoch; return why it was not finished."""
    held = "held_after" in config and done >= config["held_after"]
    end = time.time() + config.get("epoch_s", 0.1)
    if end > deadline:
        return "deadline"
    while time.time() < end or (held and not Path(config["until"]).exists()):
        if reason := stop_requested():
            return reason
        if time.time() > deadline:
            return "deadline"
        time.sleep(0.01)
    return ""
