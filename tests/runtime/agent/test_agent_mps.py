"""The daemon that lets the kernels of several processes run at once, by a stand-in for NVIDIA's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetctl.runtime.agent.mps import mps_daemon

STAND_IN = """\
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit 1
if [ "$1" = -f ]; then
  echo "$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_VISIBLE_DEVICES" > told
  : > control
  while [ ! -e quit ]; do sleep 0.02; done
  echo ended > {log}
else
  read -r word && [ "$word" = quit ] && : > quit
fi
"""
GPUS = "".join(f"GPU {n}: NVIDIA A100-SXM4-40GB (UUID: GPU-{n}a-0f)\n" for n in range(4))
MIG = "  MIG 1g.5gb      Device  0: (UUID: MIG-7c-1e)\n"
PIPES, VISIBLE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_VISIBLE_DEVICES"


def program(path, text):
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("named", "seen"), [(None, ""), ("2,3", "GPU-2a-0f,GPU-3a-0f"), ("GPU-1a, 0", "GPU-1a,GPU-0a-0f")]
)
def test_a_daemon_is_there_while_ranks_are_and_ends_with_them(tmp_path, monkeypatch, named, seen):
    log = tmp_path / "log"
    program(tmp_path / "nvidia-cuda-mps-control", STAND_IN.format(log=log))
    program(tmp_path / "nvidia-smi", f"echo '{GPUS}'\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(PIPES, "/another")
    monkeypatch.delenv(VISIBLE, raising=False)
    if named:
        monkeypatch.setenv(VISIBLE, named)
    with mps_daemon(50):
        folder = Path(os.environ[PIPES])
        # It numbers the GPUs that it sees from 0, so that its processes must not name them by numbers.
        assert (folder / "told").read_text() == f"50 {seen}\n"
        assert os.environ.get(VISIBLE, "") == seen
        assert (folder.stat().st_mode & 0o777, log.exists()) == (0o700, False)
    assert (os.environ[PIPES], folder.exists(), log.read_text()) == ("/another", False, "ended\n")
    assert os.environ.get(VISIBLE) == named


@pytest.mark.parametrize(
    ("listed", "daemon", "why"),
    [
        (None, None, "nvidia-smi"),
        (GPUS, None, "nvidia-cuda-mps-control"),
        (GPUS, "exit 3\n", "ended or did not start, exit code 3"),
        ("", "exit 3\n", "lists no GPU"),
        # Each of them would need one of its own.
        (GPUS + MIG, "exit 3\n", "lists MIG devices"),
    ],
)
def test_without_a_daemon_processes_take_turns(tmp_path, monkeypatch, capfd, listed, daemon, why):
    monkeypatch.delenv(PIPES, raising=False)
    monkeypatch.setenv(VISIBLE, "1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if listed is not None:
        program(tmp_path / "nvidia-smi", f"echo '{listed}'\n")
    if daemon:
        program(tmp_path / "nvidia-cuda-mps-control", daemon)
    with mps_daemon(100):
        assert (PIPES in os.environ, os.environ[VISIBLE]) == (False, "1")
    said = capfd.readouterr().err
    assert "no MPS on this node, processes take turns" in said
    assert why in said
