"""Memory of this node: its limits, the ranks' shares, kills for lack of it, and leftover files."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from hetctl.model.values import dataclass
from hetctl.runtime.agent.messages import Overuse
from hetctl.storage.processes import commands_below

MEMBERSHIP, ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
PROCESSES = Path("/proc")
SHARED_MEMORY = Path("/dev/shm")
KIBIBYTE = 1024
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
NEARLY = 0.95
"""Share of a limit above which memory counts as nearly full."""


@dataclass(frozen=True)
class _ControlGroupVersion:
    """Names of files and a line in one version of control groups.

    Parameters
    ----------
    folder : str
        Folder of the groups below the root.
    kills : str
        File with the line ``oom_kill N``.
    cache : str
        Line of ``memory.stat`` with the bytes of file cache that the kernel can drop.
    """

    folder: str
    kills: str
    usage: str
    limit: str
    cache: str


VERSIONS = {
    "": _ControlGroupVersion("", "memory.events", "memory.current", "memory.max", "inactive_file"),
    "memory": _ControlGroupVersion(
        *("memory", "memory.oom_control", "memory.usage_in_bytes", "memory.limit_in_bytes"),
        "total_inactive_file",
    ),
}
"""Versions 2 and 1 of control groups, by the controllers in `MEMBERSHIP` (cgroups(7))."""


@dataclass(frozen=True)
class MemoryUse:
    """Used bytes of a memory, and its limit in bytes."""

    used: int
    limit: int

    @property
    def nearly_full(self) -> bool:
        """True if the kernel may soon kill a process of its own choice."""
        return self.used > NEARLY * self.limit


def most_above(
    private: Mapping[int, int], share: int, memories: Iterable[MemoryUse], per_node: int = sys.maxsize
) -> tuple[int, Overuse] | None:
    """Return the rank to end, if any memory is nearly full: the largest on a GPU above its share.

    Parameters
    ----------
    private : mapping of int to int
        Private memory of each rank and its commands in bytes, by number (`gpus_of`).
    share : int
        Share in bytes of the ranks on a GPU. They may use more while memory is free.
    per_node : int
        Number of all GPUs of the node.
    """
    if not any(memory.nearly_full for memory in memories):
        return None
    used = Counter[int]()
    for rank, own in private.items():
        used[rank % per_node] += own
    above = [rank for rank in private if used[rank % per_node] > share]
    found = max(above, key=lambda rank: private[rank], default=None)
    return None if found is None else (found, Overuse(private[found], share))


class MemoryWatch:
    """Watch that finds the rank to end before the kernel kills another.

    Parameters
    ----------
    share : int
        Bytes of the node's memory for each GPU.
    gpus : int
        Number of the job's GPUs on this node.
    per_node : int
        Number of all GPUs of the node.
    """

    def __init__(self, share: int, gpus: int, per_node: int = sys.maxsize) -> None:
        self._per_node = per_node
        machine = machine_memory().limit
        # For no limit version 1 writes a number near 2**63, version 2 the word max.
        self._groups = tuple(group for group in limited_groups() if group.limit < machine)
        limits = (machine, *(group.limit for group in self._groups))
        self._share = min(share, *(limit // gpus for limit in limits))
        self._limit = self._share * gpus

    def check(self, pids: Mapping[int, int], commands: Mapping[int, int]) -> tuple[int, Overuse] | None:
        """Return the rank to end, if any; `pids` has the processes of all ranks, by GPU.

        `commands` has those of commands that ranks have not started themselves, by GPU. Unless memory is
        nearly full, it reads only two or three small files, and none of the ranks.
        """
        machine = machine_memory()
        memories = [machine, *(group.memory() for group in self._groups)]
        # The memory of all processes bounds that of the ranks, and costs one file.
        whole = MemoryUse(machine.used, self._limit)
        if not any(memory.nearly_full for memory in (*memories, whole)):
            return None
        forked = {pids[gpu]: command for gpu, command in commands.items() if gpu in pids}
        own = bytes_with_commands(pids.values(), forked)
        private = {gpu: own[pid] for gpu, pid in pids.items()}
        memories.append(MemoryUse(sum(private.values()), self._limit))
        return most_above(private, self._share, memories, self._per_node)


def machine_memory(processes: Path = PROCESSES) -> MemoryUse:
    """Return the memory of the whole machine."""
    meminfo = processes / "meminfo"
    total = _line(meminfo, "MemTotal:")
    # MemAvailable counts caches that the kernel can drop; MemFree does not (proc(5)).
    return MemoryUse(KIBIBYTE * (total - _line(meminfo, "MemAvailable:")), KIBIBYTE * total)


def bytes_with_commands(pids: Iterable[int], forked: Mapping[int, int]) -> dict[int, int]:
    """Return the private memory of processes in bytes, each with its commands as of `commands_below`."""
    below = commands_below(pids, forked)
    return {pid: sum(map(private_bytes, [pid, *commands])) for pid, commands in below.items()}


def private_bytes(pid: int, processes: Path = PROCESSES) -> int:
    """Return a process's resident memory without files and shared memory, in bytes; 0 if it has ended.

    Memory that forked processes share until one writes is divided among them if the kernel counts it (from
    Linux 5.4); otherwise only a process's own memory counts.
    """
    rollup = processes / str(pid) / "smaps_rollup"
    if kibibytes := _line(rollup, "Pss_Anon:") or _line(rollup, "Private_Dirty:"):
        return KIBIBYTE * kibibytes
    try:
        _, resident, shared, *_ = (processes / str(pid) / "statm").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return 0
    # All ranks map the samples in the node's memory, which therefore count for none of them.
    return (int(resident) - int(shared)) * PAGE_BYTES


@dataclass(frozen=True)
class LimitedGroup:
    """Control group with a limit, including the groups inside it.

    Parameters
    ----------
    limit : int
        Limit in bytes.
    """

    folder: Path
    version: _ControlGroupVersion
    limit: int

    def memory(self) -> MemoryUse:
        """Return the group's memory, without the cache that the kernel would drop before it kills."""
        used = _number(self.folder / self.version.usage)
        if MemoryUse(used, self.limit).nearly_full:
            used -= _line(self.folder / "memory.stat", self.version.cache)
        return MemoryUse(used, self.limit)


def limited_groups(membership: Path = MEMBERSHIP, root: Path = ROOT) -> Iterator[LimitedGroup]:
    """Yield the control groups that contain this process and have limits, from the inside out."""
    for version, own in _own_groups(membership, root):
        top = root / version.folder
        # Slurm limits job, step and task in nested groups; any limit may be the tight one.
        for folder in (own, *own.parents):
            if limit := _number(folder / version.limit):
                yield LimitedGroup(folder, version, limit)
            if folder == top:
                break


def oom_kills(membership: Path = MEMBERSHIP, root: Path = ROOT) -> int:
    """Return how many processes of this control group were killed for memory; 0 if unknown."""
    own = _own_groups(membership, root)
    return max((_line(folder / version.kills, "oom_kill") for version, folder in own), default=0)


def remove_shared_files(pid: int, folder: Path = SHARED_MEMORY) -> None:
    """Remove a process's files in shared memory; processes that have them open keep them.

    Ranks end without exit handlers, and leave PyTorch's counters of shared tensors (80 kB) and CUDA's handles
    of events.
    """
    for pattern in (f"torch_{pid}_*", f"cuda.shm.{os.getuid():x}.{pid:x}.*"):
        for path in folder.glob(pattern):
            with suppress(OSError):
                path.unlink()


def _own_groups(membership: Path, root: Path) -> list[tuple[_ControlGroupVersion, Path]]:
    try:
        lines = membership.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    named = (line.split(":", 2) for line in lines)
    return [
        (version, root / version.folder / group.lstrip("/"))
        for _, controllers, group in named
        if (version := VERSIONS.get(controllers))
    ]


def _number(path: Path) -> int:
    """Return the number in a file; 0 if the file is missing or contains ``max``."""
    try:
        return int(path.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return 0


def _line(path: Path, name: str) -> int:
    """Return the number in a file's line of that name; 0 if there is no such line."""
    try:
        with path.open(encoding="ascii") as file:
            return next((int(line.split()[1]) for line in file if line.startswith(f"{name} ")), 0)
    except (OSError, ValueError):
        return 0
