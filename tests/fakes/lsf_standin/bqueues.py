"""bqueues: the queues by name."""

from __future__ import annotations

import sys

from .client import REFUSED, ask, parse

ARITY = {"-w": 0}


def main(arguments) -> int:
    _, names = parse(arguments, ARITY, "Usage: bqueues [options] [queue_name ...]")
    queues, jobs = ask("settings")["queues"], ask("jobs")
    code = 0
    print("QUEUE_NAME      PRIO STATUS          MAX JL/U JL/P JL/H NJOBS  PEND   RUN  SUSP")
    for name in names or queues:
        if name not in queues:
            print(f"{name}: No such queue.", file=sys.stderr)
            code = REFUSED
            continue
        states = [job["fields"]["stat"] for job in jobs if job["fields"]["queue"] == name]
        pending, running = states.count("PEND"), states.count("RUN")
        columns = f"{pending + running:5}{pending:6}{running:6}     0"
        print(f"{name:<15}  30  Open:Active       -    -    -    - {columns}")
    return code
