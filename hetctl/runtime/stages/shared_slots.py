"""Memory that a rank shares with the other ranks of its node, for tensors that it sends them."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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

    The memory has no name in any file system, so that nothing is left of processes that are killed.
    """

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._free: list[int] = []

    def fill(self, tensors: tuple[Tensor, ...]) -> SlotAddress:
        """Copy tensors one after another into a free slot; make one if none is large enough."""
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
        for descriptor in self._free:
            if len(self._maps[descriptor]) >= size:
                self._free.remove(descriptor)
                return descriptor
        descriptor = os.memfd_create("hetctl-tensors")
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
        if place is None:
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
