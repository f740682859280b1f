"""Time of a step of a PyTorch group, by three ways of averaging gradients.

All ways are in the same two processes, and take turns after each step, so that what else the machine does
hits them alike. With a GPU the ranks go over NCCL; both use the same one if there are no more.

    python tests/benchmarks/overlap_bench.py [--quick]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from tables import Figure, Table

sys.path.insert(0, str(Path(__file__).parent.parent))
import ranks

from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.worker.group import join_group

TURNS = 40
BATCHES = {"cpu": 16, "cuda": 512}
"""Samples of a rank's step, by the type of its device."""
UNTIMED = 2
"""Turns that allocate memory, connect the ranks, and order what is sent."""
WIDTHS = (3, 64, 128, 256, 512, 1024, 640)
"""Channels of the convolutions, from the image on: 12.9 million parameters, 51 MB."""
CLASSES = 1000
MB = 1e6
Way = Callable[[Any, Any], tuple[Any, Callable[[], None]]]
"""Function of a module and its optimizer; returns what is called with inputs, and what after each pass."""
OVERLAPPED, BLOCKING, DDP = "hetctl", "one all-reduce after each pass", "DistributedDataParallel"


def table(quick: bool = False) -> Table:
    """Hold the step of hetctl's groups against a blocking average, and against PyTorch's own."""
    turns = TURNS // 3 if quick else TURNS
    with tempfile.TemporaryDirectory(prefix="hetctl-overlap-") as name:
        processes = [ranks.fork(train, rank, Path(name), turns) for rank in range(2)]
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError("a rank failed: see its message above")
        found = json.loads((Path(name) / "found.json").read_text())
    seconds, size_bytes, device = found["seconds"], found["bytes"], found["device"]
    where = "Gloo, a core for each rank" if device == "cpu" else f"NCCL, {found['gpus']}"

    def over(way: str) -> float:
        pairs = zip(seconds[OVERLAPPED], seconds[way], strict=True)
        return statistics.median(mine / other for mine, other in pairs)

    rows = (
        (way, f"{statistics.median(times) * 1e3:.0f}", f"{min(times) * 1e3:.0f}", f"{over(way):.3f}")
        for way, times in seconds.items()
    )
    return Table(
        "A step of two ranks, PyTorch",
        ("average of gradients", "median, ms", "least, ms", "hetctl over it"),
        tuple(rows),
        (
            Figure("step over that with one all-reduce after each pass", over(BLOCKING), 0.9),
            Figure("step over that of DistributedDataParallel", over(DDP), 1.02),
        ),
        f"{len(WIDTHS) - 1} convolutions and a linear layer, {size_bytes / MB:.0f} MB of gradients, images of"
        f" 32 x 32, batches of {BATCHES[device]} in a rank, {where}. {turns} turns of a"
        " step of each way, in changing order; ratios are medians over turns.",
    )


def train(rank: int, folder: Path, turns: int) -> None:
    """Train by all ways in turn; rank 0 writes the seconds of each step."""
    import torch

    from hetctl.runtime.frameworks.torch_batches import present_device

    framework = load_framework("pytorch")
    gpus = torch.cuda.device_count()
    if gpus == 1:
        # NCCL refuses two ranks on one GPU of a host; they take one another for ranks on others.
        os.environ.update(NCCL_HOSTID=f"rank-{rank}")
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    framework.prepare((rank,), rank % gpus if gpus else None, 0)
    device = present_device()
    rank_info, publish_address = ranks.rank_info_in(folder, rank, 2)
    group = join_group(rank_info, framework, publish_address)
    batch = BATCHES[device.type]
    x, y = torch.randn(batch, 3, 32, 32, device=device), torch.randint(CLASSES, (batch,), device=device)
    steps = {way: _step_of(make, x, y) for way, make in WAYS.items()}
    seconds: dict[str, list[float]] = {way: [] for way in steps}
    for turn in range(-UNTIMED, turns):
        for way in sorted(steps, reverse=turn % 2 == 1):
            _wait_for_all(device)
            began = time.perf_counter()
            steps[way]()
            _wait_for_all(device)
            if turn >= 0:
                seconds[way].append(time.perf_counter() - began)
    if rank == 0:
        size_bytes = sum(parameter.nbytes for parameter in _network().parameters())
        gpu = f"{min(gpus, 2)} x {torch.cuda.get_device_name()}" if gpus else None
        found = {"seconds": seconds, "bytes": size_bytes, "device": device.type, "gpus": gpu}
        (folder / "found.json").write_text(json.dumps(found))
    group.barrier_and_close()


def _wait_for_all(device: Any) -> None:
    import torch
    import torch.distributed as dist

    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def _network() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(pairwise(WIDTHS)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if number < 4 else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTHS[-1], CLASSES))


def _step_of(
    make: Callable[[Any, Any], tuple[Any, Callable[[], None]]], x: Any, y: Any
) -> Callable[[], None]:
    """Return a function that trains a step."""
    import torch

    network = _network().to(x.device)
    optimizer = torch.optim.SGD(network.parameters(), 1e-3, momentum=0.9)
    model, after_backward = make(network, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        after_backward()
        optimizer.step()

    return step


def _overlapped(network: Any, optimizer: Any) -> tuple[Any, Callable[[], None]]:
    from hetctl.runtime.frameworks.torch_ranks import Averaging

    averaging = Averaging(optimizer)
    return network, lambda: averaging.expect(0.5, ends_step=True)


def _blocking(network: Any, _optimizer: Any) -> tuple[Any, Callable[[], None]]:
    import torch
    import torch.distributed as dist

    parameters = list(network.parameters())

    def average() -> None:
        given = torch.ones(len(parameters), device=parameters[0].device)
        message = torch.cat([*(parameter.grad.reshape(-1) for parameter in parameters), given])
        message[: -len(parameters)] *= 0.5
        dist.all_reduce(message)
        *means, _ = message.split([*(parameter.numel() for parameter in parameters), len(parameters)])
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean.view_as(parameter)

    return network, average


def _ddp(network: Any, _optimizer: Any) -> tuple[Any, Callable[[], None]]:
    import torch

    # hetctl averages statistics after each epoch; to send them in each step would slow this down.
    return torch.nn.parallel.DistributedDataParallel(network, forward_sync_buffers=False), lambda: None


WAYS: dict[str, Way] = {OVERLAPPED: _overlapped, BLOCKING: _blocking, DDP: _ddp}


if __name__ == "__main__":
    print(table("--quick" in sys.argv))
