"""A member's command on the ranks of a group: its environment, and its watch until it ends.

It gets the variables that torchrun and Horovod set, and hetctl's own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import field
from functools import partial
from pathlib import Path
from typing import NamedTuple

from hetctl.model.ensemble import Member
from hetctl.model.errors import DISK_FULL_ERRORS, SERVER_ERRORS, TransientInputError
from hetctl.model.interpreter import search_path
from hetctl.model.training_settings import NO_RANKS, RESUME_VARIABLE
from hetctl.model.values import dataclass
from hetctl.runtime.agent.binding import VISIBLE_DEVICES, Binding
from hetctl.runtime.agent.rank_memory import oom_kills
from hetctl.runtime.horovod_rendezvous import horovod_rendezvous
from hetctl.runtime.transport import LOCALHOST
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.group import Group, LostPeerError, ProcessGroup, all_gather
from hetctl.runtime.worker.member_trainer import StopSignal
from hetctl.runtime.worker.reporting import BUSY_GPU, FULL_MEMORY, OUT_OF_MEMORY_ERRORS
from hetctl.runtime.worker.scripts.command_process import CLOSED_POLL_S, CommandProcess
from hetctl.runtime.worker.scripts.warm_start import WarmStart, start_warm, warm_python_of
from hetctl.storage.event_files import EventWriter

USUAL_DEVICES = "CUDA_VISIBLE_DEVICES"
PLACE_VARIABLES = frozenset(
    {
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"),
        *("GLOO_SOCKET_IFNAME", "HOROVOD_RANK", "HOROVOD_SIZE"),
        *VISIBLE_DEVICES,
    }
)
"""Variables with a rank's place and its GPU."""
SIGNS_OF_RANKS = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|TORCHELASTIC_.*|HOROVOD_.*"
    r"|SLURM_(PROCID|LOCALID|NODEID|NTASKS.*|NPROCS|TASKS_PER_NODE|STEP_.*)"
)
"""Variables that scripts take for a sign of several ranks: of torchrun, Horovod and Slurm."""
PROFILE_VARIABLE = "HETCTL_PROFILE"
"""Variable set for a command that runs for its rate alone."""

POLL_S = 0.25
"""Longest wait in seconds for a report: polling takes time from the command, on the same cores."""
SIGNAL_DELAY_S = 1.0
"""Seconds within which a rank gets the SIGTERM that a batch system has already sent its command."""
KEPT_LINES, MAX_CAUSE_CHARACTERS = 6, 500
"""Last lines of standard error, and their characters, that state the cause of a failure."""
RANK_PREFIX = re.compile(r"^\[rank\d+\]:? ?")
"""PyTorch's prefix of each line of a rank's traceback."""
MISSING_MODULE = "ModuleNotFoundError"
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
"""Words of errors in which a rank's place may matter."""
ENDED, FAILED, OVER, STOP = "ended", "failed", "over", "stop"
"""Messages between ranks, with a reason: the command has succeeded, has failed; all end, all stop."""


class RankDevice(NamedTuple):
    """Node of a rank, and its GPU's index among those that its agent sees; None for a slot."""

    node: str
    device: int | None


def start_command(
    group: Group,
    context: WorkerContext,
    member: Member,
    words: Sequence[str],
    folder: Path,
    own: Mapping[str, str],
    grace_s: float,
    keep: ExitStack,
    copy: Path | None = None,
) -> CommandProcess:
    """Start a member's command on this rank; all ranks call it.

    Parameters
    ----------
    folder, copy : Path
        The project's folder, and a copy of it in which the command runs instead; None: there is no copy.
    own, keep
        Same as in `command_environment`; the stack also ends the command.
    """
    environment = command_environment(group, context.binding, member, own, keep)
    warm: Callable[[int, Mapping[str, int]], WarmStart] | None = None
    if python := warm_python_of(member, words, folder):
        warm = partial(start_warm, python, words, copy or folder, environment, context.binding.pythons)
    return keep.enter_context(closing(CommandProcess(words, copy or folder, environment, grace_s, warm)))


def command_environment(
    group: Group, binding: Binding, member: Member, own: Mapping[str, str], keep: ExitStack
) -> dict[str, str]:
    """Return the environment of a member's command on this rank; all ranks call it.

    Parameters
    ----------
    own : mapping of str to str
        hetctl's own variables.
    keep : ExitStack
        Stack that ends the command's servers.
    """
    devices = [RankDevice(*place) for place in all_gather(group, [binding.node, binding.device])]
    common = {
        **os.environ,
        **search_path(os.environ, sys.executable),
        **visible_devices(group.rank, devices, os.environ),
    }
    if member.ranks == NO_RANKS:
        inherited = {name: value for name, value in common.items() if not SIGNS_OF_RANKS.fullmatch(name)}
        return {**inherited, **member.environment, **own}
    host, interface, of_horovod = LOCALHOST, None, dict[str, str]()
    if isinstance(group, ProcessGroup):
        host, interface = group.host, group.interface
        # Horovod's ranks connect over IPv4 only.
        if group.rank == 0 and ":" not in host:
            of_horovod = keep.enter_context(horovod_rendezvous(horovod_scopes(devices), host))
    with socket.socket() as free:
        free.bind(("", 0))
        port, of_horovod = group.broadcast([free.getsockname()[1], of_horovod])
    ranks = rank_variables(group.rank, devices, host, port, interface, of_horovod)
    return {**common, **ranks, **member.environment, **own}


def own_variables(
    member: Member,
    run: str,
    round_index: int,
    epochs: int,
    checkpoints: str,
    deadline: float,
    resume_from: str | None = None,
) -> dict[str, str]:
    """Return hetctl's own variables of a command.

    Parameters
    ----------
    run : str
        Name of the run, or of the profiling job.
    epochs : int
        Number of epochs that the command has reported in the run.
    checkpoints : str
        Folder for its checkpoints.
    deadline : float
        Latest time of its request to stop, in seconds since the epoch.
    resume_from : str or None
        Checkpoint from which it continues; None: there is none.
    """
    resume = {RESUME_VARIABLE: resume_from} if resume_from else {}
    return {
        "HETCTL_RUN": run,
        "HETCTL_ROUND": str(round_index),
        "HETCTL_MEMBER": member.name,
        "HETCTL_SEED": str(member.seed),
        "HETCTL_BATCH_SIZE": str(member.batch_size),
        "HETCTL_EPOCH": str(epochs),
        "HETCTL_LAST_EPOCH": str(member.stop.max_epochs),
        "HETCTL_CHECKPOINT_DIR": checkpoints,
        "HETCTL_DEADLINE": str(deadline),
        **resume,
    }


def rank_variables(
    rank: int,
    devices: Sequence[RankDevice],
    host: str,
    port: int,
    interface: str | None,
    of_horovod: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables with a rank's place among the others.

    Parameters
    ----------
    devices : sequence of RankDevice
        Devices by rank.
    host, port
        Address at which rank 0 waits for the others.
    interface : str or None
        Interface to that address.
    of_horovod : mapping of str to str
        Variables by which Horovod's ranks find the server on rank 0's node; empty if they cannot connect.
    """
    sizes = Counter(device.node for device in devices)
    nodes, node = list(sizes), devices[rank].node
    local_rank = sum(device.node == node for device in devices[:rank])
    # If nodes have unlike numbers of ranks, only some have this local rank.
    across = [other for other in nodes if sizes[other] > local_rank]
    places = {
        "RANK": rank,
        "SIZE": len(devices),
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": sizes[node],
        "CROSS_RANK": across.index(node),
        "CROSS_SIZE": len(across),
    }
    own = {
        "RANK": rank,
        "WORLD_SIZE": len(devices),
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": sizes[node],
        "GROUP_RANK": nodes.index(node),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    found: dict[str, object] = own | {f"HOROVOD_{name}": value for name, value in places.items()}
    if of_horovod:
        meeting = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_HOSTNAME": node}
        found |= meeting | dict(of_horovod)
    if interface:
        found["GLOO_SOCKET_IFNAME"] = interface
    if interface and of_horovod:
        found["HOROVOD_GLOO_IFACE"] = interface
    return {name: str(value) for name, value in found.items()}


def horovod_scopes(devices: Sequence[RankDevice]) -> dict[str, int]:
    """Return the number of ranks in each scope in which Horovod's ranks meet.

    Parameters
    ----------
    devices : sequence of RankDevice
        Devices by rank.
    """
    sizes = Counter(device.node for device in devices)
    across = {
        f"cross_{local_rank}": sum(size > local_rank for size in sizes.values())
        for local_rank in range(max(sizes.values()))
    }
    return {"global": len(devices), **{f"local_{node}": size for node, size in sizes.items()}, **across}


def visible_devices(rank: int, devices: Sequence[RankDevice], inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that shows a command only its group's GPUs on its node.

    Local rank n has the nth GPU: as under torchrun, ``cuda:LOCAL_RANK`` is right.
    """
    node = devices[rank].node
    indices = [device.device for device in devices if device.node == node and device.device is not None]
    if not indices:
        return {}
    name = next((name for name in sorted(VISIBLE_DEVICES) if inherited.get(name)), USUAL_DEVICES)
    seen = inherited[name].split(",") if inherited.get(name) else None
    return {name: ",".join(seen[index] if seen else str(index) for index in indices)}


@dataclass
class CommandRun:
    """Command in training, on one rank of its group.

    Parameters
    ----------
    read : callable
        Function that judges a line of the command on rank 0; it returns the reason to stop, or None.
    ended : set of int
        Ranks whose commands have ended; on rank 0 alone.
    memory_kills : int
        Processes of the control group that the kernel killed for memory before the command.
    """

    group: Group
    process: CommandProcess
    stop: StopSignal
    read: Callable[[bytes], str | None]
    context: WorkerContext
    ended: set[int] = field(default_factory=set)
    memory_kills: int = field(default_factory=oom_kills)
    converged: str | None = None
    _heard: dict[str, str] = field(default_factory=dict)
    _asked: bool = False
    _reported: int | None = None

    def watch(self) -> None:
        """Follow the command until the commands of all ranks have ended.

        Raises
        ------
        TransientInputError
            If this rank's command has failed.
        LostPeerError
            If another rank's command has failed.
        """
        while OVER not in self._heard:
            lines = self._take_reports(POLL_S)
            self._exchange()
            self.context.heartbeat()
            if (leader := self.process.leader()) != self._reported:
                # The agent, which watches memory, does not know a process that is no child of this rank.
                self._reported = leader
                self.context.send(command=leader)
            self._stop_if_requested()
            # After the stop request: a script that looks for it right after its report must see it.
            self.process.answer(lines)
            self.process.escalate()
            code = self.process.ended()
            if code is not None and self.group.rank not in self.ended:
                self._end(code)
            if self.group.rank == 0 and len(self.ended) == self.group.size:
                self._heard[OVER] = ""
                self._tell(OVER)

    def report_end(self, events: EventWriter) -> None:
        """Write the last event of the member in this round."""
        duration_s = time.time() - self.process.began_at
        if self.process.stopping and not self.converged:
            reason = self.stop.reason or self._heard.get(STOP)
            events.write("stopped", reason=reason, part_samples=0, duration_s=duration_s)
        else:
            reason = self.converged or "its command has ended with exit code 0"
            events.write("converged", reason=reason, duration_s=duration_s)

    def _take_reports(self, wait_s: float) -> int:
        """Judge the lines that have arrived; return their number."""
        lines = list(self.process.reports(wait_s))
        for line in lines if self.group.rank == 0 else ():
            reason = self.read(line)
            self.converged = self.converged or reason
        return len(lines)

    def _exchange(self) -> None:
        for rank, (kind, reason) in self.group.reports():
            if kind == FAILED:
                raise LostPeerError("the command of another rank has failed")
            if kind == ENDED:
                self.ended.add(rank)
            self._heard.setdefault(kind, reason)

    def _stop_if_requested(self) -> None:
        """Stop the command once rank 0, which stops its own first, says so.

        Otherwise another rank's command could stop and leave rank 0's, which would then end without a
        request to stop.
        """
        leads, stop_requested = self.group.rank == 0, STOP in self._heard
        if self.process.stopping or not (stop_requested or (leads and self.converged) or self.stop()):
            return
        if leads or stop_requested:
            self.process.stop()
        self._request_stop()

    def _request_stop(self) -> None:
        """Tell the other ranks, through rank 0, to stop."""
        if not self._asked:
            self._asked = True
            self._tell(STOP, self.stop.reason or "")

    def _tell(self, kind: str, reason: str = "") -> None:
        """Send rank 0 a message; rank 0 sends it to all others."""
        if self.group.rank == 0:
            self.group.broadcast([kind, reason])
        else:
            self.group.report([kind, reason])

    def _end(self, code: int) -> None:
        """Note the end of this rank's command, after its last reports in the pipe."""
        self._take_reports(0.0)
        if code == -signal.SIGTERM and not self.process.stopping:
            limit = time.monotonic() + SIGNAL_DELAY_S
            while not self.stop() and time.monotonic() < limit:
                time.sleep(CLOSED_POLL_S)
            if self.stop():
                self.process.stop()
                self._request_stop()
        if code and not self.process.stopping:
            self._exchange()
            self._tell(FAILED)
            process, is_killed = self.process, code == -signal.SIGKILL
            raise command_failure(
                *(code, process.last_errors(), process.environment, process.program),
                is_out_of_memory=is_killed and oom_kills() > self.memory_kills,
            )
        if self.process.stopping:
            print(f"the command has ended after it was told to stop ({_described(code)})", flush=True)
        self.ended.add(self.group.rank)
        if self.group.rank != 0:
            self._tell(ENDED)


def command_failure(
    code: int,
    errors: str,
    environment: Mapping[str, str],
    program: str = "",
    *,
    is_out_of_memory: bool = False,
) -> TransientInputError:
    """Return the error of a failed command; its cause may be full memory, a busy GPU or a full disk.

    Parameters
    ----------
    code : int
        Exit code, or -n if signal n ended it.
    errors : str
        Last part of its standard error.
    environment : mapping of str to str
        Variables that it was started with.
    program : str
        First word of the command.
    is_out_of_memory : bool
        True if the kernel killed it for memory.
    """
    is_out_of_memory |= any(sign in errors for sign in (*OUT_OF_MEMORY_ERRORS, *FULL_MEMORY))
    hint = "" if is_out_of_memory else _place_hint(errors, environment)
    if MISSING_MODULE in errors:
        path = shutil.which(program, path=environment.get("PATH")) or program
        hint = (
            f"it was started by {path}: install the module there, name another Python in `command`,"
            " or put it first in PATH, by `setup` of the site file or by `environment`"
        )
    cause = f": {shown}" if (shown := _last_lines(errors)) else ""
    error = TransientInputError(f"the command has ended with {_described(code)}{cause}", hint)
    named = next((n for n in (*DISK_FULL_ERRORS, *SERVER_ERRORS) if os.strerror(n) in errors), None)
    if is_out_of_memory:
        # Counts as out of memory, so the batch may become smaller.
        error.__cause__ = MemoryError()
    elif busy := next((sign for sign in BUSY_GPU if sign in errors), None):
        error.__cause__ = RuntimeError(busy)
    elif named is not None:
        # Counts as a disk error, for which the member is not to blame.
        error.__cause__ = OSError(named, os.strerror(named))
    return error


def _last_lines(errors: str) -> str:
    """Return the last lines of standard error; of a Python traceback only the error."""
    lines = [RANK_PREFIX.sub("", line) for line in errors.splitlines() if line.strip()]
    frames = [number for number, line in enumerate(lines) if FRAME.match(line)]
    if frames:
        # The last frame's code is indented.
        lines = [line for line in lines[frames[-1] :] if not line.startswith(" ")] or lines
    return " / ".join(line.strip() for line in lines[-KEPT_LINES:])[-MAX_CAUSE_CHARACTERS:]


def _place_hint(errors: str, environment: Mapping[str, str]) -> str:
    """Return the variables set by hetctl, if the errors are about a rank's place or GPU."""
    if not any(sign in errors for sign in PLACE_SIGNS):
        return ""
    names = sorted(PLACE_VARIABLES & environment.keys())
    told = " ".join(f"{name}={environment[name]}" for name in names)
    return f"it was started with {told}; `environment` in the ensemble file takes precedence over these"


def _described(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
