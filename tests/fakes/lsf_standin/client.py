"""What the commands share: asking the daemon, and refusing options as LSF does."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path

REFUSED = 255


class RefusedError(Exception):
    """A command line that LSF does not take; the text is what it says."""


def folder() -> Path:
    try:
        return Path(os.environ["LSF_STANDIN"])
    except KeyError:
        raise RefusedError("ls_initdebug: LSF_STANDIN names no folder of the stand-in") from None


def connect() -> socket.socket:
    """Wait for the daemon, for ever, as LSF's commands do."""
    while (folder() / "away").exists():
        print("LSF is down. Please wait ...", file=sys.stderr, flush=True)
        time.sleep(0.2)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(folder() / "socket"))
    except OSError:
        raise RefusedError("Failed in an LSF library call: Connection refused by server") from None
    return connection


def ask(operation: str, **request):
    """Ask the daemon; an answer with an error is a refusal."""
    with connect() as connection, connection.makefile("rw") as file:
        return talk(file, operation, **request)


def talk(file, operation: str, **request):
    file.write(json.dumps({"operation": operation, **request}) + "\n")
    file.flush()
    line = file.readline()
    if not line:
        raise RefusedError("Failed in sending/receiving a message: Connection reset by peer")
    answer = json.loads(line)
    if "refused" in answer:
        raise RefusedError(answer["refused"])
    return answer["answer"]


def parse(arguments, arity, usage):
    """Split a command line into options, each with its values, and what follows them.

    Parameters
    ----------
    arity : mapping
        How many words each option takes; those that are not in it are refused.
    """
    options, words = [], list(arguments)
    while words and words[0].startswith("-"):
        name = words.pop(0)
        if name not in arity:
            raise RefusedError(f"{name}: Illegal option.\n{usage}")
        if len(words) < arity[name]:
            raise RefusedError(f"{name}: option requires an argument.\n{usage}")
        options.append((name, words.pop(0) if arity[name] else True))
    return options, words


def run(main) -> int:
    try:
        return main(sys.argv[1:]) or 0
    except RefusedError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except BrokenPipeError:
        return REFUSED
