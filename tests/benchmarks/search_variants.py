"""The variants of ASHA under a virtual clock, for many seeds: no time is lost between trials.

python tests/benchmarks/search_variants.py [--quick]
"""

from __future__ import annotations

import heapq
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence

from search_bench import ETA, FIRST, LAST, TRIALS, WORKERS, Search, TrainedEpoch, whole_of
from search_trainable import epoch_seconds, loss_after
from tables import Figure, Table

from hetctl.methods.automl.halving import VARIANTS, Asha
from hetctl.methods.automl.procedure import Procedure, RandomSource
from hetctl.methods.automl.trials import Categorical, NumberRange, Report
from hetctl.model.searches import DELAYED, STOPPING, Trial

SEEDS = 200
SPACE = {"learning_rate": NumberRange(0.0001, 1.0, log=True), "width": Categorical((1, 2, 4))}


def table(quick: bool = False) -> Table:
    """Search with all variants, and compare the default with the others."""
    seeds = range(20 if quick else SEEDS)
    found = [{variant: search(variant, seed) for variant in VARIANTS} for seed in seeds]
    rows = [
        (variant, *(f"{statistics.mean(values):.4g}" for values in zip(*wholes, strict=True)))
        for variant in VARIANTS
        for wholes in [[whole_of(searches[variant]) for searches in found]]
    ]
    rest = [variant for variant in VARIANTS if variant != DELAYED]
    losses = [statistics.geometric_mean(_ratios(DELAYED, other, found)[2]) for other in rest]
    return Table(
        f"The variants of ASHA under a virtual clock, {TRIALS} trials on {WORKERS} workers",
        ("variant", "GPU s", "s", "epochs", "best loss"),
        tuple(rows),
        tuple(figure for other in rest for figure in _figures(other, found)),
        note=f"The trials of the section `search`, {len(seeds)} seeds: means, and of the figures geometric "
        f"means. `{STOPPING}` is the rule of Ray Tune and of Optuna. The best loss of `{DELAYED}` is "
        + " and ".join(
            f"{ratio:.3f} times that of `{other}`" for ratio, other in zip(losses, rest, strict=True)
        )
        + ".",
    )


def _figures(other: str, found: Sequence[Mapping[str, Search]]) -> Iterator[Figure]:
    """Yield the costs of the default variant over those of another."""
    gpu_s, seconds, _ = (statistics.geometric_mean(values) for values in _ratios(DELAYED, other, found))
    yield Figure(f"GPU-seconds to the best loss that both reach, {DELAYED} over {other}", gpu_s, 1.0)
    yield Figure(f"time to the best loss that both reach, {DELAYED} over {other}", seconds, 1.0)


def _ratios(one: str, other: str, found: Sequence[Mapping[str, Search]]) -> list[tuple[float, ...]]:
    """Return the ratios of GPU-seconds, of times and of best losses, each by seed."""
    return list(zip(*(_ratio(searches[one], searches[other]) for searches in found), strict=True))


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


def _ratio(own: Search, other: Search) -> tuple[float, float, float]:
    loss = max(own.best, other.best)
    (own_gpu_s, own_s), (gpu_s, s) = own.to(loss), other.to(loss)
    return own_gpu_s / gpu_s, own_s / s, own.best / other.best


if __name__ == "__main__":
    print(table("--quick" in sys.argv))
