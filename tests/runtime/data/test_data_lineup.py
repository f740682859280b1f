"""Input shares of ranks, and lineups of rounds as leaders read them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.profile import PreprocessPoint
from hetctl.model.run import CACHED, LOCKSTEP, NONE
from hetctl.runtime.data.lineup import Lineup, lockstep_on, read_lineup, shares_of, write_lineup

PLACES = {
    "a": (Placement("n1", (0, 1)), Placement("n2", (0,))),
    "b": (Placement("n1", (2,)),),
    "c": (Placement("n2", (1,)),),
}
GPUS = {"a": 3, "b": 1, "c": 1}


def lineup(sharing, index=4, **how):
    members = tuple(Member(name, batch_size=size) for name, size in (("a", 16), ("b", 48), ("c", 96)))
    return Lineup(
        run="r",
        run_key="r",
        index=index,
        ensemble=Ensemble("e", "pytorch", Functions("m:i", "m:m"), members, "/x"),
        allocations=tuple(Allocation(n, GPUS[n], DATA_PARALLEL, 100.0, p) for n, p in PLACES.items()),
        sharing=sharing,
        preprocess=(PreprocessPoint(1, 100.0),),
        cores=16,
        **how,
    )


@pytest.mark.parametrize("sharing", [NONE, CACHED, LOCKSTEP])
def test_every_rank_of_every_member_has_a_share(sharing):
    shares = shares_of(lineup(sharing))
    assert {name: len(own) for name, own in shares.items()} == GPUS
    assert all((share.lockstep is not None) == (sharing == LOCKSTEP) for s in shares.values() for share in s)


def test_ranks_on_a_node_read_one_ring_each_in_its_own_place():
    shares = shares_of(lineup(LOCKSTEP, led=True))
    steps = {name: [share.lockstep for share in own] for name, own in shares.items()}
    assert [(step.reader, step.readers) for step in steps["a"]] == [(0, 3), (1, 3), (0, 2)]
    assert [(step.reader, step.readers) for step in (*steps["b"], *steps["c"])] == [(2, 3), (1, 2)]
    every = [step for own in steps.values() for step in own]
    assert len({replace(step, reader=0, readers=0) for step in every}) == 1
    assert (every[0].chunk, every[0].largest, every[0].led) == (48, 96, True)


def test_a_leader_has_the_lockstep_of_the_first_rank():
    of_round = lineup(LOCKSTEP)
    steps = shares_of(of_round)["a"]
    assert lockstep_on(of_round, "n1") == steps[0].lockstep
    assert lockstep_on(of_round, "n2") == steps[2].lockstep


def test_rounds_have_rings_and_orders_of_their_own():
    one, other = (lockstep_on(lineup(LOCKSTEP, index), "n1") for index in (1, 2))
    assert one.name != other.name
    assert one.seed != other.seed


def test_leaders_find_their_round_among_those_of_the_job(tmp_path):
    path = tmp_path / "lineups.jsonl"
    rounds = [lineup(LOCKSTEP, index, led=True) for index in (4, 7)]
    for each in rounds:
        write_lineup(path, each)
    assert [read_lineup(path, index) for index in (7, 4)] == rounds[::-1]
    assert path.stat().st_mode & 0o777 == 0o600
