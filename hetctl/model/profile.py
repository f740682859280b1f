"""Measurements of each member, and known facts about its remaining work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hetctl.model.site import Point


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
        Seconds from its start to its first sample, one-time costs such as tracing included.
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
    predicted_from : str
        Member of another shape from whose rates they are predicted; empty: its own shape was measured.
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
    predicted_from: str = ""


@dataclass(frozen=True)
class Hardware:
    """Hardware and software of a measurement, by which an outdated profile is recognized."""

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
        Seconds from the rank's assignment to the member to its first sample, one-time costs included.
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
        Excluded outliers: seconds per step of each run of steps that was far too slow.
    shape : str
        Digest of the member's shape, for all members of which it holds; empty: it holds for the member.
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
        Peak of memory during the passes and the update beyond what was there before, what is held, the
        activations received and the gradients of the weights: temporary memory of operations.
    optimizer_bytes : int or None
        State that the optimizer keeps for its weights after a step. None in files that do not say, and in
        measurements of earlier versions, whose workspace includes the gradients.
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
