"""A training script as its user would start it by torchrun; it notes its first step and its rate.

python script_job.py RESULT [CORES]
"""

import json
import os
import sys
import time
from pathlib import Path

if len(sys.argv) > 2:
    os.sched_setaffinity(0, json.loads(sys.argv[2]))

import torch

import hetctl

STEPS, WARM_UP, BATCH, WIDTH = 1500, 100, 64, 512

torch.set_num_threads(1)
torch.manual_seed(0)
torch.distributed.init_process_group("gloo")
layers = torch.nn.Sequential(
    torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)
)
model = torch.nn.parallel.DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, 1)
first = began = cpu_began = 0.0
for step in range(1, STEPS + 1):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    first = first or time.time()
    if step == WARM_UP:
        began, cpu_began = time.perf_counter(), time.process_time()
    hetctl.report(epoch=1, finished=False, samples=step * BATCH, loss=loss)
seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
Path(sys.argv[1]).write_text(
    json.dumps(
        {
            "first": first,
            "rate": (STEPS - WARM_UP) * BATCH / seconds,
            "cpu_rate": (STEPS - WARM_UP) * BATCH / cpu_seconds,
            "cores": sorted(os.sched_getaffinity(0)),
        }
    )
)
hetctl.report(epoch=1, samples=STEPS * BATCH, val_loss=float(loss.detach()))
torch.distributed.destroy_process_group()
