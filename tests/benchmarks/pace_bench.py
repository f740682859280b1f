"""Gain of ``cached`` over ``lockstep``, which holds members of a flotilla with different rates to one.

Trainers sleep as long as a GPU would compute, and samples take next to nothing to prepare.

    python tests/benchmarks/pace_bench.py
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np
from tables import Figure, Table
from trainers import BATCH, at_once, fed

from hetctl.model.run import CACHED, LOCKSTEP
from hetctl.runtime.data.sources import as_source

STEPS_S = (0.2, 0.05)
"""Of a batch, by member."""
SAMPLES, SHAPE = 320, (224, 224, 3)
WARM_UP_S, SECONDS, ROUNDS = 4.0, 8.0, 3
"""While it warms up, the fastest member in lockstep uses up what is prepared ahead."""
MODES = (LOCKSTEP, CACHED)


class Images:
    """Images of one colour, so large that few of them are prepared ahead."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Any, int]:
        return np.full(SHAPE, number, np.float32), number


def rates(mode: str) -> list[float]:
    """Return the samples/s of each member, the slowest first."""
    begin = time.perf_counter() + WARM_UP_S

    def train(number: int) -> float:
        steps = 0
        with fed(as_source(Images(), "training"), mode, number, len(STEPS_S)) as feed:
            for epoch in range(1, 1000):
                for _ in feed.batches(epoch, 0):
                    time.sleep(STEPS_S[number])
                    if (now := time.perf_counter()) > begin + SECONDS:
                        return BATCH * steps / SECONDS
                    steps += now > begin
        raise AssertionError("too few epochs")

    return sorted(at_once(len(STEPS_S), train))


def table(quick: bool = False) -> Table:
    """Set the medians out."""
    rounds = 1 if quick else ROUNDS
    found = [{mode: rates(mode) for mode in MODES} for _ in range(rounds)]
    rows = tuple(
        (
            mode,
            *(f"{statistics.median(each[mode][i] for each in found):,.0f}" for i in range(len(STEPS_S))),
            f"{statistics.median(sum(each[mode]) for each in found):,.0f}",
        )
        for mode in MODES
    )
    ratio = statistics.median(sum(each[LOCKSTEP]) / sum(each[CACHED]) for each in found)
    note = (
        f"{' and '.join(f'{step * 1000:g} ms' for step in STEPS_S)} a batch of {BATCH}: rates are as 1 : 4; "
        f"{SECONDS:g} s after {WARM_UP_S:g} s, medians of {rounds} rounds. The limit is 0.4."
    )
    return Table(
        "Samples/s of members whose rates differ",
        ("sharing", "slow", "fast", "both"),
        rows,
        (Figure("lockstep over cached, samples/s of both", ratio, 1 / 1.8),),
        note,
    )


def main() -> int:
    """Print the table; exit code 1: the bar is passed."""
    result = table("--quick" in sys.argv)
    print(result)
    return 0 if all(figure.holds for figure in result.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
