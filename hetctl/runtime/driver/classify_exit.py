"""Reasons for a task's end, from its exit code and the output of launcher and trainer."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hetctl.cluster.launchers import LAUNCHERS
from hetctl.model.events import EXIT_CODES, LOST_PEER, ExitReason

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
    ExitReason.DISK_FULL: "disk full",
    ExitReason.DISK_ERROR: "the file system did not answer",
    ExitReason.HUNG: "no heartbeat",
}
"""Descriptions of reasons that say more than the exit code."""


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
