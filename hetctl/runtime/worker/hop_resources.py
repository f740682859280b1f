"""State of a rank that lasts from one visit to the next."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hetctl.runtime.data.open_partitions import OpenPartitions
from hetctl.runtime.worker.heartbeat import Busy
from hetctl.runtime.worker.kept_networks import KeptNetworks
from hetctl.runtime.worker.state_saver import StateSaver

NETWORKS_BYTES = 2**30
"""Bytes of the states of all networks that a rank keeps; on a GPU they take a little more of its memory."""
PARTITIONS_SHARE = 0.5
"""Share of the rank's memory for partitions; the rest is for the framework."""
LEAST_BYTES = 2**28
"""Memory for partitions if the rank's share is not known."""


@dataclass(frozen=True)
class HopResources:
    """Store, partitions, networks, and unwritten states of a rank.

    Parameters
    ----------
    store : Path
        Folder of the node's states.
    busy : callable
        Function for heartbeats, which returns the used share of the rank's device.
    """

    store: Path
    partitions: OpenPartitions
    networks: KeptNetworks
    saver: StateSaver
    busy: Busy


def memory_for_partitions(memory_bytes: int) -> int:
    """Return the bytes for open partitions of a rank with so much memory; 0: its share is unknown."""
    return int(PARTITIONS_SHARE * memory_bytes) or LEAST_BYTES
