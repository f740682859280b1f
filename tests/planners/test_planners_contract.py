"""What every planner keeps to, whatever its method."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.core.profile import Candidate
from hetctl.core.site import Cluster, Node
from hetctl.planners import PLANNERS
from hetctl.planners.base import Options, Planner, Request

every_planner = pytest.mark.parametrize("planner", PLANNERS.values(), ids=PLANNERS)

curves = st.lists(st.floats(1.0, 500.0), min_size=1, max_size=20).map(
    lambda values: dict(enumerate(values, start=1))
)
candidates = st.lists(st.tuples(curves, st.floats(1.0, 1e6)), max_size=12).map(
    lambda members: tuple(Candidate(f"m{i:02}", *member) for i, member in enumerate(members))
)
nodes = st.lists(st.sets(st.integers(0, 7)), max_size=5).map(
    lambda free: tuple(Node(f"n{i}", tuple(sorted(gpus))) for i, gpus in enumerate(free))
)
options = st.builds(
    Options,
    delta=st.none() | st.floats(0.1, 500.0),
    relative_delta=st.floats(0.01, 2.0),
    max_permutations=st.integers(1, 100),
    seed=st.integers(),
)
requests = st.builds(
    Request, candidates, nodes, gpus=st.just(40), round_index=st.integers(0, 9), options=options
)


@every_planner
@settings(deadline=None)
@given(requests)
def test_no_gpu_is_given_twice_and_only_free_ones_are(planner: Planner, request_: Request) -> None:
    given_ = planner.decide(request_).start
    taken = [(p.node, gpu) for a in given_ for p in a.placement for gpu in p.gpus]
    assert len(taken) == len(set(taken)) <= request_.free_gpus
    assert set(taken) <= {(node.name, gpu) for node in request_.nodes for gpu in node.gpus}


@every_planner
@settings(deadline=None)
@given(requests)
def test_allocations_are_of_candidates_within_their_limits(planner: Planner, request_: Request) -> None:
    given_ = planner.decide(request_).start
    by_name = {candidate.name: candidate for candidate in request_.candidates}
    assert len({allocation.member for allocation in given_}) == len(given_)
    for allocation in given_:
        candidate = by_name[allocation.member]
        assert 1 <= allocation.gpus <= candidate.max_gpus
        assert allocation.rate == candidate.rates[allocation.gpus]
        assert allocation.gpus == sum(len(part.gpus) for part in allocation.placement)
        assert all(part.gpus for part in allocation.placement)


@every_planner
@settings(deadline=None)
@given(requests)
def test_members_span_as_few_nodes_as_their_gpus_can(planner: Planner, request_: Request) -> None:
    sizes = sorted((len(node.gpus) for node in request_.nodes), reverse=True)
    for allocation in planner.decide(request_).start:
        fewest = next(n for n in range(1, len(sizes) + 1) if sum(sizes[:n]) >= allocation.gpus)
        assert len(allocation.placement) == len({part.node for part in allocation.placement}) == fewest


@every_planner
@settings(deadline=None)
@given(requests)
def test_somebody_trains_whenever_somebody_can(planner: Planner, request_: Request) -> None:
    possible = bool(request_.candidates) and request_.free_gpus > 0
    assert bool(planner.decide(request_).start) is possible


@every_planner
@settings(deadline=None)
@given(requests)
def test_the_same_question_has_the_same_answer(planner: Planner, request_: Request) -> None:
    assert planner.decide(request_) == planner.decide(request_)


@every_planner
def test_a_round_of_100_members_on_160_gpus_is_planned_in_milliseconds(planner: Planner) -> None:
    members = tuple(
        Candidate(f"m{i}", {m: (21 + 1.55 * i) * m**0.85 for m in range(1, 161)}, 1e5) for i in range(100)
    )
    request_ = Request(members, Cluster.of(160, 4).nodes, 160, 0, Options())
    seconds = []
    for _ in range(3):
        started = time.process_time()
        planner.decide(request_)
        seconds.append(time.process_time() - started)
    assert min(seconds) < 0.1
