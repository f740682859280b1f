"""Starts of a command by a warm Python of its node, which has imported modules for it (`preload`).

A rank asks the template from which it was forked, which keeps the node's warm Pythons and passes the rank's
connection on to one of them. So modules are imported once on each node, for all ranks. An agent starts the
first ones before all else: they import while it starts, connects and forks ranks.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hetctl.model.interpreter import PythonStart, python_start, search_path
from hetctl.model.serialization import decode, encode
from hetctl.model.training_settings import FIRST_USE
from hetctl.model.values import dataclass
from hetctl.runtime.worker.scripts import warm_python
from hetctl.storage.processes import die_with_parent

if TYPE_CHECKING:
    from hetctl.model.ensemble import Ensemble, Member


@dataclass(frozen=True)
class WarmPython:
    """A Python with the modules that it imports ahead; starts that need the same share it.

    Parameters
    ----------
    python : tuple of str
        Program and its options.
    project : str
        Folder of the project.
    script_folder : str
        First folder to be searched for modules.
    variables : mapping of str to str
        Variables of the member, which modules may read as they are imported.
    """

    python: tuple[str, ...]
    project: str
    script_folder: str
    modules: tuple[str, ...]
    variables: Mapping[str, str]

    @property
    def key(self) -> str:
        """Text that differs from that of any other Python."""
        return json.dumps(encode(self), sort_keys=True)


def warm_python_of(member: Member, words: Sequence[str], project: Path) -> WarmPython | None:
    """Return the warm Python for a command of a member; None if it is started as a new program."""
    start = python_start(words) if member.preload else None
    if not (start and (start.module or (project / start.argv[0]).is_file())):
        return None
    needed = (name for module in member.preload for name in (module, *FIRST_USE.get(module, ())))
    return WarmPython(
        *(start.python, str(project), _script_folder(start, project), tuple(dict.fromkeys(needed))),
        dict(member.environment),
    )


def pythons_ahead(ensemble: Ensemble, most: int) -> tuple[WarmPython, ...]:
    """Return the warm Pythons that an ensemble's first members need, at most `most`."""
    project = Path(ensemble.folder)
    first = (warm_python_of(each, each.command_line(""), project) for each in ensemble.members[:most])
    return tuple({python.key: python for python in first if python}.values())


def _script_folder(start: PythonStart, place: Path) -> str:
    return str(place if start.module else (place / start.argv[0]).resolve().parent)


def start_warm(
    python: WarmPython,
    words: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    requests: int,
    errors: int,
    pipes: Mapping[str, int],
) -> WarmStart:
    """Have a command started by a warm Python of the node.

    Parameters
    ----------
    folder : Path
        The project's folder or a copy of it, to run in.
    requests : int
        Descriptor to reach the node's `WarmPythons`.
    errors : int
        Descriptor of its standard error.
    pipes : mapping of str to int
        Descriptors by the variables that tell the command their numbers.

    Raises
    ------
    OSError
        If there is no such program.
    """
    program = str(folder / words[0]) if os.sep in words[0] else words[0]
    if shutil.which(program, path=environment.get("PATH")) is None:
        raise FileNotFoundError(2, os.strerror(2))
    start = python_start(words)
    assert start
    own, theirs = socket.socketpair()
    with theirs, socket.socket(fileno=os.dup(requests)) as template:
        # A template that has ended shows by the closed connection.
        with suppress(OSError):
            socket.send_fds(template, [b"."], [theirs.fileno()])
        theirs.close()
        _send(own, {"python": encode(python), "folder": str(folder)}, [1, errors])
        told = {
            "words": list(words),
            "argv": start.argv,
            "module": start.module,
            "folder": str(folder),
            "script_folder": _script_folder(start, folder),
            "environment": dict(environment),
            "cores": sorted(os.sched_getaffinity(0)),
            "pipes": list(pipes),
        }
        _send(own, told, [1, errors, *pipes.values()])
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

    Parameters
    ----------
    ahead : iterable of WarmPython
        Pythons to be started now, with the output of this process.

    Attributes
    ----------
    requests : socket
        End for the ranks.
    """

    def __init__(self, ahead: Iterable[WarmPython] = ()) -> None:
        self._inbox, self.requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._controls = {python.key: _begin(python, python.project, 1, 2) for python in ahead}

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
            python: WarmPython = decode(WarmPython, wanted["python"])
            key = python.key
            control = self._controls.pop(key, None)
            if control is None or not _pass_on(control, connection):
                while len(self._controls) >= max(most, 1):
                    # It ends with its last script.
                    self._controls.pop(next(iter(self._controls))).close()
                control = _begin(python, wanted["folder"], *wanted["descriptors"])
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


def _begin(python: WarmPython, folder: str, output: int, errors: int) -> socket.socket:
    """Start a Python; return the socket for connections, which is closed at once if it cannot be started."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    end_with_template = die_with_parent(signal.SIGKILL)

    def prepare() -> None:
        end_with_template()
        # A batch system's signal must not end it, with all its scripts. Forks inherit the second one: the
        # signal of a stop must not end a command that has no handler for it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    number = theirs.fileno()
    words = [*python.python, warm_python.__file__, str(number), python.script_folder]
    with theirs:
        try:
            subprocess.Popen(
                [*words, *python.modules],
                cwd=folder,
                env={**os.environ, **search_path(os.environ, sys.executable), **python.variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                pass_fds=(number,),
                start_new_session=True,
                preexec_fn=prepare,
            )
        except OSError as error:
            os.write(errors, f"{python.python[0]} cannot be started: {error.strerror}\n".encode())
    return control
