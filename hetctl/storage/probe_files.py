"""Files of a job that tests a site: its order, the reports of its ranks, and its result."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from hetctl.model.site import Site
from hetctl.model.values import dataclass
from hetctl.storage.atomic_io import read_json

GB = 1e9
ORDER_FILE, END_FILE = "order.json", "end.json"
REPAIR = "check the disk, and run `hetctl doctor --job` again"
"""Next step for a user whose test has left a damaged file."""


@dataclass(frozen=True)
class ProbeOrder:
    """An order to test a site.

    Parameters
    ----------
    site : Site
        Site with the nodes of the job.
    framework : str or None
        Framework of the all-reduce; None: the first one that is installed, if any.
    """

    site: Site
    framework: str | None = None


@dataclass(frozen=True)
class StartCost:
    """Measured costs of the start of a node's agent.

    Parameters
    ----------
    import_s, cpu_s : float
        Time of the import of the framework, and the CPU's part of it, in seconds.
    files : int
        Number of files of all installed packages.
    unpack_s : float
        Time to write as many files of their sizes to the node's `stage_folder`, in seconds.
    """

    import_s: float
    cpu_s: float
    files: int
    unpack_s: float


@dataclass(frozen=True)
class RankReport:
    """Observations of one rank.

    Parameters
    ----------
    gpu : int
        Number of the rank's GPU or slot.
    visible : str or None
        Value of the site's variable of visible devices; None if it is not set.
    start : StartCost or None
        Costs of the start of its node's agent, of one rank of a node; None where they are not known.
    """

    node: str
    gpu: int
    visible: str | None
    cores: tuple[int, ...]
    start: StartCost | None = None


@dataclass(frozen=True)
class RankTime:
    """Result of one rank of a group.

    Parameters
    ----------
    group : str
        Name of the group's task.
    gpu : int
        Number of the rank's GPU or slot.
    backend : str
        `NCCL` or `GLOO`.
    bytes : int
        Size of each rank's array.
    median_s : float
        Median time of one all-reduce in seconds.
    unreached : tuple of int
        GPUs of its node known to have no direct access from its GPU.
    links : int or None
        Number of active NVLinks of its GPU; None if unknown.
    """

    group: str
    node: str
    gpu: int
    backend: str
    bytes: int
    median_s: float
    unreached: tuple[int, ...] = ()
    links: int | None = None


@dataclass(frozen=True)
class AllReduce:
    """Speed of a group's all-reduce.

    Parameters
    ----------
    nodes : tuple of str
        Nodes of the group. With several, the slowest link, one between nodes, determines the speed.
    gpus : int
        Number of GPUs on all nodes.
    median_s : float
        Time of one all-reduce: the ranks' medians, averaged as nccl-tests do.
    bus_gb_per_s : float
        Bus bandwidth in 1e9 bytes/s, as in function `bus_gb_per_s`.
    """

    framework: str
    backend: str
    nodes: tuple[str, ...]
    gpus: int
    bytes: int
    median_s: float
    bus_gb_per_s: float


@dataclass(frozen=True)
class GroupEnd:
    """Result of a group's all-reduce.

    Parameters
    ----------
    name : str
        Name of the group's task.
    exit_code : int or None
        Exit code of the group; None if it hung.
    """

    name: str
    nodes: tuple[str, ...]
    exit_code: int | None


@dataclass(frozen=True)
class ProbeEnd:
    """Result of the job.

    Parameters
    ----------
    ranks : int
        Number of ranks that were to start.
    exit_code : int or None
        Exit code of the group of all ranks; None if it hung.
    leaders_exit_code : int or None
        Exit code of the step of the leaders; None if it hung, or there are none.
    mpi_sizes : tuple of int
        Number of ranks in the MPI world of each leader; 0 if mpi4py cannot be imported.
    framework : str or None
        Framework of the all-reduce; None if the Python environment of the job has none.
    groups : tuple of GroupEnd
        Results in order; the first failure is the last one.
    """

    nodes: tuple[str, ...]
    ranks: int
    exit_code: int | None
    leaders_exit_code: int | None = None
    mpi_sizes: tuple[int, ...] = ()
    framework: str | None = None
    groups: tuple[GroupEnd, ...] = ()


def read_order(folder: Path) -> ProbeOrder:
    """Read the order of a test; DamagedFileError if it is damaged."""
    return read_json(folder / ORDER_FILE, ProbeOrder, REPAIR)


def speed_of(framework: str, ranks: Sequence[RankTime]) -> AllReduce:
    """Return the speed of a group from the reports of all its ranks."""
    nodes = tuple(dict.fromkeys(rank.node for rank in ranks))
    seconds = statistics.fmean(rank.median_s for rank in ranks)
    backend, size = ranks[0].backend, ranks[0].bytes
    bandwidth = bus_gb_per_s(size, len(ranks), seconds)
    return AllReduce(framework, backend, nodes, len(ranks), size, seconds, bandwidth)


def bus_gb_per_s(size_bytes: int, ranks: int, seconds: float) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s: bytes/s times ``2 (n - 1) / n``.

    With any algorithm, each rank has to send and receive this many bytes per byte of the result. So the
    figure compares with the bandwidth of a link, and between groups of different size.
    Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md, "AllReduce".

    Parameters
    ----------
    size_bytes : int
        Size of each rank's array.
    ranks : int
        Number of ranks n, at least 2.
    """
    return size_bytes / seconds * 2 * (ranks - 1) / ranks / GB
