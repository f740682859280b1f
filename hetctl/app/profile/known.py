"""Profiles of members in the catalog, and warnings about them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from hetctl.app.project import Project
from hetctl.catalog.catalog import Catalog
from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.profile import MemberProfile, ProfilePoint
from hetctl.model.site import Site
from hetctl.model.training_progress import EpochResult
from hetctl.perf.seen_rates import seen_overhead_s, seen_rates

IMPORTED = "imported"
"""Framework, and site, of an ensemble that consists of a rate table only."""
DAY_S = 86400
OLD_S = 90 * DAY_S
"""Age of a profile in seconds from which on there is a warning."""


def member_profiles(catalog: Catalog, ensemble: Ensemble, site: Site) -> tuple[MemberProfile, ...]:
    """Return the profiles of the members as they are now; points of other batch sizes are ignored."""
    return profiles_at(catalog, ensemble, site.name)


def profiles_at(catalog: Catalog, ensemble: Ensemble, site: str) -> tuple[MemberProfile, ...]:
    """Return the profiles at the site of that name."""
    points = catalog.points(ensemble.name, site)
    by_member = {member.name: current_points(points, ensemble, member.name) for member in ensemble.members}
    trained = _trained(catalog, ensemble, site)
    found = (_profile(ensemble.member(name), own, trained[name]) for name, own in by_member.items() if own)
    return tuple(
        replace(profile, samples_per_epoch=profile.samples_per_epoch or ensemble.samples_per_epoch)
        for profile in found
    )


def current_points(points: Iterable[ProfilePoint], ensemble: Ensemble, member: str) -> list[ProfilePoint]:
    """Return a member's points that were measured with its present network and batch size."""
    fingerprint = ensemble.member(member).fingerprint
    return [p for p in points if p.member == member and p.fingerprint == fingerprint]


def stale_points(points: Iterable[ProfilePoint], ensemble: Ensemble, site: Site) -> set[tuple[str, int]]:
    """Return (member, GPUs) of points whose member has changed, or whose machine differs from the newest.

    A machine differs by its software, or by its type of GPU unless the site has both types.
    """
    points = sorted(points, key=lambda point: point.measured_at)
    types = {node_type.gpu_type for node_type in site.node_types}

    def own_type(point: ProfilePoint) -> str | None:
        return point.machine.gpu_type if point.machine.gpu_type in types else None

    newest = {own_type(point): point.machine for point in points}
    current = {member.name: member.fingerprint for member in ensemble.members}
    return {
        (point.member, point.gpus)
        for point in points
        if point.machine != newest[own_type(point)] or current.get(point.member) != point.fingerprint
    }


def warnings_of(project: Project, ensemble: Ensemble, site: Site) -> list[str]:
    """Return warnings about the profile that a plan would be made from."""
    with project.reading() as catalog:
        every = catalog.points(ensemble.name, site.name)
    points = [p for member in ensemble.members for p in current_points(every, ensemble, member.name)]
    old = {point.member for point in points if time.time() - point.measured_at > OLD_S}
    mixed = {member for member, _ in stale_points(points, ensemble, site)}
    reasons = {
        "was measured with other hardware or software than the rest": mixed,
        f"is older than {OLD_S // DAY_S} days": old,
    }
    return [
        f"the profile of {', '.join(sorted(members))} {reason}; `hetctl profile --force` measures it again"
        for reason, members in reasons.items()
        if members
    ]


def _trained(catalog: Catalog, ensemble: Ensemble, site: str) -> dict[str, list[EpochResult]]:
    """Return the epochs of all runs at a site that trained the members as they are now, by time."""
    found: dict[str, list[EpochResult]] = {member.name: [] for member in ensemble.members}
    fingerprints = {member.name: member.fingerprint for member in ensemble.members}
    for record in catalog.runs(ensemble.name):
        if record.spec.site.name == site:
            epochs = catalog.epochs(record.spec.run)
            for member in record.spec.ensemble.members:
                if fingerprints.get(member.name) == member.fingerprint:
                    found[member.name] += epochs.get(member.name, ())
    return {name: sorted(epochs, key=lambda epoch: epoch.finished_at) for name, epochs in found.items()}


def _newer(epochs: Iterable[EpochResult], points: Iterable[ProfilePoint]) -> list[EpochResult]:
    """Return the epochs that are newer than the point with as many GPUs of their type."""
    measured = {(point.machine.gpu_type, point.gpus): point.measured_at for point in points}
    types = {gpu_type for gpu_type, _ in measured}
    only = next(iter(types)) if len(types) == 1 else ""
    return [
        epoch
        for epoch in epochs
        # A measurement counts more than earlier epochs: the machine may have changed in between.
        if epoch.finished_at > measured.get((epoch.gpu_type or only, epoch.gpus), 0.0)
    ]


def _profile(member: Member, points: list[ProfilePoint], trained: Iterable[EpochResult]) -> MemberProfile:
    last = max(points, key=lambda point: point.measured_at)
    by_type = {p.machine.gpu_type: _newest(points, p.machine.gpu_type) for p in points}
    newest = by_type[last.machine.gpu_type]
    used = list(newest.values())
    rates_by_type = {
        gpu_type: {gpus: here[gpus].rate for gpus in sorted(here)} for gpu_type, here in by_type.items()
    }
    newer = _newer(trained, points)
    return MemberProfile(
        member=member.name,
        rates={gpus: newest[gpus].rate for gpus in sorted(newest)},
        samples=next((p.samples for p in used if p.samples is not None), None),
        samples_per_epoch=last.samples_per_epoch,
        startup_s=_mean(p.startup_s for p in used),
        evaluate_s=_mean(p.evaluate_s for p in used),
        checkpoint_s=_mean(p.checkpoint_s for p in used if p.gpus == min(newest)),
        epoch_s=_mean(p.epoch_s for p in used),
        save_s=_mean(saves) if (saves := [p.save_s for p in used if p.save_s is not None]) else None,
        peak_memory_bytes=max(p.peak_memory_bytes for p in used),
        gpu_type=last.machine.gpu_type,
        rates_by_type=rates_by_type if len(rates_by_type) > 1 else {},
        seen_rates=seen_rates(newer, member.batch_size),
        seen_overhead_s=seen_overhead_s(newer, member.batch_size),
    )


def _newest(points: Iterable[ProfilePoint], gpu_type: str) -> dict[int, ProfilePoint]:
    here = [point for point in points if point.machine.gpu_type == gpu_type]
    return {point.gpus: point for point in sorted(here, key=lambda point: point.measured_at)}


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
