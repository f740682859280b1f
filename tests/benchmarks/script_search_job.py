"""A training script that goes on from its checkpoints, with a sleep in each step.

python script_search_job.py LEARNING_RATE
"""

import os
import sys
import time
from pathlib import Path

import torch

import hetctl

STEPS, BATCH, WIDTH, STEP_S = 200, 64, 256, 0.01

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
x, y = torch.randn(BATCH, WIDTH), torch.randn(BATCH, 1)
first, folder = 1, Path(os.environ["HETCTL_CHECKPOINT_DIR"])
if found := hetctl.last_checkpoint():
    state = torch.load(found)
    model.load_state_dict(state["model"])
    first = state["epoch"] + 1
for epoch in range(first, int(os.environ["HETCTL_LAST_EPOCH"]) + 1):
    if hetctl.should_stop():
        break
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        time.sleep(STEP_S)
        hetctl.report(epoch=epoch, finished=False, samples=step * BATCH, loss=loss)
    path = folder / f"epoch-{epoch}.pt"
    torch.save({"model": model.state_dict(), "epoch": epoch}, path)
    hetctl.report(epoch=epoch, samples=STEPS * BATCH, val_loss=float(loss.detach()), checkpoint=path)
