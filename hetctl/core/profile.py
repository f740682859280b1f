"""What was measured of each member, and what is known of the work it still needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class MemberProfile:
    """Measurements of one member at one site.

    Parameters
    ----------
    rates : mapping of int to float
        Training rate in samples/s by number of GPUs.
    samples : float or None
        Samples to convergence, where somebody knows them (a simulation's clairvoyant work).
    samples_per_epoch : int or None
        Training samples of one epoch.
    startup_s : float
        From its start to its first sample; what happens once, such as tracing, is part of it.
    evaluate_s, checkpoint_s : float
        An evaluation, and a checkpoint that training waits for.
    save_s : float or None
        What an epoch loses by a checkpoint that is written beside it; None: as much as `checkpoint_s`.
    epoch_s : float
        What an epoch takes beyond its samples at the rate, evaluation and checkpoint left out.
    seen_overhead_s : float or None
        What epochs took in training beyond their samples at the rate, all told; None: not seen.
    peak_memory_bytes : int
        The largest of the ranks.
    rates_by_type : mapping
        `rates` by type of GPU, where more than one type was measured; `rates` are the newest one's.
    seen_rates : mapping
        Rates in training that are newer than the measured ones, by type of GPU ("" where a site has one)
        and number of GPUs.
    """

    member: str
    rates: Mapping[int, float]
    samples: float | None = None
    samples_per_epoch: int | None = None
    startup_s: float = 0.0
    evaluate_s: float = 0.0
    checkpoint_s: float = 0.0
    peak_memory_bytes: int = 0
    gpu_type: str | None = None
    rates_by_type: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    epoch_s: float = 0.0
    seen_rates: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    save_s: float | None = None
    seen_overhead_s: float | None = None


@dataclass(frozen=True)
class Machine:
    """What a rate was measured on, so that a stale profile can be told."""

    gpu_type: str
    driver: str
    framework: str


@dataclass(frozen=True)
class ProfilePoint:
    """One measurement: a member on a number of GPUs.

    Parameters
    ----------
    rate : float
        Samples/s of full batches in steady state (FLEET, appendix B.3).
    measured_at : float
        Seconds since the epoch.
    startup_s : float
        From when the rank turned to the member to its first sample; what happens once is part of it.
    epoch_s, save_s : float
        What each epoch takes beyond its samples at `rate`, evaluation and checkpoint left out, and what it
        loses by a checkpoint that is written beside it.
    rate_error : float or None
        Half-width of the rate's 95 % confidence interval, as a share of it; None: not measured here.
    step_spread : float or None
        Robust standard deviation of the time of a step, as a share of it.
    steps : int
        That were timed.
    slow_steps_s : tuple of float
        Outliers, which do not count: seconds of a step in each run of steps that was far too slow.
    """

    member: str
    gpus: int
    rate: float
    fingerprint: str
    batch_size: int
    measured_at: float
    machine: Machine
    samples: float | None = None
    samples_per_epoch: int | None = None
    startup_s: float = 0.0
    evaluate_s: float = 0.0
    checkpoint_s: float = 0.0
    peak_memory_bytes: int = 0
    epoch_s: float = 0.0
    save_s: float | None = None
    rate_error: float | None = None
    step_spread: float | None = None
    steps: int = 0
    slow_steps_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class PreprocessPoint:
    """Throughput of the preprocessing function on a number of cores, in samples/s."""

    cores: int
    rate: float


@dataclass(frozen=True)
class EpochResult:
    """What one epoch of a member gave.

    Parameters
    ----------
    epoch : int
        Counted from 1.
    metrics : mapping
        ``loss`` over the training samples and ``val_*`` over the validation samples.
    seconds : float
        Training time of the epoch, evaluation and checkpoint left out.
    rate : float or None
        Samples/s of the group over the full batches behind the first; None: there were too few.
    batch_size : int or None
        Samples per GPU and step.
    gpu_type : str or None
        Of its GPUs, if the site has several types and these were of one.
    overhead_s : float or None
        What passed from the end of the last epoch's training to the end of this one's beyond the samples at
        `rate`; None: the process had trained no epoch before, or not the whole of this one.
    """

    epoch: int
    metrics: Mapping[str, float]
    seconds: float
    gpus: int
    finished_at: float
    rate: float | None = None
    batch_size: int | None = None
    gpu_type: str | None = None
    overhead_s: float | None = None


@dataclass(frozen=True)
class Progress:
    """How far a member has come.

    Parameters
    ----------
    failures : int
        Steps that failed since the last finished epoch.
    part_samples : int
        Samples of the unfinished epoch that the last checkpoint holds.
    node_failures : int
        Steps that ended with one of their nodes.
    batch_size : int or None
        What the member's batch size came down to after it had run out of memory; None: it has not.
    restarts_s : tuple of float
        Seconds to the first step of its newest starts on ranks that had been at work before.
    """

    member: str
    epochs: tuple[EpochResult, ...] = ()
    converged: str | None = None
    failed: str | None = None
    failures: int = 0
    part_samples: int = 0
    node_failures: int = 0
    batch_size: int | None = None
    restarts_s: tuple[float, ...] = ()

    @property
    def active(self) -> bool:
        """Whether the member still needs training."""
        return self.converged is None and self.failed is None


@dataclass(frozen=True)
class Candidate:
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

    def with_left(self, samples_left: float) -> Candidate:
        """Return the member with other work left; a driver asks for all in training at each decision."""
        other = object.__new__(Candidate)
        # `dataclasses.replace` takes six times as long.
        vars(other).update(vars(self), samples_left=samples_left)
        return other

    def interrupted(self, samples_left: float) -> Candidate:
        """Return the member as it is after a step that did not finish it."""
        startup_s = self.startup_s if self.restart_s is None else self.restart_s
        return replace(self, samples_left=samples_left, startup_s=startup_s)

    @property
    def max_gpus(self) -> int:
        """The most GPUs that make sense for this member."""
        return max(self.rates)

    def on_type(self, gpu_type: str) -> Candidate:
        """Return the member as it is on GPUs of one type."""
        if not self.rates_by_type:
            return self
        return replace(self, rates=self.rates_by_type.get(gpu_type, self.rates), rates_by_type={})

    def on_slowest(self, gpu_types: Iterable[str]) -> Candidate:
        """Return the member as it is on GPUs of several types at once: the slowest sets its pace."""
        if not self.rates_by_type:
            return self
        curves = [self.rates_by_type.get(gpu_type, self.rates) for gpu_type in gpu_types]
        shared = set.intersection(*(set(curve) for curve in curves))
        rates = {gpus: min(curve[gpus] for curve in curves) for gpus in sorted(shared)}
        return replace(self, rates=rates, rates_by_type={})

    def on_balanced(self, gpus: Mapping[str, int]) -> Candidate:
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
