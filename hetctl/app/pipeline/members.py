"""Members as pipelines at a site: their layers, the GPUs' memory and links, and the resulting times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hetctl.app.pipeline.inputs import fitted, measured_profile, refuse_idle, refuse_large_layers
from hetctl.app.profile.measured_layers import rows_of
from hetctl.inputs.layer_profile import LayerRow, read_layers
from hetctl.methods.pipeline.gpu_cluster import PipelineCluster
from hetctl.methods.pipeline.layers import UNNAMED, LayerProfile
from hetctl.methods.pipeline.layouts import PipelineProblem, PlacedPipeline, lay_out
from hetctl.methods.pipeline.pipeline_plan import Waves
from hetctl.methods.pipeline.stage_costs import bytes_alone
from hetctl.model.ensemble import Member
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.profile import LayerPoint, MemberProfile
from hetctl.model.site import Cluster, Site
from hetctl.model.workload import Workload
from hetctl.scheduling.planners.base import Options


@dataclass(frozen=True)
class MemberLayers:
    """Layers of a member, the lines of their file, and the framework's memory on a GPU by type."""

    profile: LayerProfile
    rows: Sequence[LayerRow]
    context_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def source(self) -> Path:
        """File of the layers, or words that say that they were measured."""
        return self.rows[0].place.path

    @property
    def needed_bytes(self) -> int:
        """Bytes of memory of a GPU with all layers."""
        return bytes_alone(self.profile) + max(self.context_bytes.values(), default=0)


def layers_of(
    member: Member, site: Site, cluster: Cluster, measured: Sequence[LayerPoint] = ()
) -> MemberLayers | None:
    """Return the layers of a member with times on all types of GPU.

    None if it names no layer profile, and was not measured on all these types. A profile without a type
    applies to the only type of the nodes.

    Parameters
    ----------
    measured : sequence of LayerPoint
        Measurements of the member's layers, for a member without a file.

    Raises
    ------
    BadInputError
        If the file is wrong or lacks a type, or no layer takes any time on one.
    """
    if member.layers is None and not measured:
        return None
    types = site.types_in(cluster)
    found = _with_type(_from_file(member.layers) if member.layers else _from_catalog(measured), types)
    lacking = [gpu_type for gpu_type in types if gpu_type not in found.profile.gpu_types]
    if lacking and member.layers is None:
        return None
    if lacking:
        raise BadInputError(
            f"{member.layers}: layers of {member.name} have no times on {', '.join(lacking)}, of which"
            f" site {site.name} has GPUs",
            "measure them there; the column gpu_type says where it was",
        )
    refuse_idle(found.profile, found.rows, types)
    return found


def _from_file(path: str) -> MemberLayers:
    rows = read_layers(Path(path))
    return MemberLayers(measured_profile(rows), rows)


def _from_catalog(measured: Sequence[LayerPoint]) -> MemberLayers:
    rows = rows_of(measured)
    context_bytes = {point.machine.gpu_type: point.context_bytes for point in measured}
    return MemberLayers(measured_profile(rows), rows, context_bytes)


def _with_type(layers: MemberLayers, types: Sequence[str]) -> MemberLayers:
    """Return layers of the only type with its name at the site, if one of both is missing."""
    known = sorted(layers.profile.gpu_types)
    # With one type on either side a missing name leaves no doubt about which type is meant.
    if len(types) != 1 or len(known) != 1 or UNNAMED not in (*types, *known):
        return layers
    context_bytes = {types[0]: layers.context_bytes.get(known[0], 0)}
    return MemberLayers(layers.profile.derived({types[0]: 1.0}, known[0]), layers.rows, context_bytes)


WAYS_TO_GIVE = {
    "links": "`hetctl profile --links` measures the links",
    # The site's file may be one that came with hetctl.
    "gpu_memory": (
        "write site-configs/{site}.yaml in your project, or add the last line to it if it is there:\n"
        "  extends: {site}\n"
        "  gpu_memory: 40GB  # of each GPU"
    ),
}
"""Ways to give a site the keys that pipelines depend on."""


def pipeline_cluster(site: Site, cluster: Cluster, context_bytes: Mapping[str, int]) -> PipelineCluster:
    """Return a job's nodes as a cluster for pipelines.

    Parameters
    ----------
    context_bytes : mapping of str to int
        Memory that the framework takes on a GPU, by type.

    Raises
    ------
    BadInputError
        If the site does not give its GPUs' memory or links.
    """
    memory = {gpu_type: size for gpu_type, size in site.memory_in(cluster).items() if size is not None}
    is_known = {"links": site.links is not None, "gpu_memory": len(memory) == len(site.types_in(cluster))}
    if missing := [key for key, known in is_known.items() if not known]:
        raise BadInputError(
            f"site {site.name} has no {' and '.join(missing)}, which pipelines depend on",
            "\n".join(WAYS_TO_GIVE[key].format(site=site.name) for key in missing),
        )
    assert site.links is not None
    return PipelineCluster(
        nodes=tuple((node.gpu_type or site.gpu_type or UNNAMED,) * len(node.gpus) for node in cluster.nodes),
        memory_bytes=memory,
        links=fitted(site.links),
        context_bytes=context_bytes,
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

    def ideal(self, gpus: int) -> Workload:
        """Return an upper bound of any pipeline's rate: no layer waits, each on its fastest type of GPU."""
        layers = self.layers.profile
        times = [layers.forward_s(kind) + layers.backward_s(kind) for kind in layers.gpu_types]
        rate = self.member.batch_size / float(np.min(times, axis=0).sum())
        return Workload(
            name=self.member.name,
            rates={count: count * rate for count in range(1, self.member.most_gpus(gpus) + 1)},
            samples_left=float(self.epochs * self.samples_per_epoch),
            samples_per_epoch=self.samples_per_epoch,
        )

    def problem(self, site: Site, cluster: Cluster, options: Options) -> PipelineProblem:
        """Return what its pipelines are planned from.

        Raises
        ------
        BadInputError
            If the site does not give its GPUs' memory or links.
        InfeasibleError
            If a layer fits no GPU.
        """
        nodes = pipeline_cluster(site, cluster, self.layers.context_bytes)
        refuse_large_layers(self.layers.profile, self.layers.rows, nodes.free_bytes)
        return PipelineProblem(
            layers=self.layers.profile,
            memory_bytes=nodes.memory_bytes,
            links=nodes.links,
            batch_size=self.member.batch_size,
            context_bytes=nodes.context_bytes,
            gpu_type=site.gpu_type or UNNAMED,
            node_memory_bytes=site.memory_per_node,
            max_gpus=self.member.max_gpus,
            policy=options.policy,
            waves=Waves(options.clock_distance, options.ps_placement),
            in_flight=options.in_flight,
            search_s=options.solver_time_limit_s,
        )

    def laid_out(self, problem: PipelineProblem, cluster: Cluster) -> PlacedPipeline:
        """Return its pipeline on the nodes of a job; InfeasibleError if GPUs or nodes have no room for it."""
        try:
            return lay_out(problem, cluster.nodes)
        except InfeasibleError as error:
            message = f"{self.layers.source}: {self.member.name}: {error.message}"
            raise InfeasibleError(message, error.hint) from None

    def seconds(self, rate: float) -> float:
        """Return its time in seconds at a rate in samples/s, evaluation and checkpoints included."""
        # The last minibatch is padded, and takes as long as a full one.
        whole = math.ceil(self.samples_per_epoch / self.member.batch_size) * self.member.batch_size
        epoch_s = whole / rate
        if self.profile is not None:
            epoch_s += self.profile.evaluate_s + self.profile.checkpoint_s
        return self.epochs * epoch_s
