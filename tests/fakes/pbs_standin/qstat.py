"""qstat, qselect, qdel and pbsnodes."""

from __future__ import annotations

import sys
import time

from lsf_standin.client import RefusedError, ask, parse

from . import SERVER

UNKNOWN_JOB = 153
OVER = ("DONE", "EXIT")
LETTERS = {"PEND": "Q", "PSUSP": "H", "RUN": "R", "UNKWN": "R", "USUSP": "S", "DONE": "F", "EXIT": "F"}
LIMIT, OWNER = "TERM_RUNLIMIT", "TERM_OWNER"
WIDTH = 78


def qstat(arguments) -> int:
    options, words = parse(
        arguments, {"-x": 0, "-f": 0, "-B": 0, "-Q": 0}, "usage:\nqstat [-x] [-f] [job_identifier...]"
    )
    flags = dict(options)
    if "-B" in flags:
        print(f"Server: {SERVER}\n    server_state = Active\n    job_history_enable = True")
        return 0
    if "-Q" in flags:
        return queues(words)
    return jobs(words, "-x" in flags)


def queues(names) -> int:
    known = ask("settings")["queues"]
    for name in names or known:
        if name not in known:
            raise RefusedError(f"qstat: Unknown queue {name}")
        print(f"Queue: {name}\n    queue_type = Execution\n    total_jobs = 0")
        if known[name]:
            print(f"    resources_max.walltime = {clock(known[name] * 60)}")
        print("    enabled = True\n    started = True\n")
    return 0


def jobs(ids, history) -> int:
    code, known = 0, {number(job): job for job in ask("jobs") if not job["hidden"]}
    for one in ids or known:
        job = known.get(one.partition(".")[0])
        if job is None:
            print(f"qstat: Unknown Job Id {one.partition('.')[0]}.{SERVER}", file=sys.stderr)
            code = UNKNOWN_JOB
        elif job["fields"]["stat"] in OVER and not history:
            print(
                f"qstat: {one} Job has finished, use -x or -H to obtain historical job information",
                file=sys.stderr,
            )
            code = 35
        else:
            show(job)
    return code


def show(job):
    fields = job["fields"]
    ended, owner = fields["stat"] in OVER, fields["exit_reason"].startswith(OWNER)
    waits = fields["pend_reason"].startswith("Job dependency")
    lines = {
        "Job_Name": fields["job_name"],
        "Job_Owner": f"{fields['user']}@login",
        "job_state": "H" if waits else LETTERS[fields["stat"]],
        "queue": fields["queue"],
        "server": SERVER,
        "Resource_List.walltime": clock(job["limit_s"]) if job["limit_s"] else "",
        "stime": time.ctime(job["started"]) if job["started"] else "",
        "substate": ("91" if owner else "92") if ended else "42",
        "Variable_List": "PBS_O_HOME=/home/tester,PBS_O_LANG=C.UTF-8,PBS_O_PATH=/usr/local/bin:/bin",
        "comment": comment(fields),
        "Exit_status": str(status_of(fields)) if ended and fields["exec_host"] else "",
    }
    print(f"Job Id: {number(job)}.{SERVER}")
    for name, value in lines.items():
        if value:
            print(fold(f"    {name} = {value}"))
    print()


def status_of(fields):
    if fields["exit_reason"].startswith(LIMIT):
        return -29
    code = int(fields["exit_code"] or 0)
    return 256 + code - 128 if code > 128 else code


def comment(fields):
    return fields["pend_reason"] and f"Not Running: {fields['pend_reason']}"


def fold(line):
    return "\n\t".join(line[at : at + WIDTH] for at in range(0, len(line), WIDTH))


def number(job):
    return str(job["number"])


def clock(seconds):
    whole = int(seconds)
    return f"{whole // 3600:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def qselect(arguments) -> int:
    options, _ = parse(arguments, {"-x": 0, "-u": 1, "-N": 1}, "usage: qselect [-x] [-u users] [-N name]")
    flags = dict(options)
    for job in ask("jobs"):
        fields = job["fields"]
        if (
            not job["hidden"]
            and fields["job_name"] == flags["-N"]
            and ("-x" in flags or fields["stat"] not in OVER)
        ):
            print(f"{number(job)}.{SERVER}")
    return 0


def qdel(arguments) -> int:
    code = 0
    for one in parse(arguments, {}, "usage: qdel job_identifier...")[1]:
        try:
            ask("kill", job=one.partition(".")[0])
        except RefusedError as error:
            over = "finished" in str(error)
            print(f"qdel: {'Job has finished' if over else 'Unknown Job Id'} {one}", file=sys.stderr)
            code = 35 if over else UNKNOWN_JOB
    return code


def pbsnodes(arguments) -> int:
    parse(arguments, {"-a": 0}, "usage: pbsnodes -a")
    for name, (cores, gpus) in ask("settings")["hosts"].items():
        print(f"{name}\n     Mom = {name}\n     state = free")
        print(f"     resources_available.mem = 2097152kb\n     resources_available.ncpus = {cores}")
        print(f"     resources_available.ngpus = {gpus}\n")
    return 0
