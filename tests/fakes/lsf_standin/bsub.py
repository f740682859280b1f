"""bsub: options of the command line and of ``#BSUB`` lines, checked as LSF checks them."""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path

from .client import RefusedError, ask, parse

USAGE = "Usage: bsub [options] [job_script | command [argument ...]]"
VALUES = (
    *(
        "-J",
        "-q",
        "-P",
        "-G",
        "-n",
        "-nnodes",
        "-R",
        "-W",
        "-We",
        "-wa",
        "-wt",
        "-w",
        "-o",
        "-oo",
        "-e",
        "-eo",
    ),
    *("-gpu", "-alloc_flags", "-cn_cu", "-cn_mem", "-ln_slots", "-ln_mem", "-core_isolation", "-env", "-cwd"),
    *("-M", "-m", "-app", "-U", "-u", "-jd", "-sp", "-L"),
)
FLAGS = ("-B", "-N", "-x", "-r", "-rn", "-H", "-ti")
ARITY = {**dict.fromkeys(VALUES, 1), **dict.fromkeys(FLAGS, 0)}
SEVERAL = ("-R",)
LAUNCH_NODE_ONLY = ("-nnodes", "-alloc_flags", "-cn_cu", "-cn_mem", "-ln_slots", "-ln_mem", "-core_isolation")
SIGNALS = ("HUP", "INT", "QUIT", "USR1", "USR2", "TERM", "URG", "CONT")
NOT_SUBMITTED = "Job not submitted."


def main(arguments) -> int:
    given, command = parse(arguments, ARITY, f"{USAGE}\n{NOT_SUBMITTED}")
    settings = ask("settings")
    script, embedded = None, []
    if not command:
        script = sys.stdin.read()
        if not script.strip():
            raise RefusedError(f"No command is specified. {NOT_SUBMITTED}")
        embedded = directives(script)
    elif settings["parse_scripts"] and (text := script_text(command[0])) is not None:
        script, embedded = text, directives(text)
    options = merged([*given, *embedded])
    job = ask(
        "submit",
        request=checked(options, settings),
        script=script if script is not None else " ".join(command),
        cwd=str(Path.cwd()),
        umask=current_umask(),
        environment=dict(os.environ),
    )
    queue = options.get("-q")
    where = f"queue <{queue}>" if queue else f"default queue <{next(iter(settings['queues']))}>"
    print(f"Job <{job}> is submitted to {where}.")
    return 0


def script_text(word):
    """Return a job script's text; other words are commands, as LSF tells them apart."""
    path = Path(word)
    try:
        text = path.read_text() if path.is_file() else None
    except UnicodeDecodeError:
        return None
    return text


def directives(text):
    """Read the ``#BSUB`` lines; options on the command line go before them."""
    found = []
    for line in text.splitlines():
        if match := re.match(r"#\s?BSUB\s+(.*)", line):
            options, rest = parse(shlex.split(match.group(1)), ARITY, f"{USAGE}\n{NOT_SUBMITTED}")
            if rest:
                raise RefusedError(f"{rest[0]}: Illegal option in #BSUB line. {NOT_SUBMITTED}")
            found += options
    return found


def merged(options):
    """Take the first of several values; resource requirements add up."""
    result = {}
    for name, value in options:
        if name in SEVERAL:
            result.setdefault(name, []).append(value)
        else:
            result.setdefault(name, value)
    return result


def checked(options, settings):
    """Return what the daemon needs of the options."""
    for name in LAUNCH_NODE_ONLY:
        if name in options and not settings["launch_host"]:
            raise RefusedError(f"{name}: CSM is not enabled in this cluster. {NOT_SUBMITTED}")
    if "-nnodes" in options and "-n" in options:
        raise RefusedError(f"-n: cannot be used with -nnodes. {NOT_SUBMITTED}")
    queue = options.get("-q", next(iter(settings["queues"])))
    if queue not in settings["queues"]:
        raise RefusedError(f"{queue}: No such queue. {NOT_SUBMITTED}")
    run_limit, longest = minutes(options.get("-W"), "-W", "RUNLIMIT"), settings["queues"][queue]
    if run_limit and longest and run_limit > longest:
        raise RefusedError(f"RUNLIMIT: Cannot exceed queue's hard limit(s). {NOT_SUBMITTED}")
    if ("-wa" in options) != ("-wt" in options):
        raise RefusedError(f"-wa, -wt: warning action and time must both be specified. {NOT_SUBMITTED}")
    action = options.get("-wa", "USR2").removeprefix("SIG")
    if action not in SIGNALS:
        raise RefusedError(f"{action}: Bad warning action. {NOT_SUBMITTED}")
    name, first, last, at_once = job_name(options.get("-J", ""))
    return {
        "name": name,
        "first": first,
        "last": last,
        "at_once": at_once,
        "queue": queue,
        "project": options.get("-P", "default"),
        "nnodes": number(options, "-nnodes"),
        "slots": number(options, "-n"),
        "gpus": gpus(options.get("-gpu", "num=0")),
        "run_limit_min": run_limit or longest,
        "warning": action if "-wa" in options else None,
        "warning_min": minutes(options.get("-wt"), "-wt", "warning time"),
        "depends": condition(options.get("-w")),
        "output": options.get("-oo") or options.get("-o"),
        "errors": options.get("-eo") or options.get("-e"),
        "overwrite": "-oo" in options,
        "held": "-H" in options,
        "cwd": options.get("-cwd"),
        **requirements(options.get("-R", [])),
    }


def job_name(text):
    match = re.fullmatch(r"([^\[\]]*)(?:\[(\d+)(?:-(\d+))?\](?:%(\d+))?)?", text)
    if not match or (match[2] and int(match[2]) < 1):
        raise RefusedError(f"{text}: Bad job name. {NOT_SUBMITTED}")
    first = int(match[2]) if match[2] else 0
    last = int(match[3] or match[2] or 0)
    if last < first:
        raise RefusedError(f"{text}: Bad job array index list. {NOT_SUBMITTED}")
    return match[1], first, last, int(match[4] or 0)


def number(options, name):
    text = options.get(name)
    if text is not None and not re.fullmatch(r"[1-9]\d*", text):
        raise RefusedError(f"{name} {text}: Bad argument. {NOT_SUBMITTED}")
    return int(text) if text else None


def minutes(text, option, what):
    if text is None:
        return None
    match = re.fullmatch(r"(?:(\d+):)?(\d+)", text)
    if not match or (option == "-wt" and int(match[1] or 0) * 60 + int(match[2]) == 0):
        raise RefusedError(f"{option} {text}: Bad {what} specification. {NOT_SUBMITTED}")
    return int(match[1] or 0) * 60 + int(match[2])


def gpus(text):
    known = r"num=\d+(/host)?|mode=(shared|exclusive_process)|j_exclusive=(yes|no)|mps=(yes|no)|gmodel=\S+"
    if not all(re.fullmatch(known, part) for part in text.split(":")):
        raise RefusedError(f"{text}: Bad GPU requirement syntax. {NOT_SUBMITTED}")
    return next((int(re.sub(r"\D", "", p)) for p in text.split(":") if p.startswith("num=")), 1)


def condition(text):
    """Read ``ended(12) && done(13)``."""
    if text is None:
        return []
    parts = [re.fullmatch(r'(ended|done|exit|started)\("?([^()"]+)"?\)', p.strip()) for p in text.split("&&")]
    if not all(parts):
        raise RefusedError(f"{text}: Dependency condition syntax error. {NOT_SUBMITTED}")
    return [[part[1], part[2]] for part in parts]


def requirements(texts):
    """Read ``select[hname!='n1' && ..]``, ``span[ptile=4]``, ``span[hosts=1]`` and ``rusage[..]``."""
    result = {"avoid": [], "ptile": None, "one_host": False}
    for text in texts:
        sections = re.findall(r"(\w+)\[([^\]]*)\]", text)
        if not sections or re.sub(r"\w+\[[^\]]*\]", "", text).strip():
            raise RefusedError(f"Bad resource requirement syntax. {NOT_SUBMITTED}")
        for section, body in sections:
            read(section, body, result)
    return result


def read(section, body, result):
    if section == "select":
        parts = [re.fullmatch(r"hname\s*!=\s*'?([\w.-]+)'?", part.strip()) for part in body.split("&&")]
        if all(parts):
            result["avoid"] += [part[1] for part in parts]
            return
    elif section == "span" and (match := re.fullmatch(r"ptile=(\d+)", body)):
        result["ptile"] = int(match[1])
        return
    elif section == "span" and body == "hosts=1":
        result["one_host"] = True
        return
    elif section in ("rusage", "order"):
        return
    raise RefusedError(f"Bad resource requirement syntax. {NOT_SUBMITTED}")


def current_umask():
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
