"""qsub: the ``#PBS`` lines of a file, checked as PBS checks them."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

from lsf_standin.bsub import current_umask
from lsf_standin.client import RefusedError, ask, parse

from . import SERVER

ARITY = dict.fromkeys(("-N", "-q", "-A", "-l", "-W", "-j", "-k", "-o", "-r", "-a", "-m", "-M"), 1)
USAGE = "usage: qsub [-N name] [-q queue] [-A account] [-l resource_list] [-W attributes] [script]"
KNOWN = {"ncpus", "ngpus", "mem", "host"}
# As in a login: the environment of the submission is not passed on.
KEPT = ("PATH", "HOME", "USER", "LANG", "LSF_STANDIN")
ENVIRONMENT = """
export PBS_JOBID="$LSB_JOBID.{server}" PBS_NODEFILE="$LSB_DJOB_HOSTFILE.pbs" PBS_O_WORKDIR={folder}
uniq "$LSB_DJOB_HOSTFILE" >"$PBS_NODEFILE"
unset CUDA_VISIBLE_DEVICES
cd
"""


def main(arguments) -> int:
    given, words = parse(arguments, ARITY, USAGE)
    if len(words) != 1 or not Path(words[0]).is_file():
        raise RefusedError(f"qsub: script file:: No such file or directory\n{USAGE}")
    script = Path(words[0]).read_text()
    options = {}
    for name, value in [*given, *directives(script)]:
        options.setdefault(name, []).append(value)
    first, _, rest = script.partition("\n")
    added = ENVIRONMENT.format(server=SERVER, folder=shlex.quote(str(Path.cwd())))
    job = ask(
        "submit",
        request=checked({name: values[0] for name, values in options.items()}, options, ask("settings")),
        script=f"{first}{added}{rest}",
        cwd=str(Path.cwd()),
        umask=current_umask(),
        environment={name: os.environ[name] for name in KEPT if name in os.environ},
    )
    print(f"{job}.{SERVER}")
    return 0


def directives(text):
    """Read the ``#PBS`` lines before the first command."""
    found = []
    for line in text.splitlines():
        if match := re.match(r"#PBS\s+(.*)", line):
            found += parse(shlex.split(match.group(1)), ARITY, USAGE)[0]
        elif line.strip() and not line.startswith("#"):
            break
    return found


def checked(single, options, settings):
    """Return what the daemon needs of the options."""
    queue = single.get("-q", next(iter(settings["queues"])))
    if queue not in settings["queues"]:
        raise RefusedError("qsub: Unknown queue")
    resources = dict(part.split("=", 1) for one in options.get("-l", []) for part in one.split(","))
    nodes, _, chunk = resources.pop("select", "1").partition(":")
    wanted = dict(part.split("=", 1) for part in chunk.split(":") if part)
    for name in {*wanted} - KNOWN | {*resources} - {"place", "walltime"}:
        raise RefusedError(f"qsub: Unknown resource: {name}")
    wall = seconds(resources["walltime"]) / 60 if "walltime" in resources else None
    longest = settings["queues"][queue]
    if wall and longest and wall > longest:
        raise RefusedError("qsub: Job violates queue and/or server resource limits")
    cores = int(wanted.get("ncpus", 1))
    return {
        "name": single.get("-N", "STDIN"), "first": 0, "last": 0, "at_once": 0, "queue": queue,
        "project": single.get("-A", ""), "nnodes": None, "slots": int(nodes) * cores,
        "gpus": int(wanted.get("ngpus", 0)), "run_limit_min": wall or longest, "warning": None,
        "warning_min": None, "depends": depends(options.get("-W", [])), "output": single.get("-o"),
        "errors": None, "overwrite": True, "held": False, "cwd": None, "avoid": [], "ptile": cores,
        "one_host": False,
    }  # fmt: skip


def seconds(text):
    match = re.fullmatch(r"(?:(\d+):)?(?:(\d+):)?(\d+)", text)
    if not match:
        raise RefusedError(f"qsub: Illegal attribute or resource value Resource_List.walltime={text}")
    total = 0
    for part in filter(None, match.groups()):
        total = total * 60 + int(part)
    return total


def depends(attributes):
    """Read ``depend=afterany:12.server``."""
    found = []
    for one in attributes:
        match = re.fullmatch(rf"depend=afterany:(\d+)\.{SERVER}", one)
        if not match:
            raise RefusedError(f"qsub: Illegal attribute or resource value {one}")
        found.append(["ended", match[1]])
    return found
