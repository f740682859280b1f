"""Families of loss curves, to predict work from: drawn ones, and those of networks that really train.

Drawn ones end when an epoch lowers the loss by no more than `RULE.min_delta`, as in Equation 1, or, those
with plateaus, a patience later. The networks train on scikit-learn's digits, and end by their own rule.
"""

from __future__ import annotations

import math
import random
from functools import cache, partial
from itertools import pairwise

import numpy as np
import torch
from sklearn.datasets import load_digits

from hetctl.model.ensemble import StopRule
from hetctl.scheduling.simulate.work_estimator import RULE, LossCurve, equation_1

NETWORKS, TRAINING = 30, 1200
"""Networks that train, and digits for training; the others validate."""
REAL = StopRule(patience=3, min_delta=0.002, max_epochs=100)
PLATEAU = 0.25
"""Share of a run with plateaus for which the rule is patient."""


def noisy(epochs: float, draw: random.Random, noise: float) -> LossCurve:
    """Draw by Equation 1, with another noise than the fit expects."""
    return LossCurve(equation_1(epochs, draw).loss, noise)


def power_law(epochs: float, draw: random.Random) -> LossCurve:
    """Draw floor + a * k^-b."""
    exponent, floor = draw.uniform(0.3, 1.5), draw.uniform(0.3, 1.5)
    scale = RULE.min_delta / (max(epochs - 1, 0.5) ** -exponent - epochs**-exponent)
    return LossCurve(lambda epoch: floor + scale * epoch**-exponent)


def exponential(epochs: float, draw: random.Random) -> LossCurve:
    """Draw floor + a * exp(-k / tau)."""
    tau, floor = epochs / draw.uniform(3.0, 6.0), draw.uniform(0.3, 1.5)
    scale = RULE.min_delta / (math.exp((1 - epochs) / tau) - math.exp(-epochs / tau))
    return LossCurve(lambda epoch: floor + scale * math.exp(-epoch / tau))


def plateaus(epochs: float, draw: random.Random) -> LossCurve:
    """Draw a curve that levels off, and falls again where the learning rate falls, at 0.35 and 0.6."""
    floor, drop, tau = draw.uniform(0.3, 1.5), draw.uniform(0.3, 0.8), epochs / 20
    falls = [(0.0, 2.5), (0.35 * epochs, drop), (0.6 * epochs, drop / 2)]

    def loss(epoch: float) -> float:
        above = (size * min(1.0, math.exp((at - epoch) / tau)) for at, size in falls)
        return floor + math.fsum(above)

    return LossCurve(loss, rule=StopRule(patience=max(2, round(PLATEAU * epochs)), min_delta=RULE.min_delta))


@cache
def measured() -> tuple[tuple[float, ...], ...]:
    """Train networks of unlike widths, optimizers and learning rates; return their validation losses."""
    torch.set_num_threads(1)
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    return tuple(_trained(x, y, seed) for seed in range(NETWORKS))


def _trained(x: torch.Tensor, y: torch.Tensor, seed: int) -> tuple[float, ...]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width, depth = draw.choice((8, 16, 32, 64, 128)), draw.choice((1, 2))
    sizes = (64, *[width] * depth)
    hidden = [part for a, b in pairwise(sizes) for part in (torch.nn.Linear(a, b), torch.nn.ReLU())]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(width, 10))
    make, low, high = draw.choice(((torch.optim.SGD, 0.01, 0.3), (torch.optim.Adam, 2e-4, 5e-3)))
    optimizer = make(model.parameters(), lr=math.exp(draw.uniform(math.log(low), math.log(high))))
    falls_at, cost = draw.choice((5, 10, 10_000)), torch.nn.functional.cross_entropy
    rate = torch.optim.lr_scheduler.StepLR(optimizer, falls_at, 0.3)
    order, losses = np.random.default_rng(seed), list[float]()
    while REAL.reason_to_stop(tuple(losses)) is None:
        for rows in np.array_split(order.permutation(TRAINING), TRAINING // 32):
            optimizer.zero_grad()
            cost(model(x[rows]), y[rows]).backward()
            optimizer.step()
        rate.step()
        with torch.no_grad():
            losses.append(float(cost(model(x[TRAINING:]), y[TRAINING:])))
    return tuple(losses)


def trained(epochs: float, draw: random.Random) -> LossCurve:
    """Draw the losses of a network that trained for as many epochs."""
    losses = draw.choice([losses for losses in measured() if len(losses) == round(epochs)])
    return LossCurve(lambda epoch: losses[round(epoch) - 1], 0.0, REAL)


TRAINED = "networks that trained on digits"
FAMILIES = {
    "Equation 1, 2 % noise: as the fit assumes": equation_1,
    "Equation 1, 0.5 % noise": partial(noisy, noise=0.005),
    "Equation 1, 5 % noise": partial(noisy, noise=0.05),
    "Equation 1, 10 % noise": partial(noisy, noise=0.1),
    "power law": power_law,
    "exponential": exponential,
    "plateaus": plateaus,
    TRAINED: trained,
}
