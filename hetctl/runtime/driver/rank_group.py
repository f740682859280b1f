"""A group of ranks: their messages while it works, its result, and reasons for its end.

The reasons follow from its exit code, and from the output of launcher and trainers.
"""

from __future__ import annotations

import math
import re
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import field
from typing import Any

from hetctl.cluster.launchers import LAUNCHERS
from hetctl.cluster.launchers.agents import NodeGpu
from hetctl.model.ensemble import TrainingCode
from hetctl.model.events import EXIT_CODES, LOST_PEER, ExitReason
from hetctl.model.plan import FUSED, Placement
from hetctl.model.serialization import decode
from hetctl.model.training_progress import LiveMetrics
from hetctl.model.values import dataclass
from hetctl.runtime.agent.messages import Overuse
from hetctl.runtime.job_logs import append, end_of
from hetctl.runtime.transport import Address
from hetctl.runtime.worker.messages import TaskMessage

GIBIBYTE = 2**30
MISPLACED = "placement could not be kept"
"""Words in a member's log if its agents run on other nodes or GPUs than planned."""

OF_LAUNCHERS = tuple(
    (re.compile(launcher.exit_lines + text, re.MULTILINE | re.IGNORECASE), reason)
    for launcher in LAUNCHERS.values()
    for text, reason in launcher.exit_messages
)
EVIDENCE = (*OF_LAUNCHERS, (re.compile(f"^{MISPLACED}: ", re.MULTILINE), ExitReason.NOT_LAUNCHED))
"""Messages in the output of a step, with reasons; the first that fits decides."""

BY_CODE = {
    **{code: reason for launcher in LAUNCHERS.values() for code, reason in launcher.exit_codes.items()},
    LOST_PEER: ExitReason.KILLED,
    **{code: reason for reason, code in EXIT_CODES.items()},
}

DESCRIPTIONS = {
    ExitReason.TIME: "the job's time was over",
    ExitReason.PREEMPTED: "the job was preempted",
    ExitReason.CANCELLED: "the batch system ended the job",
    ExitReason.NOT_LAUNCHED: "the batch system did not start it as planned",
    ExitReason.NODE_FAILURE: "node failure",
    ExitReason.OUT_OF_MEMORY: "out of memory",
    ExitReason.GPU_BUSY: "its GPU lets in no other process beside the one that it has",
    ExitReason.DISK_FULL: "disk full",
    ExitReason.DISK_ERROR: "the file system did not answer",
    ExitReason.HUNG: "no heartbeat",
    ExitReason.BAD_INPUT: "its code or its entry of the ensemble file is wrong",
}
"""Descriptions of reasons that say more than the exit code."""


@dataclass
class RankSlot:
    """The rank on one GPU.

    Parameters
    ----------
    step : str
        Name of the step whose agent forks the rank.
    ready : bool
        True once the rank has been forked and waits for assignments.
    code : TrainingCode or None
        Code that it loads with its first member; None if it has loaded none.
    awaits_end : bool
        True until the GPU's last rank, which had loaded other code, has ended.
    leaving : bool
        True from when it was told to end, without work, for a member that is to have its GPU alone.
    groups : list of RankGroup
        Groups in which it is at work: none while it waits for one, several if it trains fused members.
    """

    gpu: NodeGpu
    step: str
    ready: bool = False
    code: TrainingCode | None = None
    awaits_end: bool = False
    leaving: bool = False
    groups: list[RankGroup] = field(default_factory=list)


@dataclass
class RankGroup:
    """A group at work, and its result.

    Parameters
    ----------
    slots : list of RankSlot
        Ranks by number.
    steps : tuple of str
        Names of the steps of agents for this group alone: they end with it, and it ends with them.
    started_at : float
        Start in seconds since the epoch.
    last_message_at : float
        Time of the last message of any rank, in seconds of the monotonic clock, as the times below.
    live_metrics : LiveMetrics or None
        Last metrics of rank 0.
    stop : str or None
        Reason to stop with a checkpoint; None if it continues.
    stopping_since : float
        Time from which its delay counts after it was told to stop.
    terminated : bool
        True if a signal had to end it because it did not stop.
    assigned, done, lost : set of int
        Ranks with an assignment, finished ranks, and ranks that have ended.
    exit_code : int
        Exit code of the first rank that failed by itself, 128 + n if signal n ended it.
    overuse : Overuse or None
        Memory use of the first rank that an agent ended for its memory.
    output : str
        Output of the launcher, if the group was lost with its agents; after its end also the ranks' output.
    lost_nodes : tuple of str
        Nodes whose loss ended the group.
    hung : bool
        True if it was ended because it sent no heartbeat.
    signalled : bool
        True if one of its ranks received SIGTERM and has to stop.
    ending : float or None
        Time from which the group has to end; None if it continues.
    energy_j : float or None
        Energy of its GPUs or slots in joules; None if nothing was measured.
    killed : bool
        True if the remaining ranks were killed after a failure.
    beside_others : bool
        True if the rank that it lost, not with its node, was at work for other members, too, or had no memory
        for it beside them.
    divided_s : float or None
        Seconds of a shared GPU, each divided by the groups there; None if it has its GPUs alone.
    told : list of dict
        Messages to all of its ranks, for those that get their assignments later.
    """

    task: TaskMessage
    placement: tuple[Placement, ...]
    slots: list[RankSlot] = field(default_factory=list)
    steps: tuple[str, ...] = ()
    key: str = ""
    log_start: int = 0
    started_at: float = 0.0
    last_message_at: float = 0.0
    master: Address | None = None
    live_metrics: LiveMetrics | None = None
    stop: str | None = None
    stopping_since: float = math.inf
    terminated: bool = False
    assigned: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    exit_code: int = 0
    overuse: Overuse | None = None
    output: str = ""
    lost_nodes: tuple[str, ...] = ()
    hung: bool = False
    signalled: bool = False
    ending: float | None = None
    killed: bool = False
    energy_j: float | None = None
    divided_s: float | None = None
    told: list[dict[str, str]] = field(default_factory=list)
    beside_others: bool = False

    @property
    def name(self) -> str:
        """Name of its task."""
        return self.task.name

    @property
    def got_sigterm(self) -> bool:
        """True if SIGTERM made it stop, or ended it."""
        return self.signalled or self.exit_code == 128 + signal.SIGTERM

    @property
    def over(self) -> bool:
        """True if no rank is at work."""
        return len(self.done | self.lost) == len(self.slots)

    @property
    def working(self) -> Iterator[RankSlot]:
        """Ranks that are at work."""
        return (s for rank, s in enumerate(self.slots) if rank not in self.done | self.lost)

    def on_message(self, slot: RankSlot, message: Any) -> None:
        """Process a message of a rank."""
        if "master" in message:
            self.master = decode(Address, message["master"])
        if "metrics" in message:
            self.live_metrics = decode(LiveMetrics, message["metrics"])
        if "signalled" in message:
            self.signalled = True
        if "done" in message:
            self.exit_code = self.exit_code or message.get("code", 0)
            self.done.add(self.slots.index(slot))
            is_full = self.exit_code == EXIT_CODES[ExitReason.OUT_OF_MEMORY]
            self.beside_others |= is_full and self.task.kind == FUSED

    def note_overuse(self, overuse: Overuse, rank: str) -> None:
        """Record and log that an agent ended a rank for its memory; the first record stands."""
        self.overuse = self.overuse or overuse
        with suppress(OSError):
            append(self.task.log, f"{rank} was ended: {_described(overuse)}\n")

    def record_lost_rank(
        self, slot: RankSlot, exit_code: int, output: str = "", lost_node: str | None = None
    ) -> None:
        """Record the end of a rank; exit codes that follow from the loss of another rank do not count.

        Parameters
        ----------
        output : str
            Output of the launcher, if the rank was lost with its agent.
        lost_node : str or None
            Node of the rank, if the node is lost.
        """
        self.lost.add(self.slots.index(slot))
        self.output = output or self.output
        if lost_node is not None and lost_node not in self.lost_nodes:
            self.lost_nodes += (lost_node,)
        # A rank that lost a peer may be seen to end first, but the peer's exit code is the cause.
        if not self.exit_code or (self.exit_code == LOST_PEER and not self.killed):
            # srun exits with 0 after a node failure, which is no success.
            self.exit_code = exit_code or LOST_PEER
        self.end()

    def end(self) -> None:
        """Begin to end the group; ranks without an assignment count as done."""
        self.ending = self.ending or time.monotonic()
        self.done |= set(range(len(self.slots))) - self.assigned

    def complete(self) -> bool:
        """Read the ranks' output from the log; if they wrote none, append the launchers' output to it.

        Return false while the disk does not answer: the log tells why the group has ended.
        """
        output = end_of(self.task.log, self.log_start)
        if output is None:
            return False
        if self.output and not output:
            # A full disk ends the job in order.
            with suppress(OSError):
                append(self.task.log, self.output)
        self.output += output
        return True

    def description(self, reason: ExitReason) -> str:
        """Return a description of why it ended."""
        if reason is ExitReason.OUT_OF_MEMORY and self.overuse:
            return _described(self.overuse)
        if self.beside_others:
            return "it could not go on with others in a process: it goes on alone"
        if reason in DESCRIPTIONS:
            return DESCRIPTIONS[reason]
        if self.exit_code <= 128:
            return f"exit code {self.exit_code}"
        number = self.exit_code - 128
        known = number in signal.Signals.__members__.values()
        return f"killed by {signal.Signals(number).name if known else f'signal {number}'}"


def _described(overuse: Overuse) -> str:
    return with_peak(DESCRIPTIONS[ExitReason.OUT_OF_MEMORY], overuse.peak, overuse.share)


def exit_reason_of(exit_code: int, output: str, reported: str | None = None) -> ExitReason:
    """Return why a task ended before its work was done.

    Parameters
    ----------
    exit_code : int
        Exit code of the task, 128 + n if signal n ended it. It may be 0: srun returns 0 when a node fails.
    output : str
        Output of the task, including the trainers' lines.
    reported : str or None
        Reason in the trainer's ``failed`` event. It may be a mere consequence: when a rank is lost, the other
        ranks fail, too.
    """
    for pattern, reason in EVIDENCE:
        if pattern.search(output):
            return reason
    if reported is not None:
        return ExitReason(reported)
    return BY_CODE.get(exit_code, ExitReason.KILLED if exit_code > 128 else ExitReason.PROGRAM_ERROR)


def failed_nodes(output: str, nodes: Iterable[str]) -> tuple[str, ...]:
    """Return the failed nodes of a task: those that the launcher names, or its only node."""
    nodes = tuple(nodes)
    starts = [launcher.exit_lines for launcher in LAUNCHERS.values() if launcher.exit_lines]
    lines = "\n".join(line for line in output.splitlines() if any(re.match(each, line) for each in starts))
    # Match whole words alone: n1 is neither in n10 nor in rack-n1.
    named = tuple(node for node in nodes if re.search(rf"(?<![\w-]){re.escape(node)}(?![\w-])", lines))
    return named if len(nodes) > 1 else nodes


def with_peak(description: str, peak_bytes: int, share_bytes: int = 0) -> str:
    """Append the peak of memory and the exceeded share, if known (nonzero)."""
    peak = f": {peak_bytes / GIBIBYTE:.2f} GiB at its peak" if peak_bytes else ""
    share = f", and its share of the node is {share_bytes / GIBIBYTE:.2f} GiB" if share_bytes else ""
    return f"{description}{peak}{share}"
