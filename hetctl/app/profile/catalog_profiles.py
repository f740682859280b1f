"""Profiles, layers and links in the catalog that hold now, and warnings about them."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from itertools import chain
from pathlib import Path

from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog
from hetctl.inputs.input_errors import SourceLine
from hetctl.inputs.layer_profile import LayerRow
from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.plan import Plan
from hetctl.model.profile import (
    INTER_NODE,
    INTRA_NODE,
    LayerPoint,
    LinkPoint,
    MemberProfile,
    ProfilePoint,
    measured_members,
    shape_digest,
    some_of,
)
from hetctl.model.run import LOCKSTEP
from hetctl.model.serialization import encode
from hetctl.model.site import InterNode, IntraNode, NodeLinks, Site, SiteKey
from hetctl.model.training_progress import (
    EpochHistory,
    EpochResult,
    FusedRates,
    Progress,
    TimedRate,
    with_fused,
)
from hetctl.model.training_settings import missing_for_groups, of_one_gpu
from hetctl.model.values import dataclass
from hetctl.perf.rate_prediction import seen_overhead_s, seen_rates
from hetctl.storage.run_state import state_in

NAMED = 3
"""Largest number of members that a warning about predicted rates names."""
IMPORTED = "imported"
"""Framework, and site, of an ensemble that consists of a rate table only."""
DAY_S = 86400
OLD_S = 90 * DAY_S
"""Age in seconds from which on a warning names a profile."""


Seen = EpochResult | TimedRate
"""Record of a rate that was seen in training."""


@dataclass
class Trained:
    """Rates of a member in earlier runs, by time; its newest progress, and values of `MemberProfile`."""

    rates: list[Seen] = field(default_factory=list)
    newest: Progress | None = None
    unfit: tuple[tuple[str, int], ...] = ()
    preparation_rate: float | None = None
    fused_rates: FusedRates = ()


def member_profiles(catalog: Catalog, ensemble: Ensemble, site: Site) -> tuple[MemberProfile, ...]:
    """Return the profiles of the members as they are now, in their order.

    A member that was not measured has the rates and times of earlier runs, or none.
    """
    trained = _trained(catalog, ensemble, site.name)
    measured = _profiles(catalog, ensemble, site.name, trained, has_types=bool(site.node_types))
    known = {profile.member: profile for profile in measured}
    seen = (one.newest.restarts_s[:1] for one in trained.values() if one.newest)
    restarts_s = [*chain.from_iterable(seen)]
    restart_s = statistics.median(restarts_s) if restarts_s else math.inf
    return tuple(
        known.get(member.name) or _unmeasured(member, ensemble, trained[member.name], restart_s)
        for member in ensemble.members
    )


def _unmeasured(member: Member, ensemble: Ensemble, trained: Trained, restart_s: float) -> MemberProfile:
    seen = trained.newest or Progress(member.name)
    startup_s = seen.startup_s or 0.0
    # The first start on a node waits for processes and imports that members share, in the job's start.
    own_s = min((startup_s, *(seen.restarts_s[:1] or (restart_s,))))
    return MemberProfile(
        member.name,
        rates={},
        samples_per_epoch=ensemble.samples_per_epoch or seen.samples_per_epoch,
        startup_s=own_s,
        evaluate_s=seen.evaluate_s or 0.0,
        checkpoint_s=seen.checkpoint_s or 0.0,
        peak_memory_bytes=seen.peak_memory_bytes,
        seen_rates=seen_rates(trained.rates, member.batch_size),
        seen_overhead_s=seen_overhead_s(trained.rates, member.batch_size),
        job_start_s=startup_s - own_s,
        unfit=trained.unfit,
        preparation_rate=trained.preparation_rate,
        fused_rates=trained.fused_rates,
    )


def profiles_at(catalog: Catalog, ensemble: Ensemble, site: str) -> tuple[MemberProfile, ...]:
    """Return the profiles at the site of that name, as if its jobs chose between types of GPU."""
    return _profiles(catalog, ensemble, site, _trained(catalog, ensemble, site), has_types=True)


def _profiles(
    catalog: Catalog,
    ensemble: Ensemble,
    site: str,
    trained: Mapping[str, Trained],
    *,
    has_types: bool,
) -> tuple[MemberProfile, ...]:
    """Return the profiles; without `has_types` only the type of GPU that was measured last counts."""
    points = RatePoints(catalog.points(ensemble.name, site), ensemble)
    found = (
        _profile(member, own, trained[member.name], has_types=has_types)
        for member in ensemble.members
        if (own := points.of(member.name))
    )
    return tuple(
        replace(profile, samples_per_epoch=profile.samples_per_epoch or ensemble.samples_per_epoch)
        for profile in found
    )


def stale_points(points: Iterable[ProfilePoint], ensemble: Ensemble, site: Site) -> set[tuple[str, int]]:
    """Return (member, GPUs) of points that hold for no member, or whose machine differs from the newest.

    A machine differs by its software, or by its type of GPU unless the site has both types. Points of
    different frameworks are not compared: members may have one of their own.
    """
    points = list(points)
    current = RatePoints(points, ensemble)
    return {
        (point.member, point.gpus) for point in points if not current.is_current(point)
    } | _of_other_machines(points, site)


def _of_other_machines(points: Iterable[ProfilePoint], site: Site) -> set[tuple[str, int]]:
    points = sorted(points, key=lambda point: point.measured_at)
    types = {node_type.gpu_type for node_type in site.node_types}

    def kind(point: ProfilePoint) -> tuple[str | None, str]:
        own_type = point.machine.gpu_type if point.machine.gpu_type in types else None
        return own_type, point.machine.framework.partition(" ")[0]

    newest = {kind(point): point.machine for point in points}
    return {(point.member, point.gpus) for point in points if point.machine != newest[kind(point)]}


def warnings_of(project: Project, ensemble: Ensemble, site: Site) -> list[str]:
    """Return warnings about the measurements that a plan would use."""
    with project.reading() as catalog:
        points = RatePoints(catalog.points(ensemble.name, site.name), ensemble).every()
    old = {point.member for point in points if time.time() - point.measured_at > OLD_S}
    mixed = {member for member, _ in _of_other_machines(points, site)}
    reasons = {
        "was measured with other hardware or software than the rest": mixed,
        f"is older than {OLD_S // DAY_S} days": old,
    }
    warnings = [
        f"the profile of {', '.join(sorted(members))} {reason}; `hetctl profile --force` measures it again"
        for reason, members in reasons.items()
        if members
    ]
    types = sorted({point.machine.gpu_type for point in points})
    if len(types) > 1 and not site.node_types:
        warnings.append(
            f"GPUs of {len(types)} types were measured at {site.name} ({', '.join(types)}), and plans go by"
            " the type measured last; if the site has them all, name them as `node_types` in its file"
        )
    if ensemble != ensemble.as_installed(site.other_python) and site.gpus > 1:
        limited = {code.framework for code in ensemble.codes if missing_for_groups(code.framework)}
        warnings += [of_one_gpu(framework, site.device) for framework in sorted(limited)]
    return warnings


def beyond_measured(plan: Plan, profiles: Iterable[MemberProfile]) -> list[str]:
    """Return a warning if a plan gives members more GPUs than they were measured on."""
    measured = {
        profile.member: max(gpus for rates in (profile.rates, *profile.seen_rates.values()) for gpus in rates)
        for profile in profiles
        if profile.rates
    }
    given: dict[str, int] = {}
    for allocation in (a for planned in plan.rounds for a in planned.allocations):
        if allocation.gpus > measured.get(allocation.member, allocation.gpus):
            given[allocation.member] = max(allocation.gpus, given.get(allocation.member, 0))
    if not given:
        return []
    most = max(given.values())
    return [
        f"{some_of(tuple(given), NAMED)}: on more GPUs than were measured, up to {most}, the rates are"
        f" predicted; `hetctl profile --beyond --gpus {most}` measures them"
    ]


def _trained(catalog: Catalog, ensemble: Ensemble, site: str) -> dict[str, Trained]:
    """Return what all runs at a site have seen of members of the same name and shape.

    Pipelines are left out, and rates and times in lockstep, in which all run at the slowest member's rate.
    """
    found = {member.name: Trained() for member in ensemble.members}
    shapes = {member.name: shape_digest(member, ensemble.rate_keys) for member in ensemble.members}
    fused = defaultdict[str, FusedRates](tuple)
    for record in catalog.runs(ensemble.name):
        spec, search = record.spec, record.spec.ensemble.search
        # For other searches a run stores the planned configs, not the trained ones.
        if spec.site.name == site and (search is None or search.configs_are_known):
            progress = state_in(catalog.home.run(spec.run), spec).progress
            for member in [m for m in spec.ensemble.members if m.name not in spec.pipelines]:
                if shapes.get(member.name) == shape_digest(member, ensemble.rate_keys):
                    done, trained = progress[member.name], found[member.name]
                    trained.preparation_rate = done.preparation_rate or trained.preparation_rate
                    fused[shapes[member.name]] = with_fused(fused[shapes[member.name]], done.fused_rates)
                    if spec.sharing == LOCKSTEP:
                        continue
                    trained.rates += (*done.epochs, *EpochHistory.of(done.epochs).timed)
                    # Commands may tell of epochs alone.
                    trained.newest = done if done.epochs or done.startup_s is not None else trained.newest
                    has_tried = done.unfit or done.startup_s is not None
                    trained.unfit = done.unfit if has_tried and not done.batch_size else trained.unfit
    for name, trained in found.items():
        trained.rates.sort(key=lambda seen: seen.finished_at)
        # One member has told for all of its shape.
        trained.fused_rates = fused[shapes[name]]
    return found


def _newer(seen: Iterable[Seen], points: Iterable[ProfilePoint]) -> list[Seen]:
    """Return the epochs and rates that are newer than the point with as many GPUs of their type."""
    measured = {(point.machine.gpu_type, point.gpus): point.measured_at for point in points}
    types = {gpu_type for gpu_type, _ in measured}
    only = next(iter(types)) if len(types) == 1 else ""
    return [
        epoch
        for epoch in seen
        # A measurement counts more than earlier epochs: the machine may have changed in between.
        if epoch.finished_at > measured.get((epoch.gpu_type or only, epoch.gpus), 0.0)
    ]


def _profile(
    member: Member, points: Sequence[ProfilePoint], trained: Trained, *, has_types: bool
) -> MemberProfile:
    """Return the profile of a member by its points, one for each type and number of GPUs."""
    last = max(points, key=lambda point: point.measured_at)
    used = [point for point in points if point.machine.gpu_type == last.machine.gpu_type]
    points = points if has_types else used
    rates: dict[str, dict[int, float]] = {}
    for point in points:
        rates.setdefault(point.machine.gpu_type, {})[point.gpus] = point.rate
    saves = [point.save_s for point in used if point.save_s is not None]
    newer = _newer(trained.rates, points)
    return MemberProfile(
        member=member.name,
        rates=rates[last.machine.gpu_type],
        samples=next((p.samples for p in used if p.samples is not None), None),
        samples_per_epoch=last.samples_per_epoch,
        startup_s=statistics.fmean(p.startup_s for p in used),
        evaluate_s=statistics.fmean(p.evaluate_s for p in used),
        checkpoint_s=used[0].checkpoint_s,
        epoch_s=statistics.fmean(p.epoch_s for p in used),
        save_s=statistics.fmean(saves) if saves else None,
        peak_memory_bytes=max(p.peak_memory_bytes for p in used),
        gpu_type=last.machine.gpu_type,
        rates_by_type=rates if len(rates) > 1 else {},
        seen_rates=seen_rates(newer, member.batch_size),
        seen_overhead_s=seen_overhead_s(newer, member.batch_size),
        # Only the first points of a job have waited for it.
        job_start_s=max(p.job_start_s for p in used),
        unfit=trained.unfit,
        busy=next((p.busy for p in used if p.busy is not None), None),
        preparation_rate=trained.preparation_rate,
        fused_rates=trained.fused_rates,
    )


class RatePoints:
    """Measured points of an ensemble as it is now.

    A point holds for all members of the measured shape. A point without a shape, as in an imported table or
    an old catalog, holds for the member of its name if that has not changed, and for members of the same
    shape without other points.
    """

    def __init__(self, points: Iterable[ProfilePoint], ensemble: Ensemble) -> None:
        members = {member.name: member for member in ensemble.members}
        # Once for each member: a table has many points of one.
        digests = {name: shape_digest(member, ensemble.rate_keys) for name, member in members.items()}
        self._measured = measured_members(ensemble)
        self._shapes = {name: digests[member.name] for name, member in self._measured.items()}
        self._now = set(self._shapes.values())
        self._of_shape: dict[str, list[ProfilePoint]] = defaultdict(list)
        self._of_member: dict[str, list[ProfilePoint]] = defaultdict(list)
        self._of_alike: dict[str, list[ProfilePoint]] = defaultdict(list)
        for point in points:
            self._of_shape[point.shape].append(point)
            named = members.get(point.member)
            if named is not None and named.fingerprint == point.fingerprint:
                self._of_member[named.name].append(point)
                self._of_alike[digests[named.name]].append(point)

    def of(self, member: str) -> list[ProfilePoint]:
        """Return the newest points that hold for a member, in the order of types and numbers of GPUs."""
        shape, measured = self._shapes[member], self._measured[member].name
        own = [*self._of_shape.get(shape, ()), *self._of_member.get(measured, ())]
        newest: dict[tuple[str, int], ProfilePoint] = {}
        for point in sorted(own or self._of_alike.get(shape, []), key=lambda point: point.measured_at):
            newest[point.machine.gpu_type, point.gpus] = point
        return [newest[key] for key in sorted(newest)]

    def every(self) -> list[ProfilePoint]:
        """Return the points that hold for any member, each once, in the order of the members."""
        return list({id(point): point for member in self._measured for point in self.of(member)}.values())

    def is_current(self, point: ProfilePoint) -> bool:
        """Return true if a point is of a shape, or of a member, that the ensemble has now."""
        return point.shape in self._now or point in self._of_member.get(point.member, ())


def current_layers(
    points: Iterable[LayerPoint], ensemble: Ensemble, members: Iterable[str], site: Site
) -> Iterator[LayerPoint]:
    """Yield the newest layers of members as they are now, one measurement for each of the site's types."""
    fingerprints = {name: ensemble.member(name).fingerprint for name in members}
    newest = {
        (point.member, point.machine.gpu_type if site.node_types else ""): point
        for point in sorted(points, key=lambda point: point.measured_at)
        if fingerprints.get(point.member) == point.fingerprint
    }
    yield from (newest[key] for key in sorted(newest))


def rows_of(points: Sequence[LayerPoint]) -> list[LayerRow]:
    """Return a member's layers as rows of a layer profile, one per layer and type of GPU.

    Types on which the network had other layers than in the newest measurement are left out. Bytes that are
    kept or used in passes are the maxima over all types.

    Parameters
    ----------
    points : sequence of LayerPoint
        Measurements of one member, at least one.
    """
    last = max(points, key=lambda point: point.measured_at)
    names = [layer.name for layer in last.layers]
    alike = [point for point in points if [layer.name for layer in point.layers] == names]
    source = Path(f"measured layers of {last.member}")
    return [
        LayerRow(
            SourceLine(source, number),
            point.machine.gpu_type,
            replace(
                on_types[0],
                forward_s=layer.forward_s,
                backward_s=layer.backward_s,
                held_bytes=max(one.kept_bytes for one in on_types),
                workspace_bytes=max(one.workspace_bytes for one in on_types),
            ),
        )
        for number, on_types in enumerate(zip(*(point.layers for point in alike), strict=True), start=1)
        for point, layer in zip(alike, on_types, strict=True)
    ]


def links_between(points: Sequence[LinkPoint], site: Site) -> NodeLinks | None:
    """Return measured links as the links of a site; None if a kind that the site has was not measured."""
    measured = {point.link: point.points for point in points}
    needed = {INTRA_NODE: site.gpus_per_node > 1, INTER_NODE: site.nodes > 1}
    if not measured or any(needed[kind] and kind not in measured for kind in needed):
        return None
    # Both kinds need a figure, though one for a kind that the site lacks is not used.
    intra = measured.get(INTRA_NODE) or measured[INTER_NODE]
    inter = measured.get(INTER_NODE) or intra
    peak = max(size / seconds for size, seconds in intra)
    return NodeLinks(IntraNode(peak, points=intra), InterNode(points=inter))


def traced_site(project: Project, name: str) -> tuple[Site, tuple[SiteKey, ...]]:
    """Return a site with the source of each of its keys; links are measured ones where its file has none."""
    site, keys = project.traced_site(name)
    if site.links is not None or not project.home.catalog.exists():
        return site, keys
    with project.reading() as catalog:
        points = catalog.links(site.name)
    links = links_between(points, site)
    if links is None:
        return site, keys
    measured = SiteKey("links", encode(links), measured_at=max(point.measured_at for point in points))
    return replace(site, links=links), tuple(measured if key.key == "links" else key for key in keys)
