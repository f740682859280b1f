"""The template: a process that imports the framework once, and from which ranks are forked.

An import takes seconds, a fork a hundredth of one. The template only imports and forks, and keeps the warm
Pythons of commands: nothing before the fork creates threads, opens devices or starts MPI.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from hetctl.model.serialization import encode, parse
from hetctl.model.values import dataclass
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.worker.scripts.warm_start import WarmPythons
from hetctl.storage.processes import die_with_parent

LONGEST_MESSAGE = 2**16
CRASHED = 1

import_times: dict[str, float] = {}
"""Seconds of the imports of this process's template, and of the CPU in them, for its ranks."""

Serve = Callable[[Binding, socket.socket], int]
"""Body of a rank, which talks to the agent over the socket and returns an exit code."""


@dataclass(frozen=True)
class RankEvent:
    """Start or end of a forked rank.

    Parameters
    ----------
    exit_code : int or None
        128 + n if signal n ended it; None: it has started.
    """

    gpu: int
    pid: int
    exit_code: int | None = None


READY = b"ready"
"""Message of a template that has imported all, and from now on forks at once."""


class Template:
    """Template process, seen from its agent.

    Parameters
    ----------
    preload : callable
        Function that, in the template, imports the needs of all ranks.
    serve : callable
        Function that runs in each rank.
    pythons : WarmPythons or None
        Warm Pythons of its ranks; None: there are none yet.
    """

    def __init__(self, preload: Callable[[], None], serve: Serve, pythons: WarmPythons | None = None) -> None:
        # SOCK_SEQPACKET keeps messages apart and shows the other end's death; SOCK_DGRAM does not (unix(7)).
        self._control, template_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # Both processes would write text left in a buffer.
        sys.stdout.flush()
        sys.stderr.flush()
        # Before the fork, to note the parent's number.
        end_with_agent = die_with_parent(signal.SIGKILL)
        if os.fork() == 0:
            end_with_agent()
            self._control.close()
            run_to_the_end(lambda: _serve_forks(template_end, preload, serve, pythons))
        template_end.close()

    def fileno(self) -> int:
        """Return the descriptor that is readable when `receive` would not block."""
        return self._control.fileno()

    def fork(self, binding: Binding, channel: socket.socket) -> None:
        """Fork a rank with this end of a channel; OSError if the template has ended."""
        message = json.dumps(encode(binding)).encode()
        socket.send_fds(self._control, [message], [channel.fileno()])

    def receive(self) -> RankEvent | bool:
        """Wait for the end of the imports, which is true, then for ranks' events; false if it has ended."""
        message = b""
        with suppress(ConnectionError):
            message = self._control.recv(LONGEST_MESSAGE)
        return parse(RankEvent, message) if message not in (b"", READY) else message == READY

    def close(self) -> None:
        """Close the channel, which ends the template and the remaining ranks."""
        self._control.close()


def _serve_forks(
    control: socket.socket, preload: Callable[[], None], serve: Serve, pythons: WarmPythons | None
) -> int:
    """Fork a rank for each message, and report each rank's end, until the agent has ended."""
    # Batch systems signal all processes of a step: ranks then write checkpoints, and would die with the
    # template.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # Once per node: on 2 cores PyTorch 2.13 imports in 3.1 s, TensorFlow 2.18 with Horovod in 8.4 s.
    began, cpu_began = time.monotonic(), time.process_time()
    # Without garbage collections, which free next to nothing here, PyTorch imports in three quarters of the
    # time. Frozen objects stay on pages that all ranks share.
    gc.disable()
    preload()
    gc.freeze()
    import_times.update(wall=time.monotonic() - began, cpu=time.process_time() - cpu_began)
    # The loop sees the agent's end.
    with suppress(BrokenPipeError):
        control.send(READY)
    children: dict[int, int] = {}
    woken, wake = os.pipe()
    # set_wakeup_fd() requires it: a full pipe must not block a signal handler.
    os.set_blocking(wake, False)
    os.set_blocking(woken, False)
    # SIGCHLD is ignored by default, and Python writes to the wakeup descriptor only for handled signals.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    pythons = pythons or WarmPythons()
    selector.register(pythons, selectors.EVENT_READ)
    while True:
        ready = {key.fd for key, _ in selector.select()}
        if control.fileno() in ready:
            try:
                message, descriptors, _, _ = socket.recv_fds(control, LONGEST_MESSAGE, 1)
            # The agent was killed before it had read all reports (unix(7)).
            except ConnectionResetError:
                return 0
            if not message:
                return 0
            binding = replace(parse(Binding, message), pythons=pythons.requests.fileno())
            channel = socket.socket(fileno=descriptors[0])
            inherited = (control.fileno(), woken, wake, *pythons.descriptors())
            pid = _fork_rank(binding, channel, serve, inherited)
            children[pid] = binding.gpu
            _report(control, RankEvent(binding.gpu, pid))
        if pythons.fileno() in ready:
            pythons.serve(len(children))
        if woken in ready:
            with suppress(BlockingIOError):
                os.read(woken, LONGEST_MESSAGE)
        for pid, exit_code in _reaped(children):
            _report(control, RankEvent(children.pop(pid), pid, exit_code))


def _fork_rank(binding: Binding, channel: socket.socket, serve: Serve, inherited: tuple[int, ...]) -> int:
    """Fork a rank and return its process ID."""
    end_with_template = die_with_parent(signal.SIGKILL)
    pid = os.fork()
    if pid == 0:
        end_with_template()
        gc.enable()
        # The pipe is the template's: signals to the rank would wake it.
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # A rank's copy of the control socket would hide the template's end from the agent.
        for descriptor in inherited:
            os.close(descriptor)
        run_to_the_end(lambda: serve(binding, channel))
    # The agent sees the rank's end only if no other process holds this end of the channel.
    channel.close()
    return pid


def _report(control: socket.socket, event: RankEvent) -> None:
    with suppress(BrokenPipeError):
        control.send(json.dumps(encode(event)).encode())


def run_to_the_end(body: Callable[[], int]) -> None:
    """Run a forked process's body; exit without Python's cleanup, which may wait for other processes."""
    code = CRASHED
    try:
        code = body()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else CRASHED
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Exit handlers may be the parent's, and those of frameworks wait for ranks that may be gone.
        os._exit(code)


def _reaped(children: dict[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the ended processes with their exit codes."""
    while True:
        try:
            # Pending signals of one kind merge (signal(7)): one SIGCHLD may stand for several ranks.
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid in children:
            code = os.waitstatus_to_exitcode(status)
            yield pid, code if code >= 0 else 128 - code
