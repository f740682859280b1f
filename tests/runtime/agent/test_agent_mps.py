"""The daemon that lets the kernels of several processes run at once, by a stand-in for NVIDIA's."""

from __future__ import annotations

import os
from pathlib import Path

from hetctl.runtime.agent.mps import mps_daemon

STAND_IN = """\
#!/bin/sh
cd "$CUDA_MPS_PIPE_DIRECTORY" || exit 1
if [ "$1" = -f ]; then
  echo "$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" > threads
  : > control
  while [ ! -e quit ]; do sleep 0.02; done
  echo ended > {log}
else
  read -r word && [ "$word" = quit ] && : > quit
fi
"""
PIPES = "CUDA_MPS_PIPE_DIRECTORY"


def test_a_daemon_is_there_while_ranks_are_and_ends_with_them(tmp_path, monkeypatch):
    program, log = tmp_path / "nvidia-cuda-mps-control", tmp_path / "log"
    program.write_text(STAND_IN.format(log=log))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv(PIPES, "/another")
    with mps_daemon(50):
        folder = Path(os.environ[PIPES])
        assert (folder / "threads").read_text() == "50\n"
        assert (folder.stat().st_mode & 0o777, log.exists()) == (0o700, False)
    assert (os.environ[PIPES], folder.exists(), log.read_text()) == ("/another", False, "ended\n")


def test_without_a_daemon_processes_take_turns(tmp_path, monkeypatch, capfd):
    program = tmp_path / "nvidia-cuda-mps-control"
    monkeypatch.delenv(PIPES, raising=False)
    for there in (False, True):
        if there:
            program.write_text("#!/bin/sh\nexit 3\n")
            program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        with mps_daemon(100):
            assert PIPES not in os.environ
        assert "no MPS on this node, processes take turns" in capfd.readouterr().err
