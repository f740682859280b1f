"""Rates as planners know them in a simulated run in which only training reveals them."""

from __future__ import annotations

from dataclasses import replace

from hetctl.model.ensemble import Ensemble
from hetctl.model.training_progress import EpochHistory, Progress, TimedRate
from hetctl.model.workload import Workload
from hetctl.perf.sharing import NO_SHARING, GpuTerms
from hetctl.perf.workloads import Workloads

RATE_KNOWN_S = 3.0
"""Seconds of training after which the rate of a group is known."""


class RateLearner:
    """Rates as a driver without profiles sees them: reported ones, and estimates from these (`Workloads`).

    Parameters
    ----------
    ensemble : Ensemble
        The members with the names of their workloads; their `max_gpus` limit what can be tried.
    gpus : int
        Number of GPUs of the cluster.
    known_s : float
        Seconds of training after which a rate is reported.
    terms : GpuTerms
        How members share GPUs.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        gpus: int,
        known_s: float = RATE_KNOWN_S,
        terms: GpuTerms = NO_SHARING,
    ) -> None:
        self.known_s = known_s
        self._members = {member.name: member for member in ensemble.members}
        self._workloads = Workloads(ensemble, {}, gpus, terms=terms)
        self._epochs: dict[str, EpochHistory] = {}

    def seen(self, workload: Workload) -> Workload:
        """Return a member with the rates that planners see in place of its true ones."""
        if workload.name not in self._workloads.left:
            self._workloads.update({workload.name: Progress(workload.name)})
        known = self._workloads.left[workload.name]
        return replace(workload, rates=known.rates, spread=known.spread, family=known.family, busy=known.busy)

    def report(self, member: str, gpus: int, rate: float, busy: float | None = None) -> None:
        """Report the rate of a member on a number of GPUs, and on one its busy share."""
        timed = TimedRate(rate, gpus, self._members[member].batch_size, None, 0.0, busy=busy)
        history = self._epochs.get(member, EpochHistory()).with_rate(timed)
        self._epochs[member] = history
        self._workloads.update({member: Progress(member, history)})
