"""Instances of the static problem that `doubling` solves, and their exact optima."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping

from hetctl.model.workload import Workload
from hetctl.scheduling.planners.doubling import ResizeCandidate

Curve = Callable[[random.Random], dict[int, float]]


def sublinear(draw: random.Random) -> dict[int, float]:
    alone, exponent = draw.uniform(21, 176), draw.uniform(0.6, 0.97)
    return {gpus: alone * gpus**exponent for gpus in range(1, 65)}


def falling(draw: random.Random) -> dict[int, float]:
    """Like ElasticFlow's measurements: less is won with each doubling, and some is lost in the end."""
    rates, rate, won = {}, draw.uniform(1, 30), draw.uniform(1.6, 1.95)
    for exponent in range(7):
        rates.update(dict.fromkeys(range(1 << exponent, min(2 << exponent, 65)), rate))
        rate *= won
        won = max(won - draw.uniform(0.05, 0.35), 0.85)
    return rates


def dipping(draw: random.Random) -> dict[int, float]:
    """Like some of Gavel's language models: slower on two GPUs than on one, faster on four."""
    rates = sublinear(draw)
    return {gpus: rate * (0.55 if gpus == 2 else 1.0) for gpus, rate in rates.items()}


CURVES: tuple[Curve, ...] = (sublinear, falling, dipping)
GPUS = (7, 16, 32, 64)


def instance(curve: Curve, gpus: int, seed: int) -> list[ResizeCandidate]:
    """Draw a job for every eighth GPU up to one for each, with lognormal work around one GPU-hour."""
    draw = random.Random(seed)
    jobs = []
    for number in range(draw.randint(max(gpus // 8, 1), gpus)):
        rates = curve(draw)
        work = rates[1] * 3600 * draw.lognormvariate(0, 1)
        jobs.append(ResizeCandidate(Workload(f"m{number}", rates, work), rates))
    return jobs


def total_s(jobs: list[ResizeCandidate], counts: Mapping[str, int]) -> float:
    """Return the sum of all jobs' times on so many GPUs."""
    return math.fsum(job.seconds(counts[job.name]) for job in jobs)


def exact_s(jobs: list[ResizeCandidate], gpus: int) -> float:
    """The least total time with a power of two for each job, by dynamic programming over GPUs."""
    best = [0.0] * (gpus + 1)
    for job in jobs:
        options = [(1 << e, job.seconds(1 << e)) for e in range(7) if 1 << e <= gpus]
        best = [
            min((best[left - w] + t for w, t in options if w <= left), default=math.inf)
            for left in range(gpus + 1)
        ]
    return best[gpus]
