"""Starts of a command by a warm Python of its node, which has imported modules for it (`preload`).

A rank asks the template from which it was forked, which keeps the node's warm Pythons and passes the rank's
connection on to one of them. So modules are imported once on each node, for all ranks.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetctl.model.python_start import PythonStart
from hetctl.model.training_settings import FIRST_USE
from hetctl.runtime.worker.scripts import warm_python
from hetctl.storage.processes import die_with_parent

KEY = ("python", "script_folder", "modules", "variables")
"""Key of the starts that share a Python: program and options, first folder to be searched for
modules, modules, and variables of the member."""


def start_warm(
    start: PythonStart,
    modules: Sequence[str],
    variables: Mapping[str, str],
    words: Sequence[str],
    project: Path,
    folder: Path,
    environment: Mapping[str, str],
    errors: int,
    pipes: Mapping[str, int],
    requests: int,
) -> WarmStart:
    """Have a command started by the node's Python that has imported these modules.

    Parameters
    ----------
    variables : mapping of str to str
        Variables of the member, which modules may read as they are imported.
    project, folder : Path
        Folder of the script whose modules are imported ahead, and the same or a copy of it, to run in.
    errors : int
        Descriptor of its standard error.
    pipes : mapping of str to int
        Descriptors by the variables that tell the command their numbers.
    requests : int
        Descriptor to reach the node's `WarmPythons`.

    Raises
    ------
    OSError
        If there is no such program.
    """
    program = str(folder / words[0]) if os.sep in words[0] else words[0]
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise FileNotFoundError(2, os.strerror(2))
    own_folder, ahead = (
        str(place if start.module else (place / start.argv[0]).resolve().parent)
        for place in (folder, project)
    )
    needed = dict.fromkeys(name for module in modules for name in (module, *FIRST_USE.get(module, ())))
    python = dict(zip(KEY, (start.python, ahead, list(needed), dict(variables)), strict=True))
    own, theirs = socket.socketpair()
    with theirs, socket.socket(fileno=os.dup(requests)) as template:
        # A template that has ended shows by the closed connection.
        with suppress(OSError):
            socket.send_fds(template, [b"."], [theirs.fileno()])
        theirs.close()
        place: dict[str, Any] = {"folder": str(folder), "environment": dict(environment)}
        _send(own, {**python, **place}, [1, errors])
        place["script_folder"] = own_folder
        told = {"words": list(words), "argv": start.argv, "module": start.module, "pipes": list(pipes)}
        cores = sorted(os.sched_getaffinity(0))
        _send(own, {**told, **place, "cores": cores}, [1, errors, *pipes.values()])
    return WarmStart(own)


def _send(connection: socket.socket, message: Mapping[str, object], descriptors: Sequence[int]) -> None:
    text = json.dumps(message).encode()
    with suppress(BrokenPipeError, ConnectionResetError):
        socket.send_fds(connection, [len(text).to_bytes(warm_python.LENGTH_BYTES, "big")], descriptors)
        connection.sendall(text)


class WarmStart:
    """Command that a warm Python starts, as `CommandProcess` sees it.

    Attributes
    ----------
    pid : int or None
        Number of its process; None until the Python has forked.
    began_at : float
        Time of that, in seconds since the epoch; until then, that of the request.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid: int | None = None
        self.began_at = time.time()
        self._numbers: list[int] = []
        self._code: int | None = None
        self._rest = b""

    def ended(self) -> int | None:
        """Return its exit code, -n if signal n ended it or its Python; None if it has not ended."""
        while self._code is None:
            try:
                data = self._connection.recv(64, socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except ConnectionResetError:
                data = b""
            *lines, self._rest = (self._rest + data).split(b"\n")
            self._numbers += map(int, lines)
            if len(self._numbers) > 1:
                self.pid, self.began_at = self._numbers[0], self._numbers[1] / 1000
            if len(self._numbers) > 2:
                self._code = self._numbers[2]
            if not data and self._code is None:
                self._code = -signal.SIGKILL
        return self._code

    def give_up(self, number: signal.Signals) -> None:
        """Count it as ended by a signal before it has begun."""
        self._code = -number
        self._connection.close()

    def wait(self) -> None:
        """Wait for its end after SIGKILL, and release its number."""
        while self._code is None and self.ended() is None:
            select.select([self._connection], [], [])
        self._connection.close()


class WarmPythons:
    """Warm Pythons of a node, each started when a rank first needs it.

    Attributes
    ----------
    requests : socket
        End for the ranks.
    """

    def __init__(self) -> None:
        self._inbox, self.requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._controls: dict[str, socket.socket] = {}

    def fileno(self) -> int:
        """Return the descriptor that is readable when `serve` would not block."""
        return self._inbox.fileno()

    def serve(self, most: int) -> None:
        """Pass a rank's connection on to the Python that it needs.

        Parameters
        ----------
        most : int
            Number of Pythons to keep at most: each holds its modules in memory.
        """
        _, (number,), _, _ = socket.recv_fds(self._inbox, 1, 1)
        with socket.socket(fileno=number) as connection:
            if (wanted := warm_python.received(connection)) is None:
                return
            key = json.dumps([wanted[name] for name in KEY])
            control = self._controls.pop(key, None)
            if control is None or not _pass_on(control, connection):
                while len(self._controls) >= max(most, 1):
                    # It ends with its last script.
                    self._controls.pop(next(iter(self._controls))).close()
                control = _begin(wanted)
                _pass_on(control, connection)
            self._controls[key] = control
            for descriptor in wanted["descriptors"]:
                os.close(descriptor)

    def descriptors(self) -> Iterator[int]:
        """Yield the descriptors that ranks must not hold: they would hide the template's end."""
        yield from (end.fileno() for end in (self._inbox, *self._controls.values()))

    def close(self) -> None:
        """End all Pythons that run no script, and the others with their last one."""
        for end in (self._inbox, self.requests, *self._controls.values()):
            end.close()


def _pass_on(control: socket.socket, connection: socket.socket) -> bool:
    """Return false if the Python has ended."""
    try:
        socket.send_fds(control, [b"."], [connection.fileno()])
    except OSError:
        control.close()
        return False
    return True


def _begin(wanted: Mapping[str, Any]) -> socket.socket:
    """Start a Python; return the socket for connections, which is closed at once if it cannot be started."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output, errors = wanted["descriptors"]
    end_with_template = die_with_parent(signal.SIGKILL)

    def prepare() -> None:
        end_with_template()
        # A batch system's signal must not end it, with all its scripts. Forks inherit the second one: the
        # signal of a stop must not end a command that has no handler for it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    number = theirs.fileno()
    words = [*wanted["python"], warm_python.__file__, str(number), wanted["script_folder"]]
    with theirs:
        try:
            subprocess.Popen(
                [*words, *wanted["modules"]],
                cwd=wanted["folder"],
                env=wanted["environment"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                pass_fds=(number,),
                start_new_session=True,
                preexec_fn=prepare,
            )
        except OSError as error:
            os.write(errors, f"{wanted['python'][0]} cannot be started: {error.strerror}\n".encode())
    return control
