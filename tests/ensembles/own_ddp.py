"""A script of the user's own for any number of ranks: PyTorch's DistributedDataParallel over gloo."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import hetctl

EPOCHS, SAMPLES = int(sys.argv[1]), 64


def stops():
    """Return true on all ranks as soon as one of them has to stop: they must leave between the same steps."""
    flag = torch.tensor(float(hetctl.should_stop()))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
checkpoint = Path(os.environ["HETCTL_CHECKPOINT_DIR"]) / "state.pt"
torch.manual_seed(0)
x = torch.randn(SAMPLES, 4)
y = x @ torch.tensor([1.0, -2.0, 0.5, 3.0])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
first = 1
if checkpoint.exists():
    saved = torch.load(checkpoint)
    model.module.load_state_dict(saved["model"])
    first = saved["epoch"] + 1
for epoch in range(first, EPOCHS + 1):
    if stops():
        break
    own = slice(rank, SAMPLES, size)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x[own])[:, 0], y[own])
    loss.backward()
    optimizer.step()
    time.sleep(0.1)
    dist.all_reduce(loss := loss.detach())
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "epoch": epoch}, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)
        hetctl.report(epoch=epoch, samples=SAMPLES, val_loss=loss / size, ranks=size)
dist.destroy_process_group()
