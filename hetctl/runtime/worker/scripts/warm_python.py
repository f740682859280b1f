"""A Python that has imported modules, and forks a process for each start of a script.

``python [OPTIONS] warm_python.py SOCKET FOLDER MODULE ..``, with the command's own Python, which may lack
hetctl: it needs the standard library alone, of Python 3.9 or later. `warm_start` has the other end of the
socket. Each start is a number of bytes, with descriptors for output, errors and pipes, and so many bytes of
JSON; the answer is the number of the process, which becomes a child of the rank.
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
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any, NoReturn

LENGTH_BYTES, NUMBER_BYTES = 4, 32
MOST_DESCRIPTORS = 16
PR_SET_PDEATHSIG = 1
INTERRUPTED: list[bool] = []
"""Not empty once the script has ended by KeyboardInterrupt."""


def main() -> None:
    """Import the modules, fork for each start until the rank has ended, and run the script in each fork."""
    control = socket.socket(fileno=int(sys.argv[1]))
    script_folder, *modules = sys.argv[2:]
    # Registered before any other handler, so that it runs last.
    atexit.register(_end_interrupted)
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
    # Collections would copy the pages that all forks share.
    gc.freeze()
    start = _serve(control)
    gc.enable()
    _prepare(start)
    if has_folder and start["module"]:
        sys.path[0] = str(Path.cwd())
    _run(start)


def _import(module: str) -> None:
    try:
        importlib.import_module(module)
    except Exception as error:
        # The script may do without it; if not, it says so itself.
        print(f"{module} cannot be imported ahead: {type(error).__name__}: {error}", file=sys.stderr)


def _serve(control: socket.socket) -> dict[str, Any]:
    """Fork for each start; return it in the fork. End with the rank."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(control, LENGTH_BYTES, MOST_DESCRIPTORS)
        if not head:
            os._exit(0)
        text = _received(control, int.from_bytes(head, "big"))
        forked, tell = os.pipe()
        ready, go = os.pipe()
        if (helper := os.fork()) == 0:
            if child := os.fork():
                os.write(tell, str(child).encode())
                os._exit(0)
            for descriptor in (forked, tell, go):
                os.close(descriptor)
            control.close()
            os.read(ready, 1)
            os.close(ready)
            return {**json.loads(text), "descriptors": descriptors}
        # The end of its parent makes the fork a child of the rank, which has asked for orphans.
        os.waitpid(helper, 0)
        number = os.read(forked, NUMBER_BYTES)
        os.write(go, b".")
        for descriptor in (*descriptors, forked, tell, ready, go):
            os.close(descriptor)
        control.sendall(number.ljust(NUMBER_BYTES))


def _received(control: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        parts.append(control.recv(size))
        if not parts[-1]:
            os._exit(0)
        size -= len(parts[-1])
    return b"".join(parts)


def _prepare(start: dict[str, Any]) -> None:
    """Make this fork what a new process would be."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != start["rank"]:
        os._exit(1)
    os.setsid()
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
            _run_file(module, script if script.startswith("/") else f"{Path.cwd()}/{script}")
    except SystemExit:
        raise
    except BaseException as error:
        _fail(error)


def _run_file(module: types.ModuleType, path: str) -> None:
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    module.__dict__.update(__file__=path, __loader__=loader, __cached__=None)
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), module.__dict__)


def _fail(error: BaseException) -> NoReturn:
    """Show an error of the script, without the frames of this file, and end."""
    traceback = error.__traceback__
    while traceback and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    sys.excepthook(type(error), error.with_traceback(traceback), traceback)
    if isinstance(error, KeyboardInterrupt):
        INTERRUPTED.append(True)
    sys.exit(1)


def _end_interrupted() -> None:
    if INTERRUPTED:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
