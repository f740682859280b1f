"""Interface of every planner: from free GPUs, and the members that wait for them, to a decision."""

from __future__ import annotations

import difflib
import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import fields, replace
from functools import cached_property
from typing import Any, Literal

from hetctl.model.errors import BadInputError
from hetctl.model.plan import (
    DATA_PARALLEL,
    HOP_SCHEDULERS,
    PIPELINE_POLICIES,
    PS_PLACEMENTS,
    Allocation,
    Placement,
)
from hetctl.model.site import MOST_PER_GPU, Node
from hetctl.model.training_settings import AUTO, BALANCE_MODES
from hetctl.model.values import dataclass
from hetctl.model.workload import Workload
from hetctl.perf.bounds import Backlog


class WaitingQueue(list[Workload]):
    """Workloads sorted by a key, equal ones by their first arrival.

    Thousands of members take thousands of decisions, so no decision may look at every member that waits.

    Attributes
    ----------
    by_name : dict of str to Workload
        The workloads by name.
    largest_min_gpus : int
        Number of GPUs that is enough for each of them.
    guesses : int
        Number of those without any known rate.
    """

    def __init__(self, key: Callable[[Workload], Any], workloads: Iterable[Workload] = ()) -> None:
        super().__init__()
        self.by_name: dict[str, Workload] = {}
        self.largest_min_gpus = self.guesses = 0
        self._key = key
        self._numbers: dict[str, int] = {}
        self._interruptions_s: list[float] = []
        self._backlog: Backlog | None = None
        for workload in workloads:
            self.add(workload)

    @property
    def interruption_s(self) -> float:
        """Seconds that the costliest interruption of one of them takes."""
        return self._interruptions_s[-1] if self._interruptions_s else 0.0

    def add(self, workload: Workload) -> None:
        """Insert a workload in order."""
        # A member that comes back keeps its first number, and so its place before later arrivals.
        number = self._numbers.setdefault(workload.name, len(self._numbers))
        insort(self, workload, key=self._place)
        self.by_name[workload.name] = workload
        self.guesses += workload.is_guess
        insort(self._interruptions_s, workload.interruption_s)
        if workload.min_gpus > self.largest_min_gpus:
            # It may be too wide for the cluster: only a new backlog tells.
            self.largest_min_gpus, self._backlog = workload.min_gpus, None
        if self._backlog:
            self._backlog.add(number, workload)

    def drop(self, name: str) -> None:
        """Remove the workload of that name."""
        workload, number = self.by_name.pop(name), self._numbers[name]
        del self[bisect_left(self, self._place(workload), key=self._place)]
        self.guesses -= workload.is_guess
        del self._interruptions_s[bisect_left(self._interruptions_s, workload.interruption_s)]
        if self._backlog:
            self._backlog.remove(number, workload)

    def _place(self, workload: Workload) -> tuple[Any, int]:
        return self._key(workload), self._numbers[workload.name]

    def without(self, names: Set[str]) -> Sequence[Workload]:
        """Return the workloads except those of `names`."""
        return [workload for workload in self if workload.name not in names] if names else self

    def backlog(self, gpus: int) -> Backlog:
        """Return the workloads by the time that each takes on up to `gpus` GPUs."""
        if self._backlog is None or self._backlog.gpus != gpus:
            self._backlog = Backlog(gpus)
            for workload in self:
                self._backlog.add(self._numbers[workload.name], workload)
        return self._backlog


MAKESPAN, MEAN_JCT = "makespan", "mean-jct"
OBJECTIVES = (MAKESPAN, MEAN_JCT)


@dataclass(frozen=True)
class Options:
    """Options that a user may set; each planner reads those that it supports.

    Parameters
    ----------
    delta : float or None
        Largest difference of rates in a flotilla, in samples/s (FLEET, Equation 3).
    relative_delta : float
        The same as a share of the fastest member's rate on one GPU; used if `delta` is None. The
        paper's 20 images/s are about this share of its fastest member's 176.
    alpha : float
        Share of active GPUs below which a flotilla stops.
    max_permutations : int
        Largest number of orders that packing tries.
    objective : str
        ``makespan``: an early end of the last member; ``mean-jct``: a small mean completion time.
    solver_time_limit_s : float
        Search time in seconds for a whole plan, for planners that search.
    exploration : str
        ``shared`` if the members of a family explore their rates together, ``each`` otherwise.
    mix_types : bool
        True if a member may have GPUs of several types at once.
    balance : str
        Mode of balanced batches, as in `BalanceSettings`. Unless it is ``off``, batches on several types of
        GPU are sized for equal times, and the rates of the types add up; else the slowest type sets the pace.
    hop_scheduler : str
        Scheduler of members that hop.
    policy : str
        Policy by which the GPUs of a pipeline form virtual workers.
    clock_distance : int
        Waves by which a virtual worker may be ahead of the slowest, D.
    ps_placement : str
        Placement of layers on parameter servers.
    in_flight : int or None
        Minibatches of a virtual worker in flight, N_m; None: the best number.
    max_per_gpu : int
        Largest number of members on one GPU, each in a process of its own.
    fuse : bool
        True if waiting members of one shape may train fused with others on a GPU; no plan predicts it.
    """

    delta: float | None = None
    relative_delta: float = 0.12
    alpha: float = 0.8
    max_permutations: int = 1024
    seed: int = 0
    objective: str = MAKESPAN
    solver_time_limit_s: float = 2.0
    exploration: str = "shared"
    mix_types: bool = False
    balance: str = AUTO
    hop_scheduler: str = HOP_SCHEDULERS[0]
    policy: str = PIPELINE_POLICIES[-1]
    clock_distance: int = 0
    ps_placement: str = PS_PLACEMENTS[0]
    in_flight: int | None = None
    max_per_gpu: int = 1
    fuse: bool = False


@dataclass(frozen=True)
class RunningMember:
    """Member in training.

    Parameters
    ----------
    workload : Workload
        The member as it is now: `startup_s` is the time of a new start.
    since_s : float
        Time since which it has held these GPUs, in seconds.
    fixed : bool
        True if it can be neither stopped nor moved.
    """

    workload: Workload
    allocation: Allocation
    since_s: float
    fixed: bool = False


@dataclass(frozen=True)
class Request:
    """Input of one call of a planner.

    Parameters
    ----------
    workloads : sequence of Workload
        Members that hold no GPU now and need training, in the planner's order (`Planner.order`). Each has
        rates for all numbers of GPUs from its least up.
    nodes : tuple of Node
        Nodes with their free GPUs only.
    gpus : int
        GPUs of the whole cluster, M in the papers.
    held : tuple of RunningMember
        Members in training; empty except in the elastic paradigm.
    cluster : tuple of Node
        Nodes with all their GPUs, free or not; empty means that `nodes` is all there is.
    now_s : float
        Time since the start of the run, in seconds.
    planner_state : Any
        State returned with the planner's last decision; None in the first call, and possibly after an
        interruption of the run.
    """

    workloads: Sequence[Workload]
    nodes: tuple[Node, ...]
    gpus: int
    round_index: int
    options: Options
    held: tuple[RunningMember, ...] = ()
    cluster: tuple[Node, ...] = ()
    now_s: float = 0.0
    planner_state: Any = None

    @cached_property
    def waiting(self) -> WaitingQueue:
        """The workloads as a queue, which answers questions about all of them."""
        own = self.workloads
        return own if isinstance(own, WaitingQueue) else WaitingQueue(lambda _: 0, own)

    @property
    def free_gpus(self) -> int:
        """Number of free GPUs on all nodes."""
        return sum(len(node.gpus) for node in self.nodes)

    @property
    def all_nodes(self) -> tuple[Node, ...]:
        """Nodes with all their GPUs."""
        return self.cluster or self.nodes


@dataclass(frozen=True)
class Decision:
    """Output of one call of a planner.

    Parameters
    ----------
    start : tuple of Allocation
        Members with the GPUs that they get. A held member is stopped first, then resized or moved. GPUs of
        stopped members may go to others in the same decision.
    stop : tuple of str
        Members in training that lose their GPUs and wait.
    replan_at_s : float or None
        Time in seconds of the next call if no event comes before.
    planner_state : Any
        State to keep until the next request, of JSON types.
    """

    start: tuple[Allocation, ...] = ()
    stop: tuple[str, ...] = ()
    replan_at_s: float | None = None
    planner_state: Any = None


def allocations_after(request: Request, decision: Decision) -> dict[str, Allocation]:
    """Return the allocation of each member with GPUs after a decision is carried out."""
    held = {h.workload.name: h.allocation for h in request.held if h.workload.name not in decision.stop}
    return held | {allocation.member: allocation for allocation in decision.start}


def gpus_after(request: Request, decision: Decision) -> dict[str, int]:
    """Return the GPUs by member after a decision is carried out."""
    return {name: given.gpus for name, given in allocations_after(request, decision).items()}


def allocation_on(workload: Workload, placement: tuple[Placement, ...]) -> Allocation:
    """Return the allocation of a member on all GPUs of a placement."""
    gpus = sum(len(part.gpus) for part in placement)
    return Allocation(workload.name, gpus, DATA_PARALLEL, workload.rates[gpus], placement)


def single_s(workload: Workload) -> float:
    """Return the GPU-seconds of the remaining work on the fewest GPUs, to compare different members."""
    return workload.samples_left / workload.gpu_rate


@dataclass(frozen=True)
class Planner:
    """A published planning method, or one of hetctl's own.

    Parameters
    ----------
    paradigm : str
        ``global``: called when all GPUs are free; ``local``: called whenever some are (FLEET, section
        4.1); ``elastic``: called after any change, and may resize members in training.
    decide : callable
        Pure function; it starts a member if none trains, one waits and a GPU is free.
    trains_as_group : bool
        True if the members of a round train as a group on one data stream.
    order : callable
        Sort key of a workload for `Request.workloads`; equal ones, by default all, keep the order
        of arrival.
    reasons : callable
        Function that returns why each member got its GPUs, or why it waits.
    alpha : float or None
        Share of active GPUs below which a group stops; None means `Options.alpha`.
    """

    name: str
    paradigm: Literal["global", "local", "elastic"]
    decide: Callable[[Request], Decision]
    trains_as_group: bool = False
    order: Callable[[Workload, Options], Any] = lambda _workload, _options: 0
    reasons: Callable[[Request, Decision], Mapping[str, str]] = lambda _request, _decision: {}
    alpha: float | None = None

    def stop_share(self, options: Options) -> float:
        """Return the share of its GPUs below which a round stops; 0 if members do not train as a group."""
        share = options.alpha if self.alpha is None else self.alpha
        return share if self.trains_as_group else 0.0


def plan_fitting(
    planner: Planner, request: Request, fits: Callable[[Allocation], bool]
) -> tuple[Decision, tuple[str, ...]]:
    """Call a planner until all that it starts fits; return the decision and the members left out.

    Near the wall-clock limit a member may get too few GPUs to finish its next epoch. The later half of
    such members is left out, and the planner is called again to give the GPUs to others. The last ones
    are left out one by one, so that a member that fits on all GPUs stays in. A member in training that
    would not fit elsewhere stays where it is.
    """
    left_out = set[str]()
    while True:
        decision = planner.decide(request)
        # Each call leaves out one member at least, so the loop ends.
        unfit = [allocation.member for allocation in decision.start if not fits(allocation)]
        if not unfit:
            return decision, tuple(sorted(left_out))
        left_out.update(unfit[len(unfit) // 2 :])
        request = replace(
            request,
            workloads=tuple(c for c in request.workloads if c.name not in left_out),
            held=tuple(replace(h, fixed=h.fixed or h.workload.name in left_out) for h in request.held),
        )


def options_from(values: Mapping[str, Any]) -> Options:
    """Return checked user options; missing ones take their defaults.

    Raises
    ------
    BadInputError
        On an unknown name, a wrong type or a value out of range.
    """
    for name, value in values.items():
        if name not in _RULES:
            raise BadInputError(f"unknown planner option {name!r}", hint=nearest(name, _RULES))
        holds, rule = _RULES[name]
        if not holds(value):
            raise BadInputError(f"planner option {name} is {value!r}, but must be {rule}")
    return Options(**values)


def nearest(name: str, known: Mapping[str, Any]) -> str:
    """Return a hint with the nearest known word, or with all of them if none is near."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"one of: {', '.join(known)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "delta": (lambda v: v is None or (_is_number(v) and v > 0), "a number of samples/s above 0"),
    "relative_delta": (lambda v: _is_number(v) and v > 0, "a number above 0"),
    "alpha": (lambda v: _is_number(v) and 0 <= v <= 1, "a number from 0 to 1"),
    "max_permutations": (lambda v: _is_whole(v) and v >= 1, "a whole number, at least 1"),
    "seed": (_is_whole, "a whole number"),
    "objective": (lambda v: v in OBJECTIVES, f"one of: {', '.join(OBJECTIVES)}"),
    "solver_time_limit_s": (lambda v: _is_number(v) and v > 0, "a number of seconds above 0"),
    "exploration": (lambda v: v in ("shared", "each"), "shared or each"),
    "mix_types": (lambda v: isinstance(v, bool), "true or false"),
    "balance": (lambda v: v in BALANCE_MODES, f"one of: {', '.join(BALANCE_MODES)}"),
    "fuse": (lambda v: isinstance(v, bool), "true or false"),
    "hop_scheduler": (lambda v: v in HOP_SCHEDULERS, f"one of: {', '.join(HOP_SCHEDULERS)}"),
    "policy": (lambda v: v in PIPELINE_POLICIES, f"one of: {', '.join(PIPELINE_POLICIES)}"),
    "clock_distance": (lambda v: _is_whole(v) and v >= 0, "a whole number, at least 0"),
    "ps_placement": (lambda v: v in PS_PLACEMENTS, f"one of: {', '.join(PS_PLACEMENTS)}"),
    "in_flight": (lambda v: v is None or (_is_whole(v) and v >= 1), "a whole number, at least 1"),
    "max_per_gpu": (lambda v: _is_whole(v) and 1 <= v <= MOST_PER_GPU, f"a number from 1 to {MOST_PER_GPU}"),
}
assert set(_RULES) == {field.name for field in fields(Options)}
