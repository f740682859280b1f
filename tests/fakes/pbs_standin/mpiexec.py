"""mpiexec of PALS: programs on the job's nodes, in the order of ``--hosts``, one process on each."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from pathlib import Path

from lsf_standin.client import RefusedError

VALUES = ("-n", "--ppn", "--hosts", "--cpu-bind", "--pmi")
FLAGS = ("--no-transfer", "--line-buffer", "--no-abort-on-failure")
PR_SET_PDEATHSIG = 1


def main(arguments) -> int:
    of_job = Path(os.environ["PBS_NODEFILE"]).read_text().split()
    programs, options = [], {}
    for words in split(arguments):
        own, command = options_of(words)
        options.update(own)
        programs += [command] * int(own["-n"])
    hosts = options["--hosts"].split(",")
    if {*hosts} - {*of_job} or len(hosts) != len(programs):
        raise RefusedError(
            f"mpiexec: {hosts} are not in the job's allocation, or do not fit {len(programs)} processes"
        )
    running = [
        start(host, rank, command) for rank, (host, command) in enumerate(zip(hosts, programs, strict=True))
    ]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: [one.send_signal(n) for one in running])
    return follow(running, lambda _: "--no-abort-on-failure" in options)


def split(arguments):
    """Split the programs of a command line at ``:``."""
    parts = [[]]
    for word in arguments:
        parts.append([]) if word == ":" else parts[-1].append(word)
    return parts


def options_of(words):
    options, words = {}, list(words)
    while words and words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        if name not in VALUES + FLAGS:
            raise RefusedError(f"Error: No such option: {name}")
        options[name] = (value or words.pop(0)) if name in VALUES else True
    return options, words


def start(host, rank, command):
    known = {
        "PALS_RANKID": str(rank),
        "PALS_LOCAL_RANKID": "0",
        "PMIX_HOSTNAME": host,
        "LSF_STANDIN_HOST": host,
    }
    die = ctypes.CDLL(None).prctl
    return subprocess.Popen(
        command,
        env={**os.environ, **known},
        preexec_fn=lambda: die(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0),
    )


def follow(running, go_on) -> int:
    """Wait for all; one that fails ends the others, unless they go on after its code."""
    codes = []
    while left := [one for one in running if one.returncode is None]:
        pid = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT).si_pid
        codes += [one.wait() for one in left if one.pid == pid]
        if codes and codes[-1] and not go_on(codes[-1]):
            for one in left:
                one.send_signal(signal.SIGTERM)
    failed = [code for code in codes if code]
    return 0 if not failed else failed[0] if failed[0] > 0 else 128 - failed[0]
