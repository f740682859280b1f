"""Queues, nodes and accounts of batch systems: commands, and the parsers of their output."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from hetctl.model.values import dataclass

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86400


@dataclass(frozen=True)
class QueueFacts:
    """Limits of a queue; None means that there is no limit, or that it is unknown."""

    open: bool
    max_nodes: int | None = None
    max_wall_s: int | None = None


@dataclass(frozen=True)
class NodeClass:
    """Class of identical nodes: their number, and the resources that jobs may have on each."""

    nodes: int
    cores: int
    memory_mib: int
    gpus: int


def partition_command(name: str) -> list[str]:
    """Return Slurm's query for a partition."""
    return ["scontrol", "--oneliner", "show", "partition", name]


def parse_partition(text: str, name: str) -> QueueFacts | None:
    """Parse the output of `partition_command`; None if it is not about that partition."""
    fields = dict(word.split("=", 1) for word in text.split() if "=" in word)
    if fields.get("PartitionName") != name:
        return None
    limits = [int(fields[key]) for key in ("MaxNodes", "TotalNodes") if fields.get(key, "").isdecimal()]
    wall = parse_slurm_time(fields.get("MaxTime", ""))
    return QueueFacts(fields.get("State") == "UP", min(limits, default=None), wall)


def qos_command(name: str) -> list[str]:
    """Return the query of Slurm's accounting for a QOS."""
    columns = "format=Name,MaxWall,MaxTRES"
    return ["sacctmgr", "--noheader", "--parsable2", "show", "qos", f"name={name}", columns]


def parse_qos(text: str, name: str) -> QueueFacts | None:
    """Parse the output of `qos_command`; None if there is no such QOS."""
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 3 and fields[0] == name:
            nodes = re.search(r"\bnode=(\d{1,9})\b", fields[2], re.ASCII)
            return QueueFacts(True, int(nodes[1]) if nodes else None, parse_slurm_time(fields[1]))
    return None


def nodes_command(partition: str | None) -> list[str]:
    """Return Slurm's query for the nodes of a partition, or for all; identical nodes share one line."""
    where = [f"--partition={partition}"] if partition else []
    # --exact: without it, sinfo groups nodes of different sizes and prints
    # the least of each resource with a +.
    return ["sinfo", "--noheader", "--exact", *where, "--format=%D|%c|%m|%G"]


def parse_nodes_of_partition(text: str) -> tuple[NodeClass, ...]:
    """Parse the output of `nodes_command`; lines without a complete record are skipped."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split("|")]
        numbers = [field.rstrip("+") for field in fields[:3]]
        if len(fields) == 4 and all(number.isdecimal() and len(number) < 12 for number in numbers):
            nodes, cores, memory = map(int, numbers)
            found.append(NodeClass(nodes, cores, memory, _gpus(fields[3])))
    return tuple(found)


def accounts_command(user: str) -> list[str]:
    """Return the query of Slurm's accounting for the accounts that a user may charge."""
    return [
        *("sacctmgr", "--noheader", "--parsable2", "show", "associations"),
        *(f"user={user}", "format=Account"),
    ]


def parse_accounts(text: str) -> tuple[str, ...]:
    """Parse the output of `accounts_command`: each account once."""
    return tuple(dict.fromkeys(line.strip() for line in text.splitlines() if line.strip()))


def parse_start(text: str) -> str | None:
    """Return the start that sbatch expects of a tested script, as a local time to compare; None if none.

    It prints ``sbatch: Job 7 to start at 2026-11-29T12:30:00 using 4 processors on nodes n1 in partition p``.
    """
    found = re.search(r"to start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)", text, re.ASCII)
    return found[1] if found else None


def parse_slurm_time(text: str) -> int | None:
    """Convert ``days-hours:minutes:seconds`` and its shorter forms to seconds; None for no limit."""
    days, dash, clock = text.strip().rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() and len(part) < 10 for part in (*parts, days if dash else "0")):
        return None
    numbers = [int(part) for part in parts]
    if dash:
        return int(days) * DAY_S + _weighted(numbers, (HOUR_S, MINUTE_S, 1))
    # A single number is minutes, two are minutes and seconds; after days,
    # hours come first (sbatch(1), --time).
    weights = {1: (MINUTE_S,), 2: (MINUTE_S, 1), 3: (HOUR_S, MINUTE_S, 1)}.get(len(numbers))
    return _weighted(numbers, weights) if weights else None


def _weighted(numbers: Sequence[int], weights: Sequence[int]) -> int:
    return sum(number * weight for number, weight in zip(numbers, weights, strict=False))


def _gpus(text: str) -> int:
    """Return the number of GPUs in ``gpu:a100:4(S:0-1),craynetwork:4``."""
    return sum(map(int, re.findall(r"(?:^|,)gpu(?::[^:,()]+)?:(\d{1,6})", text, re.ASCII)))


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


def pbs_server_command() -> list[str]:
    """Return PBS' query for its server."""
    return ["qstat", "-B", "-f"]


def keeps_history(text: str) -> bool:
    """Return true if, by the output of `pbs_server_command`, PBS keeps the states of jobs that are over."""
    return re.search(r"^ +job_history_enable = True\s*$", text, re.MULTILINE) is not None


def pbs_queue_command(name: str) -> list[str]:
    """Return PBS' query for a queue."""
    return ["qstat", "-Q", "-f", name]


def parse_pbs_queue(text: str, name: str) -> QueueFacts | None:
    """Parse the output of `pbs_queue_command`; None if it is not about that queue.

    A queue that only passes jobs on to others has their limits, at best.
    """
    if re.search(rf"^Queue: {re.escape(name)}\s*$", text, re.MULTILINE) is None:
        return None
    fields = dict(re.findall(r"^ +([\w.]+) = (\S+)\s*$", text, re.MULTILINE | re.ASCII))
    nodes, wall = (fields.get(f"resources_max.{key}", "") for key in ("nodect", "walltime"))
    is_open = fields.get("enabled") == fields.get("started") == "True"
    return QueueFacts(is_open, int(nodes) if nodes.isdecimal() else None, parse_slurm_time(wall))


def pbs_nodes_command() -> list[str]:
    """Return PBS' query for all nodes."""
    return ["pbsnodes", "-a"]


def parse_pbs_nodes(text: str) -> tuple[NodeClass, ...]:
    """Parse the output of `pbs_nodes_command`: an unindented name, then indented attributes of the node."""
    found: Counter[tuple[int, int, int]] = Counter()
    for record in re.split(r"^(?=\S)", text, flags=re.MULTILINE):
        fields = dict(
            re.findall(r"^ +resources_available\.(\w+) = (\d{1,15}[kmgt]?b?)\s*$", record, re.M | re.A)
        )
        if fields.get("ncpus", "").isdecimal():
            gpus = fields.get("ngpus", "")
            memory = _pbs_mib(fields.get("mem", ""))
            found[int(fields["ncpus"]), memory, int(gpus) if gpus.isdecimal() else 0] += 1
    return tuple(NodeClass(nodes, *size) for size, nodes in found.items())


def _pbs_mib(text: str) -> int:
    """Return a size such as 527672492kb or 4gb in MiB; 0 if it is none."""
    match = re.fullmatch(r"(\d+)([kmgt]?)b", text, re.ASCII)
    return int(match[1]) * 1024 ** "kmgt".find(match[2]) // 1024 if match and match[2] else 0


def flux_queues_command() -> list[str]:
    """Return Flux' query for its queues; one without a name has none."""
    fields = "{queue}|{enabled}|{started}|{limits.timelimit!F}|{limits.range.nnodes}"
    return ["flux", "queue", "list", "--no-header", f"--format={fields}"]


def parse_flux_queue(text: str, name: str) -> QueueFacts | None:
    """Parse the output of `flux_queues_command`; None without this queue. Times are as 1.5h or inf."""
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 5 and fields[0] == name:
            wall = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)([smhd])", fields[3], re.ASCII)
            nodes = fields[4].rpartition("-")[2]
            seconds = (
                int(float(wall[1]) * {"s": 1, "m": MINUTE_S, "h": HOUR_S, "d": DAY_S}[wall[2]])
                if wall
                else None
            )
            is_open = all(each in ("\u2714", "y", "True") for each in fields[1:3])
            return QueueFacts(is_open, int(nodes) if nodes.isdecimal() else None, seconds)
    return None
