"""Rates that are known from training, and those still to be explored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from hetctl.model.workload import Workload
from hetctl.perf.allreduce_model import fitted_rates
from hetctl.scheduling.planners.base import Held
from hetctl.scheduling.planners.elastic import ResizeCandidate

STAGE_S = 150.0
"""Seconds on a number of GPUs after which its rate is known: the paper's 2.5 minutes."""

EXPLORED = 8
"""Largest number of GPUs that is explored."""


class Known:
    """Numbers of GPUs with known rates, by member or, if shared, by family."""

    def __init__(self, shared: bool, memory: Mapping[str, list[int]]) -> None:
        self._shared = shared
        self._counts = defaultdict(set, {key: set(counts) for key, counts in memory.items()})

    def learn(self, held: Iterable[Held], now_s: float) -> None:
        """Add the numbers of GPUs that members have trained with for long enough by now."""
        for member in held:
            if now_s >= ready_s(member):
                self._counts[self.key(member.workload)].add(member.allocation.gpus)

    def key(self, workload: Workload) -> str:
        """Return the key of workloads with the same rates: the family, or the member itself."""
        if self._shared and workload.family:
            return f"family {workload.family}"
        return f"member {workload.name}"

    def next_stage(self, workload: Workload, limit: int = EXPLORED) -> int | None:
        """Return the first power of two whose rate is to be explored; None if all are known."""
        known = self._counts[self.key(workload)]
        stages = powers_of_two(min(limit, EXPLORED, workload.max_gpus))
        return next((gpus for gpus in stages if gpus not in known), None)

    def rates(self, workload: Workload) -> dict[int, float]:
        """Return the rates on powers of two up to the first one that is still to be explored.

        Above `EXPLORED`, Equation 5 of Capes et al., fitted to the known rates, gives the others.
        """
        known = self._counts[self.key(workload)]
        tried = {gpus: workload.rates[gpus] for gpus in powers_of_two(workload.max_gpus) if gpus in known}
        rates: dict[int, float] = {}
        for gpus in powers_of_two(workload.max_gpus):
            if gpus in tried:
                rates[gpus] = tried[gpus]
            elif gpus > EXPLORED and tried:
                rates[gpus] = _fitted(tuple(tried.items()), workload.max_gpus)[gpus]
            else:
                break
        return rates

    def job(self, job: ResizeCandidate) -> ResizeCandidate:
        """Return a member with its known rates only."""
        return replace(job, rates=self.rates(job.workload))

    def memory(self) -> dict[str, list[int]]:
        """Return the state to be kept."""
        return {key: sorted(counts) for key, counts in self._counts.items() if counts}


@lru_cache(maxsize=1 << 12)
def _fitted(tried: tuple[tuple[int, float], ...], max_gpus: int) -> dict[int, float]:
    return fitted_rates(dict(tried), max_gpus)[0]


def ready_s(held: Held) -> float:
    """Return the time in seconds when the rate of a member in training is known."""
    return held.since_s + STAGE_S


def powers_of_two(limit: int) -> Iterator[int]:
    """Yield 1, 2, 4, .. up to `limit`."""
    gpus = 1
    while gpus <= limit:
        yield gpus
        gpus *= 2
