"""What was measured of each member, and what is known of the work it still needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
class Hardware:
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
    machine: Hardware
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
