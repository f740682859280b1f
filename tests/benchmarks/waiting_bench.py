"""Share of its time that a trainer waits for batches when preprocessing is fast enough.

Trainers sleep as long as a GPU would compute.

    python tests/benchmarks/waiting_bench.py
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

from tables import Figure, Table
from trainers import BATCH, at_once, fed, images, jpeg_files

from hetctl.model.run import CACHED, LOCKSTEP, NONE
from hetctl.runtime.data.sources import as_source

FILES, PIXELS, CROP = 640, 128, 112
TRAINERS, STEP_S = 2, 0.025
WARM_UP, EPOCHS, ROUNDS = 2, 10, 3
MODES = (NONE, CACHED, LOCKSTEP)


def waiting(mode: str, folder: Path) -> float:
    """Return the largest share of any trainer's time."""

    def train(number: int) -> float:
        source = as_source(images(folder, PIXELS, CROP), "training")
        with fed(source, mode, number, TRAINERS) as feed:
            for epoch in range(1, WARM_UP + EPOCHS + 1):
                if epoch in (1, WARM_UP + 1):
                    began, slept_s = time.perf_counter(), 0.0
                for _ in feed.batches(epoch, 0):
                    asleep = time.perf_counter()
                    time.sleep(STEP_S)
                    slept_s += time.perf_counter() - asleep
            return 1 - slept_s / (time.perf_counter() - began)

    return max(at_once(TRAINERS, train))


def table(quick: bool = False) -> Table:
    """Set the medians out."""
    rounds = 1 if quick else ROUNDS
    with jpeg_files(FILES, PIXELS) as folder:
        found = [{mode: waiting(mode, folder) for mode in MODES} for _ in range(rounds)]
    medians = {mode: statistics.median(shares[mode] for shares in found) for mode in MODES}
    rows = tuple(
        (mode, f"{medians[mode]:.2%}", f"{max(shares[mode] for shares in found):.2%}") for mode in MODES
    )
    note = (
        f"{TRAINERS} trainers with a preprocessor each, {STEP_S * 1000:g} ms a batch of {BATCH}, "
        f"JPEG files of {PIXELS} pixels, {EPOCHS} epochs after {WARM_UP}, {rounds} rounds; "
        "the trainer that waits longest."
    )
    figures = tuple(
        Figure(f"share of time that a trainer waits, {mode}", medians[mode], 0.02) for mode in MODES
    )
    return Table("Waiting for batches", ("sharing", "median", "most"), rows, figures, note)


def main() -> int:
    """Print the table; exit code 1: a bar is passed."""
    result = table("--quick" in sys.argv)
    print(result)
    return 0 if all(figure.holds for figure in result.figures) else 1


if __name__ == "__main__":
    sys.exit(main())
