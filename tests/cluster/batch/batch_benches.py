"""The batch systems that the contract is tested with, each behind the same few handles.

To add one, write a class like those below and name it in ``BENCHES``: what it needs to run is set up in
``__init__``, which may ask `request` for fixtures, and skips or fails where that is not to be had.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from lsf_cluster import FluxCluster, LsfCluster, PbsCluster

from hetctl.cluster.batch.base import JobRequest
from hetctl.cluster.batch.flux import FluxBatch
from hetctl.cluster.batch.local import LocalBatch
from hetctl.cluster.batch.lsf import LsfBatch
from hetctl.cluster.batch.pbs import PbsBatch
from hetctl.cluster.batch.slurm import SlurmBatch
from hetctl.model.site import Queue, Site


class Bench:
    """A batch system and a folder for its jobs.

    Parameters
    ----------
    headers : str
        Lines at the top of every script, with the places {name} and {after}; `after_line` fills the latter.
    wall_s, short_wall_s : int
        What jobs ask for, and what one asks for that is to reach its limit.
    """

    batch_system = "local"
    command: tuple[str, ...] = ()
    headers = ""
    after_line = ""
    patience_s = 60.0  # limits of Slurm are looked at every 30 s
    wall_s = 600
    short_wall_s = 600

    def __init__(self, request, folder: Path) -> None:
        self.folder = folder
        self.token = os.urandom(3).hex()
        self.jobs: list[str] = []
        self.set_up(request)

    def set_up(self, request) -> None:
        raise NotImplementedError

    def use(self, request, cluster) -> None:
        """Have the commands of a cluster on the PATH during the test."""
        self.cluster = cluster
        patch = request.getfixturevalue("monkeypatch")
        for name, value in cluster.environment().items():
            patch.setenv(name, value)

    def request(self, name, text, wall_s=None, after=None) -> JobRequest:
        """Write a script that is to become a job."""
        name = self.named(name)
        script = self.folder / f"{name}.sh"
        after_line = self.after_line.format(after=after) if after else ""
        script.write_text(f"#!/bin/bash\n{self.headers.format(name=name)}{after_line}{text}\n")
        command = (*self.command, str(script))
        return JobRequest(name, script, command, wall_s or self.wall_s, self.site, 1, after)

    @property
    def site(self) -> Site:
        return Site("s", self.batch_system, "local", 4, 2, 2, 2**30, (Queue(self.queue),), device="slot")

    def named(self, name) -> str:
        """Return a name that no other test has used."""
        return f"hetctl-{name}-{self.token}"

    def submit(self, name, text, wall_s=None, after=None) -> str:
        self.jobs.append(self.batch.submit(self.request(name, text, wall_s, after)))
        return self.jobs[-1]

    def status(self, job):
        return self.batch.statuses([job])[job]

    def wait(self, condition, seconds=None) -> None:
        limit = time.monotonic() + (seconds or self.patience_s)
        while not condition():
            assert time.monotonic() < limit, {job: str(self.status(job)) for job in self.jobs}
            time.sleep(0.2)

    def end_of(self, job):
        self.wait(lambda: self.status(job).state.over)
        return self.status(job)

    def reach_limit(self, job) -> None:
        """Bring the end of a job's time near."""

    def close(self) -> None:
        self.batch.cancel(self.jobs)
        self.wait(lambda: all(s.state.over for s in self.batch.statuses(self.jobs).values()))


class LocalBench(Bench):
    short_wall_s = 4
    queue = "local"

    def set_up(self, _request) -> None:
        self.batch = LocalBatch(self.folder / "jobs")


class SlurmBench(Bench):
    batch_system = "slurm"
    command = ("sbatch", "--parsable")
    headers = (
        "#SBATCH --job-name={name}\n#SBATCH --time=10\n#SBATCH --output=/dev/null\n#SBATCH --no-requeue\n"
        "#SBATCH --mem=100\n"
    )
    after_line = "#SBATCH --dependency=afterany:{after}\n"
    queue = "main"

    def set_up(self, request) -> None:
        self.use(request, request.getfixturevalue("slurm_cluster"))
        self.batch = SlurmBatch(self.folder)

    def reach_limit(self, job) -> None:
        self.cluster.run("scontrol", "update", f"jobid={job}", "EndTime=now+1")


class StandInBench(Bench):
    """A stand-in, whose minutes shrink when a limit is to come near."""

    def set_up(self, request) -> None:
        self.use(request, request.getfixturevalue("standin")(self.kind))
        self.batch = self.system(self.folder)

    def reach_limit(self, _job) -> None:
        self.cluster.ask("set", minute_s=0.01)

    def close(self) -> None:
        super().close()
        self.cluster.ask("set", minute_s=60.0)


class LsfBench(StandInBench):
    """The stand-in for LSF."""

    batch_system = "lsf"
    command = ("bsub",)
    headers = "#BSUB -J {name}\n#BSUB -W 10\n#BSUB -o /dev/null\n"
    after_line = "#BSUB -w 'ended({after})'\n"
    queue = "normal"

    kind = LsfCluster
    system = LsfBatch


class PbsBench(StandInBench):
    """The stand-in for PBS, with LSF's daemon."""

    batch_system = "pbs"
    command = ("qsub",)
    headers = "#PBS -N {name}\n#PBS -l walltime=0:10:00\n#PBS -o /dev/null\n"
    after_line = "#PBS -W depend=afterany:{after}\n"
    queue = "workq"

    kind = PbsCluster
    system = PbsBatch


class FluxBench(StandInBench):
    """The stand-in for Flux, with LSF's daemon."""

    batch_system = "flux"
    command = ("flux", "batch")
    headers = (
        "# flux: --job-name={name}\n# flux: --time-limit=10m\n# flux: --nodes=1\n# flux: --output=/dev/null\n"
    )
    after_line = "# flux: --dependency=afterany:{after}\n"
    queue = "batch"

    kind = FluxCluster
    system = FluxBatch


BENCHES = {"local": LocalBench, "slurm": SlurmBench, "lsf": LsfBench, "pbs": PbsBench, "flux": FluxBench}
