"""Memory that a rank shares with the other ranks of its node, for tensors that it sends them."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetctl.methods.pipeline.node_memory import SLOTS
from hetctl.runtime.frameworks.stage_network import Tensor


@dataclass(frozen=True)
class SlotAddress:
    """Place of a slot, as another process of the node finds it.

    Parameters
    ----------
    pid, descriptor : int
        Process that owns the slot, and its file descriptor there.
    size : int
        Bytes of the slot.
    """

    pid: int
    descriptor: int
    size: int


class SharedSlots:
    """Slots of one sender, each of which holds the tensors of one message until they are received.

    There are at most `SLOTS`, which grow with the messages: one is filled while the other is read. The memory
    has no name in any file system, so that nothing is left of processes that are killed.
    """

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._free: list[int] = []

    @property
    def has_room(self) -> bool:
        """True if a slot is free, or one can be made."""
        return bool(self._free) or len(self._maps) < SLOTS

    def fill(self, tensors: tuple[Tensor, ...]) -> SlotAddress:
        """Copy tensors one after another into a free slot; there must be room."""
        size = sum(tensor.nbytes for tensor in tensors)
        descriptor = self._take(size)
        place = self._maps[descriptor]
        start = 0
        for tensor in tensors:
            np.copyto(np.ndarray(tensor.shape, tensor.dtype, place, start), tensor)
            start += tensor.nbytes
        return SlotAddress(os.getpid(), descriptor, len(place))

    def release(self, descriptor: int) -> None:
        """Use a slot again: its tensors are received."""
        self._free.append(descriptor)

    def close(self) -> None:
        """Release the memory; receivers may still have it mapped."""
        for descriptor, place in self._maps.items():
            place.close()
            os.close(descriptor)
        self._maps.clear()

    def _take(self, size: int) -> int:
        if not self._free:
            descriptor = os.memfd_create("hetctl-tensors")
        else:
            descriptor = max(self._free, key=lambda free: len(self._maps[free]))
            self._free.remove(descriptor)
            if len(self._maps[descriptor]) >= size:
                return descriptor
            self._maps[descriptor].close()
        os.ftruncate(descriptor, size)
        self._maps[descriptor] = mmap.mmap(descriptor, size)
        return descriptor


class SlotReader:
    """Reader of the slots of one sender on the same node."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}

    def read(self, address: SlotAddress, into: tuple[Tensor, ...]) -> None:
        """Copy the tensors of a slot into arrays of their shapes and types.

        Raises
        ------
        OSError
            If this process may not read the sender's memory.
        """
        place = self._maps.get(address.descriptor)
        if place is None or len(place) < address.size:
            place = self._maps[address.descriptor] = _mapped(address)
        start = 0
        for tensor in into:
            np.copyto(tensor, np.ndarray(tensor.shape, tensor.dtype, place, start))
            start += tensor.nbytes

    def close(self) -> None:
        """Release the memory."""
        for place in self._maps.values():
            place.close()
        self._maps.clear()


def _mapped(address: SlotAddress) -> mmap.mmap:
    with Path(f"/proc/{address.pid}/fd/{address.descriptor}").open("rb") as file:
        return mmap.mmap(file.fileno(), address.size, prot=mmap.PROT_READ)
