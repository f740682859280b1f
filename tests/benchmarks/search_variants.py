"""Both variants of ASHA under a virtual clock, for many seeds: no time is lost between trials.

python tests/benchmarks/search_variants.py [--quick]
"""

from __future__ import annotations

import heapq
import statistics
import sys

from search_bench import ETA, FIRST, LAST, TRIALS, WORKERS, Search, TrainedEpoch, whole_of
from search_trainable import epoch_seconds, loss_after
from tables import Table

from hetctl.methods.automl.asha import VARIANTS, Asha
from hetctl.methods.automl.grid_random import RandomSource
from hetctl.methods.automl.procedure import Procedure
from hetctl.methods.automl.space import Categorical, NumberRange
from hetctl.methods.automl.trial_history import Report, Trial
from hetctl.model.searches import PROMOTION, STOPPING

SEEDS = 200
SPACE = {"learning_rate": NumberRange(0.0001, 1.0, log=True), "width": Categorical((1, 2, 4))}


def table(quick: bool = False) -> Table:
    """Search with both variants, and compare them."""
    seeds = range(20 if quick else SEEDS)
    found = [{variant: search(variant, seed) for variant in VARIANTS} for seed in seeds]
    rows = [
        (variant, *(f"{statistics.mean(values):.4g}" for values in zip(*wholes, strict=True)))
        for variant in VARIANTS
        for wholes in [[whole_of(searches[variant]) for searches in found]]
    ]
    ratios = [_ratios(searches[STOPPING], searches[PROMOTION]) for searches in found]
    means = [statistics.geometric_mean(values) for values in zip(*ratios, strict=True)]
    return Table(
        f"The variants of ASHA under a virtual clock, {TRIALS} trials on {WORKERS} workers",
        ("variant", "GPU s", "s", "epochs", "best loss"),
        tuple(rows),
        note=f"The trials of the section `search`, {len(seeds)} seeds, means. To the best loss that both "
        f"reach, `stopping` takes {means[0]:.3f} times the GPU-seconds of `promotion`, and {means[1]:.3f} "
        f"times the time; its best loss is {means[2]:.3f} times as high (geometric means).",
    )


def search(variant: str, seed: int) -> Search:
    """Return the epochs of a search whose workers are never idle without need."""
    procedure = Procedure(Asha(TRIALS, LAST, FIRST, ETA, variant=variant), RandomSource(SPACE, seed))
    epochs = list[TrainedEpoch]()
    ends = list[tuple[float, int, Trial]]()
    now = 0.0
    while not procedure.done:
        for trial in procedure.ask(WORKERS - len(ends)):
            done = sum(epoch.trial == trial.number for epoch in epochs)
            seconds = epoch_seconds(trial.config)
            for epoch in range(done + 1, trial.epochs + 1):
                epochs.append(TrainedEpoch(trial.number, epoch, now + (epoch - done) * seconds, seconds))
            heapq.heappush(ends, (now + (trial.epochs - done) * seconds, len(epochs), trial))
        now, _, ended = heapq.heappop(ends)
        procedure.tell(Report(ended.number, ended.epochs, loss_after(ended.config, ended.epochs)))
    configs = [trial.config for trial in procedure.history.trials]
    return Search(configs, sorted(epochs, key=lambda epoch: epoch.ended_at))


def _ratios(own: Search, other: Search) -> tuple[float, float, float]:
    loss = max(own.best, other.best)
    (own_gpu_s, own_s), (gpu_s, s) = own.to(loss), other.to(loss)
    return own_gpu_s / gpu_s, own_s / s, own.best / other.best


if __name__ == "__main__":
    print(table("--quick" in sys.argv))
