"""A Python that has imported modules, and forks a process for each start of a script on its node.

``python [OPTIONS] warm_python.py SOCKET FOLDER MODULE ..``, with the command's own Python, which may lack
hetctl: it needs the standard library alone, of Python 3.9 or later. Each message on the socket is a rank's
connection. Over it comes one message with the start, beside descriptors for output, errors and pipes. The
answers are numbers in lines: that of the process, the milliseconds since the epoch at its start, and its exit
code. It stays a zombie, which keeps its number, until the rank closes the connection; if it still runs then,
it is killed.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import time
import types
from pathlib import Path
from typing import Any, NoReturn

LENGTH_BYTES = 4
MOST_DESCRIPTORS = 16
PR_SET_PDEATHSIG = 1
EXIT_CODE, INTERRUPTED = "exit_code", "interrupted"
AHEAD: set[str] = set()
"""Names of the modules that were imported ahead."""
ENDED: dict[str, Any] = {}
"""End of the script."""


def main() -> None:
    """Import the modules, fork for each start, and run the script in each fork."""
    control = socket.socket(fileno=int(sys.argv[1]))
    script_folder, *modules = sys.argv[2:]
    # Registered before any other handler, so that it runs last.
    atexit.register(_end)
    # Python has put the folder of this file first, unless it was told not to.
    has_folder = not getattr(sys.flags, "safe_path", sys.flags.isolated)
    if has_folder:
        sys.path[0] = script_folder
    gc.disable()
    for module in modules:
        _import(module)
    sys.stdout.flush()
    sys.stderr.flush()
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)
    AHEAD.update(sys.modules)
    # Collections would copy the pages that all forks share.
    gc.freeze()
    start = Starts(control).serve()
    gc.enable()
    _prepare(start)
    if has_folder:
        sys.path[0] = start["script_folder"]
    _run(start)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        # The script may do without it; if not, it says so itself.
        print(f"{module} cannot be imported ahead: {type(error).__name__}: {error}", file=sys.stderr)


def received(connection: socket.socket) -> dict[str, Any] | None:
    """Return a message, with its descriptors under that name; None if the connection was closed."""
    head, descriptors, _, _ = socket.recv_fds(connection, LENGTH_BYTES, MOST_DESCRIPTORS)
    text, size = b"", int.from_bytes(head, "big")
    while head and len(text) < size and (part := connection.recv(size - len(text))):
        text += part
    return {**json.loads(text), "descriptors": descriptors} if text and len(text) == size else None


class Starts:
    """Forks of this Python, and the connections of their ranks."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._running: dict[int, socket.socket] = {}
        self._closed: set[int] = set()
        self._told: set[int] = set()
        self._woken, self._wake = os.pipe()
        # set_wakeup_fd() requires it: a full pipe must not block a signal handler.
        os.set_blocking(self._wake, False)
        self._selector = selectors.DefaultSelector()

    def serve(self) -> dict[str, Any]:
        """Fork for each start; return it in the fork. End once nobody can ask for another."""
        # Python writes to the wakeup descriptor only for handled signals.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._selector.register(self._control, selectors.EVENT_READ, self._accept)
        self._selector.register(self._woken, selectors.EVENT_READ, self._reap)
        while self._control.fileno() >= 0 or self._running:
            for key, _ in self._selector.select():
                start: dict[str, Any] | None = key.data()
                if start:
                    return start
        os._exit(0)

    def _accept(self) -> dict[str, Any] | None:
        message, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not message:
            self._selector.unregister(self._control)
            self._control.close()
            return None
        connection = socket.socket(fileno=descriptors[0])
        # A rank may have given up while this Python imported its modules.
        if (start := received(connection)) is None or _is_closed(connection):
            connection.close()
            return None
        start["parent"] = os.getpid()
        if (pid := os.fork()) == 0:
            self._leave()
            connection.close()
            return start
        for descriptor in start["descriptors"]:
            os.close(descriptor)
        self._running[pid] = connection
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._close(pid))
        self._tell(pid, pid, int(1000 * time.time()))
        return None

    def _leave(self) -> None:
        """Close, in a fork, all that is not its own, and have signals as a new process has them."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # Signals of the batch system are for the scripts.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._selector.close()
        for end in (self._control, *self._running.values()):
            end.close()
        os.close(self._woken)
        os.close(self._wake)

    def _tell(self, pid: int, *numbers: int) -> None:
        with contextlib.suppress(OSError):
            self._running[pid].sendall(b"".join(b"%d\n" % number for number in numbers))

    def _close(self, pid: int) -> None:
        """End what a rank no longer wants."""
        self._selector.unregister(self._running[pid])
        self._running[pid].close()
        self._closed.add(pid)
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        self._reap_ended()

    def _reap(self) -> None:
        os.read(self._woken, MOST_DESCRIPTORS)
        self._reap_ended()

    def _reap_ended(self) -> None:
        for pid in list(self._running):
            found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found and pid in self._closed:
                os.waitpid(pid, 0)
                del self._running[pid]
                self._closed.remove(pid)
                self._told.discard(pid)
            elif found and pid not in self._told:
                self._told.add(pid)
                exited = found.si_code == os.CLD_EXITED
                self._tell(pid, found.si_status if exited else -found.si_status)


def _is_closed(connection: socket.socket) -> bool:
    with contextlib.suppress(BlockingIOError):
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return False


def _prepare(start: dict[str, Any]) -> None:
    """Make this fork what a new process would be."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != start["parent"]:
        os._exit(1)
    os.setsid()
    os.sched_setaffinity(0, start["cores"])
    os.chdir(start["folder"])
    output, errors, *pipes = start["descriptors"]
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.close(output)
    os.close(errors)
    environment = dict(start["environment"])
    for name, descriptor in zip(start["pipes"], pipes, strict=True):
        os.set_inheritable(descriptor, True)
        environment[name] = str(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    if hasattr(sys, "orig_argv"):
        sys.orig_argv[:] = start["words"]
    sys.argv[:] = start["argv"]
    if "numpy" in sys.modules:
        # All forks would draw the same numbers; Python itself sees to `random`.
        importlib.import_module("numpy.random").seed()


def _run(start: dict[str, Any]) -> None:
    """Run the script or module as the main module, as Python does."""
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins
    if sys.version_info < (3, 14):
        module.__dict__.update(__annotations__={})
    try:
        if start["module"]:
            runpy._run_module_as_main(start["module"])  # type: ignore[attr-defined]
        else:
            script = start["argv"][0]
            # As Python does it, which keeps a leading "./".
            path = script if script.startswith("/") else f"{Path.cwd()}/{script}"
            loader = importlib.machinery.SourceFileLoader("__main__", path)
            module.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
            exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        ENDED[EXIT_CODE] = _exit_code(error.code)
        raise
    except BaseException as error:
        _fail(error)


def _fail(error: BaseException) -> NoReturn:
    """Show an error of the script, without the frames of this file, and end."""
    traceback = error.__traceback__
    while traceback and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    ENDED.update({EXIT_CODE: 1, INTERRUPTED: isinstance(error, KeyboardInterrupt)})
    sys.exit(1)


def _exit_code(code: Any) -> int:
    """Return the code with which Python ends after ``sys.exit(code)``."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _end() -> None:
    """End this fork without taking apart what was imported ahead.

    Python and the destructors of C++ take 1.2 s for PyTorch's modules, of which all forks share the pages.
    """
    # Threads that are left must not run while their modules go.
    sys.setswitchinterval(3600)
    # Objects of the script end here: files are written, and others run their ``__del__``.
    script = vars(sys.modules["__main__"])
    script.update(dict.fromkeys(script.keys() - {"__builtins__"}))
    for name in sys.modules.keys() - AHEAD:
        del sys.modules[name]
    gc.collect()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdout.flush()
        sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)
    if ENDED.get(INTERRUPTED):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(ENDED.get(EXIT_CODE, 0))


if __name__ == "__main__":
    main()
