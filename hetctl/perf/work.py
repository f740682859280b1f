"""What planners need to know of each member that still has to be trained."""

from __future__ import annotations

from collections.abc import Mapping

from hetctl.core.ensemble import Ensemble, Member
from hetctl.core.errors import BadInputError
from hetctl.core.profile import Candidate, MemberProfile, Progress
from hetctl.perf.outlook import predicted_epochs
from hetctl.perf.scaling import rate_curve, usable_rates


def candidates(
    ensemble: Ensemble,
    profiles: Mapping[str, MemberProfile],
    progress: Mapping[str, Progress],
    max_gpus: int,
    gpus_per_node: int,
) -> tuple[Candidate, ...]:
    """Return the active members in the ensemble's order, each with its rates and the work left.

    A curve of rates ends at the member's `max_gpus`, at the cluster's, or where the rate is highest,
    whichever is least.

    Raises
    ------
    BadInputError
        If an active member has no profile, or one that does not tell how long an epoch is.
    """
    done = {m.name: progress.get(m.name, Progress(m.name)) for m in ensemble.members}
    active = [member for member in ensemble.members if done[member.name].active]
    _refuse_gaps(active, profiles)
    outlook = predicted_epochs(ensemble.members, done)
    return tuple(
        _candidate(
            member,
            profiles[member.name],
            done[member.name],
            outlook.get(member.name),
            max_gpus,
            gpus_per_node,
        )
        for member in active
    )


def _refuse_gaps(active: list[Member], profiles: Mapping[str, MemberProfile]) -> None:
    missing = [m for m in active if m.name not in profiles or not usable_rates(profiles[m.name].rates)]
    if missing:
        names = ", ".join(member.name for member in missing)
        with_layers = any(member.layers for member in missing)
        pipelines = "; `hetctl plan --mode auto` plans those that fit no GPU by their layers"
        raise BadInputError(f"no profile of {names}", f"run hetctl profile{pipelines * with_layers}")
    for member in active:
        profile = profiles[member.name]
        if profile.samples is None and not profile.samples_per_epoch:
            raise BadInputError(
                f"the profile of {member.name} has neither samples nor samples_per_epoch",
                hint="run hetctl profile, or import a rate table with a samples column",
            )


def _candidate(
    member: Member,
    profile: MemberProfile,
    progress: Progress,
    outlook: tuple[int, str] | None,
    max_gpus: int,
    gpus_per_node: int,
) -> Candidate:
    limit = min(max_gpus, member.max_gpus or max_gpus)
    rates, notes = rate_curve(profile.rates, limit, gpus_per_node)
    samples_left, remarks = _samples_left(member, profile, progress, outlook)
    return Candidate(
        name=member.name,
        rates=_up_to_the_peak(rates),
        rates_by_type={
            gpu_type: _up_to_the_peak(rate_curve(measured, limit, gpus_per_node)[0])
            for gpu_type, measured in profile.rates_by_type.items()
        },
        samples_left=samples_left,
        samples_per_epoch=profile.samples_per_epoch,
        startup_s=profile.startup_s,
        evaluate_s=profile.evaluate_s,
        checkpoint_s=profile.checkpoint_s,
        notes=notes + remarks,
    )


def _up_to_the_peak(rates: Mapping[int, float]) -> dict[int, float]:
    peak = max(rates, key=lambda gpus: rates[gpus])
    return {gpus: rate for gpus, rate in rates.items() if gpus <= peak}


def _samples_left(
    member: Member, profile: MemberProfile, progress: Progress, outlook: tuple[int, str] | None
) -> tuple[float, tuple[str, ...]]:
    """Return the samples left, and notes on how that is known, or that it is more than was expected."""
    epoch = profile.samples_per_epoch or 0
    epochs, how = outlook or (member.stop.planned_epochs, "")
    expected = epochs * epoch if profile.samples is None else profile.samples
    notes = (how,) if how and profile.samples is None else ()
    left = expected - len(progress.epochs) * epoch
    if left <= 0:
        left, notes = epoch, (*notes, "longer than expected: one more epoch is assumed")
    return max(float(left - progress.part_samples), 0.0), notes
