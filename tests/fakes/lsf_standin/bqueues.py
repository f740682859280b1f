"""bqueues: the queues by name, on a line each or at length."""

from __future__ import annotations

import sys

from .client import REFUSED, ask, parse

ARITY = {"-w": 0, "-l": 0}
SHORT = "QUEUE_NAME      PRIO STATUS          MAX JL/U JL/P JL/H NJOBS  PEND   RUN  SUSP"
LONG = """
QUEUE: {name}
  -- A queue of the stand-in.

PARAMETERS/STATISTICS
PRIO NICE STATUS          MAX JL/U JL/P JL/H NJOBS  PEND   RUN SSUSP USUSP  RSV PJOBS
 30    0  Open:Active       -    -    -    - {jobs:5} {pending:5} {running:5}     0     0    0 {pending:5}
Interval for a host to accept two jobs is 0 seconds
{limits}
SCHEDULING PARAMETERS
           r15s   r1m  r15m   ut      pg    io   ls    it    tmp    swp    mem
 loadSched   -     -     -     -       -     -    -     -     -      -      -
 loadStop    -     -     -     -       -     -    -     -     -      -      -

USERS: all
HOSTS:  all
"""
LIMITS = """
MAXIMUM LIMITS:
 RUNLIMIT
 {minutes:.1f} min
"""


def main(arguments) -> int:
    given, names = parse(arguments, ARITY, "Usage: bqueues [options] [queue_name ...]")
    long = "-l" in dict(given)
    queues, jobs = ask("settings")["queues"], ask("jobs")
    known = [name for name in names or queues if name in queues]
    unknown = [name for name in names if name not in queues]
    if known and not long:
        print(SHORT)
    for name in known:
        states = [job["fields"]["stat"] for job in jobs if job["fields"]["queue"] == name]
        show = at_length if long else in_short
        print(show(name, queues[name], states.count("PEND"), states.count("RUN")))
    for name in unknown:
        print(f"{name}: No such queue.", file=sys.stderr)
    return REFUSED if unknown else 0


def in_short(name, _, pending, running):
    columns = f"{pending + running:5}{pending:6}{running:6}     0"
    return f"{name:<15}  30  Open:Active       -    -    -    - {columns}"


def at_length(name, minutes, pending, running):
    limits = LIMITS.format(minutes=minutes) if minutes else ""
    return LONG.format(name=name, jobs=pending + running, pending=pending, running=running, limits=limits)
