"""LSF plugin of submitit, found by its entry point: ``submitit.AutoExecutor(cluster="lsf")``."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from submitit.core import core, job_environment, utils

from hetctl.cluster.batch.lsf import bjobs_command, lsf_id, parse_bjobs, parse_job_id
from hetctl.model.job import JobState

PARAMETERS: dict[str, Any] = {
    "job_name": "submitit",
    "time": 5,  # minutes
    "nodes": 1,
    "whole_nodes": False,  # -nnodes, at a site with jsrun
    "cpus_per_task": 1,
    "gpus_per_node": 0,
    "mem_gb": None,  # of each node
    "queue": None,
    "project": None,
    "array_parallelism": None,
    "setup": (),  # shell lines
    "options": (),  # further arguments of bsub
}
GENERIC = {
    "name": "job_name",
    "timeout_min": "time",
    "mem_gb": "mem_gb",
    "nodes": "nodes",
    "cpus_per_task": "cpus_per_task",
    "gpus_per_node": "gpus_per_node",
    "tasks_per_node": "tasks_per_node",
}
ENVIRONMENT = {
    "job_id": "LSB_JOBID",
    "array_job_id": "LSB_JOBID",
    "array_task_id": "LSB_JOBINDEX",
    # A job is one task, and LSF has no variables for task numbers: unset ones mean 1 task with number 0.
    "num_tasks": "SUBMITIT_LSF_NUM_TASKS",
    "num_nodes": "SUBMITIT_LSF_NUM_NODES",
    "node": "SUBMITIT_LSF_NODE",
    "global_rank": "SUBMITIT_LSF_GLOBAL_RANK",
    "local_rank": "SUBMITIT_LSF_LOCAL_RANK",
}
FINISHED = "COMPLETED"
"""State of a successful job in submitit; all other states have the names of hetctl."""


class LsfInfoWatcher(core.InfoWatcher):  # type: ignore[misc]
    """Watcher that queries all of submitit's jobs at once."""

    def _make_command(self) -> list[str] | None:
        unfinished = sorted(self._registered - self._finished)
        return bjobs_command(unfinished) if unfinished else None

    def get_state(self, job_id: str, mode: str = "standard") -> str:
        """Return a job's state by submitit's name."""
        return str(self.get_info(job_id, mode=mode).get("State", "UNKNOWN"))

    def read_info(self, string: bytes | str) -> dict[str, dict[str, str]]:
        """Parse the output of bjobs."""
        text = string if isinstance(string, str) else string.decode(errors="replace")
        return {job: {"State": _word(status.state)} for job, status in parse_bjobs(text).items()}


class LsfJob(core.Job):  # type: ignore[misc]
    """Job, or element of an array."""

    watcher = LsfInfoWatcher(delay_s=600)

    def cancel(self, check: bool = True) -> None:
        """Run bkill."""
        subprocess.run(["bkill", lsf_id(self.job_id)], check=check)


class LsfJobEnvironment(job_environment.JobEnvironment):  # type: ignore[misc]
    """Environment of a job; LSF counts the elements of an array from 1."""

    _env = ENVIRONMENT

    @property
    def array_job_id(self) -> str | None:
        """Id of the array; None in a job outside any array, which has the index 0."""
        index = os.environ.get("LSB_JOBINDEX", "")
        return os.environ["LSB_JOBID"] if index.strip("0") else None

    @property
    def hostnames(self) -> list[str]:
        """Hosts of the job, each once."""
        return list(dict.fromkeys((os.environ.get("LSB_HOSTS") or str(self.hostname)).split()))

    def _requeue(self, countdown: int) -> None:  # noqa: ARG002 (submitit's name)
        subprocess.run(["brequeue", lsf_id(self.job_id)], check=True, timeout=60)


class LsfExecutor(core.PicklingExecutor):  # type: ignore[misc]
    """Executor that submits functions with bsub; options are arguments, not parsed by shell or directives.

    The command is a shell with the path of the script; bsub treats it alike at sites that read scripts from
    files and at sites that read them from standard input.
    """

    job_class = LsfJob

    @classmethod
    def affinity(cls) -> int:
        """Return the priority of LSF in submitit's choice, negative on a machine without bsub."""
        return 2 if shutil.which("bsub") else -1

    @classmethod
    def _equivalence_dict(cls) -> dict[str, str]:
        return GENERIC

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return set(PARAMETERS)

    def _internal_update_parameters(self, **kwargs: Any) -> None:
        if kwargs.pop("tasks_per_node", 1) != 1:
            raise ValueError("an LSF job of submitit is one task: let it start others itself")
        if unknown := sorted(set(kwargs) - set(PARAMETERS)):
            raise ValueError(f"unknown parameters {unknown}; known are {sorted(PARAMETERS)}")
        super()._internal_update_parameters(**kwargs)

    def _internal_process_submissions(self, delayed_submissions: list[Any]) -> list[Any]:
        if len(delayed_submissions) == 1:
            return list(super()._internal_process_submissions(delayed_submissions))
        pickles = [self._dump(delayed) for delayed in delayed_submissions]
        array = LsfExecutor(self.folder, self.max_num_timeout)
        array.parameters = {**self.parameters, "map_count": len(pickles)}
        first = array._submit_command(self._submitit_command_str)
        jobs = [LsfJob(self.folder, f"{first.job_id}_{index}") for index in range(1, len(pickles) + 1)]
        for job, pickle in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(pickle, "submitted_pickle")
        return jobs

    def _dump(self, delayed: Any) -> Path:
        folder = utils.JobPaths.get_first_id_independent_folder(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = Path(folder, f"{uuid.uuid4().hex}.pkl")
        delayed.set_timeout(self.parameters.get("time", PARAMETERS["time"]), self.max_num_timeout)
        delayed.dump(path)
        return path

    @property
    def _submitit_command_str(self) -> str:
        return shlex.join([sys.executable, "-u", "-m", "submitit.core._submit", str(self.folder)])

    def _num_tasks(self) -> int:
        return 1

    def _make_submission_file_text(self, command: str, uid: str) -> str:  # noqa: ARG002 (submitit's name)
        setup = self.parameters.get("setup", ())
        return "\n".join(["#!/bin/bash", *setup, "export SUBMITIT_EXECUTOR=lsf", command, ""])

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        wanted = {**PARAMETERS, "map_count": None, **self.parameters}
        # submitit renames its file as soon as bsub returns, when the job may be about to read it.
        script = shutil.copy(submission_file_path, submission_file_path.with_suffix(".job"))
        command = shlex.join(["/bin/bash", str(script)])
        return ["bsub", *_options(wanted, self.folder), *wanted["options"], command]

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        return parse_job_id(string if isinstance(string, str) else string.decode(errors="replace"))


def _options(wanted: dict[str, Any], folder: Path) -> Iterator[str]:
    """Yield bsub's options for parameters from `PARAMETERS`."""
    # submitit looks for output by these names: JOB_TASK_log.out.
    name, log = wanted["job_name"], "%J_0_log"
    if wanted["map_count"]:
        at_once = wanted["array_parallelism"]
        name += f"[1-{wanted['map_count']}]" + (f"%{at_once}" if at_once else "")
        log = "%J_%I_0_log"
    yield from ("-J", name, "-W", str(wanted["time"]))
    yield from ("-o", f"{folder}/{log}.out", "-e", f"{folder}/{log}.err")
    if wanted["queue"]:
        yield from ("-q", wanted["queue"])
    if wanted["project"]:
        yield from ("-P", wanted["project"])
    if wanted["mem_gb"]:
        yield from ("-R", f"rusage[mem={wanted['mem_gb']}GB]")
    yield from _whole_nodes(wanted) if wanted["whole_nodes"] else _slots(wanted)


def _whole_nodes(wanted: dict[str, Any]) -> Iterator[str]:
    yield from ("-nnodes", str(wanted["nodes"]))


def _slots(wanted: dict[str, Any]) -> Iterator[str]:
    cores = wanted["cpus_per_task"]
    yield from ("-n", str(wanted["nodes"] * cores), "-R", f"span[ptile={cores}]")
    if wanted["gpus_per_node"]:
        yield from ("-gpu", f"num={wanted['gpus_per_node']}:mode=shared:j_exclusive=yes")


def _word(state: JobState) -> str:
    return FINISHED if state == JobState.FINISHED else state.name
