"""Members on one GPU each that share it: who sits with whom, and in which seat.

The time of the device is what they share. As long as their busy shares add up to no more than 1, each trains
as fast as alone; beyond that, all are slowed down alike (`perf/sharing.py`). So a GPU with a sum of 1 or more
loses no time, and those who can wait may sit on one with more: what slows them down trains others. As long as
others want GPUs, those on the emptiest shared one move to others if there is room.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from operator import attrgetter, itemgetter

from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.site import Node
from hetctl.model.values import dataclass
from hetctl.model.workload import NOT_SLOWED, Slowed, Workload
from hetctl.perf.sharing import FULL, LEAST_BUSY, slowdown
from hetctl.scheduling.planners.base import Decision, Request, RunningMember
from hetctl.scheduling.planners.placement import NodeCapacity, place_members

BARELY = 1.05
"""Factor by which even a member that is late may be slowed down, as it catches up: else shared GPUs idle."""
MOST_COMPARED = 8
"""Number of shared GPUs that are tried when one is to be emptied, or to be filled."""
MOST_MISSES = 50
"""Number of members in a row without room after which no other one is tried: thousands may wait."""
Gpu = tuple[str, int]
"""Name of a node, and number of one of its GPUs."""


@dataclass(frozen=True, eq=False)
class Sitter:
    """A member that is to sit on a GPU.

    Parameters
    ----------
    slack : float
        Factor by which it may be slowed down and still be done with all others; 1 or less if it is late.
    fixed : bool
        True if it can be neither stopped nor moved.
    """

    workload: Workload
    slack: float
    fixed: bool = False


@dataclass(eq=False)
class SharedGpu:
    """A GPU with the members that are to sit on it.

    Parameters
    ----------
    gpu : Gpu or None
        The GPU that some of them hold; None: any.
    """

    gpu: Gpu | None
    sitters: list[Sitter] = field(default_factory=list)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the members."""
        return tuple(sitter.workload.name for sitter in self.sitters)

    @property
    def busy(self) -> float:
        """Sum of the busy shares."""
        return sum(sitter.workload.busy for sitter in self.sitters)

    def slowdown_with(self, *more: Sitter) -> float:
        """Return the factor by which all are slowed down if more sit here."""
        return slowdown(sitter.workload.busy for sitter in (*self.sitters, *more))

    def admits(self, sitter: Sitter, limit: int, *, is_own: bool) -> bool:
        """Return true if a member may sit here: there is room, and nobody is late for it.

        Beside one whose busy share is 1 or unknown nobody sits.

        Parameters
        ----------
        is_own : bool
            True if it sits here now: then it stays unless it delays a member that is late.
        """
        if not self.sitters or (is_own and sitter.fixed):
            return True
        if any(other.workload.busy >= 1 for other in (*self.sitters, sitter)):
            return False
        all_of_them = (*self.sitters, sitter)
        used = sum(other.workload.memory for other in all_of_them)
        if len(self.sitters) >= limit or used > 1 + 1e-9:
            return False
        slower = self.slowdown_with(sitter)
        least = min(other.slack for other in all_of_them)
        if slower > BARELY and not (least > 1 if is_own else self.busy < FULL and slower <= least):
            return False
        # One after the other, their relative speeds add up to 1.
        return sum(1 / slowed.at_least for slowed in slowdowns(all_of_them)) > slower


def slowdowns(sitters: Sequence[Sitter]) -> list[Slowed]:
    """Return how much slower each is than the busy shares say: as beside the one that slows it down most."""
    workloads = [sitter.workload for sitter in sitters]
    return [
        max(
            (one.slowed_beside(other.shape) for other in workloads if one.slowed and other is not one),
            key=attrgetter("at_least"),
            default=NOT_SLOWED,
        )
        for one in workloads
    ]


class SharedCapacity:
    """Numbers of GPUs that fit on nodes together (`NodeCapacity`), where members on one GPU may share it.

    Parameters
    ----------
    limit : int
        Largest number of members on a GPU; 1 if none is shared.
    held : mapping of str to Gpu
        GPUs of the members in training that sit in seats.

    Attributes
    ----------
    may_move : bool
        True if members may move together to make room.
    """

    def __init__(self, nodes: Sequence[Node], limit: int, held: Mapping[str, Gpu]) -> None:
        self._counts, self._limit, self._held = NodeCapacity(nodes), limit, held
        self._by_gpu: dict[Gpu, SharedGpu] = {}
        self.shared: list[SharedGpu] = []
        self.may_move = limit > 1
        self._misses = 0

    @property
    def left(self) -> int:
        """GPUs that nobody has."""
        return self._counts.left

    @property
    def is_full(self) -> bool:
        """True if no member gets a GPU any more, as far as the last ones tell."""
        return not self.left and (
            self._misses > MOST_MISSES
            or not any(len(one.sitters) < self._limit and one.busy < FULL for one in self.shared)
        )

    def change(self, sitter: Sitter, before: int, after: int) -> bool:
        """Replace a member's `before` GPUs by more; change nothing and return false if they do not fit."""
        if self._limit > 1 and after == 1:
            return self._seat(sitter)
        name = sitter.workload.name

        def seat() -> SharedGpu | None:
            return next((one for one in self.shared if name in one.names), None)

        # Of a shared GPU it frees what nobody else has there. When others move, it may do so, too.
        while not self._counts.change(before if (own := seat()) is None else 1 // len(own.sitters), after):
            if not self.may_move or not self._empty_one():
                return False
        if own is None:
            return True
        own.sitters = [other for other in own.sitters if other.workload.name != name]
        if not own.sitters:
            self._drop(own)
        return True

    def _take_one(self) -> bool:
        """Take a GPU, for which those who sit on others may move together."""
        return self._counts.change(0, 1) or (
            self.may_move and self._empty_one() and self._counts.change(0, 1)
        )

    def _empty_one(self) -> bool:
        """Let those on one shared GPU move to others, of which no one is slowed down; false if none can."""
        movable = (one for one in self.shared if not any(sitter.fixed for sitter in one.sitters))
        fewest = sorted(movable, key=lambda one: (self._stays(one), one.busy))
        for one in fewest[:MOST_COMPARED]:
            moved: list[SharedGpu] = []
            for sitter in sorted(one.sitters, key=lambda sitter: -sitter.workload.busy):
                others = (other for other in self.shared if other is not one)
                room = [o for o in others if o.admits(sitter, self._limit, is_own=False)]
                room = [other for other in room if other.slowdown_with(sitter) <= BARELY]
                if not room:
                    break
                moved.append(max(room, key=lambda other: other.busy))
                moved[-1].sitters.append(sitter)
            else:
                self._drop(one)
                self._counts.change(1, 0)
                return True
            for other in moved:
                other.sitters.pop()
        self.may_move = False
        return False

    def _stays(self, one: SharedGpu) -> int:
        """Return how many members in training would have to move."""
        return sum(name in self._held for name in one.names)

    def balance(self, time_s: float) -> None:
        """Let members move from GPUs with too little time for all to those that idle, the best move first.

        Each move is worth its restart if it lasts for the time left, `time_s`.
        """
        while best := max(self._moves(time_s), key=itemgetter(0), default=None):
            _, sitter, donor, taker = best
            donor.sitters.remove(sitter)
            taker.sitters.append(sitter)

    def _moves(self, time_s: float) -> Iterator[tuple[float, Sitter, SharedGpu, SharedGpu]]:
        """Yield moves and the idle time that each fills, in seconds for each second."""
        idle = sorted((one for one in self.shared if one.busy < 1), key=lambda one: one.busy)[:MOST_COMPARED]
        for donor in self.shared:
            spare = donor.busy - 1
            for sitter in donor.sitters if spare > 0 else ():
                if sitter.fixed:
                    continue
                busy = sitter.workload.busy
                # Rounding must not let it move to and fro.
                least = max(busy * sitter.workload.interruption_s / time_s, LEAST_BUSY)
                for taker in idle:
                    filled = min(busy, 1 - taker.busy) - max(busy - spare, 0.0)
                    if filled > least and taker.admits(sitter, self._limit, is_own=False):
                        yield filled, sitter, donor, taker

    def spread(self) -> None:
        """Let members that are to start have GPUs of their own, as long as any are left."""
        new = [
            (shared, sitter)
            for shared in self.shared
            for sitter in shared.sitters[1:]
            if sitter.workload.name not in self._held
        ]
        for shared, sitter in sorted(new, key=lambda one: -one[0].busy):
            if self._counts.change(0, 1):
                shared.sitters.remove(sitter)
                self.shared.append(SharedGpu(None, [sitter]))

    def _seat(self, sitter: Sitter) -> bool:
        gpu = self._held.get(sitter.workload.name)
        if gpu is not None:
            own = self._by_gpu.get(gpu)
            if own is None and self._take_one():
                own = self._by_gpu[gpu] = SharedGpu(gpu)
                self.shared.append(own)
            if own is not None and own.admits(sitter, self._limit, is_own=True):
                own.sitters.append(sitter)
                return True
        open_to = [shared for shared in self.shared if shared.admits(sitter, self._limit, is_own=False)]
        found = max(open_to, key=lambda shared: shared.busy, default=None)
        if found is None or found.slowdown_with(sitter) > BARELY:
            if self._take_one():
                found = SharedGpu(None)
                self.shared.append(found)
            elif found is not None:
                found = min(open_to, key=lambda shared: shared.slowdown_with(sitter))
        self._misses = self._misses + 1 if found is None else 0
        if found is None:
            return False
        found.sitters.append(sitter)
        return True

    def _drop(self, shared: SharedGpu) -> None:
        self.shared.remove(shared)
        if shared.gpu is not None:
            del self._by_gpu[shared.gpu]


def seats_of(held: Iterable[RunningMember]) -> dict[str, Placement]:
    """Return the seats of members in training, by name."""
    return {h.workload.name: h.allocation.placement[0] for h in held if not h.allocation.own_gpus}


def place_shared(
    request: Request, counts: Mapping[str, int], shared: Sequence[SharedGpu]
) -> tuple[Decision, dict[str, int]]:
    """Return the decision as `place_members`, where members also sit on shared GPUs.

    Each shared GPU is placed like one member on one GPU; those who sit on it keep their seats if it stays.

    Parameters
    ----------
    counts : mapping of str to int
        GPUs of the members that share none.
    """
    seats = seats_of(request.held)
    if not shared and not seats:
        return place_members(request, counts)
    by_gpu = {one.gpu: one for one in shared if one.gpu}
    names = {id(one): f"shared GPU {number}" for number, one in enumerate(shared)}
    of_gpu: dict[Gpu, list[RunningMember]] = {}
    for h in request.held:
        if seat := seats.get(h.workload.name):
            of_gpu.setdefault((seat.node, seat.gpus[0]), []).append(h)
    units = [
        _unit(names[id(by_gpu[gpu])] if gpu in by_gpu else f"left GPU {gpu}", gpu, members)
        for gpu, members in of_gpu.items()
    ]
    others = [h for h in request.held if h.workload.name not in seats]
    known = ChainMap({h.workload.name: h.workload for h in request.held}, request.waiting.by_name)
    kept = {h.workload.name for h in others}
    starting = [known[name] for name, gpus in counts.items() if gpus and name not in kept]
    new = [Workload(name, {1: 1.0}, 1.0) for name in names.values()]
    whole, given = place_members(
        replace(request, workloads=(*starting, *new), held=(*others, *units)),
        {**counts, **dict.fromkeys(names.values(), 1)},
    )
    places = {unit.workload.name: unit.allocation.placement for unit in units}
    places |= {allocation.member: allocation.placement for allocation in whole.start}
    found = {name: gpus for name, gpus in given.items() if name in counts}
    start = [allocation for allocation in whole.start if allocation.member in counts]
    for one in shared:
        if (name := names[id(one)]) in given:
            start += _seated(one, places[name][0], seats)
            found |= dict.fromkeys(one.names, 1)
    stop = tuple(h.workload.name for h in request.held if h.workload.name not in found)
    return Decision(tuple(start), stop), found


def _unit(name: str, gpu: Gpu, members: Sequence[RunningMember]) -> RunningMember:
    """Return the members in training on a GPU as one."""
    allocation = Allocation(name, 1, DATA_PARALLEL, 1.0, (Placement(gpu[0], (gpu[1],)),))
    fixed = any(member.fixed for member in members)
    return RunningMember(Workload(name, {1: 1.0}, 1.0), allocation, members[0].since_s, fixed)


def _seated(one: SharedGpu, place: Placement, seats: Mapping[str, Placement]) -> list[Allocation]:
    """Return the allocations of those who are to start on a shared GPU, in free seats."""
    stays = {
        name: seats[name].seat
        for sitter in one.sitters
        if (name := sitter.workload.name) in seats
        and (seats[name].node, seats[name].gpus) == (place.node, place.gpus)
    }
    free = (number for number in range(1, len(one.sitters) + 1) if number not in stays.values())
    slower = one.slowdown_with()
    return [
        Allocation(
            (name := sitter.workload.name),
            1,
            DATA_PARALLEL,
            sitter.workload.rates[1] / (slower * slowed.factor),
            (replace(place, seat=next(free)),),
            alone=sitter.workload.busy >= 1,
            beside=tuple(other for other in one.names if other != name),
        )
        for sitter, slowed in zip(one.sitters, slowdowns(one.sitters), strict=True)
        if sitter.workload.name not in stays
    ]
