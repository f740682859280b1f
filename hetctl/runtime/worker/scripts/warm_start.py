"""Starts of a command by a warm Python, which has imported modules for it (`preload`)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hetctl.model.python_start import PythonStart, python_start
from hetctl.model.training_settings import FIRST_USE
from hetctl.runtime.worker.scripts import warm_python
from hetctl.storage.processes import adopt_orphans, die_with_parent


class WarmPython:
    """Process of Python that has imported modules, and forks for each start of a script.

    Parameters
    ----------
    python : tuple of str
        Program and its options.
    script_folder : str
        Folder that is the first to be searched for modules.
    modules : tuple of str
        Names of the modules.
    folder : Path
        Folder in which scripts run.
    variables : mapping of str to str
        Variables of the member, which modules may read as they are imported.
    """

    def __init__(
        self,
        python: tuple[str, ...],
        script_folder: str,
        modules: tuple[str, ...],
        folder: Path,
        variables: Mapping[str, str],
    ) -> None:
        self.key = (python, script_folder, modules, folder, dict(variables))
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def of(
        cls, start: PythonStart, modules: Sequence[str], folder: Path, variables: Mapping[str, str]
    ) -> WarmPython:
        """Return the process, not started yet, that can run a command."""
        script = folder if start.module else (folder / start.argv[0]).resolve().parent
        needed = dict.fromkeys(name for module in modules for name in (module, *FIRST_USE.get(module, ())))
        return cls(start.python, str(script), tuple(needed), folder, variables)

    def start(
        self, words: Sequence[str], environment: Mapping[str, str], errors: int, pipes: Mapping[str, int]
    ) -> WarmStart:
        """Have a command started as a child of this process.

        Parameters
        ----------
        errors : int
            Descriptor of its standard error.
        pipes : mapping of str to int
            Descriptors by the variables that tell the command their numbers.

        Raises
        ------
        OSError
            If the program cannot be started.
        """
        start = python_start(words)
        assert start
        if self._process is None or self._process.poll() is not None:
            self._begin(environment, errors)
        told = {
            "words": list(words),
            "argv": start.argv,
            "module": start.module,
            "environment": dict(environment),
            "pipes": list(pipes),
            "rank": os.getpid(),
        }
        assert self._process
        # Forked twice, so that the command becomes a child of this process.
        adopt_orphans(True)
        text = json.dumps(told).encode()
        head = len(text).to_bytes(warm_python.LENGTH_BYTES, "big")
        # A process that has just ended shows by its exit.
        with suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._control, [head], [1, errors, *pipes.values()])
            self._control.sendall(text)
        return WarmStart(self._process, self._control)

    def close(self) -> None:
        """End the process, but not the commands that it has forked."""
        if self._process:
            self._control.close()
            self._process.kill()
            self._process.wait()

    def _begin(self, environment: Mapping[str, str], errors: int) -> None:
        python, script_folder, modules, folder, _ = self.key
        end_with_rank = die_with_parent(signal.SIGKILL)

        def prepare() -> None:
            end_with_rank()
            # Forks inherit it: the signal must not end a command that has no handler for it.
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

        self.close()
        self._process = None
        self._control, theirs = socket.socketpair()
        with theirs:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [*python, warm_python.__file__, str(number), script_folder, *modules],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(number,),
                start_new_session=True,
                preexec_fn=prepare,
            )


class WarmStart:
    """Command that a warm Python starts: the process of that Python until it has forked."""

    def __init__(self, python: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._python, self._control = python, control
        self._child: int | None = None

    @property
    def pid(self) -> int:
        """Number of its process."""
        if self._child is None:
            with suppress(BlockingIOError, ConnectionResetError):
                if answer := self._control.recv(warm_python.NUMBER_BYTES, socket.MSG_DONTWAIT):
                    self._child = int(answer)
                    adopt_orphans(False)
        return self._child or self._python.pid

    def wait(self) -> None:
        """Wait for its end, and release its number."""
        if self._child is None:
            self._python.wait()
        else:
            os.waitpid(self._child, 0)
