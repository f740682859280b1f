"""State of a rank that lasts from one visit to the next."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

from hetctl.model.ensemble import Ensemble
from hetctl.runtime.data.open_partitions import OpenPartitions
from hetctl.runtime.data.sharing.node_folder import node_folder, state_folder
from hetctl.runtime.worker.context import SavingFailure, WorkerContext
from hetctl.runtime.worker.heartbeat import Busy, busy_share
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
    """Store, partitions, networks, and unwritten states of a rank; its `KeptResources`.

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

    @property
    def has_networks(self) -> bool:
        """True if networks are kept for their next visits."""
        return len(self.networks) > 0

    @property
    def has_unsaved(self) -> bool:
        """True if the state of a visit is still to be written into a checkpoint."""
        return self.saver.is_busy

    def release_networks(self) -> None:
        """Release the networks that are kept."""
        self.networks.clear()

    def finish_saving(self) -> SavingFailure | None:
        """Wait until the states of all visits are in checkpoints; return the first failure."""
        self.saver.finish()
        return self.saver.failure


def open_hops(context: WorkerContext, run_key: str, ensemble: Ensemble) -> HopResources:
    """Return the resources of all visits of a rank; open them at the first call."""
    if not isinstance(context.kept, HopResources):
        context.kept = _open(context, run_key, ensemble)
    context.sign()
    return context.kept


def _open(context: WorkerContext, run_key: str, ensemble: Ensemble) -> HopResources:
    assert ensemble.partitions is not None
    _, functions = context.load_code(ensemble)
    # Objects that stay need not be scanned each time that garbage of a member is collected.
    gc.collect()
    gc.freeze()
    binding, saver = context.binding, StateSaver(context.on_unsaved)
    limit_bytes = memory_for_partitions(binding.memory_bytes)
    resources = HopResources(
        store=context.keep.enter_context(node_folder(state_folder(run_key, binding.node))),
        partitions=OpenPartitions(ensemble.partitions, ensemble.data, functions.input_fn, limit_bytes),
        networks=KeptNetworks(NETWORKS_BYTES),
        saver=saver,
        busy=busy_share(binding.device),
    )
    context.keep.callback(saver.close)
    return resources


def memory_for_partitions(memory_bytes: int) -> int:
    """Return the bytes for open partitions of a rank with so much memory; 0: its share is unknown."""
    return int(PARTITIONS_SHARE * memory_bytes) or LEAST_BYTES
