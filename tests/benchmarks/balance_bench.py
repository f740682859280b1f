"""Distance of balanced batches from t*, iterations until then, and LB-BSP's section 5.2 replayed.

t* is the least time in which the workers can take the batch together, even in parts of samples. All start
with equal batches; at iteration 150 conditions change. Workers' times by batch are smooth, not the straight
lines that `curve` learns.

    python tests/benchmarks/balance_bench.py [--quick]
"""

from __future__ import annotations

import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tables import Figure, Table

from hetctl.methods.balance.curve_manager import CurveManager
from hetctl.methods.balance.manager import BatchSizeManager, Observation, equal_batches
from hetctl.methods.balance.managers import CpuManager, GpuManager
from hetctl.methods.balance.predictors.learner import Ema
from hetctl.methods.balance.simulate import Conditions, iterate, phases
from hetctl.methods.balance.step_time import TimeCurve
from hetctl.model.simulation import ConditionSpan, Iteration

EACH, CHANGE, ITERATIONS = 32, 150, 300
SIZES = (2, 4, 16, 96)
JITTERS = (0.0, 0.02)
POINTS = (*range(1, 17), 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 192, 256, 512, 1024)
PAPER_SPLIT = (89, 21, 12, 6)


@dataclass(frozen=True)
class Worker:
    """What an iteration takes a worker.

    Parameters
    ----------
    fixed_s : float
        Launch overhead, and gradients and weights on the network.
    rate : float
        Samples/s of large batches.
    saturation : float
        Batches below it take as long as it does, x^s (LB-BSP, section 3.3.1).
    cap : int or None
        Samples that fit into memory, x^o.
    """

    fixed_s: float
    rate: float
    saturation: float = 0.0
    cap: int | None = None

    @property
    def curve(self) -> TimeCurve:
        """Return a curve that bends smoothly where the worker is saturated."""
        return TimeCurve(tuple((float(x), self._seconds(x)) for x in POINTS), self.cap)

    def _seconds(self, batch: float) -> float:
        return self.fixed_s + math.hypot(batch**2, self.saturation**2) ** 0.5 / self.rate


# Derived, not measured: rates and fixed times are such that the paper's split is balanced and its two
# differences come out (section 5.2: the K520 saves 2 s from 32 samples to 6, the V100 needs 0.5 s more
# from 32 to 89); the other two GPUs' lie between. 190 MB of gradients and weights take 0.15 s at
# 10 Gbit/s and 0.61 s at 2.5.
PAPER = {
    "V100": Worker(0.30, 114, 16, 128),
    "M60": Worker(0.555, 40, 4, 64),
    "K80": Worker(0.68, 30, 4, 96),
    "K520": Worker(0.62, 13, 2, 32),
}
DROP_S = 0.46


@dataclass(frozen=True)
class Scenario:
    """Workers before and after the change."""

    before: tuple[Worker, ...]
    after: tuple[Worker, ...]

    @property
    def conditions(self) -> list[Conditions]:
        starts = ((0, self.before), (CHANGE, self.after))
        return [Conditions(first, tuple(worker.curve for worker in workers)) for first, workers in starts]


def dropped(of_each: int) -> Scenario:
    """Return section 5.2's GPUs, or with four of each section 5.1's; one M60 loses bandwidth."""
    before = tuple(PAPER[name] for name in PAPER for _ in range(of_each))
    after = [*before]
    after[of_each] = replace(before[of_each], fixed_s=before[of_each].fixed_s + DROP_S)
    return Scenario(before, tuple(after))


def slowed() -> Scenario:
    """Return two GPUs so unlike that one gets hardly any samples, until the other one is slower."""
    fast, slow = PAPER["V100"], PAPER["K520"]
    return Scenario((fast, slow), (replace(fast, rate=fast.rate / 2), slow))


def drawn(workers: int, seed: int, accelerated: bool) -> Scenario:
    """Draw workers whose rates span a factor of ten; a third of them get faster or slower, by up to two."""
    draw = random.Random(f"{workers}:{seed}:{accelerated}")
    before = tuple(_drawn_worker(draw, accelerated) for _ in range(workers))
    after = list(before)
    for i in draw.sample(range(workers), max(workers // 3, 1)):
        after[i] = replace(before[i], rate=before[i].rate * 2 ** draw.uniform(-1, 1))
    return Scenario(before, tuple(after))


def _drawn_worker(draw: random.Random, accelerated: bool) -> Worker:
    rate = 20 * 10 ** draw.random()
    if not accelerated:
        return Worker(0.0, rate)
    return Worker(draw.uniform(0.1, 0.4), rate, draw.uniform(0, 0.2) * rate, draw.choice([48, 96, 192, None]))


Maker = Callable[[Sequence[int], Sequence[int | None]], BatchSizeManager]
ALGORITHMS: dict[str, Maker] = {
    "cpu, ema": lambda batches, caps: CpuManager(batches, Ema(len(caps)), caps),
    "gpu": GpuManager,
    "curve": CurveManager,
}


def run(
    scenario: Scenario, make: Maker, jitter: float = 0.0
) -> tuple[list[Iteration], tuple[ConditionSpan, ...]]:
    """Simulate a scenario."""
    caps = [worker.cap for worker in scenario.before]
    manager = make(equal_batches(EACH * len(caps), caps), caps)
    found = list(iterate(manager, scenario.conditions, ITERATIONS, jitter))
    return found, phases(found, scenario.conditions)


def scenarios(seeds: range) -> Iterator[tuple[str, list[Scenario]]]:
    """Return groups of them by name."""
    yield "section 5.2", [dropped(1)]
    yield "Cluster-A", [dropped(4)]
    yield "V100, K520", [slowed()]
    for size in SIZES:
        yield f"{size} GPUs", [drawn(size, seed, accelerated=True) for seed in seeds]
        yield f"{size} CPUs", [drawn(size, seed, accelerated=False) for seed in seeds]


HEADER = (
    "workers",
    "jitter",
    "algorithm",
    *("best", "ratio", "within 5 %"),
    *("best, changed", "ratio, changed", "within 5 %, changed"),
)


def table(quick: bool = False) -> Table:
    """Ratios to t* in steady state, and iterations until 1.05 of it; the worst of each group."""
    seeds = range(2 if quick else 10)
    rows, worst = [], {jitter: [0.0, 0.0] for jitter in JITTERS}
    for name, group in scenarios(seeds):
        for jitter in JITTERS:
            for algorithm, make in ALGORITHMS.items():
                found = [run(scenario, make, jitter)[1] for scenario in group]
                both = [phase for pair in found for phase in pair]
                if algorithm == "curve":
                    worst[jitter][0] = max(worst[jitter][0], *(phase.ratio for phase in both))
                    worst[jitter][1] = max(worst[jitter][1], *(_steps(phase) for phase in both))
                cells = [cell for phase in zip(*found, strict=True) for cell in _cells(phase)]
                rows.append((name, f"{jitter:.0%}", algorithm, *cells))
    figures = [
        figure
        for jitter, (ratio, steps) in worst.items()
        for figure in (
            Figure(f"curve, jitter {jitter:.0%}: worst ratio in steady state", ratio, 1.03),
            Figure(f"curve, jitter {jitter:.0%}: most iterations to 1.05 of t*", steps, 10),
        )
    ]
    figures += [
        Figure(f"{name}: update for 96 workers, ms", update_ms(make), 1.0)
        for name, make in ALGORITHMS.items()
    ]
    return Table(
        "Balanced batches over t*",
        HEADER,
        tuple(rows),
        tuple(figures),
        f"{EACH} samples for each worker, {ITERATIONS} iterations, conditions change at {CHANGE}; the worst "
        f"of {len(seeds)} seeds, `-` if one never came within 5 %. `best`: the best split in whole samples.",
    )


def _cells(group: Sequence[ConditionSpan]) -> tuple[str, str, str]:
    best = max(phase.best_s / phase.t_star_s for phase in group)
    ratio = max(phase.ratio for phase in group)
    steps = max(_steps(phase) for phase in group)
    return f"{best:.3f}", f"{ratio:.3f}", "-" if steps > ITERATIONS else str(int(steps))


def _steps(phase: ConditionSpan) -> float:
    return float("inf") if phase.reached_at is None else phase.reached_at - phase.first


def update_ms(make: Maker, workers: int = 96, updates: int = 200) -> float:
    """Return the milliseconds of processor time that one update takes, the median."""
    scenario = drawn(workers, 0, accelerated=True)
    curves = [worker.curve for worker in scenario.before]
    caps = [worker.cap for worker in scenario.before]
    manager, draw = make(equal_batches(EACH * workers, caps), caps), random.Random(0)
    taken_s = []
    for _ in range(updates):
        seen = [
            Observation(batch, curve.seconds(batch) * draw.lognormvariate(0, 0.02))
            for curve, batch in zip(curves, manager.batches, strict=True)
        ]
        began = time.process_time()
        manager.update(seen)
        taken_s.append(time.process_time() - began)
    return 1000 * statistics.median(taken_s)


SHOWN = (0, 5, 10, 20, 30, 50, 149, 150, 155, 160, 170, 200, 299)


def replay(quick: bool = False) -> Table:  # noqa: ARG001
    """Section 5.2: batches and seconds by iteration, `gpu` beside `curve`."""
    names = ("gpu", "curve")
    courses = {name: run(dropped(1), ALGORITHMS[name]) for name in names}
    (start, changed) = courses["curve"][1]
    rows = [(str(at), *(cell for name in names for cell in _at(courses[name][0][at]))) for at in SHOWN]
    mean_s = {
        name: statistics.mean(one.duration_s for one in course) for name, (course, _) in courses.items()
    }
    return Table(
        "LB-BSP, section 5.2: four types of GPU, Inception-V3",
        ("iteration", *(head for name in names for head in (f"{name}: {', '.join(PAPER)}", "seconds"))),
        tuple(rows),
        note="Assumed: times by batch, which the paper does not list. Rates and fixed times are such that"
        " its one split is balanced, and that the K520 saves 2 s and the V100 needs 0.5 s more, as its text"
        " says; those of M60 and K80 lie between. So the split is input here, and how the managers come to"
        " it is simulated. Best splits: "
        f"{start.best_batches} (paper: {PAPER_SPLIT}), and {changed.best_batches} once the M60 has "
        f"2.5 Gbit/s; t* is {start.t_star_s:.3f} s and {changed.t_star_s:.3f} s, equal batches take "
        f"{start.equal_s:.2f} s. Mean iteration: gpu {mean_s['gpu']:.3f} s, curve {mean_s['curve']:.3f} s.",
    )


def _at(iteration: Iteration) -> tuple[str, str]:
    return ", ".join(map(str, iteration.batches)), f"{iteration.duration_s:.3f}"


def main() -> int:
    """Print both tables."""
    print(replay())
    print(f"\n{table('--quick' in sys.argv)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
