"""Members as pipelines at a site: their layers and times, phases of plans, and the input of drivers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path

import numpy as np

from hetctl.app.pipeline import fitted, measured_profile, refuse_idle, refuse_large_layers
from hetctl.app.plan.phase_drafts import PhaseDraft, assembled
from hetctl.app.plan.planning import PlanRequest
from hetctl.app.profile.catalog_profiles import rows_of
from hetctl.inputs.layer_profile import LayerRow, read_layers
from hetctl.methods.parallelism import phase_in_turn
from hetctl.methods.pipeline.layouts import PipelineProblem, PlacedPipeline, allocation_of, lay_out
from hetctl.methods.pipeline.stage_costs import UNNAMED, LayerProfile, PipelineCluster, bytes_alone
from hetctl.methods.pipeline.transfers import Waves
from hetctl.model.combinations import STAGES, features_of, refuse_conflicts
from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.plan import PIPELINE, ModeChoice, Plan, Round
from hetctl.model.profile import LayerPoint, MemberProfile
from hetctl.model.run import RunSpec
from hetctl.model.serialization import encode
from hetctl.model.site import Cluster, Site
from hetctl.model.training_progress import Progress
from hetctl.model.values import dataclass
from hetctl.model.workload import Workload
from hetctl.perf.bounds import fluid_bound
from hetctl.scheduling.planners.base import Options, options_from


@dataclass(frozen=True)
class MemberLayers:
    """Layers of a member, the lines of their file, and the framework's memory on a GPU by type."""

    profile: LayerProfile
    rows: Sequence[LayerRow]
    context_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def source(self) -> Path:
        """File of the layers, or words for measured ones."""
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
    rows = read_layers(Path(member.layers)) if member.layers else rows_of(measured)
    context_bytes = {} if member.layers else {p.machine.gpu_type: p.context_bytes for p in measured}
    found = _with_type(MemberLayers(measured_profile(rows), rows, context_bytes), types)
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


def _with_type(layers: MemberLayers, types: Sequence[str]) -> MemberLayers:
    """Return layers of a single type under its name at the site, if the site or they lack its name."""
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

    def ideal(self, gpus: int) -> Workload:
        """Return the member at a rate that no pipeline exceeds: no layer waits, each has its fastest type."""
        layers = self.layers.profile
        times = [layers.forward_s(kind) + layers.backward_s(kind) for kind in layers.gpu_types]
        rate = self.member.batch_size / float(np.min(times, axis=0).sum())
        return Workload(
            name=self.member.name,
            rates={count: count * rate for count in range(1, self.member.most_gpus(gpus) + 1)},
            samples_left=float(self.member.stop.planned_epochs * self.samples_per_epoch),
            samples_per_epoch=self.samples_per_epoch,
        )

    def problem(self, site: Site, cluster: Cluster, options: Options) -> PipelineProblem:
        """Return the input for planning its pipelines.

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
        return self.member.stop.planned_epochs * epoch_s


def plan_pipelined(request: PlanRequest) -> Plan:
    """Plan one phase, in which all members train as pipelines, one after another.

    Raises
    ------
    BadInputError
        If the layers of a member are unknown, or the site does not give its links or memory.
    InfeasibleError
        If the GPUs have no room for a member.
    """
    layers = known_layers(request)
    for member in request.ensemble.members:
        if member.name not in layers:
            raise BadInputError(
                f"the layers of {member.name} are unknown, so that it cannot be cut into stages",
                f"run `hetctl profile --layers {member.name}`, or give `layers` in the ensemble file",
            )
    unfinished = [
        member.name
        for member in request.ensemble.members
        if request.progress.get(member.name, Progress(member.name)).active
    ]
    pipelined = [pipeline_member_of(request, name, layers[name]) for name in unfinished]
    reason = "the mode was given: its layers go to several GPUs"
    choices = tuple(ModeChoice(name, PIPELINE, reason) for name in unfinished)
    phases = [pipelines(request, pipelined)] if pipelined else []
    bound_s = fluid_bound([each.ideal(request.gpus) for each in pipelined], request.gpus)
    return assembled(request, phases, choices, bound_s)


def known_layers(request: PlanRequest) -> dict[str, MemberLayers]:
    """Return the layers of the members that name a layer profile, or whose layers were measured."""
    found = {
        member.name: layers_of(
            member, request.site, request.scenario.cluster, request.layers.get(member.name, ())
        )
        for member in request.ensemble.members
        # A network is divided into shards or into stages, not both.
        if not member.shard
    }
    return {name: layers for name, layers in found.items() if layers is not None}


def pipeline_member_of(request: PlanRequest, name: str, layers: MemberLayers) -> PipelineMember:
    """Return a member as a pipeline.

    Raises
    ------
    BadInputError
        If the number of samples in an epoch is unknown, or the member has a global batch size.
    """
    member = request.ensemble.member(name)
    refuse_conflicts(name, STAGES, *(["global_batch_size"] if member.global_batch_size else []))
    samples_per_epoch = _samples_per_epoch(request.ensemble, request.profiles.values(), request)
    if samples_per_epoch is None:
        raise BadInputError(
            f"the number of samples in an epoch of {name} is unknown",
            "set samples_per_epoch in the ensemble file, or run hetctl profile for a member that fits a GPU",
        )
    return PipelineMember(member, layers, samples_per_epoch, request.profiles.get(name))


def pipelines(request: PlanRequest, pipelined: Sequence[PipelineMember]) -> PhaseDraft:
    """Return the phase of members that train as pipelines, one after another, each on all its GPUs."""
    found = _laid_out(request, pipelined)
    seconds = {each.member.name: each.seconds(found[each.member.name].rate) for each in pipelined}
    run = phase_in_turn(seconds, request.scenario.timing)
    starts_s = [0.0, *run.done_s.values()]
    rounds = tuple(
        Round(index, seconds[name], (allocation_of(name, laid_out),), start_s)
        for index, ((name, laid_out), start_s) in enumerate(zip(found.items(), starts_s, strict=False))
    )
    return PhaseDraft(PIPELINE, run, {PIPELINE: run.seconds}, rounds)


def _laid_out(request: PlanRequest, pipelined: Sequence[PipelineMember]) -> dict[str, PlacedPipeline]:
    """Return the pipeline of each member; equal ones, as of trials of one shape, are planned once."""
    cluster, options = request.scenario.cluster, request.planner_options
    problems = {each.member.name: each.problem(request.site, cluster, options) for each in pipelined}
    texts = {name: json.dumps(encode(problem), sort_keys=True) for name, problem in problems.items()}
    seconds = options.solver_time_limit_s / len(set(texts.values()))
    found: dict[str, PlacedPipeline] = {}
    for each in pipelined:
        name = each.member.name
        if texts[name] not in found:
            found[texts[name]] = each.laid_out(replace(problems[name], search_s=seconds), cluster)
    return {name: found[text] for name, text in texts.items()}


def with_pipelines(spec: RunSpec, plan: Plan, request: PlanRequest) -> RunSpec:
    """Add the layers, links and memory from which drivers lay out the pipelines of a plan on their nodes.

    In the profile of such a member its pipeline's rate replaces its own, since the driver schedules by it.

    Raises
    ------
    BadInputError
        If the launcher, ``train_fn``, the partitions or the sharing of samples leave no room for stages.
    """
    planned = {
        allocation.member: allocation
        for each in plan.rounds
        for allocation in each.allocations
        if allocation.mode == PIPELINE
    }
    cluster, options = Cluster.at(request.site, spec.gpus), options_from(spec.options)
    samples = _samples_per_epoch(spec.ensemble, spec.profiles, request)
    profiles, problems = {profile.member: profile for profile in spec.profiles}, {}
    for name, allocation in planned.items():
        member = spec.ensemble.member(name)
        features = features_of(spec.ensemble.of(member))
        refuse_conflicts(name, STAGES, *features, launch=spec.site.launch, sharing=spec.sharing)
        layers = layers_of(member, request.site, cluster, request.layers.get(name, ()))
        assert layers is not None
        pipelined = PipelineMember(member, layers, samples_per_epoch=0)
        problems[name] = encode(pipelined.problem(request.site, cluster, options))
        profile = profiles.get(name, MemberProfile(name, {}))
        profiles[name] = replace(
            profile,
            rates={allocation.gpus: allocation.rate},
            rates_by_type={},
            seen_rates={},
            samples_per_epoch=profile.samples_per_epoch or samples,
        )
    return replace(spec, pipelines=problems, profiles=tuple(profiles.values()))


def _samples_per_epoch(
    ensemble: Ensemble, profiles: Iterable[MemberProfile], request: PlanRequest
) -> int | None:
    known = (
        ensemble.samples_per_epoch,
        *(profile.samples_per_epoch for profile in profiles),
        *(point.samples_per_epoch for points in request.layers.values() for point in points),
    )
    return next(filter(None, known), None)
