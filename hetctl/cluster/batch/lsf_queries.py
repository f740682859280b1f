"""LSF's queues: the command, and the parser of its output."""

from __future__ import annotations

import re

from hetctl.cluster.batch.queue_info import QueueFacts

MINUTE_S = 60


def queue_command(name: str) -> list[str]:
    """Return LSF's query for a queue."""
    return ["bqueues", "-l", name]


def parse_queue(text: str, name: str) -> QueueFacts | None:
    """Parse the output of `queue_command`; None if it is not about that queue.

    The run limit is below the heading MAXIMUM LIMITS, in minutes; a default limit may precede it.
    """
    if re.search(rf"^QUEUE: {re.escape(name)}\s*$", text, re.MULTILINE) is None:
        return None
    limits = text.partition("MAXIMUM LIMITS:")[2] or re.sub(r"DEFAULT LIMITS:.*?\n\n", "", text, flags=re.S)
    wall = re.search(r"RUNLIMIT[^\n]*\n\s*(\d{1,9})(?:\.\d+)? min", limits, re.ASCII)
    return QueueFacts("Open:" in text, None, int(wall[1]) * MINUTE_S if wall else None)
