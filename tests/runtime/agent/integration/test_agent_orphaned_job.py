"""The end of a job whose script's node is lost, commanded by an agent of another node."""

import os
import signal
import subprocess
import sys

SCANCEL = """\
#!/bin/sh
echo "$@" >> {folder}/calls
[ "$(wc -l < {folder}/calls)" -ge 3 ]
"""
FROM = "from hetctl.runtime.agent.agent import end_orphaned_job; "
END = f"{FROM}end_orphaned_job(('scancel', '17'), 0.0)"


def test_a_refused_command_is_given_again(tmp_path):
    command = tmp_path / "scancel"
    command.write_text(SCANCEL.format(folder=tmp_path))
    command.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    subprocess.run([sys.executable, "-c", END], env=environment, check=True, timeout=60)
    assert (tmp_path / "calls").read_text().split() == ["17"] * 3


def test_sigterm_of_the_batch_system_ends_the_wait():
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); "
    code = f"{ignore}{FROM}end_orphaned_job(('false',), 60.0)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as agent:
        assert agent.stdout.readline() == b"up\n"
        while agent.poll() is None:  # Until the agent has stopped to ignore it.
            agent.send_signal(signal.SIGTERM)
            try:
                agent.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
    assert agent.returncode == -signal.SIGTERM


def test_nodes_without_the_command_leave_the_job_alone(tmp_path):
    environment = {**os.environ, "PATH": str(tmp_path)}
    subprocess.run([sys.executable, "-c", END], env=environment, check=True, timeout=60)
