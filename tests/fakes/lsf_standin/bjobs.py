"""bjobs: only what has been asked for in ``-o``, as JSON or as columns."""

from __future__ import annotations

import fnmatch
import json
import sys

from .client import REFUSED, RefusedError, ask, parse

ARITY = {"-a": 0, "-json": 0, "-o": 1, "-J": 1, "-noheader": 0, "-u": 1, "-w": 0, "-q": 1}
USAGE = "Usage: bjobs [options] [job_ID | job_ID[index]] ..."
DEFAULT = "jobid user stat queue from_host exec_host job_name"
UNFINISHED = ("PEND", "PSUSP", "RUN", "USUSP", "UNKWN")


def main(arguments) -> int:
    given, ids = parse(arguments, ARITY, USAGE)
    options = dict(given)
    if "-json" in options and "-o" not in options:
        raise RefusedError(f"-json must be used with -o.\n{USAGE}")
    jobs = [job for job in ask("jobs") if not job["hidden"]]
    names = options.get("-o", DEFAULT).split()
    records = [record for one in ids for record in of_id(one, jobs)] if ids else of_name(jobs, options)
    known = [record for record in records if "ERROR" not in record]
    for record in known:
        check(names, record)
    if "-json" in options:
        show_json(records, names)
    else:
        show_columns(records, names, "-noheader" in options)
    if not ids and not known:
        print(f"Job <{options['-J']}> is not found" if "-J" in options else "No job found", file=sys.stderr)
    return 0 if known or not (ids or "-J" in options) else REFUSED


def of_id(one, jobs):
    found = [job["fields"] for job in jobs if one in (job["id"], str(job["number"]))]
    return found or [{"jobid": one, "ERROR": f"Job <{one}> is not found"}]


def of_name(jobs, options):
    return [
        job["fields"]
        for job in jobs
        if ("-a" in options or job["fields"]["stat"] in UNFINISHED)
        and fnmatch.fnmatchcase(job["fields"]["job_name"].partition("[")[0], options.get("-J", "*"))
    ]


def check(names, record):
    for name in names:
        if name not in record:
            raise RefusedError(f"{name}: unknown field name.\n{USAGE}")


def show_json(records, names):
    print('{\n  "COMMAND":"bjobs",')
    print(f'  "JOBS":{len(records)},\n  "RECORDS":[')
    for index, record in enumerate(records):
        shown = ["jobid", "ERROR"] if "ERROR" in record else names
        lines = [f"      {json.dumps(n.upper())}:{json.dumps(record[n])}" for n in shown]
        print("    {\n" + ",\n".join(lines) + "\n    }" + ("," if index + 1 < len(records) else ""))
    print("  ]\n}")


def show_columns(records, names, bare):
    if not bare:
        print(" ".join(name.upper() for name in names))
    for record in records:
        if "ERROR" in record:
            print(record["ERROR"], file=sys.stderr)
        else:
            print(" ".join(record[name] or "-" for name in names))
