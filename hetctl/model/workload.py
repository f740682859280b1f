"""A member as planners see it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Workload:
    """A member as planners see it: its rates and the work it has left.

    Parameters
    ----------
    rates : mapping of int to float
        Samples/s for every number of GPUs the planner may give.
    samples_left : float
        Predicted, never below zero.
    startup_s : float
        From its next start to the first sample.
    epoch_s : float
        What an epoch takes beyond its samples at the rate, evaluation and checkpoint left out.
    save_s : float or None
        What an epoch loses by a checkpoint that is written beside it; None: as much as `checkpoint_s`.
    restart_s : float or None
        The same for every start after that; None: as `startup_s`.
    family : str
        Members of one family have the same rates, so what is learned of one holds for all.
    rates_by_type : mapping
        `rates` on types of GPU that differ, by the type's name.
    """

    name: str
    rates: Mapping[int, float]
    samples_left: float
    samples_per_epoch: int | None = None
    startup_s: float = 0.0
    evaluate_s: float = 0.0
    checkpoint_s: float = 0.0
    notes: tuple[str, ...] = field(default=())
    restart_s: float | None = None
    family: str = ""
    rates_by_type: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    epoch_s: float = 0.0
    save_s: float | None = None

    @property
    def overhead_s(self) -> float:
        """Seconds of each epoch beyond its samples at the rate."""
        of_epoch_s = self.epoch_s + self.evaluate_s if self.samples_per_epoch else 0.0
        return of_epoch_s + (self.checkpoint_s if self.save_s is None else self.save_s)

    @property
    def interruption_s(self) -> float:
        """What it costs to stop this member and start it again."""
        return self.checkpoint_s + (self.startup_s if self.restart_s is None else self.restart_s)

    def with_left(self, samples_left: float) -> Workload:
        """Return the member with other work left; a driver asks for all in training at each decision."""
        other = object.__new__(Workload)
        # `dataclasses.replace` takes six times as long.
        vars(other).update(vars(self), samples_left=samples_left)
        return other

    def interrupted(self, samples_left: float) -> Workload:
        """Return the member as it is after a step that did not finish it."""
        startup_s = self.startup_s if self.restart_s is None else self.restart_s
        return replace(self, samples_left=samples_left, startup_s=startup_s)

    @property
    def max_gpus(self) -> int:
        """The most GPUs that make sense for this member."""
        return max(self.rates)

    def on_type(self, gpu_type: str) -> Workload:
        """Return the member as it is on GPUs of one type."""
        if not self.rates_by_type:
            return self
        return replace(self, rates=self.rates_by_type.get(gpu_type, self.rates), rates_by_type={})

    def on_slowest(self, gpu_types: Iterable[str]) -> Workload:
        """Return the member as it is on GPUs of several types at once: the slowest sets its pace."""
        if not self.rates_by_type:
            return self
        curves = [self.rates_by_type.get(gpu_type, self.rates) for gpu_type in gpu_types]
        shared = set.intersection(*(set(curve) for curve in curves))
        rates = {gpus: min(curve[gpus] for curve in curves) for gpus in sorted(shared)}
        return replace(self, rates=rates, rates_by_type={})

    def on_balanced(self, gpus: Mapping[str, int]) -> Workload:
        """Return the member as it is on GPUs of several types whose batches are balanced.

        Each GPU keeps the pace that it has in a group of its own type, so rates add up in proportion
        to the GPUs of each type, `gpus`.
        """
        if not self.rates_by_type:
            return self
        curves = [(self.rates_by_type.get(gpu_type, self.rates), count) for gpu_type, count in gpus.items()]
        shared = set.intersection(*(set(curve) for curve, _ in curves))
        total = sum(gpus.values())
        rates = {k: sum(count * curve[k] for curve, count in curves) / total for k in sorted(shared)}
        return replace(self, rates=rates, rates_by_type={})

    @property
    def highest_rates(self) -> Mapping[int, float]:
        """Samples/s by number of GPUs on whichever type is fastest."""
        if not self.rates_by_type:
            return self.rates
        curves = (self.rates, *self.rates_by_type.values())
        counts = sorted({gpus for curve in curves for gpus in curve})
        return {gpus: max(curve.get(gpus, 0.0) for curve in curves) for gpus in counts}
