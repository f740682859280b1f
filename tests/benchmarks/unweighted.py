"""Training in one process with batches of unequal sizes, their gradients averaged without weights."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "ensembles"))
from paced_digits import TRAINING, input_fn
from paced_torch import accuracy, model_fn
from torch import nn

from hetctl.runtime.data.sampler import Stream


def accuracies(config: dict[str, Any], seed: int, sizes: Sequence[int], epochs: int) -> list[float]:
    """Return the validation accuracy of each epoch (LB-BSP, Equation 6).

    Parameters
    ----------
    seed : int
        Seed of the member, from which hetctl derives the order of the samples.
    sizes : sequence of int
        Samples of each rank.
    """
    torch.set_num_threads(1)
    (x, y), validation = (map(torch.as_tensor, part) for part in input_fn(None))
    x_val, y_val = validation
    parts = model_fn(config)
    chunk, ranks = sum(sizes), len(sizes)
    streams = [Stream(TRAINING, chunk, seed, rank=r, ranks=ranks, sizes=tuple(sizes)) for r in range(ranks)]
    steps = -(-TRAINING // chunk)
    found = []
    for position in range(steps * epochs):
        shares = [stream.at(position).numbers.copy() for stream in streams]
        losses = [nn.functional.cross_entropy(parts["model"](x[own]), y[own]) for own in shares if len(own)]
        parts["optimizer"].zero_grad()
        torch.stack(losses).mean().backward()
        parts["optimizer"].step()
        if (position + 1) % steps == 0:
            with torch.no_grad():
                found.append(float(accuracy(parts["model"](x_val), y_val)))
    return found
