"""Members as planners see them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import field, replace

from hetctl.model.values import dataclass


@dataclass(frozen=True)
class Slowed:
    """Factor by which a member is slower beside others than the busy shares say.

    Parameters
    ----------
    spread : float
        Standard error of its logarithm.
    """

    factor: float = 1.0
    spread: float = 0.0

    @property
    def at_least(self) -> float:
        """The factor less its spread."""
        return max(1.0, self.factor * math.exp(-self.spread))


NOT_SLOWED = Slowed()


@dataclass(frozen=True)
class Workload:
    """A member as planners see it: its rates and the work it has left.

    Parameters
    ----------
    rates : mapping of int to float
        Expected samples/s for every number of GPUs that the planner may assign, in ascending order.
    samples_left : float
        Predicted samples left, at least zero.
    startup_s : float
        Seconds from its next start to the first sample.
    epoch_s : float
        Seconds of an epoch beyond its samples at the rate, without evaluation and checkpoint.
    save_s : float or None
        Seconds that an epoch loses by a checkpoint written in parallel; None: equal to `checkpoint_s`.
    restart_s : float or None
        Seconds from any later start to the first sample; None: equal to `startup_s`.
    family : str
        Name of a family of members with equal rates: observations of one member hold for all.
    rates_by_type : mapping
        Rates of each type of GPU by name, if the types differ.
    spread : mapping of int to float
        Standard error of the logarithm of each rate that is a guess; 0, or missing, if it was measured.
    busy : float
        Share of the time for which it keeps its device busy alone on one GPU; 1 if it shares with none.
    memory : float
        Share of a GPU's memory that it takes.
    shape : str
        Digest of what its rates depend on.
    slowed : mapping of str to Slowed
        How much slower it is beside members of each shape than the busy shares say, as far as it was seen;
        "": beside any other.
    fuses : str
        Shape of the members with which it may be one computation; empty: with none.
    fused : mapping of int to float
        Samples/s of members of this shape together, by the number of them that are one computation.
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
    spread: Mapping[int, float] = field(default_factory=dict)
    busy: float = 1.0
    memory: float = 0.0
    shape: str = ""
    slowed: Mapping[str, Slowed] = field(default_factory=dict)
    fuses: str = ""
    fused: Mapping[int, float] = field(default_factory=dict)

    @property
    def overhead_s(self) -> float:
        """Seconds of each epoch beyond its samples at the rate."""
        # If the length of epochs is unknown, so are their number and the total of such times.
        of_epoch_s = self.epoch_s + self.evaluate_s if self.samples_per_epoch else 0.0
        return of_epoch_s + (self.checkpoint_s if self.save_s is None else self.save_s)

    @property
    def interruption_s(self) -> float:
        """Seconds lost by stopping this member and starting it again."""
        return self.checkpoint_s + (self.startup_s if self.restart_s is None else self.restart_s)

    @property
    def gpu_share(self) -> float:
        """Share of a GPU that it takes of all that others could have: of its time or its memory."""
        slowed = self.slowed_beside("").factor
        if self.busy >= 1 or slowed >= 2:
            return 1.0
        return min(max(self.busy * slowed, self.memory), 1.0)

    def slowed_beside(self, shape: str) -> Slowed:
        """Return how much slower it is beside a member of a shape than the busy shares say."""
        return self.slowed.get(shape) or self.slowed.get("") or NOT_SLOWED

    def fused_gain(self, members: int) -> float:
        """Return how much faster members of its shape train fused than one after the other; 1 if unknown.

        Between two numbers of members that were measured the logarithms of both are in proportion.
        """
        if not self.fuses or 1 not in self.fused:
            return 1.0
        gains = {number: rate / self.fused[1] for number, rate in self.fused.items()}
        # A larger group may be several computations.
        gain = max(one for number, one in gains.items() if number <= members)
        low, high = max(n for n in gains if n <= members), min((n for n in gains if n > members), default=0)
        if not high:
            return gain
        part = math.log(members / low) / math.log(high / low)
        return max(gain, math.exp((1 - part) * math.log(gains[low]) + part * math.log(gains[high])))

    @property
    def least_busy(self) -> float:
        """Share of the time for which it keeps a device busy, at least, also as one of fused members."""
        return self.busy / max(map(self.fused_gain, self.fused), default=1.0)

    def with_left(self, samples_left: float) -> Workload:
        """Return the member with other work left; called for all members in training at each decision."""
        other = object.__new__(Workload)
        # `dataclasses.replace` takes six times as long.
        vars(other).update(vars(self), samples_left=samples_left)
        return other

    def interrupted(self, samples_left: float) -> Workload:
        """Return the member after a task that did not finish it."""
        startup_s = self.startup_s if self.restart_s is None else self.restart_s
        return replace(self, samples_left=samples_left, startup_s=startup_s)

    @property
    def min_gpus(self) -> int:
        """Least number of GPUs on which this member trains."""
        # Called for all members at each decision: only the first key is looked at.
        return next(iter(self.rates))

    @property
    def least_rate(self) -> float:
        """Rate on the least number of GPUs, in samples/s."""
        return self.rates[self.min_gpus]

    @property
    def is_guess(self) -> bool:
        """True if no rate of the member is known, not even on its least number of GPUs."""
        return bool(self.spread) and self.rates.keys() <= self.spread.keys()

    @property
    def gpu_rate(self) -> float:
        """Rate of one GPU of the least number, in samples/s."""
        return self.least_rate / self.min_gpus

    @property
    def max_gpus(self) -> int:
        """Largest useful number of GPUs of this member."""
        return max(self.rates)

    def on_type(self, gpu_type: str) -> Workload:
        """Return the member with its rates on GPUs of one type."""
        if not self.rates_by_type:
            return self
        return replace(self, rates=self.rates_by_type.get(gpu_type, self.rates), rates_by_type={}, spread={})

    def on_slowest(self, gpu_types: Iterable[str]) -> Workload:
        """Return the member on GPUs of several types at once: the slowest type determines the rate."""
        if not self.rates_by_type:
            return self
        curves = [self.rates_by_type.get(gpu_type, self.rates) for gpu_type in gpu_types]
        # Curves of types may end at different numbers of GPUs: each is cut at its own peak.
        shared = set.intersection(*(set(curve) for curve in curves))
        rates = {gpus: min(curve[gpus] for curve in curves) for gpus in sorted(shared)}
        return replace(self, rates=rates, rates_by_type={}, spread={})

    def on_balanced(self, gpus: Mapping[str, int]) -> Workload:
        """Return the member on GPUs of several types with balanced batches.

        Each GPU has the speed that it has in a group of its own type, so rates add up in proportion to the
        GPUs of each type, `gpus`.
        """
        if not self.rates_by_type:
            return self
        curves = [(self.rates_by_type.get(gpu_type, self.rates), count) for gpu_type, count in gpus.items()]
        shared = set.intersection(*(set(curve) for curve, _ in curves))
        total = sum(gpus.values())
        rates = {k: sum(count * curve[k] for curve, count in curves) / total for k in sorted(shared)}
        return replace(self, rates=rates, rates_by_type={}, spread={})

    @property
    def highest_rates(self) -> Mapping[int, float]:
        """Samples/s by number of GPUs, on the fastest type for each number."""
        if not self.rates_by_type:
            return self.rates
        curves = (self.rates, *self.rates_by_type.values())
        counts = sorted({gpus for curve in curves for gpus in curve})
        return {gpus: max(curve.get(gpus, 0.0) for curve in curves) for gpus in counts}
