"""Operations of the ranks of a PyTorch group: connection, averages of statistics, times of steps."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hetctl.runtime.frameworks.packed_state import from_bytes, to_bytes
from hetctl.runtime.interfaces import gloo_over
from hetctl.runtime.worker.group import ProcessGroup

MS_PER_S = 1000.0
FLOAT_BYTES = 4
"""Bytes of the smallest numbers in which means are computed."""
ERROR_HANDLING, CLEAN_UP_ONLY = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "2"
"""Variable of PyTorch for errors of NCCL; the value has operations fail, where others end the process."""


def init_group(group: ProcessGroup) -> None:
    """Initialize ``torch.distributed``: NCCL with GPUs, else Gloo; rank 0 broadcasts its store's port.

    NCCL's operations wait for a rank that has ended: they are aborted when its connection ends.
    """
    store = None
    if group.rank == 0:
        # By default it would listen at all addresses, and wait for ranks, which do not have the port yet.
        family = socket.AF_INET6 if ":" in group.host else socket.AF_INET
        listener = socket.create_server((group.host, 0), family=family, backlog=group.size)
        own = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.fileno()}
        store = dist.TCPStore(group.host, listener.getsockname()[1], group.size, **own)
        listener.detach()
    port = group.broadcast(store and store.port)
    store = store or dist.TCPStore(group.host, port, group.size, is_master=False)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # Without it, PyTorch's own limits hold: 10 minutes with NCCL, 30 with Gloo.
    limit = timedelta(seconds=group.hang_s)
    # Otherwise PyTorch would end the process amid a checkpoint.
    os.environ.setdefault(ERROR_HANDLING, CLEAN_UP_ONLY)
    with gloo_over("GLOO_SOCKET_IFNAME", group.interface):
        dist.init_process_group(backend, store=store, rank=group.rank, world_size=group.size, timeout=limit)
    if backend == "nccl":
        group.on_peer_loss(dist.distributed_c10d._abort_process_group)


def make_equal(tensors: Iterable[torch.Tensor]) -> None:
    """Set the tensors on every rank to rank 0's values."""
    with torch.no_grad():
        for tensor in tensors:
            # Broadcasts refuse tensors that are not contiguous, such as transposed weights, and some types.
            values = tensor.contiguous()
            dist.broadcast(values.reshape(-1).view(torch.uint8), 0)
            tensor.copy_(values)


def average(tensors: Iterable[torch.Tensor], weight: float) -> None:
    """Set the tensors on every rank to the mean of all ranks' values.

    Parameters
    ----------
    weight : float
        Weight of this rank; the weights of all ranks add up to 1.
    """
    with torch.no_grad():
        for tensor in tensors:
            # Numbers of 16 bits would lose digits each time. Infinite ones, as in masks, are not 0 times 0.
            values = tensor.float() if tensor.element_size() < FLOAT_BYTES else tensor
            values = values * weight if weight else torch.zeros_like(values)
            dist.all_reduce(values)
            tensor.copy_(values)


def add_up(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of all ranks' values, on every rank."""
    dist.all_reduce(values)
    return values


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank, on rank 0; no values on the others.

    Values are mappings, lists and tuples of arrays and plain values.
    """
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    # PyTorch's own function pickles values, and would run what another process has put into them.
    data = torch.frombuffer(bytearray(to_bytes(value)), dtype=torch.uint8)
    lengths = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=device)
    lengths[dist.get_rank()] = len(data)
    dist.all_reduce(lengths)
    padded = torch.zeros(int(lengths.max()), dtype=torch.uint8, device=device)
    padded[: len(data)] = data
    parts = [torch.empty_like(padded) for _ in lengths] if dist.get_rank() == 0 else None
    dist.gather(padded, parts, dst=0)
    found = zip(parts or (), lengths.tolist(), strict=False)
    return [from_bytes(part[:length].cpu().numpy().tobytes()) for part, length in found]


class CudaStepTimer:
    """Timer by events in the GPU's queue, which are read when the GPU has passed them."""

    def __init__(self) -> None:
        self._step = 0
        self._began = torch.cuda.Event(enable_timing=True)
        self._queued: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque()

    def begin(self, step: int) -> None:
        """Start the time of a step."""
        self._step, self._began = step, torch.cuda.Event(enable_timing=True)
        self._began.record()

    def end(self) -> None:
        """End the time of the step; a later end of the same step, as of its next backward pass, holds."""
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        if self._queued and self._queued[-1][0] == self._step:
            self._queued.pop()
        self._queued.append((self._step, self._began, ended))

    def taken(self) -> list[tuple[int, float]]:
        """Return the steps whose end the GPU has passed."""
        taken = []
        while self._queued and self._queued[0][2].query():
            step, began, ended = self._queued.popleft()
            taken.append((step, began.elapsed_time(ended) / MS_PER_S))
        return taken
