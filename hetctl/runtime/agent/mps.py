"""NVIDIA's Multi-Process Service on a node: kernels of processes that share a GPU run at the same time."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hetctl.storage.processes import die_with_parent

CONTROL = "nvidia-cuda-mps-control"
LIST = ("nvidia-smi", "-L")
"""Command that lists the GPUs and MIG devices, in the order of ``CUDA_DEVICE_ORDER=PCI_BUS_ID``.

Not by its library, which must be loaded after ranks' templates have been forked.
"""
VISIBLE = "CUDA_VISIBLE_DEVICES"
PIPES = "control"
"""File in its folder from which on it accepts processes."""
START_S, END_S = 30.0, 10.0
"""Seconds that it gets to start, as the list of GPUs does, and to end."""


@contextmanager
def mps_daemon(threads: int) -> Iterator[None]:
    """Run a control daemon that the processes started meanwhile use; it ends with this process at the latest.

    Without it, and a message, kernels take turns. Its folder is its own, so that daemons of other jobs and
    users on the node are left alone.

    Parameters
    ----------
    threads : int
        Largest share of a GPU's threads for each process, in percent.
    """
    # Short, since sockets are created in it (unix(7)).
    folder = tempfile.mkdtemp(prefix="hetctl-mps-", dir="/tmp")
    variables = {
        "CUDA_MPS_PIPE_DIRECTORY": folder,
        "CUDA_MPS_LOG_DIRECTORY": folder,
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(threads),
    }
    before = {name: os.environ.get(name) for name in (*variables, VISIBLE)}
    daemon = None
    try:
        os.environ.update(variables | _visible(os.environ.get(VISIBLE)))
        daemon = _started(Path(folder))
    except (OSError, subprocess.TimeoutExpired) as error:
        _restore(before)
        print(f"agent: no MPS on this node, processes take turns on a GPU: {error}", file=sys.stderr)
    try:
        yield
    finally:
        if daemon is not None:
            _end(daemon)
            _restore(before)
        shutil.rmtree(folder, ignore_errors=True)


def _visible(named: str | None) -> dict[str, str]:
    """Return the variable with the visible GPUs by UUID, if there is one.

    A daemon numbers the GPUs that it sees from 0, so that numbers would mean other ones to its processes
    (https://docs.nvidia.com/deploy/mps/, CUDA_VISIBLE_DEVICES).

    Raises
    ------
    OSError
        If they cannot be listed, or are MIG devices: each of these would need a daemon of its own.
    """
    listed = subprocess.run(LIST, capture_output=True, text=True, timeout=START_S, check=False).stdout
    uuids = re.findall(r"UUID: ((?:GPU|MIG)-[^)\s]+)", listed)
    if not uuids or any(uuid.startswith("MIG-") for uuid in uuids):
        raise OSError(f"{' '.join(LIST)} lists {'MIG devices' if uuids else 'no GPU'}")
    numbers = (entry.strip() for entry in (named or "").split(","))
    by_uuid = [uuids[int(n)] if n.isdecimal() and int(n) < len(uuids) else n for n in numbers]
    return {VISIBLE: ",".join(by_uuid)} if named else {}


def _started(folder: Path) -> subprocess.Popen[bytes]:
    """Start the daemon in the foreground, and wait until it accepts processes."""
    end_with_this_process = die_with_parent(signal.SIGKILL)

    def before_exec() -> None:
        end_with_this_process()
        # The batch system signals all processes, and ranks still write their checkpoints.
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)

    daemon = subprocess.Popen([CONTROL, "-f"], stdin=subprocess.DEVNULL, preexec_fn=before_exec)
    ends = time.monotonic() + START_S
    while not (folder / PIPES).exists():
        if daemon.poll() is not None or time.monotonic() > ends:
            daemon.kill()
            raise TimeoutError(f"{CONTROL} ended or did not start, exit code {daemon.wait()}")
        time.sleep(0.02)
    return daemon


def _end(daemon: subprocess.Popen[bytes]) -> None:
    """Let the daemon end its servers; kill it if it does not."""
    with suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run([CONTROL], input=b"quit\n", timeout=END_S, check=False)
        daemon.wait(END_S)
    daemon.kill()
    daemon.wait()


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
