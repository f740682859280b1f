"""Input shares of ranks, and inputs of rounds as leaders read them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.profile import PreprocessPoint
from hetctl.model.run import CACHED, LOCKSTEP, NONE
from hetctl.runtime.data.round_inputs import RoundInputs, append_round, read_round, roles_of

POINTS = [PreprocessPoint(1, 100.0), PreprocessPoint(8, 800.0)]

PLACES = {
    "a": (Placement("n1", (0, 1)), Placement("n2", (0,))),
    "b": (Placement("n1", (2,)),),
    "c": (Placement("n2", (1,)),),
}
GPUS = {"a": 3, "b": 1, "c": 1}


def allocation(member, rate, **gpus):
    places = tuple(Placement(node, tuple(numbers)) for node, numbers in gpus.items())
    return Allocation(member, sum(len(p.gpus) for p in places), DATA_PARALLEL, rate, places)


ROUND = [
    allocation("a", 300.0, n1=[0, 1], n2=[0]),
    allocation("b", 100.0, n1=[2]),
    allocation("c", 150.0, n2=[1]),
]


@pytest.mark.parametrize(
    ("sharing", "n1", "n2"),
    [
        ("none", [1, 1, 1], [2, 1]),  # 300 and 250 samples/s
        ("cached", [1, 1, 1], [2, 1]),  # as fast as a, which has all nodes' stores to itself at first
        ("lockstep", [1, 0, 0], [1, 1]),  # as slow as b on n1, as c on n2
    ],
)
def test_preprocessors_meet_the_demand_of_their_node(sharing, n1, n2):
    roles = roles_of(ROUND, sharing, POINTS, 16)
    assert [f"{role.member} {role.node}" for role in roles] == ["a n1", "a n1", "a n2", "b n1", "c n2"]
    assert [role.preprocessors for role in roles if role.node == "n1"] == n1
    assert [role.preprocessors for role in roles if role.node == "n2"] == n2


def test_ranks_with_a_core_each_share_the_burden():
    assert [role.preprocessors for role in roles_of(ROUND, "lockstep", POINTS, 5)] == [1, 1, 1, 1, 1]


rounds = st.lists(
    st.tuples(st.floats(1.0, 1e4), st.dictionaries(st.sampled_from("uvw"), st.integers(1, 4), min_size=1)),
    min_size=1,
    max_size=6,
)


@given(rounds, st.sampled_from(["none", "cached", "lockstep"]), st.integers(1, 64))
def test_any_layout_gives_each_node_one_leader_and_fair_shares(members, sharing, cores):
    allocations = [
        allocation(f"m{index}", rate, **{node: range(count) for node, count in nodes.items()})
        for index, (rate, nodes) in enumerate(members)
    ]
    roles = roles_of(allocations, sharing, POINTS, cores)
    assert [role.member for role in roles] == [a.member for a in allocations for _ in range(a.gpus)]
    for node in {role.node for role in roles}:
        here = [role for role in roles if role.node == node]
        counts = [role.preprocessors for role in here]
        assert max(counts) - min(counts) <= 1
        assert 1 <= sum(counts) <= max(cores, len(here))
        assert min(counts) > 0 or sharing == "lockstep"


def inputs(sharing, index=4, **how):
    members = tuple(Member(name, batch_size=size) for name, size in (("a", 16), ("b", 48), ("c", 96)))
    return RoundInputs(
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
    shares = inputs(sharing).shares
    assert {name: len(own) for name, own in shares.items()} == GPUS
    assert all(share.preprocessors is not None for s in shares.values() for share in s)
    # In lockstep one preprocessor may serve all ranks.
    unknown = replace(inputs(sharing), preprocess=()).shares
    assert {share.preprocessors is None for s in unknown.values() for share in s} == {sharing != LOCKSTEP}
    assert all((share.lockstep is not None) == (sharing == LOCKSTEP) for s in shares.values() for share in s)


def test_all_preprocessors_of_a_member_work_until_its_rate_is_known():
    of_round = inputs(CACHED)
    guessed = (replace(of_round.allocations[0], rate_known=False), *of_round.allocations[1:])
    shares = replace(of_round, allocations=guessed).shares
    every = {name: {share.preprocessors is None for share in own} for name, own in shares.items()}
    assert every == {"a": {True}, "b": {False}, "c": {False}}


def test_ranks_on_a_node_read_one_ring_each_in_its_own_place():
    shares = inputs(LOCKSTEP, has_leaders=True).shares
    steps = {name: [share.lockstep for share in own] for name, own in shares.items()}
    assert [(step.reader, step.readers) for step in steps["a"]] == [(0, 3), (1, 3), (0, 2)]
    assert [(step.reader, step.readers) for step in (*steps["b"], *steps["c"])] == [(2, 3), (1, 2)]
    every = [step for own in steps.values() for step in own]
    assert len({replace(step, reader=0, readers=0) for step in every}) == 1
    assert (every[0].chunk, every[0].largest, every[0].has_leaders) == (48, 96, True)


def test_a_leader_has_the_lockstep_of_the_first_rank():
    of_round = inputs(LOCKSTEP)
    steps = of_round.shares["a"]
    assert of_round.lockstep_on("n1") == steps[0].lockstep
    assert of_round.lockstep_on("n2") == steps[2].lockstep


def test_rounds_have_rings_and_orders_of_their_own():
    one, other = (inputs(LOCKSTEP, index).lockstep_on("n1") for index in (1, 2))
    assert one.name != other.name
    assert one.seed != other.seed


def test_leaders_find_their_round_among_those_of_the_job(tmp_path):
    path = tmp_path / "lineups.jsonl"
    rounds = [inputs(LOCKSTEP, index, has_leaders=True) for index in (4, 7)]
    for each in rounds:
        append_round(path, each)
    assert [read_round(path, index) for index in (7, 4)] == rounds[::-1]
    assert path.stat().st_mode & 0o777 == 0o600
