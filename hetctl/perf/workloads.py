"""Inputs of planners for each member that still needs training."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.errors import BadInputError
from hetctl.model.profile import MemberProfile, compared_config, shapes_of
from hetctl.model.training_progress import EpochResult, Progress
from hetctl.model.training_settings import EVERY_EPOCH
from hetctl.model.workload import Workload
from hetctl.perf.convergence import ConvergenceForecast
from hetctl.perf.rate_extrapolation import rate_curve, usable_rates
from hetctl.perf.rate_prediction import known_rates, nearest_config

RECENT_RESTARTS = 9
"""Number of newest restarts of all members that predict the first restart of another one."""


class Workloads:
    """Remaining work of a run's active members, kept up to date with their progress.

    A member is updated only if its own progress or its prediction changes.

    Parameters
    ----------
    max_gpus : int
        Number of GPUs of the cluster.
    in_lockstep : bool
        True if the members train in lockstep, which tells little of their own rates (`known_rates`).

    Attributes
    ----------
    left : dict of str to Workload
        Active members, in the ensemble's order.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        profiles: Mapping[str, MemberProfile],
        max_gpus: int,
        *,
        in_lockstep: bool = False,
    ) -> None:
        self._members = {member.name: member for member in ensemble.members}
        self._profiles, self._max_gpus = profiles, max_gpus
        self._in_lockstep = in_lockstep
        self._rate_keys = ensemble.rate_keys
        self._forecast = ConvergenceForecast(ensemble.members)
        self._progress: dict[str, Progress] = {}
        self._restarts_s: deque[float] = deque(maxlen=RECENT_RESTARTS)
        self._whole: dict[str, Workload] = {}
        self.left: dict[str, Workload] = {}
        self._alike = _predicted_alike(ensemble, profiles)

    def update(self, changed: Mapping[str, Progress]) -> None:
        """Update the progress of members.

        Raises
        ------
        BadInputError
            If an active member has no profile, or its profile lacks the length of an epoch.
        """
        self._refuse_gaps([self._members[name] for name in changed if changed[name].active])
        for name, progress in changed.items():
            before = self._progress.get(name)
            if progress.restarts_s and (before is None or progress.restarts_s != before.restarts_s):
                self._restarts_s.append(progress.restarts_s[-1])
        self._progress |= changed
        outdated = {*changed, *self._forecast.update(changed)}
        for name in changed:
            outdated.update(mate for mate in self._alike.get(name, ()) if mate in self._progress)
        for name in outdated.intersection(self._alike).union(changed):
            self._whole.pop(name, None)
        if outdated:
            left = self.left | {name: self._workload(name) for name in outdated}
            self.left = {name: workload for name in self._members if (workload := left.get(name))}

    def _refuse_gaps(self, active: list[Member]) -> None:
        missing = [m for m in active if not self._has_rates(m)]
        if missing:
            raise BadInputError(
                f"no profile of {', '.join(member.name for member in missing)}", self._ways_out(missing)
            )
        for member in active:
            profile = self._profiles[member.name]
            if profile.samples is None and not profile.samples_per_epoch:
                raise BadInputError(
                    f"the profile of {member.name} has neither samples nor samples_per_epoch",
                    hint="run hetctl profile, or import a rate table with a samples column",
                )

    def _has_rates(self, member: Member) -> bool:
        return member.name in self._profiles and bool(usable_rates(self._profiles[member.name].rates))

    def _ways_out(self, missing: list[Member]) -> str:
        """Return the commands that give members without a profile their rates."""
        ways = ["run `hetctl profile`"]
        if any(member.command for member in missing):
            ways.append("import rates that you know with `hetctl profile import FILE`")
        configs = {name: compared_config(m, self._rate_keys) for name, m in self._members.items()}
        known = {name: configs[name] for name, m in self._members.items() if self._has_rates(m)}
        # Members that still lack rates although rates are predicted compare to no measured one.
        if all(nearest_config(configs[member.name], known) for member in missing):
            ways.append("plan and submit with --predict-rates, as similar members were measured")
        if any(member.layers for member in missing):
            ways.append(
                "where the site has `gpu_memory`, `hetctl plan --mode auto` plans those that fit no GPU"
                " by their layers"
            )
        return ", or ".join(ways)

    def _workload(self, name: str) -> Workload | None:
        """Return an active member; None for any other."""
        member, progress = self._members[name], self._progress[name]
        if not progress.active:
            return None
        profile = self._profiles[name]
        if name not in self._whole:
            epochs = progress.epochs or self._epochs_of_alike(name)
            batch_size = progress.batch_size or member.batch_size
            known = known_rates(profile, epochs, batch_size, in_lockstep=self._in_lockstep)
            seen = profile.seen_rates or (epochs and not self._in_lockstep)
            guessed = bool(profile.predicted_from) and not seen
            self._whole[name] = _untrained(member, known, self._max_gpus, guessed=guessed)
        whole = self._whole[name]
        left, remarks = _samples_left(member, profile, progress, self._forecast.epochs.get(name))
        # For a member that was never restarted, the last restarts of other members are used.
        restarts_s = progress.restarts_s or self._restarts_s
        restart_s = statistics.median(restarts_s) if restarts_s else None
        return replace(whole, samples_left=left, notes=whole.notes + remarks, restart_s=restart_s)

    def _epochs_of_alike(self, name: str) -> list[EpochResult]:
        """Return the epochs of all members of its shape if their rates are predicted, by time."""
        mates = (self._progress[mate] for mate in self._alike.get(name, ()) if mate in self._progress)
        return sorted((e for mate in mates for e in mate.epochs), key=lambda epoch: epoch.finished_at)


def _predicted_alike(ensemble: Ensemble, profiles: Mapping[str, MemberProfile]) -> dict[str, tuple[str, ...]]:
    """Return for each member with predicted rates the members of its shape."""
    if not any(profile.predicted_from for profile in profiles.values()):
        return {}
    groups = [(shape.member, *shape.shared_by) for shape in shapes_of(ensemble)]
    predicted = {name for name, profile in profiles.items() if profile.predicted_from}
    return {name: group for group in groups for name in predicted.intersection(group)}


def active_workloads(
    ensemble: Ensemble,
    profiles: Mapping[str, MemberProfile],
    progress: Mapping[str, Progress],
    max_gpus: int,
    *,
    in_lockstep: bool = False,
) -> tuple[Workload, ...]:
    """Return the active members in the ensemble's order, each with its rates and its remaining work.

    Rates observed in training take precedence over profiled ones, in lockstep only where they are higher. A
    rate curve begins at the member's `min_gpus`. It ends at its `max_gpus`, at the size of the cluster, or
    where more GPUs gain no more than the error of their predicted rate, whichever is least.

    Raises
    ------
    BadInputError
        Same as in `Workloads.update`.
    """
    workloads = Workloads(ensemble, profiles, max_gpus, in_lockstep=in_lockstep)
    workloads.update({m.name: progress.get(m.name, Progress(m.name)) for m in ensemble.members})
    return tuple(workloads.left.values())


def _untrained(member: Member, profile: MemberProfile, max_gpus: int, *, guessed: bool) -> Workload:
    """Return a member with the rates known so far, before its remaining work is determined."""
    # A job that is too small for a member counts as large enough: planners leave the member out.
    limit = max(member.most_gpus(max_gpus), member.min_gpus)
    curve = rate_curve(profile.rates, limit, member.min_gpus)
    origin = (f"rates predicted from those of {profile.predicted_from}",) * guessed
    return Workload(
        name=member.name,
        rates=curve.useful,
        # Each of several types has its own curve, and these rates would count for any of them.
        unsure={} if profile.rates_by_type else curve.unsure,
        rates_by_type={
            gpu_type: rate_curve(measured, limit, member.min_gpus).useful
            for gpu_type, measured in profile.rates_by_type.items()
        },
        samples_left=0.0,
        samples_per_epoch=profile.samples_per_epoch,
        startup_s=profile.startup_s,
        evaluate_s=profile.evaluate_s,
        checkpoint_s=profile.checkpoint_s,
        epoch_s=profile.epoch_s,
        save_s=_save_s(member, profile, curve.rates),
        notes=(*origin, *curve.notes),
    )


def _save_s(member: Member, profile: MemberProfile, rates: Mapping[int, float]) -> float | None:
    """Return the seconds that an epoch loses by checkpoints on the least GPUs, where it takes longest."""
    samples, interval = profile.samples_per_epoch, member.checkpoint
    if interval == EVERY_EPOCH or not samples:
        return profile.save_s
    save_s = profile.checkpoint_s if profile.save_s is None else profile.save_s
    gpus = min(rates)
    return save_s * interval.saves_of_epoch(samples / member.step_samples(gpus), samples / rates[gpus])


def _samples_left(
    member: Member, profile: MemberProfile, progress: Progress, forecast: tuple[int, str] | None
) -> tuple[float, tuple[str, ...]]:
    """Return the samples left, and notes on their source, or on an excess over the expected work."""
    epoch = profile.samples_per_epoch or 0
    if progress.asked and epoch:
        # A search has said how many epochs a trial gets.
        rest = (progress.asked - progress.last_epoch) * epoch - progress.part_samples
        return max(float(rest), 0.0), ()
    epochs, how = forecast or (member.stop.planned_epochs, "")
    expected = epochs * epoch if profile.samples is None else profile.samples
    notes = (how,) if how and profile.samples is None else ()
    left = expected - len(progress.epochs) * epoch
    if left <= 0:
        # No work left would mean converged, which only the stop rule decides.
        left, notes = epoch, (*notes, "longer than expected: one more epoch is assumed")
    return max(float(left - progress.part_samples), 0.0), notes
