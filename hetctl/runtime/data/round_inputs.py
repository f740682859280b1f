"""The inputs of a round: the roles of its ranks (FLEET, Table 1), and the sources of their samples.

The driver uses it, so it needs no NumPy.
"""

from __future__ import annotations

import json
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import count, repeat
from pathlib import Path

from hetctl.model.ensemble import Ensemble
from hetctl.model.plan import Allocation
from hetctl.model.profile import PreprocessPoint
from hetctl.model.run import CACHED, LOCKSTEP
from hetctl.model.serialization import decode, encode
from hetctl.model.site import USUAL_TIMEOUTS, Timeouts
from hetctl.model.values import dataclass
from hetctl.perf.preprocessing import preprocessors_needed
from hetctl.runtime.job_logs import append


@dataclass(frozen=True)
class Lockstep:
    """A stream on which all ranks of a node train together (FLEET, section 5).

    Parameters
    ----------
    name : str
        Name of the ring.
    seed : int
        Seed of the orders of its epochs, different from every member's.
    chunk, largest : int
        Samples that are prepared together, and samples of the largest batch of any member.
    reader, readers : int
        Number of this rank among the readers on the node, and the number of readers.
    has_leaders : bool
        True if a leader supplies the chunks of this node and of others.
    """

    name: str
    seed: int
    chunk: int
    largest: int
    reader: int
    readers: int
    has_leaders: bool = False


@dataclass(frozen=True)
class InputShare:
    """Source of a member's batches on this rank.

    Parameters
    ----------
    preprocessors : int or None
        Number of the rank's preprocessors that work for the member; None: all.
    """

    preprocessors: int | None = None
    lockstep: Lockstep | None = None


LEAST_CHUNK = 8


@dataclass(frozen=True)
class RoundInputs:
    """Members that start together, and the settings by which their ranks get samples.

    Parameters
    ----------
    run_key : str
        Unique name of the run, as from `run_key`.
    index : int
        Index of the round.
    ensemble : Ensemble
        Ensemble of these members alone, with the batch sizes of this training.
    sharing, preprocess
        Settings of `RunSpec`.
    cores : int
        Number of cores per node, for all its ranks and preprocessors.
    has_leaders : bool
        In lockstep, true if the nodes have leaders that exchange prepared chunks.
    timeouts : Timeouts
        Time limits of the site.
    """

    run: str
    run_key: str
    index: int
    ensemble: Ensemble
    allocations: tuple[Allocation, ...]
    sharing: str
    preprocess: tuple[PreprocessPoint, ...] = ()
    cores: int = 1
    has_leaders: bool = False
    timeouts: Timeouts = USUAL_TIMEOUTS

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of all ranks, by member and rank."""
        return roles_of(self.allocations, self.sharing, self.preprocess, self.cores)

    @property
    def locksteps(self) -> tuple[Lockstep, ...]:
        """Lockstep of each rank with the others on its node, in the order of the roles.

        The chunk that is prepared together is the greatest common divisor of the members' batches, or the
        smallest of them if the divisor is less than `LEAST_CHUNK`.
        """
        batches = {a.member: self.ensemble.member(a.member).step_samples(a.gpus) for a in self.allocations}
        roles, sizes = self.roles, [batches[a.member] for a in self.allocations]
        common, readers = math.gcd(*sizes), Counter(role.node for role in roles)
        numbers = {node: count() for node in readers}
        return tuple(
            Lockstep(
                name=f"round-{self.index}.ring",
                # hash() of a text differs from process to process (PYTHONHASHSEED), and ranks must agree.
                seed=zlib.crc32(f"{self.run}/{self.index}".encode()),
                chunk=common if common >= LEAST_CHUNK else min(sizes),
                largest=max(sizes),
                reader=next(numbers[role.node]),
                readers=readers[role.node],
                has_leaders=self.has_leaders,
            )
            for role in roles
        )

    @property
    def shares(self) -> dict[str, tuple[InputShare, ...]]:
        """Input shares of the ranks of each member.

        If the throughput of preprocessing is unknown, or the member's rate, all preprocessors of a rank work:
        with too few of them, the rate that is seen would be theirs. In lockstep one does until it is known.
        """
        rates_known = {a.member for a in self.allocations if a.rate_known and self.preprocess}
        locksteps: Iterable[Lockstep | None] = self.locksteps if self.sharing == LOCKSTEP else repeat(None)
        shares: dict[str, list[InputShare]] = {}
        for role, lockstep in zip(self.roles, locksteps, strict=False):
            is_known = lockstep is not None or role.member in rates_known
            share = InputShare(role.preprocessors if is_known else None, lockstep)
            shares.setdefault(role.member, []).append(share)
        return {member: tuple(own) for member, own in shares.items()}

    def lockstep_on(self, node: str) -> Lockstep:
        """Return the lockstep of the first rank on a node."""
        ranks = zip(self.roles, self.locksteps, strict=True)
        return next(lockstep for role, lockstep in ranks if role.node == node)


def nodes_of(allocations: Sequence[Allocation]) -> tuple[str, ...]:
    """Return the nodes of a round in the order of their leaders' ranks."""
    return tuple(dict.fromkeys(place.node for a in allocations for place in a.placement))


def append_round(path: Path, inputs: RoundInputs) -> None:
    """Add a round to a job's file of rounds."""
    append(path, json.dumps(encode(inputs)) + "\n")


def read_round(path: Path, index: int) -> RoundInputs:
    """Read the inputs of a round."""
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return decode(RoundInputs, next(line for line in lines if line["index"] == index))


@dataclass(frozen=True)
class Role:
    """One rank of a member's group.

    Parameters
    ----------
    preprocessors : int
        Number of preprocessor processes of the rank.
    """

    member: str
    node: str
    preprocessors: int


def roles_of(
    allocations: Sequence[Allocation], sharing: str, points: Sequence[PreprocessPoint], cores: int
) -> tuple[Role, ...]:
    """Assign the roles of a round.

    Each node has the least number of preprocessors that meets the demand of its ranks: the sum of their
    rates if each prepares for itself; the fastest member's rate if a prepared sample serves all; the slowest
    member's if all wait for it. They are distributed evenly over the ranks. Each rank has at least one,
    except in lockstep with two or more cores per rank, where one can serve all.

    Parameters
    ----------
    sharing : str
        Kind of sharing: ``none``, ``cached`` or ``lockstep``.
    points
        Rates of preprocessing on 1, 2, 4, .. cores, in samples/s.
    cores : int
        Number of cores per node.

    Returns
    -------
    tuple of Role
        Roles of all ranks, by member and rank.
    """
    # Launchers number ranks node by node.
    ranks = [(a, place.node) for a in allocations for place in a.placement for _ in place.gpus]
    counts = {
        node: iter(_counts([a for a, there in ranks if there == node], sharing, points, cores))
        for node in nodes_of(allocations)
    }
    return tuple(Role(a.member, node, next(counts[node])) for a, node in ranks)


def _counts(
    ranks: Sequence[Allocation], sharing: str, points: Sequence[PreprocessPoint], cores: int
) -> list[int]:
    """Return the number of preprocessors of each rank on a node; `ranks` are their allocations."""
    rates = [allocation.rate for allocation in ranks]
    alone = sum(allocation.rate / allocation.gpus for allocation in ranks)
    demand = {LOCKSTEP: min(rates), CACHED: max(rates)}.get(sharing, alone)
    total = preprocessors_needed(points, demand, cores)
    # With one core per rank, a rank that alone has a preprocessor would slow all others down.
    if sharing != LOCKSTEP or cores < 2 * len(ranks):
        total = max(total, len(ranks))
    return [total // len(ranks) + (index < total % len(ranks)) for index in range(len(ranks))]
