"""Rates of a run: as planned, and as measured in training."""

from __future__ import annotations

from collections.abc import Iterable

from hetctl.model.ensemble import Member
from hetctl.model.profile import MemberProfile
from hetctl.model.run_status import MemberRate
from hetctl.model.site import Site
from hetctl.model.training_progress import Progress
from hetctl.perf.rate_extrapolation import rate_on
from hetctl.perf.seen_rates import NOTEWORTHY, is_noteworthy, known_rates, seen_rates


def rates_of(
    member: Member, profile: MemberProfile | None, progress: Progress, site: Site
) -> tuple[MemberRate, ...]:
    """Return the rates on one GPU and on all numbers of GPUs that the member has trained on."""
    seen = seen_rates(progress.epochs, progress.batch_size or member.batch_size) or {"": {}}
    better = known_rates(profile) if profile and profile.seen_rates else profile
    found = []
    for gpu_type in sorted(seen):
        for count in sorted({1, *seen[gpu_type]}):
            profiled = _rate(profile, gpu_type, count, site)
            planned = profiled if better is profile else _rate(better, gpu_type, count, site)
            found.append(MemberRate(count, gpu_type or None, profiled, planned, seen[gpu_type].get(count)))
    return tuple(found)


def wrong_rates(member: str, rates: Iterable[MemberRate]) -> list[str]:
    """Return texts on a member's planned rates that were wrong by more than `NOTEWORTHY`."""
    return [
        f"{member} on {rate.gpus} planned {rate.planned:,.0f}, seen {rate.seen:,.0f} samples/s"
        for rate in rates
        if rate.planned and rate.seen and is_noteworthy(rate.planned, rate.seen)
    ]


def rate_warnings(wrong: Iterable[str]) -> tuple[str, ...]:
    """Return a warning about the plan's wrong rates and its effect; empty if there are none.

    Parameters
    ----------
    wrong : iterable of str
        Texts from `wrong_rates`, of all members.
    """
    if not (off := "; ".join(wrong)):
        return ()
    return (
        f"the plan's rates were off by more than {NOTEWORTHY:.0%}: {off}. Planners go by"
        " what is seen, in this run and in later ones; `hetctl profile --force` measures anew",
    )


def _rate(profile: MemberProfile | None, gpu_type: str, count: int, site: Site) -> float | None:
    """Return a profile's rate on a number of GPUs, measured or predicted."""
    if profile is None:
        return None
    return rate_on(count, profile.rates_by_type.get(gpu_type, profile.rates), site.gpus_per_node)
