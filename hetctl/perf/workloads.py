"""Inputs of planners for each member that still needs training."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from hetctl.model.ensemble import Ensemble, Member
from hetctl.model.profile import MemberProfile, compared_config, measured_members, shape_digest
from hetctl.model.training_progress import EpochHistory, FusedRates, Progress, TimedRate, with_fused
from hetctl.model.training_settings import EVERY_EPOCH
from hetctl.model.workload import Slowed, Workload
from hetctl.perf.convergence import ConvergenceForecast
from hetctl.perf.rate_extrapolation import learned, prior_shapes, rate_curve, usable_rates
from hetctl.perf.rate_prediction import USUAL_LEVEL, Level, estimated_levels, known_rates
from hetctl.perf.sharing import DOUBT, NO_SHARING, GpuTerms, may_gain, slowdown, slowed_by

LEARNED = ("startup_s", "evaluate_s", "checkpoint_s")
"""Times of members that were not profiled, which their training shows."""
RECENT_RESTARTS = 9
"""Number of newest restarts of all members that predict the first restart of another one."""
RESTART_SHARE = 0.1
"""Length of a restart by that of the first start, which imports the framework, before any is known."""
USUAL_EPOCH = 10_000
"""Samples of an epoch before the length of any is known."""
MANY, NEWS = 50, 1.1
"""Number of known rates from which on they have to grow by a factor before members are estimated anew: with
thousands of members, each rate would otherwise change all others."""

Fuses = Callable[[Member], str | None]
"""Function that returns the shape of a member that may train fused with others of it; None if it may not."""


class Workloads:
    """Remaining work of a run's active members, kept up to date with their progress.

    A member is updated only if its own progress or its prediction changes. Of a member that was not measured,
    its rates and the length of its epochs are estimates from what is known of the others.

    Parameters
    ----------
    max_gpus : int
        Number of GPUs of the cluster.
    in_lockstep : bool
        True if the members train in lockstep, which tells little of their own rates (`known_rates`).
    terms : GpuTerms
        How members share GPUs.
    fuses : callable
        Function that tells which members may train fused.

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
        terms: GpuTerms = NO_SHARING,
        fuses: Fuses = lambda _: None,
    ) -> None:
        self._ensemble, self._fuses = ensemble, fuses
        self._shapes_to_fuse: dict[tuple[str, int], str] = {}
        self._members = {member.name: member for member in ensemble.members}
        self._profiles, self._max_gpus = dict(profiles), max_gpus
        self._in_lockstep, self._terms = in_lockstep, terms
        self._configs = {name: compared_config(m, ensemble.rate_keys) for name, m in self._members.items()}
        self._replaced: dict[str, tuple[Mapping[str, Any], MemberProfile]] = {}
        self._forecast = ConvergenceForecast(ensemble.members)
        self._progress: dict[str, Progress] = {}
        self._restarts_s: deque[float] = deque(maxlen=RECENT_RESTARTS)
        self._times_s: dict[str, deque[float]] = {time: deque(maxlen=RECENT_RESTARTS) for time in LEARNED}
        self._known: dict[str, MemberProfile] = {}
        self._whole: dict[str, Workload] = {}
        self.left: dict[str, Workload] = {}
        measured = measured_members(ensemble)
        self._digests = {name: shape_digest(one, ensemble.rate_keys) for name, one in measured.items()}
        self._alike = self._shapes_of_all()
        self._fused: dict[str, FusedRates] = {}
        self._note_fused(self._profiles)
        self._facts = 0
        self._shapes = prior_shapes()
        self._levels: Mapping[str, Level] = {}
        self._epoch = USUAL_EPOCH
        self._scripts_s: dict[str, float] = {}
        self._peaks: dict[tuple[str, int | None], int] = {}
        """Largest peaks of memory seen in training, by shapes and changed batches."""
        self._seen_together = set[tuple[str, ...]]()
        self._together: dict[tuple[str, str], list[float]] = defaultdict(list)
        """Logarithms of slowdowns by pairs of shapes."""

    def replace_config(self, trial: Member, profile: MemberProfile) -> None:
        """Give a trial of a search its config and profile in place of the planned ones.

        A profile of the planned config still tells of others; `update` has to follow.
        """
        name, config = trial.name, compared_config(trial, self._ensemble.rate_keys)
        if config == self._configs[name]:
            return
        if (planned := self._profiles.get(name)) and planned.has_rates:
            self._replaced.setdefault(name, (self._configs[name], known_rates(planned)))
        self._members[name] = replace(self._members[name], config=trial.config)
        self._shapes_to_fuse.clear()
        self._configs[name], self._profiles[name] = config, profile
        left = tuple(mate for mate in self._alike[name] if mate != name)
        self._alike |= dict.fromkeys(left, left)
        digest = self._digests[name] = shape_digest(self._members[name], self._ensemble.rate_keys)
        mates = (mate for mate, other in self._digests.items() if other == digest and mate != name)
        shape = (*self._alike.get(next(mates, ""), ()), name)
        self._alike |= dict.fromkeys(shape, shape)
        self._known.pop(name, None)
        self._facts = 0

    def _shapes_of_all(self) -> dict[str, tuple[str, ...]]:
        """Return, by member, all members of its shape; the first is one whose own config it is."""
        groups: dict[str, list[str]] = defaultdict(list)
        for name in sorted(self._members, key=lambda name: self._members[name].profile_as is not None):
            groups[self._digests[name]].append(name)
        return {name: shape for shape in map(tuple, groups.values()) for name in shape}

    def edit(self, ensemble: Ensemble, profiles: Mapping[str, MemberProfile]) -> None:
        """Go on with edited members, of whom none may leave; new ones have no work before `update`.

        Parameters
        ----------
        profiles : mapping of str to MemberProfile
            Profiles of new members, and those that are others than before.
        """
        was = {member.name: member for member in self._ensemble.members}
        same_keys = ensemble.rate_keys == self._ensemble.rate_keys
        edited = {
            each.name: self._as_drawn(each, was.get(each.name))
            for each in ensemble.members
            if each.name in profiles or each != was.get(each.name) or not same_keys
        }
        self._ensemble, before = ensemble, self._alike
        self._shapes_to_fuse.clear()
        names = [each.name for each in ensemble.members]
        self._members = {name: edited.get(name) or self._members[name] for name in names}
        self._profiles |= profiles
        self._note_fused(profiles)
        self._configs |= {name: compared_config(each, ensemble.rate_keys) for name, each in edited.items()}
        measured = measured_members(replace(ensemble, members=tuple(self._members.values())))
        concerned = {name: each for name, each in measured.items() if name in edited or each.name in edited}
        self._digests |= {name: shape_digest(each, ensemble.rate_keys) for name, each in concerned.items()}
        self._alike = self._shapes_of_all()
        self._forecast.edit(edited.values())
        for name in concerned:
            self._known.pop(name, None)
        if any(map(self._is_unmeasured, edited)):
            # Their levels follow from those of all others.
            self._facts = 0
        mates = {mate for name in concerned for mate in (*before.get(name, ()), *self._alike[name])}
        self.update({name: self._progress[name] for name in mates if name in self._progress})

    def _as_drawn(self, member: Member, before: Member | None) -> Member:
        """Return an edited member; a trial keeps the config that its search has drawn."""
        if before is None or (drawn := self._members[member.name].config) == before.config:
            return member
        return replace(member, config=drawn)

    def update(self, changed: Mapping[str, Progress]) -> None:
        """Update the progress of members."""
        for name, progress in changed.items():
            before = self._progress.get(name)
            if progress.restarts_s and (before is None or progress.restarts_s != before.restarts_s):
                self._restarts_s.append(progress.restarts_s[-1])
            for time, newest in self._times_s.items():
                seconds = getattr(progress, time)
                if seconds is not None and seconds != getattr(before, time, None):
                    newest.append(seconds)
        unfit = [name for name, now in changed.items() if now.unfit != self._unfit_now(name)]
        fused, grown = self._note_fused(changed), self._note_peaks(changed)
        self._progress |= changed
        news = [name for name in changed if self._has_news(name)]
        outdated = {*changed, *self._forecast.update(changed), *self._mates_of(news)}
        concerned = (mate for name in (*unfit, *fused, *grown) for mate in self._alike[name])
        outdated.update(mate for mate in concerned if mate in self._progress)
        if ended := {name: changed[name].script_s for name in changed if self._ended_unreported(name)}:
            self._scripts_s |= ended
            outdated.update(name for name in self._whole if self._reports_nothing(name))
        if news and self._learn():
            outdated.update(name for name in self._whole if self._is_estimate(name))
        outdated.update(self._see_together(changed))
        for name in outdated:
            self._whole.pop(name, None)
        if outdated:
            left = self.left | {name: self._workload(name) for name in outdated}
            self.left = {name: workload for name in self._members if (workload := left.get(name))}

    def may_share(self, name: str) -> bool:
        """Return true if a member may share a GPU: its memory was enough there so far."""
        return self._terms.most > 1 and not any(gpus == 0 for _, gpus in self._unfit(name))

    def keep_apart(self) -> None:
        """Let no member share a GPU any more."""
        self._terms = NO_SHARING
        self._whole.clear()
        self.left = {name: workload for name in self.left if (workload := self._workload(name))}

    def has_other_gpus(self, name: str, gpus: int, gpu_type: str = "") -> bool:
        """Return true if a member that has run out of memory on so many GPUs should try another number.

        It had trained there neither itself nor in a member of its shape, and has to go back to fewer, or has
        no smaller batch to try.

        Parameters
        ----------
        gpu_type : str
            Type of the GPUs; "" at a site with one type, and for GPUs of several types.
        """
        member, progress, fitting = self._members[name], self._progress[name], self._fitting(name, gpu_type)
        if gpus in fitting or not self._gpus_left(name, gpu_type, gpus):
            return False
        is_smallest = member.smaller_batch(progress.batch_size or member.batch_size) is None
        return is_smallest or any(count < gpus for count in fitting)

    def _gpus_left(self, name: str, gpu_type: str = "", *unfit: int) -> tuple[int, int] | None:
        """Return the least and the largest number of GPUs that a member may have; None if none is left.

        What was too small in a group on several types is so on each.
        """
        member = self._members[name]
        # A job that is too small for a member counts as large enough: planners leave the member out.
        limits = member.min_gpus, max(member.most_gpus(self._max_gpus), member.min_gpus)
        unfit += tuple(gpus for of, gpus in self._unfit(name) if gpus and of in ("", gpu_type))
        return gpus_left(*limits, unfit, self._fitting(name, gpu_type)) if unfit else limits

    def _unfit(self, name: str) -> set[tuple[str, int]]:
        """Return the types and numbers of GPUs on which members of its shape ran out of memory."""
        batch_size = self._progress[name].batch_size
        mates = (mate for mate in self._alike[name] if mate in self._progress)
        alike = [mate for mate in mates if self._progress[mate].batch_size == batch_size]
        # Earlier runs have told of the batch of the ensemble file alone.
        earlier = (self._profiles[mate].unfit for mate in alike if mate in self._profiles and not batch_size)
        return {*chain.from_iterable((*map(self._unfit_now, alike), *earlier))}

    def _unfit_now(self, name: str) -> tuple[tuple[str, int], ...]:
        return self._progress[name].unfit if name in self._progress else ()

    def _fitting(self, name: str, gpu_type: str = "") -> set[int]:
        """Return the numbers of GPUs on which the memory of a member was enough; with a type, those of it."""
        progress, known = self._progress[name], self._known[name]
        size = progress.batch_size or self._members[name].batch_size
        seen = EpochHistory.of(progress.epochs)
        if gpu_type:
            rates = known.rates_by_type.get(gpu_type, known.rates if known.gpu_type == gpu_type else {})
            return {*rates, *(gpus for of, gpus, batch in seen.rates if (of, batch) == (gpu_type, size))}
        trained = (gpus for _, gpus, batch in seen.batches if gpus and batch == size)
        return {*self._rates_of(name), *trained}

    def _has_news(self, name: str) -> bool:
        """Update what is known of a member; return true if its rates or the length of its epochs changed."""
        before = self._known.get(name)
        now = self._known[name] = self._profile_of(name)
        same = before and (before.rates, before.samples_per_epoch) == (now.rates, now.samples_per_epoch)
        return not same

    def _mates_of(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the other members to which the rates of these apply."""
        for mate in {mate for name in names for mate in self._alike[name]}:
            if mate in self._progress and self._is_unmeasured(mate):
                self._known[mate] = self._profile_of(mate)
                yield mate

    def _is_unmeasured(self, name: str) -> bool:
        profile = self._profiles.get(name)
        return profile is None or not usable_rates(profile.rates)

    def _profile_of(self, name: str) -> MemberProfile:
        """Return what is known of a member, in training too."""
        member, progress = self._members[name], self._progress[name]
        profile = self._profiles.get(name) or MemberProfile(name, {})
        if self._is_unmeasured(name):
            shown = {time: seconds for time in LEARNED if (seconds := getattr(progress, time)) is not None}
            profile = replace(profile, **shown)
        batch_size = progress.batch_size or member.batch_size
        known = known_rates(profile, progress.epochs, batch_size, in_lockstep=self._in_lockstep)
        return replace(known, samples_per_epoch=profile.samples_per_epoch or progress.samples_per_epoch)

    def _rates_of(self, name: str) -> dict[int, float]:
        """Return the known rates of a member; if it was not profiled, also those of members of its shape."""
        own = usable_rates(self._known[name].rates)
        if not self._is_unmeasured(name):
            return own
        found: dict[int, list[float]] = defaultdict(list)
        for mate in self._alike[name]:
            if mate in self._known and self._is_unmeasured(mate):
                for gpus, rate in usable_rates(self._known[mate].rates).items():
                    found[gpus].append(rate)
        alone = self.fused_rates(name).get(1)
        rates = {gpus: statistics.median(rates) for gpus, rates in found.items()} | own
        # Members that have trained fused alone have shown no rate of their own.
        return rates or ({1: alone} if alone else {})

    def _reports_nothing(self, name: str) -> bool:
        """Return true if a member is a command of which nothing is known but when it began."""
        known = self._known[name]
        return bool(self._members[name].command) and not (
            usable_rates(known.rates) or known.samples or self._progress[name].epochs
        )

    def _ended_unreported(self, name: str) -> bool:
        progress = self._progress[name]
        return bool(progress.converged and progress.script_s) and self._reports_nothing(name)

    def _is_estimate(self, name: str) -> bool:
        known = self._known[name]
        return bool(self._whole[name].spread) or not (known.samples or known.samples_per_epoch)

    def _learn(self) -> bool:
        """Learn from all members about those not measured; return false if there is too little news."""
        facts = sum(
            len(usable_rates(known.rates)) + bool(known.samples_per_epoch) for known in self._known.values()
        )
        if MANY < facts < NEWS * self._facts:
            return False
        self._facts = facts
        tables = {name: self._rates_of(name) for name in self._known}
        planned = {name: usable_rates(profile.rates) for name, (_, profile) in self._replaced.items()}
        self._shapes = learned([*tables.values(), *planned.values()])
        levels = {name: self._level(name, table) for name, table in tables.items() if table}
        levels |= {f"planned {name}": self._level(name, table) for name, table in planned.items() if table}
        configs = self._configs | {f"planned {name}": config for name, (config, _) in self._replaced.items()}
        if len(levels) < len(configs):
            self._levels = estimated_levels(configs, levels)
        epochs = [known.samples_per_epoch for known in self._known.values() if known.samples_per_epoch]
        self._epoch = round(statistics.median(epochs)) if epochs else USUAL_EPOCH
        return True

    def _level(self, name: str, table: Mapping[int, float]) -> float:
        """Return the rate of a GPU of a member's least number, by known rates."""
        least = self._members[name].min_gpus
        return rate_curve(table, least, least, self._shapes).rates[least] / least

    def _workload(self, name: str) -> Workload | None:
        """Return an active member; None for any other."""
        member, progress = self._members[name], self._progress[name]
        if not progress.active:
            return None
        known = self._known[name]
        notes: tuple[str, ...] = ()
        if known.samples is None and not known.samples_per_epoch:
            known = replace(known, samples_per_epoch=self._epoch)
            notes = (f"{self._epoch:,} samples of an epoch are a guess",)
        if name not in self._whole:
            self._whole[name] = self._untrained(member, known)
        whole = self._whole[name]
        left, remarks = _samples_left(member, known, progress, self._forecast.epochs.get(name))
        if self._scripts_s and self._reports_nothing(name):
            script_s = statistics.median(self._scripts_s.values())
            # Its rate is a guess, so that its samples only stand for this time.
            left = max(script_s - progress.script_s, 0.1 * script_s) * whole.least_rate
            notes, remarks = (), (f"as long as commands that have ended: {script_s:.0f} s",)
        # For a member that was never restarted, the last restarts of other members are used.
        restarts_s = progress.restarts_s or self._restarts_s
        restart_s = statistics.median(restarts_s) if restarts_s else None
        times: dict[str, Any] = {}
        if self._is_unmeasured(name):
            # Where training has shown none of this member yet, those that it has shown of others.
            times = {
                time: statistics.median(newest)
                for time, newest in self._times_s.items()
                if newest and not getattr(known, time)
            }
            if restart_s is None:
                restart_s = RESTART_SHARE * times.get("startup_s", whole.startup_s)
        return replace(
            whole,
            samples_left=left,
            notes=whole.notes + notes + remarks,
            restart_s=restart_s,
            fuses=self._shape_to_fuse(name),
            fused=self.fused_rates(name),
            **times,
        )

    def _untrained(self, member: Member, known: MemberProfile) -> Workload:
        """Return a member with the rates known so far, before its remaining work is determined."""
        # Without any left, it trains as ever, and fails.
        least, limit = self._gpus_left(member.name) or (member.min_gpus, member.min_gpus)
        points, level, shape = self._rates_of(member.name), 0.0, self._digests[member.name]
        notes: tuple[str, ...] = ()
        if not points:
            estimate = self._levels.get(member.name, Level(*USUAL_LEVEL))
            points, level = {least: math.exp(estimate.log) * least}, estimate.spread
            notes = ("rates are a guess",)
        curve = rate_curve(points, limit, least, self._shapes)
        rates = curve.useful if known.rates_by_type else curve.promising
        return Workload(
            name=member.name,
            rates=rates,
            # Each of several types has its own curve, and these rates would count for any of them.
            spread={}
            if known.rates_by_type
            else {m: error for m in rates if (error := math.hypot(level, curve.spread.get(m, 0.0)))},
            rates_by_type=self._rates_by_type(member.name, points),
            samples_left=0.0,
            samples_per_epoch=known.samples_per_epoch,
            startup_s=known.startup_s,
            evaluate_s=known.evaluate_s,
            checkpoint_s=known.checkpoint_s,
            epoch_s=known.epoch_s,
            # A checkpoint that training has shown was written beside it.
            save_s=0.0 if self._is_unmeasured(member.name) else _save_s(member, known, curve.rates),
            notes=(*notes, *curve.notes),
            family=self._alike[member.name][0] if self._is_unmeasured(member.name) else "",
            busy=self._busy_of(member.name, rates[min(rates)]) if self.may_share(member.name) else 1.0,
            memory=self._terms.memory_of(
                known.peak_memory_bytes or self._peaks.get((shape, self._progress[member.name].batch_size), 0)
            ),
            shape=shape,
            slowed=self._slowed(shape),
        )

    def _note_peaks(self, changed: Mapping[str, Progress]) -> list[str]:
        """Note peaks of memory; return the members who have told a larger one than their shape had."""
        larger = []
        for name, progress in changed.items():
            key = self._digests[name], progress.batch_size
            if progress.peak_memory_bytes > self._peaks.get(key, 0):
                self._peaks[key] = progress.peak_memory_bytes
                larger.append(name)
        return larger

    def _see_together(self, names: Iterable[str]) -> Iterator[str]:
        """Note how much slower members are beside others; yield those for whom that counts."""
        for name in names if self._terms.most > 1 else ():
            for timed in EpochHistory.of(self._progress[name].epochs).timed:
                group = (name, *(mate for mate in timed.beside if mate in self._progress))
                rates = {one: self._rates_of(one).get(1, 0.0) for one in group}
                if group in self._seen_together or len(group) == 1 or not all(rates.values()):
                    continue
                self._seen_together.add(group)
                expected = rates[name] / slowdown(self._busy_of(*one) for one in rates.items())
                for mate in group[1:]:
                    first, last = sorted((self._digests[name], self._digests[mate]))
                    self._together[first, last].append(math.log(expected / timed.rate))
                yield from (mate for one in group for mate in self._alike[one] if mate in self._progress)

    def _slowed(self, shape: str) -> dict[str, Slowed]:
        """Return how much slower members of a shape are beside others than the busy shares say."""
        found = {
            pair[pair[0] == shape]: slowed_by(seen) for pair, seen in self._together.items() if shape in pair
        }
        return found and {"": slowed_by([math.log(one.factor) for one in found.values()], DOUBT), **found}

    def _busy_of(self, name: str, rate: float) -> float:
        """Return the busy share of a member, as measured or as seen of it or of members of its shape."""
        profile = self._profiles.get(name)
        if profile and profile.busy is not None:
            return self._terms.busy_of(profile.busy)
        # The time of the device for a sample is the same at any rate.
        seen = (t.busy / t.rate * rate for t in self._timed(name) if t.busy is not None and t.gpus == 1)
        busy = next(seen, None)
        return self._terms.busy_of(busy and min(busy, 1.0))

    def _timed(self, name: str) -> Iterator[TimedRate]:
        """Yield the newest timed rates of a member with its present batch, then those of its shape."""
        size = self._progress[name].batch_size or self._members[name].batch_size
        for mate in dict.fromkeys((name, *self._alike[name])):
            if mate in self._progress:
                timed = EpochHistory.of(self._progress[mate].epochs).timed
                yield from (one for one in timed if one.batch_size == size)

    def fused_rates(self, name: str, gpu_type: str | None = None) -> dict[int, float]:
        """Return rates of several members of its shape together, by their number.

        Parameters
        ----------
        gpu_type : str or None
            Type of GPU as in `Progress`; None: the type on which they gain most.
        """
        by_type = defaultdict[str, dict[int, float]](dict)
        for kind, members, rate in self._fused.get(self._digests[name], ()):
            by_type[kind][members] = rate
        return max(by_type.values(), key=_best_gain, default={}) if gpu_type is None else by_type[gpu_type]

    def _note_fused(self, known: Mapping[str, MemberProfile | Progress]) -> list[str]:
        """Note the rates of fused members; return the members who have told new ones."""
        told = {
            name: one.fused_rates
            for name, one in known.items()
            # What it has told before may be older than what others of its shape have told since.
            if one.fused_rates
            and name in self._digests
            and not ((before := self._progress.get(name)) and before.fused_rates == one.fused_rates)
        }
        for name, rates in told.items():
            digest = self._digests[name]
            self._fused[digest] = with_fused(self._fused.get(digest, ()), rates)
        return list(told)

    def _shape_to_fuse(self, name: str) -> str:
        """Return the shape of a member that may train fused with others; empty if it is known not to gain."""
        member = self._members[name]
        key = name, self._progress[name].batch_size or member.batch_size
        if key not in self._shapes_to_fuse:
            self._shapes_to_fuse[key] = self._fuses(replace(member, batch_size=key[1])) or ""
        gains = may_gain(self._fused.get(self._digests[name], ()))
        return self._shapes_to_fuse[key] if gains else ""

    def _rates_by_type(self, name: str, points: Mapping[int, float]) -> dict[str, Mapping[int, float]]:
        """Return the rates of types that were measured, or on which memory was not enough everywhere."""
        known = self._known[name].rates_by_type
        found = dict[str, Mapping[int, float]]()
        for gpu_type in dict.fromkeys((*known, *(of for of, _ in sorted(self._unfit(name)) if of))):
            least, limit = self._gpus_left(name, gpu_type) or (self._members[name].min_gpus,) * 2
            found[gpu_type] = rate_curve(known.get(gpu_type, points), limit, least, self._shapes).useful
        return found


def active_workloads(
    ensemble: Ensemble,
    profiles: Mapping[str, MemberProfile],
    progress: Mapping[str, Progress],
    max_gpus: int,
    *,
    in_lockstep: bool = False,
    terms: GpuTerms = NO_SHARING,
    fuses: Fuses = lambda _: None,
) -> tuple[Workload, ...]:
    """Return the active members in the ensemble's order, each with its rates and its remaining work.

    Rates observed in training take precedence over profiled ones, in lockstep only where they are higher. A
    rate curve begins at the member's `min_gpus`. It ends at its `max_gpus`, at the size of the cluster, or
    at the number of GPUs that is expected to be the fastest, whichever is least. Rates that were not measured
    are estimates with a spread.
    """
    workloads = Workloads(ensemble, profiles, max_gpus, in_lockstep=in_lockstep, terms=terms, fuses=fuses)
    workloads.update({m.name: progress.get(m.name, Progress(m.name)) for m in ensemble.members})
    return tuple(workloads.left.values())


def _best_gain(rates: Mapping[int, float]) -> float:
    """Return how much faster the best number of fused members is than the least one."""
    return max(rates.values()) / rates[min(rates)]


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


def gpus_left(
    least: int, most: int, unfit: Collection[int], fitting: Collection[int]
) -> tuple[int, int] | None:
    """Return the least and the largest number of GPUs on which a member may train; None if none is left.

    Where its memory was enough on fewer GPUs, it may try half of those on which it was not. Else a GPU's part
    has to be smaller, and it may try twice as many. It so takes few starts to find a number that fits.

    Parameters
    ----------
    least, most : int
        Numbers of GPUs that it may have otherwise.
    unfit, fitting : collection of int
        Numbers of GPUs on which its memory was not enough, and was enough.
    """
    for gpus in sorted({*unfit}.difference(fitting)):
        fewer = [count for count in fitting if least <= count < gpus]
        more = [count for count in fitting if gpus < count <= most]
        if fewer:
            most = min(most, max(gpus // 2, *fewer))
        elif least <= gpus:
            least = max(gpus + 1, min(2 * gpus, most, *more))
    return (least, most) if least <= most else None
