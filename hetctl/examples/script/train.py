"""Fit a network to y = sin(3 x): a script that needs NumPy alone, and reports to hetctl."""

import argparse
from pathlib import Path

import numpy as np

import hetctl

parser = argparse.ArgumentParser()
parser.add_argument("--units", type=int, required=True)
parser.add_argument("--learning-rate", type=float, required=True)
parser.add_argument("--folder", type=Path, required=True)
given = parser.parse_args()

draw = np.random.default_rng(7)
x = draw.uniform(-1, 1, (4096, 1))
y = np.sin(3 * x)
weights = [
    draw.normal(size=(1, given.units)),
    np.zeros(given.units),
    draw.normal(size=(given.units, 1)) * 0.1,
]
first = 1
if state := hetctl.last_checkpoint():
    with np.load(state) as kept:
        first, weights = int(kept["epoch"]) + 1, [kept[name] for name in ("arr_0", "arr_1", "arr_2")]

for epoch in range(first, 21):
    if hetctl.should_stop():
        break
    for rows in np.split(draw.permutation(len(x)), 128):
        hidden = np.tanh(x[rows] @ weights[0] + weights[1])
        error = (hidden @ weights[2] - y[rows]) / len(rows)
        back = error @ weights[2].T * (1 - hidden**2)
        steps = [x[rows].T @ back, back.sum(0), hidden.T @ error]
        weights = [one - given.learning_rate * step for one, step in zip(weights, steps, strict=True)]
    loss = float(np.mean((np.tanh(x @ weights[0] + weights[1]) @ weights[2] - y) ** 2))
    state = given.folder / f"epoch-{epoch}.npz"
    np.savez(state, *weights, epoch=epoch)
    hetctl.report(epoch=epoch, samples=len(x), val_loss=loss, checkpoint=state)
