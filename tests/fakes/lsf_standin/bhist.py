"""bhist: the story of each job, in lines of 80 columns folded as LSF folds them."""

from __future__ import annotations

import fnmatch
import sys
import time

from .client import REFUSED, RefusedError, ask, parse

ARITY = {"-a": 0, "-l": 0, "-J": 1, "-n": 1, "-u": 1}
USAGE = "Usage: bhist [options] [job_ID | job_ID[index]] ..."
WIDTH, INDENT = 79, 21


def main(arguments) -> int:
    given, ids = parse(arguments, ARITY, USAGE)
    options = dict(given)
    if "-l" not in options:
        raise RefusedError("bhist: the stand-in knows the long format only")
    jobs = [job for job in ask("jobs") if job["hidden"] != "everything"]
    if ids:
        jobs = [job for one in ids for job in jobs if one in (job["id"], str(job["number"]))]
    else:
        jobs = [job for job in jobs if fnmatch.fnmatchcase(name(job), options.get("-J", "*"))]
    if not jobs:
        print("No matching job found", file=sys.stderr)
        return REFUSED
    print("\n".join(story(job) for job in jobs))
    return 0


def name(job):
    return job["fields"]["job_name"].partition("[")[0]


def story(job):
    fields = job["fields"]
    named = f"Job Name <{fields['job_name']}>, " if fields["job_name"] else ""
    owner = f"User <{fields['user']}>, Project <{fields['proj_name']}>"
    head = f"Job <{job['id']}>, {named}{owner}, Command <...>"
    lines = [fold(head)]
    for moment, text in job["events"]:
        lines.append(fold(f"{time.strftime('%a %b %e %H:%M:%S', time.localtime(moment))}: {text}"))
        if "with exit code" in text:
            lines.append("")
    summary = "Summary of time in seconds spent in various states"
    return "\n".join(["", *lines, "", summary, "  PEND     PSUSP    RUN", "  0        0        1", "-" * 78])


def fold(line):
    parts, rest = [line[:WIDTH]], line[WIDTH:]
    while rest:
        parts.append(" " * INDENT + rest[: WIDTH - INDENT])
        rest = rest[WIDTH - INDENT :]
    return "\n".join(parts)
