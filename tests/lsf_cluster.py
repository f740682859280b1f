"""A cluster of the stand-in for LSF (tests/fakes), for tests: started, asked, made to fail, and stopped."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

FAKES = Path(__file__).parent / "fakes"
sys.path.insert(0, str(FAKES))

from lsf_standin import client  # noqa: E402

HOSTS = {f"h{number}": (2, 2) for number in range(1, 5)}
"""Cores and GPUs of each host."""


class LsfCluster:
    """A daemon of the stand-in with its hosts; whatever runs there ends with it."""

    commands = "bin"
    signals: ClassVar = {"kill_signals": ["SIGINT", "SIGTERM", "SIGKILL"], "limit_signals": ["SIGUSR2"]}
    queue = "normal"

    def __init__(self, folder: Path, **settings) -> None:
        self.folder = folder
        defaults = {
            "hosts": HOSTS,
            "launch_host": None,
            "parse_scripts": True,
            "minute_s": 60.0,
            "kill_s": 0.5,
            "queues": {self.queue: None},
            **self.signals,
            "empty_exit_code": False,
        }
        (folder / "settings.json").write_text(json.dumps({**defaults, **settings}))

    def start(self) -> None:
        environment = {**os.environ, "LSF_STANDIN": str(self.folder), "PYTHONPATH": str(FAKES)}
        self._daemon = subprocess.Popen([sys.executable, "-m", "lsf_standin.mbatchd"], env=environment)
        limit = time.monotonic() + 10
        while not (self.folder / "socket").exists():
            assert self._daemon.poll() is None, "the stand-in's daemon did not start"
            assert time.monotonic() < limit, "the stand-in's daemon is late"
            time.sleep(0.01)

    def stop(self) -> None:
        self._daemon.terminate()
        self._daemon.wait(timeout=20)

    def environment(self) -> dict[str, str]:
        """Return what a user of this cluster has in the environment."""
        path = os.pathsep.join(
            [str(FAKES / self.commands), str(Path(sys.executable).parent), os.environ["PATH"]]
        )
        return {
            "PATH": path,
            "LSF_STANDIN": str(self.folder),
            # The hosts are one machine: they share its memory, and Open MPI must not route between them.
            "OMPI_MCA_routed": "direct",
            # An mpirun that ends removes the folder that all others of this machine would share.
            "OMPI_MCA_orte_tmpdir_base": str(self.folder),
            "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
            "OMPI_MCA_btl": "self,tcp",
            "OMPI_MCA_btl_tcp_if_include": "lo",
            "OMPI_MCA_oob_tcp_if_include": "lo",
        }

    def ask(self, operation: str, **request):
        """Ask the daemon, as the commands do; `hide`, `host`, `end`, `limit` and `set` make it misbehave."""
        before = os.environ.get("LSF_STANDIN")
        os.environ["LSF_STANDIN"] = str(self.folder)
        try:
            return client.ask(operation, **request)
        finally:
            os.environ.pop("LSF_STANDIN")
            if before is not None:
                os.environ["LSF_STANDIN"] = before

    def run(self, *command: str, **options) -> subprocess.CompletedProcess:
        """Run a command as a user of this cluster."""
        inherited = {k: v for k, v in os.environ.items() if k != "TMPDIR"}
        return subprocess.run(
            command, env={**inherited, **self.environment()}, capture_output=True, text=True,
            timeout=60, **options,
        )  # fmt: skip


class FluxCluster(LsfCluster):
    """The same daemon behind the command of Flux; jobs get whole nodes."""

    commands = "flux_bin"
    signals: ClassVar = {"kill_signals": ["SIGTERM", "SIGKILL"], "limit_signals": ["SIGALRM"]}
    queue = "batch"


class PbsCluster(LsfCluster):
    """The same daemon behind the commands of PBS and of PALS."""

    commands = "pbs_bin"
    signals: ClassVar = {"kill_signals": ["SIGTERM", "SIGKILL"], "limit_signals": []}
    queue = "workq"
