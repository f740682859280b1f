"""The lineup of a round: its ranks, and the sources of their samples."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path

from hetctl.model.ensemble import Ensemble
from hetctl.model.plan import Allocation
from hetctl.model.profile import PreprocessPoint
from hetctl.model.run import LOCKSTEP
from hetctl.model.serialization import decode, encode
from hetctl.model.site import USUAL_TIMEOUTS, Timeouts
from hetctl.runtime.data.loaders import Lockstep
from hetctl.runtime.data.roles import Role, roles_of, together
from hetctl.runtime.rank_logs import append
from hetctl.runtime.worker.context import InputShare


@dataclass(frozen=True)
class Lineup:
    """Members that start together.

    Parameters
    ----------
    run_key : str
        Name of the run that no other run has, as of `run_key`.
    index : int
        Index of the round.
    ensemble : Ensemble
        Ensemble of these members alone, with the batch sizes of this training.
    sharing, preprocess
        Settings of `RunSpec`.
    cores : int
        Number of cores per node, for all its ranks and preprocessors.
    led : bool
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
    led: bool = False
    timeouts: Timeouts = USUAL_TIMEOUTS

    @property
    def roles(self) -> tuple[Role, ...]:
        """Roles of all ranks, by member and rank."""
        return roles_of(self.allocations, self.sharing, self.preprocess, self.cores)

    @property
    def locksteps(self) -> tuple[Lockstep, ...]:
        """Lockstep of each rank with the others on its node, in the order of the roles."""
        batches = {a.member: self.ensemble.member(a.member).chunk(a.gpus) for a in self.allocations}
        steps = together(self.roles, batches, self.run, self.index)
        return tuple(replace(lockstep, led=self.led) for lockstep in steps)


def nodes_of(allocations: Sequence[Allocation]) -> tuple[str, ...]:
    """Return the nodes of a round in the order of their leaders' ranks."""
    return tuple(dict.fromkeys(place.node for a in allocations for place in a.placement))


def shares_of(lineup: Lineup) -> dict[str, tuple[InputShare, ...]]:
    """Return the input shares of the ranks of each member."""
    locksteps: Iterable[Lockstep | None] = lineup.locksteps if lineup.sharing == LOCKSTEP else repeat(None)
    shares: dict[str, list[InputShare]] = {}
    for role, lockstep in zip(lineup.roles, locksteps, strict=False):
        shares.setdefault(role.member, []).append(InputShare(role.preprocessors, lockstep))
    return {member: tuple(own) for member, own in shares.items()}


def lockstep_on(lineup: Lineup, node: str) -> Lockstep:
    """Return the lockstep of the first rank on a node with the others there."""
    ranks = zip(lineup.roles, lineup.locksteps, strict=True)
    return next(lockstep for role, lockstep in ranks if role.node == node)


def write_lineup(path: Path, lineup: Lineup) -> None:
    """Add a round to a job's file of lineups."""
    append(path, json.dumps(encode(lineup)) + "\n")


def read_lineup(path: Path, index: int) -> Lineup:
    """Read the lineup of a round."""
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return decode(Lineup, next(line for line in lines if line["index"] == index))
