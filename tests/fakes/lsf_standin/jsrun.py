"""jsrun: resource sets within the job's nodes, and the ranks in them.

Several ranks are started by Open MPI's ``mpirun``, all on this machine; each then becomes `rank`, which sets
what Job Step Manager would have set for it: its numbers, cores and GPUs.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys

from .client import RefusedError, connect, parse, talk

ALIASES = {
    "-n": "--nrs", "-a": "--tasks_per_rs", "-c": "--cpu_per_rs", "-g": "--gpu_per_rs", "-r": "--rs_per_host",
    "-d": "--launch_distribution", "-b": "--bind", "-l": "--latency_priority", "-X": "--exit_on_error",
    "-E": "--env", "-m": "--memory_per_rs", "-p": "--np",
}  # fmt: skip
NAMES = frozenset(ALIASES.values())
USAGE = "Usage: jsrun [options] command [arguments]"
PLAN = "LSF_STANDIN_RANKS"
PR_SET_PDEATHSIG = 1


def main(arguments) -> int:
    if arguments[:1] == ["--rank"]:
        return rank(arguments[1:])
    if "TMPDIR" in os.environ:
        raise RefusedError("Error: Could not reach the PMIx server: TMPDIR is set. Exiting.")
    options, command = options_of(arguments)
    if not command:
        raise RefusedError(f"Error: no command. Exiting.\n{USAGE}")
    job = os.environ.get("LSB_BATCH_JID")
    if not job:
        raise RefusedError("Error initializing RM connection. Exiting.")
    with connect() as connection, connection.makefile("rw") as file:
        return launch(by_flags(file, job, options), command, options.get("--exit_on_error") == "0")


def options_of(arguments):
    """Read ``-n1``, ``-n 1``, ``--nrs 1`` and ``--nrs=1``."""
    words = []
    arguments = list(arguments)
    while arguments and arguments[0].startswith("-"):
        word = arguments.pop(0)
        if match := re.fullmatch(r"(--\w+)=(.*)", word):
            words += match.groups()
        elif not word.startswith("--") and len(word) > 2:
            words += (word[:2], word[2:])
        else:
            words += (word, *arguments[:1])
            arguments = arguments[1:]
    options, _ = parse(words, {**dict.fromkeys(ALIASES, 1), **dict.fromkeys(NAMES, 1)}, USAGE)
    return {ALIASES.get(name, name): value for name, value in options}, arguments


def by_flags(file, job, options):
    sets = int(options.get("--nrs", "1"))
    tasks = int(options.get("--tasks_per_rs", "1"))
    cores, gpus = int(options.get("--cpu_per_rs", "1")), int(options.get("--gpu_per_rs", "0"))
    per_host = int(options.get("--rs_per_host", "0"))
    bind = re.fullmatch(r"packed:(\d+)", options.get("--bind", "packed:1"))
    width = int(bind[1]) if bind else cores
    if tasks * width > cores and bind and "--bind" in options:
        raise RefusedError(f"Error: {tasks} tasks of {width} cores do not fit {cores} cores. Exiting.")
    wanted = [[cores, gpus]] * sets
    placed = talk(file, "step", job=job, sets=wanted, per_host=per_host)
    return numbered(
        (host, have[task * width : (task + 1) * width] or have, cards)
        for host, have, cards in placed
        for task in range(tasks)
    )


def numbered(sets):
    """Add to each (host, cores, gpus) its rank on the host."""
    ranks, on_host = [], {}
    for host, cores, gpus in sets:
        local = on_host.setdefault(host, 0)
        on_host[host] += 1
        ranks.append({"host": host, "cores": cores, "gpus": gpus, "local": local})
    return ranks


def launch(ranks, command, go_on) -> int:
    os.environ[PLAN] = json.dumps(ranks)
    program = [sys.executable, "-I", sys.argv[0], "--rank", *command]
    if len(ranks) > 1:
        mpirun = ["mpirun", "-np", str(len(ranks)), "--allow-run-as-root", "--oversubscribe"]
        program = [*mpirun, "--bind-to", "none", *(["--enable-recovery"] if go_on else []), *program]
    process = subprocess.Popen(program, preexec_fn=die_with_jsrun)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: process.send_signal(n))
    code = process.wait()
    return code if code >= 0 else 128 - code


def rank(command) -> int:
    """Become a rank."""
    die_with_jsrun()
    ranks = json.loads(os.environ.pop(PLAN))
    number = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    mine = ranks[number]
    local = str(mine["local"])
    os.environ.update(
        JSM_NAMESPACE_RANK=str(number),
        JSM_NAMESPACE_SIZE=str(len(ranks)),
        JSM_NAMESPACE_LOCAL_RANK=local,
        LSF_STANDIN_HOST=mine["host"],
        PMIX_HOSTNAME=mine["host"],
    )
    if len(ranks) > 1:
        os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = local
    if mine["gpus"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, mine["gpus"]))
    here = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {here[core % len(here)] for core in mine["cores"]})
    os.execvp(command[0], command)


def die_with_jsrun() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
