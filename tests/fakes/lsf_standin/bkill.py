"""bkill: ends jobs, or sends them a signal."""

from __future__ import annotations

import sys

from .client import REFUSED, RefusedError, ask, parse

ARITY = {"-s": 1}
USAGE = "Usage: bkill [-s signal] [job_ID | job_ID[index]] ..."


def main(arguments) -> int:
    given, ids = parse(arguments, ARITY, USAGE)
    if not ids:
        raise RefusedError(f"Job ID must be specified.\n{USAGE}")
    signal = dict(given).get("-s")
    code = 0
    for one in ids:
        try:
            ask("kill", job=one, signal_name=signal)
            print(f"Job <{one}> is being {'signaled' if signal else 'terminated'}")
        except RefusedError as error:
            print(error, file=sys.stderr)
            code = REFUSED
    return code
