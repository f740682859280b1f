"""A member's command in execution on the ranks of a group: its environment, and its watch until it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Protocol

from hetctl.model.ensemble import Member
from hetctl.model.errors import DISK_FULL_ERRORS, SERVER_ERRORS, BadInputError
from hetctl.model.serialization import decode, encode
from hetctl.runtime.agent.rank_memory import oom_kills
from hetctl.runtime.horovod_rendezvous import horovod_rendezvous
from hetctl.runtime.transport import LOCALHOST
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.group import Group, LostPeerError, ProcessGroup, all_gather
from hetctl.runtime.worker.member_trainer import Reporter, StopSignal
from hetctl.runtime.worker.reporting import FULL_MEMORY, OUT_OF_MEMORY_ERRORS
from hetctl.runtime.worker.scripts.command_environment import (
    PLACE_VARIABLES,
    CommandSettings,
    RankDevice,
    Rendezvous,
    horovod_scopes,
    own_variables,
    rank_variables,
    search_path,
    visible_devices,
)
from hetctl.runtime.worker.scripts.command_process import CLOSED_POLL_S, CommandProcess

POLL_S = 0.25
"""Longest wait in seconds for a report: a poll takes time from the command, which has the same cores."""
SIGNAL_DELAY_S = 1.0
"""Seconds in which a rank gets the SIGTERM of a batch system that has ended its command already."""
KEPT_LINES, LONGEST_CAUSE = 6, 500
"""Lines at the end of the standard error, and characters of them, that state the cause of a failure."""
RANK_PREFIX = re.compile(r"^\[rank\d+\]:? ?")
"""PyTorch's prefix of each line of a rank's traceback."""
FRAME = re.compile(r' +File ".*", line \d+')
PLACE_SIGNS = (
    "init_process_group",
    "init_device_mesh",
    "torch.distributed",
    "NCCL",
    "CUDA",
    "hvd.init",
    "horovod",
)
"""Words in errors of scripts to which the variables of a rank's place matter."""
ENDED, FAILED, OVER, STOP = "ended", "failed", "over", "stop"
"""Messages between ranks: the command has ended well, or not; all are to end, or to stop. With a reason."""


def command_environment(
    group: Group, context: WorkerContext, member: Member, settings: CommandSettings, keep: ExitStack
) -> dict[str, str]:
    """Return the environment of a member's command on this rank; all ranks of the group call it.

    Parameters
    ----------
    keep : ExitStack
        Stack that ends what serves the command.
    """
    binding = context.binding
    own_place = encode(RankDevice(binding.node, binding.device))
    devices = [decode(RankDevice, place) for place in all_gather(group, own_place)]
    rendezvous = _rendezvous(group, devices, keep)
    return {
        **os.environ,
        **search_path(os.environ, sys.executable),
        **visible_devices(group.rank, devices, os.environ),
        **rank_variables(group.rank, devices, rendezvous),
        **member.environment,
        **own_variables(member, settings),
    }


def _rendezvous(group: Group, devices: Sequence[RankDevice], keep: ExitStack) -> Rendezvous:
    if not isinstance(group, ProcessGroup):
        return Rendezvous(LOCALHOST, _free_port(), None)
    found = None
    if group.rank == 0:
        # Horovod's ranks connect over IPv4 only.
        serves = ":" not in group.host
        scopes = horovod_scopes(devices)
        found = _free_port(), keep.enter_context(horovod_rendezvous(scopes, group.host)) if serves else {}
    port, of_horovod = group.broadcast(found)
    return Rendezvous(group.host, port, group.interface, of_horovod)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


class ReportReader(Protocol):
    """Reader of what a command reports, on rank 0."""

    def take(self, line: bytes) -> None:
        """Judge a line of the command."""

    def reason_to_stop(self) -> str | None:
        """Return why the command has done all that is wanted of it; None if it has not."""


@dataclass
class CommandRun:
    """A command in training, on one rank of its group.

    Parameters
    ----------
    ended : set of int
        Ranks whose commands have ended; of rank 0 alone.
    memory_kills : int
        Processes of the control group that the kernel had killed for memory before the command.
    """

    group: Group
    process: CommandProcess
    stop: StopSignal
    reports: ReportReader
    context: WorkerContext
    ended: set[int] = field(default_factory=set)
    memory_kills: int = field(default_factory=oom_kills)
    converged: str | None = None
    _heard: dict[str, str] = field(default_factory=dict)
    _asked: bool = False

    def watch(self) -> None:
        """Follow the command until all ranks' have ended.

        Raises
        ------
        BadInputError
            If this rank's has failed.
        LostPeerError
            If another rank's has.
        """
        while not self._is_over():
            lines = self._take_reports(POLL_S)
            self._exchange()
            self.context.heartbeat()
            self._stop_if_requested()
            # After the stop: a script that looks for one right after its report must see it.
            self.process.answer(lines)
            self.process.press()
            code = self.process.ended()
            if code is not None and self.group.rank not in self.ended:
                self._end(code)
        if self.group.rank == 0:
            self.group.broadcast([OVER, ""])

    def report_end(self, events: Reporter) -> None:
        """Write the last event of the member in this round."""
        if self.converged:
            events.write("converged", reason=self.converged)
        elif self.process.stopping:
            reason = self.stop.reason or self._heard.get(STOP)
            events.write("stopped", reason=reason, part_samples=0)
        else:
            events.write("converged", reason="its command has ended with exit code 0")

    def _is_over(self) -> bool:
        if self.group.rank == 0:
            return len(self.ended) == self.group.size
        return OVER in self._heard

    def _take_reports(self, wait_s: float) -> int:
        """Read the lines that have come; return their number."""
        lines = list(self.process.reports(wait_s))
        for line in lines if self.group.rank == 0 else ():
            self.reports.take(line)
            self.converged = self.converged or self.reports.reason_to_stop()
        return len(lines)

    def _exchange(self) -> None:
        for rank, (kind, reason) in self.group.reports():
            if kind == FAILED:
                raise LostPeerError("the command of another rank has failed")
            if kind == ENDED:
                self.ended.add(rank)
            self._heard.setdefault(kind, reason)

    def _stop_if_requested(self) -> None:
        """Stop the command once rank 0 says so, which stops its own first.

        Otherwise the command of another rank, stopped earlier, could leave that of rank 0, which would end
        without a request to stop.
        """
        if self.process.stopping:
            return
        leads, stop_requested = self.group.rank == 0, STOP in self._heard
        if stop_requested or (leads and self.converged) or self.stop():
            if leads or stop_requested:
                self.process.stop()
            self._ask()

    def _ask(self) -> None:
        """Tell the other ranks, through rank 0, to stop."""
        if not self._asked:
            self._asked = True
            self._tell(STOP, self.stop.reason or "")

    def _tell(self, kind: str, reason: str = "") -> None:
        """Send rank 0 a message, or all others one of rank 0."""
        if self.group.rank == 0:
            self.group.broadcast([kind, reason])
        else:
            self.group.report([kind, reason])

    def _end(self, code: int) -> None:
        """Note the end of this rank's command; its last reports may still be in the pipe."""
        self._take_reports(0.0)
        if code == -signal.SIGTERM and not self.process.stopping:
            self._await_own_signal()
        if code and not self.process.stopping:
            self._exchange()
            self._tell(FAILED)
            is_out_of_memory = code == -signal.SIGKILL and oom_kills() > self.memory_kills
            errors, environment = self.process.last_errors(), self.process.environment
            raise failure_of(code, errors, environment, is_out_of_memory=is_out_of_memory)
        if self.process.stopping:
            print(f"the command has ended after it was told to stop ({_described(code)})", flush=True)
        self.ended.add(self.group.rank)
        if self.group.rank != 0:
            self._tell(ENDED)

    def _await_own_signal(self) -> None:
        limit = time.monotonic() + SIGNAL_DELAY_S
        while not self.stop() and time.monotonic() < limit:
            time.sleep(CLOSED_POLL_S)
        if self.stop():
            self.process.stop()
            self._ask()


def failure_of(
    code: int, errors: str, environment: Mapping[str, str], *, is_out_of_memory: bool = False
) -> BadInputError:
    """Return the error of a command that has failed, with full memory or a full disk as its cause.

    Parameters
    ----------
    code : int
        Exit code, or the number of the signal that ended it, negated.
    errors : str
        End of its standard error.
    environment : mapping of str to str
        Variables that it was started with.
    is_out_of_memory : bool
        True if the kernel killed it for memory.
    """
    signs = (*OUT_OF_MEMORY_ERRORS, *FULL_MEMORY)
    is_out_of_memory = is_out_of_memory or any(sign in errors for sign in signs)
    hint = "" if is_out_of_memory else _place_hint(errors, environment)
    cause = f": {shown}" if (shown := _last_lines(errors)) else ""
    error = BadInputError(f"the command has ended with {_described(code)}{cause}", hint)
    of_disk = (*DISK_FULL_ERRORS, *SERVER_ERRORS)
    named = next((number for number in of_disk if os.strerror(number) in errors), None)
    if is_out_of_memory:
        # So that it counts as out of memory, and the batch may become smaller.
        error.__cause__ = MemoryError()
    elif named is not None:
        # So that it counts as one of the disk, which is no fault of the member.
        error.__cause__ = OSError(named, os.strerror(named))
    return error


def _last_lines(errors: str) -> str:
    """Return the last lines of a standard error; of a traceback of Python only the error itself."""
    lines = [RANK_PREFIX.sub("", line) for line in errors.splitlines() if line.strip()]
    frames = [number for number, line in enumerate(lines) if FRAME.match(line)]
    if frames:
        # The code of the last frame is indented.
        lines = [line for line in lines[frames[-1] :] if not line.startswith(" ")] or lines
    return " / ".join(line.strip() for line in lines[-KEPT_LINES:])[-LONGEST_CAUSE:]


def _place_hint(errors: str, environment: Mapping[str, str]) -> str:
    """Return the variables that hetctl has set, if the errors are about a rank's place or its GPU."""
    if not any(sign in errors for sign in PLACE_SIGNS):
        return ""
    names = sorted(PLACE_VARIABLES & environment.keys())
    told = " ".join(f"{name}={environment[name]}" for name in names)
    return f"it was started with {told}; `environment` in the ensemble file takes precedence over these"


def _described(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
