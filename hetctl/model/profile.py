"""Measurements of each member, and which members share a measured rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.serialization import encode
from hetctl.model.site import Point
from hetctl.model.training_progress import FusedRates
from hetctl.model.values import dataclass


@dataclass(frozen=True)
class MemberProfile:
    """Measurements of one member at one site.

    Parameters
    ----------
    rates : mapping of int to float
        Training rate in samples/s by number of GPUs.
    samples : float or None
        Samples to convergence, if known (the clairvoyant work of a simulation).
    samples_per_epoch : int or None
        Training samples per epoch.
    startup_s : float
        Seconds from its start to its first sample, with one-time costs such as tracing.
    evaluate_s, checkpoint_s : float
        Seconds of an evaluation, and of a checkpoint during which training waits.
    save_s : float or None
        Seconds that an epoch loses by a checkpoint written in parallel; None: equal to `checkpoint_s`.
    epoch_s : float
        Seconds of an epoch beyond its samples at the rate, without evaluation and checkpoint.
    seen_overhead_s : float or None
        Total seconds of epochs in training beyond their samples at the rate; None: not measured.
    peak_memory_bytes : int
        Peak memory in bytes, the largest of all ranks.
    rates_by_type : mapping
        Rates of each type of GPU if several were measured; `rates` are those of the newest measurement.
    seen_rates : mapping
        Rates in training that are newer than the measured ones, by type of GPU ("" at a site with one
        type) and number of GPUs.
    job_start_s : float
        Seconds from the start of a job until its first member's start: of processes and imports.
    unfit : tuple of (str, int)
        Same as in `Progress`, from earlier runs.
    busy : float or None
        Share of the time for which it keeps its device busy, alone on one GPU; None: not measured.
    preparation_rate, fused_rates
        Same as in `Progress`, from earlier runs.
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
    job_start_s: float = 0.0
    unfit: tuple[tuple[str, int], ...] = ()
    busy: float | None = None
    preparation_rate: float | None = None
    fused_rates: FusedRates = ()

    @property
    def has_rates(self) -> bool:
        """True if a rate was measured, or seen in training, alone or fused with others."""
        tables = self.rates, *self.seen_rates.values()
        return bool(self.fused_rates) or any(rate > 0 for rates in tables for rate in rates.values())


@dataclass(frozen=True)
class Hardware:
    """Hardware and software of a measurement; they show whether a profile is outdated."""

    gpu_type: str
    driver: str
    framework: str


@dataclass(frozen=True)
class ProfilePoint:
    """Measurement of a member on a number of GPUs.

    Parameters
    ----------
    rate : float
        Samples/s of full batches in steady state (FLEET, appendix B.3).
    measured_at : float
        Seconds since the epoch.
    startup_s : float
        Seconds from the rank's assignment to the member's first sample, with one-time costs.
    epoch_s, save_s : float
        Seconds of each epoch beyond its samples at `rate`, without evaluation and checkpoint, and seconds
        that it loses by a checkpoint written in parallel.
    rate_error : float or None
        Half-width of the 95 % confidence interval of the rate, relative to the rate; None: not measured.
    step_spread : float or None
        Robust standard deviation of the step time, relative to it.
    steps : int
        Number of timed steps.
    slow_steps_s : tuple of float
        Seconds per step of each run of steps that was far too slow, and excluded.
    shape : str
        Digest of the shape whose members it holds for; empty: it holds for this member.
    job_start_s : float
        Seconds from the launch of its ranks until `startup_s` begins: of processes and imports.
    busy : float or None
        Same as in `MemberProfile`, of a measurement on one GPU.
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
    shape: str = ""
    job_start_s: float = 0.0
    busy: float | None = None


@dataclass(frozen=True)
class PreprocessPoint:
    """Throughput of the preprocessing function on a number of cores, in samples/s."""

    cores: int
    rate: float


@dataclass(frozen=True)
class MeasuredLayer:
    """A layer on one GPU, alone, with one minibatch.

    Parameters
    ----------
    forward_s, backward_s : float
        Seconds of a pass without transfers to and from the GPU; the update of the weights is part of the
        backward pass.
    activation_bytes, parameter_bytes : int
        Activations transferred at a cut after the layer; one version of its weights.
    held_bytes : int or None
        Data kept on the GPU from the forward to the backward pass; None, in files: `activation_bytes`.
    workspace_bytes : int
        Temporary memory of operations: the peak during the passes and the update, without the memory in use
        before, what is held, received activations and gradients of the weights.
    optimizer_bytes : int or None
        State that the optimizer keeps for its weights after a step. None in files without it, and in old
        measurements, whose workspace includes the gradients.
    """

    name: str
    forward_s: float
    backward_s: float
    activation_bytes: int
    parameter_bytes: int
    held_bytes: int | None = None
    workspace_bytes: int = 0
    optimizer_bytes: int | None = None

    @property
    def kept_bytes(self) -> int:
        """Bytes kept on the GPU from the forward to the backward pass."""
        return self.activation_bytes if self.held_bytes is None else self.held_bytes


@dataclass(frozen=True)
class LayerPoint:
    """Measurement of all layers of a member on one type of GPU, each alone on a GPU.

    Parameters
    ----------
    measured_at : float
        Seconds since the epoch.
    context_bytes : int
        Memory of a rank apart from layers: the framework and its libraries.
    layers : tuple of MeasuredLayer
        Layers in the order of computation.
    """

    member: str
    fingerprint: str
    batch_size: int
    measured_at: float
    machine: Hardware
    samples_per_epoch: int
    context_bytes: int
    layers: tuple[MeasuredLayer, ...]


INTRA_NODE, INTER_NODE = "intra-node", "inter-node"
"""Links between GPUs of one node, and between nodes."""


@dataclass(frozen=True)
class LinkPoint:
    """Measurement of the links of one kind at a site.

    Parameters
    ----------
    link : str
        `INTRA_NODE` or `INTER_NODE`.
    nodes : tuple of str
        Nodes of the two ranks.
    points : tuple of Point
        Bytes of messages of several sizes, each with the median of its transfer times in seconds.
    """

    link: str
    nodes: tuple[str, ...]
    measured_at: float
    points: tuple[Point, ...]


LEARNING_RATES = ("learning_rate", "lr", "base_lr", "initial_learning_rate", "initial_lr", "max_lr", "min_lr")
COEFFICIENTS = ("beta_1", "beta_2", "beta1", "beta2", "betas", "rho", "epsilon", "eps")
SEEDS = ("seed", "random_seed", "random_state")
RATE_NEUTRAL = frozenset((*LEARNING_RATES, *COEFFICIENTS, *SEEDS))
"""Config keys, at any depth, that do not change the rate; `rate_keys` replaces this table."""
RATE_SWITCHES = frozenset(
    ("dropout", "dropout_rate", "l1", "l2", "label_smoothing", "momentum", "weight_decay")
)
"""Config keys of which only 0 or not counts: 0 switches a layer or a term off."""


@dataclass(frozen=True)
class RateShape:
    """Members that train at the same rates.

    Parameters
    ----------
    member : str
        First member with a config of this shape; it is measured for all.
    shared_by : tuple of str
        Other members, in the ensemble's order.
    max_gpus : int or None
        Largest number of GPUs that any of them may get; None: no limit.
    min_gpus : int
        Least number of GPUs that any of them may get.
    """

    member: str
    shared_by: tuple[str, ...]
    max_gpus: int | None
    min_gpus: int = 1


def rate_config(member: Member, rate_keys: tuple[str, ...]) -> dict[str, Any]:
    """Return the part of a member's config that can change its rate.

    Parameters
    ----------
    rate_keys : tuple of str
        Keys that count; empty: all except `RATE_NEUTRAL`, and of `RATE_SWITCHES` only whether they are 0.
    """
    config: dict[str, Any] = encode(member.config)
    if rate_keys:
        return {key: value for key, value in config.items() if key in rate_keys}
    kept: dict[str, Any] = _without_neutral(config)
    return kept


SIZES = "config"
"""Key of the values that describe a network in `compared_config`."""


def compared_config(member: Member, rate_keys: tuple[str, ...]) -> dict[str, Any]:
    """Return all values that predict rates of members without a profile."""
    return {SIZES: rate_config(member, rate_keys), "batch_size": member.batch_size}


def shape_digest(member: Member, rate_keys: tuple[str, ...]) -> str:
    """Return a digest of a member's shape: its fingerprint with `rate_config` in place of its config."""
    return member.digest_with(rate_config(member, rate_keys))


def measured_members(ensemble: Ensemble) -> dict[str, Member]:
    """Return, by name, the member whose rates each has: itself, or the one that `profile_as` leads to."""
    members = {member.name: member for member in ensemble.members}
    return {name: _end_of_chain(member, members) for name, member in members.items()}


def shapes_of(ensemble: Ensemble) -> tuple[RateShape, ...]:
    """Return the shapes of an ensemble, in the order of their first members."""
    groups: dict[str, list[Member]] = {}
    measured = measured_members(ensemble)
    digests = {name: shape_digest(member, ensemble.rate_keys) for name, member in measured.items()}
    for member in ensemble.members:
        groups.setdefault(digests[member.name], []).append(member)
    return tuple(map(_shape, groups.values()))


def some_of(members: Sequence[str], most: int) -> str:
    """Return the first names as text, with the number of the others: ``a, b, c and 97 more``."""
    rest = len(members) - most
    return ", ".join(members[:most]) + (f" and {rest:,} more" if rest > 0 else "")


def _end_of_chain(member: Member, members: Mapping[str, Member]) -> Member:
    while member.profile_as is not None:
        member = members[member.profile_as]
    return member


def _shape(group: list[Member]) -> RateShape:
    # A member with `profile_as` may have a config of another shape; the one it leads to is in the group.
    first = next(member for member in group if member.profile_as is None)
    limits = [limit for limit in map(_gpu_limit, group) if limit is not None]
    return RateShape(
        first.name,
        tuple(member.name for member in group if member is not first),
        max(limits) if len(limits) == len(group) else None,
        min(member.min_gpus for member in group),
    )


def _gpu_limit(member: Member) -> int | None:
    return min(filter(None, (member.max_gpus, member.global_batch_size)), default=None)


def _without_neutral(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            key: bool(each) if key in RATE_SWITCHES else _without_neutral(each)
            for key, each in value.items()
            if key not in RATE_NEUTRAL
        }
    return [_without_neutral(each) for each in value] if isinstance(value, list) else value
