"""Members as pipelines at a site: their layers, the GPUs' memory and links, and the resulting times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hetctl.app.pipeline.inputs import fitted, measured_profile, refuse_idle, refuse_large_layers
from hetctl.inputs.layer_profile import LayerRow, read_layers
from hetctl.methods.pipeline.gpu_cluster import PipelineCluster
from hetctl.methods.pipeline.layers import UNNAMED, LayerProfile
from hetctl.methods.pipeline.pipeline_plan import BEST, PipelineOptions, Waves, plan
from hetctl.methods.pipeline.simulate import simulate_plan, steady_waves
from hetctl.methods.pipeline.stage_costs import least_bytes
from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.profile import MemberProfile
from hetctl.model.site import Cluster, Site
from hetctl.model.workload import Workload


def types_in(site: Site, cluster: Cluster) -> tuple[str, ...]:
    """Return the types of GPU of a job's nodes, as layer profiles name them."""
    return tuple(sorted({node.gpu_type or site.gpu_type or UNNAMED for node in cluster.nodes}))


def memory_in(site: Site, cluster: Cluster) -> Mapping[str, int | None]:
    """Return the memory of a GPU in bytes by type; None if the site does not give it."""
    return {gpu_type: site.memory_of(gpu_type) for gpu_type in types_in(site, cluster)}


@dataclass(frozen=True)
class MemberLayers:
    """Layers of a member, and the lines of their file."""

    profile: LayerProfile
    rows: Sequence[LayerRow]

    @property
    def needed_bytes(self) -> int:
        """Bytes of memory of a GPU with all layers."""
        return int(least_bytes(self.profile).sum())


def layers_of(member: Member, site: Site, cluster: Cluster) -> MemberLayers | None:
    """Return the layers of a member with times on all types of GPU; None if it names no layer profile.

    A profile without a type applies to the only type of the nodes.

    Raises
    ------
    BadInputError
        If the file is wrong or lacks a type, or no layer takes any time on one.
    """
    if member.layers is None:
        return None
    rows = read_layers(Path(member.layers))
    profile = measured_profile(rows)
    types, known = types_in(site, cluster), sorted(profile.gpu_types)
    # With one type on either side a missing name leaves no doubt about which type is meant.
    if len(types) == len(known) == 1 and UNNAMED in (*types, *known):
        profile, known = profile.derived({types[0]: 1.0}, known[0]), [types[0]]
    if lacking := [gpu_type for gpu_type in types if gpu_type not in known]:
        raise BadInputError(
            f"{member.layers}: layers of {member.name} have no times on {', '.join(lacking)}, of which"
            f" site {site.name} has GPUs",
            "measure them there; the column gpu_type says where it was",
        )
    refuse_idle(profile, rows, types)
    return MemberLayers(profile, rows)


def pipeline_cluster(site: Site, cluster: Cluster) -> PipelineCluster:
    """Return a job's nodes as a cluster for pipelines.

    Raises
    ------
    BadInputError
        If the site does not give its GPUs' memory or links.
    """
    memory = {gpu_type: size for gpu_type, size in memory_in(site, cluster).items() if size is not None}
    missing = [] if len(memory) == len(types_in(site, cluster)) else ["gpu_memory"]
    if site.links is None or missing:
        names = " and ".join([*missing, *(["links"] if site.links is None else [])])
        raise BadInputError(
            f"site {site.name} has no {names}, which pipelines depend on",
            f"add {names} to its site file; `hetctl sites show {site.name}` says where that is",
        )
    return PipelineCluster(
        nodes=tuple((node.gpu_type or site.gpu_type or UNNAMED,) * len(node.gpus) for node in cluster.nodes),
        memory_bytes=memory,
        links=fitted(site.links),
    )


@dataclass(frozen=True)
class PipelineMember:
    """A member that trains as a pipeline.

    Parameters
    ----------
    samples_per_epoch : int
        Number of training samples.
    profile : MemberProfile or None
        Profile with the times of evaluation and checkpoints; None: unknown, they are left out.
    """

    member: Member
    layers: MemberLayers
    samples_per_epoch: int
    profile: MemberProfile | None = None

    @property
    def epochs(self) -> int:
        """Planned number of epochs."""
        return self.member.stop.planned_epochs

    def most_gpus(self, gpus: int) -> int:
        """Return the number of GPUs that it may have, out of `gpus`."""
        return min(gpus, self.member.max_gpus or gpus)

    def ideal(self, gpus: int) -> Workload:
        """Return an upper bound of any pipeline's rate: no layer waits, each on its fastest type of GPU."""
        layers = self.layers.profile
        times = [layers.forward_s(kind) + layers.backward_s(kind) for kind in layers.gpu_types]
        rate = self.member.batch_size / float(np.min(times, axis=0).sum())
        return Workload(
            name=self.member.name,
            rates={count: count * rate for count in range(1, self.most_gpus(gpus) + 1)},
            samples_left=float(self.epochs * self.samples_per_epoch),
            samples_per_epoch=self.samples_per_epoch,
        )

    def simulated_s(self, site: Site, cluster: Cluster, seconds: float) -> float:
        """Return its time in seconds on the nodes of a job, evaluation and checkpoints included.

        Parameters
        ----------
        seconds : float
            Search time for the best pipeline, in seconds.

        Raises
        ------
        BadInputError
            If the site does not give its GPUs' memory or links.
        InfeasibleError
            If the GPUs have no room for it.
        """
        own = Cluster.at(site, self.most_gpus(cluster.gpus))
        nodes = pipeline_cluster(site, own)
        refuse_large_layers(self.layers.profile, self.layers.rows, nodes.memory_bytes)
        try:
            rate = pipeline_rate(self.layers.profile, nodes, seconds)
        except InfeasibleError as error:
            message = f"{self.member.layers}: {self.member.name}: {error.message}"
            raise InfeasibleError(message, error.hint) from None
        # The last minibatch is padded, and takes as long as a full one.
        epoch_s = math.ceil(self.samples_per_epoch / self.member.batch_size) / rate
        if self.profile is not None:
            epoch_s += self.profile.evaluate_s + self.profile.checkpoint_s
        return self.epochs * epoch_s


def pipeline_rate(layers: LayerProfile, cluster: PipelineCluster, seconds: float) -> float:
    """Return the simulated rate of the best pipelines found, in minibatches/s.

    Virtual workers are in step (D = 0); parameter servers are where most virtual workers have the layer.
    """
    waves = Waves()
    planned = plan(layers, cluster, BEST, PipelineOptions(seconds=seconds, waves=waves))
    return simulate_plan(planned, layers, cluster, waves, steady_waves(planned, waves)).throughput
