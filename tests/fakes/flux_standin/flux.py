"""flux: its subcommands that submit, query and cancel jobs, and those that a job uses."""

from __future__ import annotations

import os
import re
import shlex
import signal
import sys
import tempfile
import time
from pathlib import Path

from lsf_standin.bsub import current_umask
from lsf_standin.client import RefusedError, ask
from pbs_standin.mpiexec import follow, start

ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
PARENT, OWN = "local:///system", "local:///job"
OVER = ("DONE", "EXIT")
LIMIT, OWNER = "TERM_RUNLIMIT", "TERM_OWNER"
WORDS = {"DONE": "COMPLETED", "EXIT": "FAILED"}
PREAMBLE = f"""
export FLUX_ENCLOSING_ID=$(flux job id --to=f58plain "$LSB_JOBID") FLUX_URI={OWN}
unset CUDA_VISIBLE_DEVICES
"""


def main(arguments) -> int:
    words = [*arguments]
    if to_parent := words[:1] == ["--parent"]:
        words.pop(0)
    name = words.pop(0)
    uri = PARENT if to_parent else os.environ.get("FLUX_URI", PARENT)
    if name in ("batch", "jobs", "cancel") and uri != PARENT:
        raise RefusedError(f"flux-{name}: ERROR: the stand-in's {uri} has no such jobs")
    return COMMANDS[name](*split(words))


def split(words):
    """Split a command line into its options, each ``--name=value`` or a flag, and what follows them."""
    options, words = [], list(words)
    while words and words[0].startswith("-"):
        name, _, value = words.pop(0).partition("=")
        options.append((name, value))
    return options, words


def f58(number: int) -> str:
    digits = ""
    while number:
        number, digit = divmod(number, 58)
        digits = ALPHABET[digit] + digits
    return f"f{digits}"


def number_of(text: str) -> str:
    """Return the number of a job, given as a number or in base 58."""
    if text.isdecimal():
        return text
    total = 0
    for letter in text[1:]:
        total = total * 58 + ALPHABET.index(letter)
    return str(total)


def batch(given, words) -> int:
    if len(words) != 1 or not Path(words[0]).is_file():
        raise RefusedError(f"flux-batch: ERROR: No such file or directory: {words[:1]}")
    script = Path(words[0]).read_text()
    lines = re.findall(r"^# ?flux: (.*)$", script, re.MULTILINE)
    options = dict([*split([word for line in lines for word in shlex.split(line)])[0], *given])
    first, _, rest = script.partition("\n")
    job = ask(
        "submit",
        request=checked(options, ask("settings")),
        script=f"{first}{PREAMBLE}{rest}",
        cwd=str(Path.cwd()),
        umask=current_umask(),
        environment=dict(os.environ),
    )
    print(f58(job).replace("f", "\u0192", 1))
    return 0


def checked(options, settings):
    """Return what the daemon needs of the options."""
    queue = options.get("--queue", next(iter(settings["queues"])))
    if queue not in settings["queues"]:
        raise RefusedError(f"flux-batch: ERROR: '{queue}' is not a valid queue")
    signal, _, before = options.get("--signal", "").partition("@")
    after = options.get("--dependency", "").removeprefix("afterany:")
    known = [str(job["number"]) for job in ask("jobs")]
    if after and number_of(after) not in known:
        raise RefusedError(f"flux-batch: ERROR: dependency: afterany: id {after}: job not found")
    return {
        "name": options.get("--job-name", "script"), "first": 0, "last": 0, "at_once": 0, "queue": queue,
        "project": "", "nnodes": int(options.get("--nodes", 1)), "slots": None, "gpus": 0,
        "run_limit_min": minutes(options.get("--time-limit", "60m")), "warning": signal or None,
        "warning_min": minutes(before or "0s"), "depends": [["ended", number_of(after)]] if after else [],
        "output": options.get("--output"), "errors": None, "overwrite": True, "held": False, "cwd": None,
        "avoid": options.get("--requires", "").removeprefix("-hosts:").split(","), "ptile": None,
        "one_host": False,
    }  # fmt: skip


def minutes(text):
    match = re.fullmatch(r"(\d+)([sm])", text)
    if not match:
        raise RefusedError("flux-batch: ERROR: invalid Flux standard duration")
    return int(match[1]) / (60 if match[2] == "s" else 1)


def jobs(given, ids) -> int:
    options = dict(given)
    known = [job for job in reversed(ask("jobs")) if not job["hidden"]]
    if ids:
        wanted = {number_of(one): one for one in ids}
        for number in wanted.keys() - {str(job["number"]) for job in known}:
            print(f"JobID {wanted[number]} unknown", file=sys.stderr)
        known = [job for job in known if str(job["number"]) in wanted]
    else:
        known = [job for job in known if "-a" in options or job["fields"]["stat"] not in OVER]
        known = [job for job in known if job["fields"]["job_name"] == options.get("--name", "")]
    for job in known:
        print(re.sub(r"\{([\w.]+)\}", lambda key, job=job: shown(job)[key[1]], options["--format"]))
    return 0


def shown(job):
    fields = job["fields"]
    over, reason = fields["stat"] in OVER, fields["exit_reason"]
    late, owner = reason.startswith(LIMIT), reason.startswith(OWNER)
    waits = "DEPEND" if fields["pend_reason"].startswith("Job dependency") else "SCHED"
    result = "TIMEOUT" if late else "CANCELED" if owner else WORDS.get(fields["stat"], "")
    started = bool(fields["exec_host"])
    return {
        "id.f58plain": f58(job["number"]),
        "state": "INACTIVE" if over else "RUN" if fields["stat"] in ("RUN", "UNKWN") else waits,
        "result": result if over else "",
        "returncode": (fields["exit_code"] or "0") if over and started else "",
        "exception.type": "timeout" if late else "cancel" if owner else "",
        "exception.note": "resource allocation expired" if late else "",
    }


def cancel(_, ids) -> int:
    code = 0
    for one in ids:
        try:
            ask("kill", job=number_of(one))
        except RefusedError as error:
            over = "finished" in str(error)
            print(
                f"flux-cancel: ERROR: {one}: {'job is inactive' if over else 'unknown job id'}",
                file=sys.stderr,
            )
            code = 1
    return code


def own_job():
    (job,) = (job for job in ask("jobs") if str(job["number"]) == os.environ["LSB_JOBID"])
    return job


def lost() -> Path:
    """Return the file with the job's nodes that are lost."""
    return Path(f"{os.environ['LSB_DJOB_HOSTFILE']}.lost")


def hosts():
    gone = lost().read_text().split() if lost().exists() else []
    return [host for host in dict.fromkeys(os.environ["LSB_HOSTS"].split()) if host not in gone]


def run(given, command) -> int:
    options = dict(given)
    count = int(options["--nodes"])
    named = options.get("--requires", "").removeprefix("hosts:")
    if count > len(hosts()):
        need = f"need {count} exclusive node(s), only {len(hosts())} eligible"
        raise RefusedError(f"0.028s: job.exception f1 type=alloc severity=0 unsatisfiable request: {need}")
    nodes = [named] if named in hosts() else hosts()[:count]
    running = []
    with tempfile.TemporaryDirectory() as own:
        for rank, node in enumerate(nodes):
            os.environ.update(FLUX_JOB_ID=own, FLUX_TASK_RANK=str(rank))
            running.append(start(node, rank, [word.replace("{{node.name}}", node) for word in command]))
        tolerant = ("--setopt", "exit-timeout=none") in given
        # The loss of a node, here of its processes, ends a step in which all ranks are critical.
        code = follow(running, lambda code: tolerant and (code > 0 or Path(own, "0").exists()))
        gone = [node for node, one in zip(nodes, running, strict=True) if one.returncode == -signal.SIGKILL]
        with lost().open("a") as file:
            file.write(" ".join(["", *gone]))
        return code


def python(_, words) -> int:
    """Take a request to the job's own execution: the ranks whose loss ends it."""
    if "job-exec.critical-ranks" in words[0] and '"ranks": "0"' in words[0]:
        Path(os.environ["FLUX_JOB_ID"], "0").touch()
    return 0


def job(words) -> int:
    if words[:1] == ["id"]:
        print(f58(int(number_of(words[-1]))))
    else:
        left = own_job()["started"] + own_job()["limit_s"] - time.time()
        print(max(0, int(left)))
    return 0


def say(text) -> int:
    print(text)
    return 0


def queues() -> int:
    for name, limit in ask("settings")["queues"].items():
        print(f"{name}|\u2714|\u2714|{f'{limit}m' if limit else 'inf'}|0-inf")
    return 0


COMMANDS = {
    "batch": batch,
    "jobs": jobs,
    "cancel": cancel,
    "run": run,
    "python": python,
    "job": lambda _, words: job([*words[:1], *split(words[1:])[1]]),
    "getattr": lambda *_: say(PARENT),
    "resource": lambda *_: say(",".join(hosts())),
    "hostlist": lambda _, words: say(words[0].replace(",", " ")),
    "queue": lambda *_: queues(),
}
