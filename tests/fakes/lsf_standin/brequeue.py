"""brequeue: ends jobs and puts them back into the queue."""

from __future__ import annotations

from .client import ask, parse

ARITY = {"-r": 0, "-d": 0, "-e": 0, "-H": 0}


def main(arguments) -> int:
    _, ids = parse(arguments, ARITY, "Usage: brequeue [options] [job_ID | job_ID[index]] ...")
    for one in ids:
        ask("requeue", job=one)
        print(f"Job <{one}> is being requeued")
    return 0
