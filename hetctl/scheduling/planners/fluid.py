"""hetctl's own method: the fluid optimum in whole GPUs; a member is resized only if that is worth its cost.

If GPUs could be split and resizing were free, every member would train at the constant rate W_i / T
on its concave envelope, and all would be done at the fluid bound T (`perf/bounds.py`). Between
two corners of the envelope that rate is a mixture of two whole numbers of GPUs: the smaller for some of
the time left, the larger for the rest of it (its `share`). As in McNaughton's wrap-around rule, the
time at which a member has its share does not matter, so each has it in one piece: a member that has
begun it continues, and one that cannot wait any longer replaces the one that can wait longest. All is
computed again after each change from the work then left, so a member catches up with any lag.

With `Options.max_per_gpu` above 1 members on one GPU share it: the optimum then divides the time of the
devices, and `planners/sharing.py` says who sits with whom.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from heapq import merge
from statistics import NormalDist

from hetctl.model.values import dataclass
from hetctl.model.workload import Workload
from hetctl.perf.bounds import Envelope, WaitingMember, envelope_of, fluid_time
from hetctl.scheduling.planners import mean_jct
from hetctl.scheduling.planners.base import MEAN_JCT, Decision, Planner, Request, RunningMember, gpus_after
from hetctl.scheduling.planners.sharing import SharedCapacity, Sitter, place_shared, seats_of

URGENT = 0.999
"""Part of the time left: a member whose share takes more of it cannot wait."""
STAY = 0.3
"""Part of the time left by which a waiting member's share must be above that of one on a shared GPU to take
its place. Once it is late nobody may slow it down, and few sets of such members fill a GPU."""
PATIENCE = 10
"""Number of interruptions that must fit into the time left; otherwise no member is stopped."""
TRIAL_S, MOST_TRIALS = 5.0, 0.02
"""Seconds in which a member shows its rate and its busy share, and the part of the time left up to which all
members are tried first, where they may share GPUs: who is not known sits with nobody."""
LEAST_SHARE_S = 1.0
"""Smallest share in seconds for which a member gets more GPUs."""


@dataclass
class FluidCandidate:
    """A member and its part in the fluid optimum.

    Parameters
    ----------
    holds : int
        GPUs that it holds now.
    fixed : bool
        True if it can be neither stopped nor moved.
    low, high : int
        Corners of its envelope between which it has to train, in GPUs.
    share_s : float
        Seconds of the time left for which it needs `high` GPUs and not just `low`, its restarts
        included; more than the time left if it is late.
    gpus : int
        GPUs chosen for it now.
    number : int
        Its place in the order of arrival, if it waits.
    slack : float
        Factor by which it may be slowed down and still have its share.
    """

    workload: Workload
    envelope: Envelope
    holds: int = 0
    fixed: bool = False
    low: int = 0
    high: int = 1
    share_s: float = 0.0
    gpus: int = 0
    number: int = -1
    slack: float = 1.0

    @property
    def sitter(self) -> Sitter:
        """The member as it may share a GPU."""
        return Sitter(self.workload, self.slack, self.fixed)

    @property
    def start_s(self) -> float:
        """Seconds without training if it gets other GPUs now."""
        return self.workload.interruption_s if self.holds else self.workload.startup_s

    def seconds_on(self, gpus: int) -> float:
        """Return the seconds of the work left on `gpus` GPUs, without start-up."""
        rates = self.workload.rates
        # Its present GPUs may have turned out to be more than it can use.
        return self.workload.samples_left / rates.get(gpus, rates[min(gpus, self.workload.max_gpus)])

    def grow(self, capacity: SharedCapacity, gpus: int) -> None:
        """Increase its GPUs up to `gpus`, as far as there is room; it never gets some but too few."""
        for count in range(gpus, max(self.gpus, self.workload.min_gpus - 1), -1):
            if capacity.change(self.sitter, self.gpus, count):
                self.gpus = count
                return


def decide(request: Request) -> Decision:
    """Give every member its lower corner, then the upper one to as many as fit.

    This is for the makespan; for the mean completion time see `scheduling/planners/mean_jct.py`.
    """
    if request.options.objective == MEAN_JCT:
        return mean_jct.decide(request)
    jobs, others, time_s = _candidates(request)
    held = {name: (seat.node, seat.gpus[0]) for name, seat in seats_of(request.held).items()}
    capacity = SharedCapacity(request.all_nodes, request.options.max_per_gpu, held)
    jobs = choose(jobs, others, capacity, time_s)
    capacity.spread()
    jobs.sort(key=lambda job: job.number)
    sitters = {sitter.workload.name for one in capacity.shared for sitter in one.sitters}
    counts = {job.workload.name: job.gpus for job in jobs if job.workload.name not in sitters}
    decision, given = place_shared(request, counts, capacity.shared)
    for job in jobs:
        job.gpus = given.get(job.workload.name, 0)
    # Changes that follow one another faster than restarts would cost more than they gain.
    spacing_s = 2 * max([request.waiting.interruption_s, *(h.workload.interruption_s for h in request.held)])
    replan_at_s = _next_change(jobs, request.now_s, time_s, spacing_s)
    return replace(decision, replan_at_s=replan_at_s, planner_state=request.now_s + time_s)


def _candidates(request: Request) -> tuple[list[FluidCandidate], Iterator[FluidCandidate], float]:
    """Return members that train or cannot wait; all others, the largest share first; the fluid bound."""
    backlog = request.waiting.backlog(request.gpus)
    tried = {name: rates_once_tried(workload) for name, workload in explorers(request.held).items()}
    held = [
        FluidCandidate(
            h.workload,
            envelope_of(tried.get(h.workload.name, h.workload.rates), request.gpus, h.workload.gpu_share),
            h.allocation.gpus,
            h.fixed,
        )
        for h in request.held
    ]
    works = [(job.workload.samples_left, job.envelope) for job in held if job.workload.samples_left > 0]
    # The remaining time by the last decision is near the present one.
    near_s = request.planner_state - request.now_s if request.planner_state is not None else 0.0
    time_s = fluid_time(works, request.gpus, near_s, backlog)

    interruption_s = max((h.workload.interruption_s for h in request.held), default=0.0)
    shares = request.options.max_per_gpu > 1
    trials_s = request.waiting.guesses * (interruption_s + TRIAL_S) / request.gpus
    tries_all = shares and trials_s < MOST_TRIALS * time_s

    def waits(one: WaitingMember) -> FluidCandidate:
        job = _mixed(FluidCandidate(one.workload, one.envelope, number=-one.place), time_s)
        # Its rate is known seconds after it begins, for which another member has to stop.
        late = excess_s(one.workload, time_s) > interruption_s / request.gpus
        if late or (tries_all and one.workload.is_guess):
            job.share_s = math.inf
        return job

    # The backlog is in order of expected times, and a guess may take much longer.
    urgent_s = 0.0 if request.waiting.guesses else URGENT * time_s
    jobs = [*(_mixed(job, time_s) for job in held), *map(waits, backlog.longer_than(urgent_s))]
    for job in jobs if shares else ():
        if job.holds and job.workload.is_guess:
            # It is being tried.
            job.share_s = math.inf
    jobs.sort(key=lambda job: job.number)
    return jobs, map(waits, backlog.others(urgent_s)), time_s


def excess_s(workload: Workload, time_s: float) -> float:
    """Return the expected seconds by which a member without any known rate takes longer than the time left.

    That is what it can cost to learn of it late. Its time has a log-normal distribution; all others return 0.
    """
    if not workload.is_guess or not time_s:
        return 0.0
    median_s = workload.samples_left / workload.least_rate
    return expected_excess(median_s, workload.spread[workload.min_gpus], time_s)


def explorers(held: Iterable[RunningMember]) -> dict[str, Workload]:
    """Return by name the members that may try numbers of GPUs for what that tells: of a family one at a time.

    That is the one that does so already, else the one with the most work left.
    """
    unsure = (h for h in held if h.workload.spread)
    last = sorted(
        unsure, key=lambda h: (h.workload.spread.get(h.allocation.gpus, 0.0), h.workload.samples_left)
    )
    of_families = {h.workload.family or h.workload.name: h.workload for h in last}
    return {workload.name: workload for workload in of_families.values()}


def rates_once_tried(workload: Workload) -> Mapping[int, float]:
    """Return the rates, on numbers of GPUs that are worth a trial those to expect after it.

    A number of GPUs that turns out to be slower costs two restarts and no more, since the member goes back.
    So after the trial it has the faster of two rates, whose mean is above both means (`expected_excess`). It
    counts if it saves this member more seconds than the expected restarts take.
    """
    found, best = dict[int, float](), 0.0
    for gpus, rate in workload.rates.items():
        spread = workload.spread.get(gpus)
        if not spread:
            best = max(best, rate)
        elif best:
            tried = best + expected_excess(rate, spread, best)
            saved_s = workload.samples_left * (1 / max(best, rate) - 1 / tried)
            restarts = 1 + NormalDist(math.log(rate), spread).cdf(math.log(best))
            if saved_s > restarts * workload.interruption_s:
                found[gpus] = tried
    # Envelopes are cached by the identity of their rates.
    return {**workload.rates, **found} if found else workload.rates


def expected_excess(median: float, spread: float, limit: float) -> float:
    """Return the mean of what a variable with a log-normal distribution is above a limit, and 0 below it."""
    at, normal = math.log(max(median, 1e-9) / limit) / spread, NormalDist()
    return median * math.exp(spread**2 / 2) * normal.cdf(at + spread) - limit * normal.cdf(at)


def _mixed(job: FluidCandidate, time_s: float) -> FluidCandidate:
    """Solve slow * (time on `low`) + fast * (time on `high`) = work left, less the restarts."""
    left, curve, start_s = job.workload.samples_left, job.envelope, job.start_s
    at = curve.corner_above(left / time_s) if time_s else 1
    job.low, job.high = curve.gpus[at - 1], curve.gpus[at]
    slow, fast = curve.rates[at - 1], curve.rates[at]
    if job.holds == job.low:
        # At its lower corner a member restarts only for its share, when it moves to `high`.
        work = left - slow * time_s + fast * start_s
    else:
        # Any other member restarts now, which takes time from `low`.
        work = left - slow * max(time_s - start_s, 0.0)
    job.share_s = work / (fast - slow)
    if job.high == 1:
        job.slack = time_s / job.share_s if job.share_s > 0 else math.inf
    return job


def choose(
    jobs: list[FluidCandidate], others: Iterator[FluidCandidate], capacity: SharedCapacity, time_s: float
) -> list[FluidCandidate]:
    """Set the GPUs of each job, as far as they fit on the nodes together; return those considered.

    Parameters
    ----------
    others : iterator of FluidCandidate
        Jobs that wait and can wait longer, the largest share first, considered up to the first without a
        GPU.
    """
    fixed = [job for job in jobs if job.fixed]
    for job in fixed:
        job.slack = math.inf
        job.grow(capacity, job.holds)
    free = [job for job in jobs if not job.fixed]

    def considered() -> Iterator[FluidCandidate]:
        for job in others:
            free.append(job)
            yield job

    interruption_s = max((job.workload.interruption_s for job in free if job.holds), default=0.0)
    if time_s > PATIENCE * interruption_s:
        _follow_the_optimum(free, considered(), capacity, time_s)
    else:
        _finish(free, considered(), capacity)
    return fixed + free


def _follow_the_optimum(
    jobs: list[FluidCandidate], others: Iterator[FluidCandidate], capacity: SharedCapacity, time_s: float
) -> None:
    def urgency(job: FluidCandidate) -> tuple[bool, bool, float]:
        stays = job.holds == job.high
        if job.high == 1 and job.workload.busy < 1:
            return job.share_s < URGENT * time_s, True, -job.share_s - stays * STAY * time_s
        return job.share_s < URGENT * time_s, not stays, -job.share_s

    for job in sorted(jobs, key=lambda job: (job.holds != job.low, -job.low)):
        job.grow(capacity, job.low)
    for job in merge(sorted(jobs, key=urgency), others, key=urgency):
        if capacity.is_full:
            break
        if (job.share_s > LEAST_SHARE_S or not job.gpus) and capacity.change(job.sitter, job.gpus, job.high):
            job.gpus = job.high
    capacity.may_move = False
    for job in sorted(jobs, key=_by_share):
        job.grow(capacity, job.high if job.share_s > LEAST_SHARE_S or not job.gpus else job.holds)
    capacity.balance(time_s)


def _finish(jobs: list[FluidCandidate], others: Iterator[FluidCandidate], capacity: SharedCapacity) -> None:
    """Start waiting members, the longest first, and grow the last ones if that gains; stop none."""
    capacity.may_move = False
    for job in jobs:
        if job.holds:
            job.slack = math.inf
        job.grow(capacity, job.holds)
    for job in merge(sorted(jobs, key=_by_share), others, key=_by_share):
        if capacity.is_full:
            break
        if not job.gpus:
            job.grow(capacity, job.high)
    for job in sorted(jobs, key=lambda job: -job.seconds_on(job.gpus or job.workload.min_gpus)):
        most = min(job.gpus + capacity.left, job.envelope.gpus[-1])
        if job.holds and most > job.gpus and job.start_s + job.seconds_on(most) < job.seconds_on(job.gpus):
            job.grow(capacity, most)


def _by_share(job: FluidCandidate) -> float:
    return -job.share_s


def _next_change(jobs: list[FluidCandidate], now_s: float, time_s: float, spacing_s: float) -> float | None:
    """Return the time when a member's share ends, or when it cannot wait for it any longer; None if never.

    A member without a lower corner ends with its share, which is an event of its own.
    """
    changes = [
        job.share_s if job.gpus == job.high else time_s - job.share_s
        for job in jobs
        if 0 < job.share_s < URGENT * time_s
        and not job.fixed
        and (job.gpus == job.low or (job.gpus == job.high and job.low))
    ]
    return now_s + max(min(changes), spacing_s, LEAST_SHARE_S) if changes else None


def reasons(request: Request, decision: Decision) -> Mapping[str, str]:
    """Return the rate that each member needs to end with all others, and the GPUs that give it."""
    if request.options.objective == MEAN_JCT:
        return mean_jct.reasons(request, decision)
    jobs, others, time_s = _candidates(request)
    gpus = gpus_after(request, decision)
    return {
        job.workload.name: _reason(job, gpus.get(job.workload.name, 0), time_s) for job in (*jobs, *others)
    }


def _reason(job: FluidCandidate, gpus: int, time_s: float) -> str:
    needed = job.workload.samples_left / time_s if time_s else 0.0
    share = min(max(job.share_s / time_s, 0.0), 1.0) if time_s else 0.0
    text = (
        f"needs {needed:.0f} samples/s to be done with all others in {time_s:.0f} s:"
        f" between {job.low} and {job.high} GPUs, {share:.0%} of the time on {job.high}"
    )
    if gpus == job.high:
        return text + "; has that share now"
    if gpus == 0:
        return text + "; can wait for it"
    return text + ("; has that share later" if gpus == job.low else f"; {gpus} is what fits on the nodes")


FLUID = Planner("fluid", "elastic", decide, reasons=reasons)
