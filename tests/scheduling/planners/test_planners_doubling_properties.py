"""Properties of planners that resize members."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.model.plan import DATA_PARALLEL, Allocation, Placement
from hetctl.model.site import Cluster
from hetctl.model.workload import Workload
from hetctl.scheduling.planners import planner_named
from hetctl.scheduling.planners.base import Decision, Options, Planner, Request, RunningMember
from hetctl.scheduling.planners.packing import pack

DOUBLING = planner_named("doubling")
elastic = pytest.mark.parametrize("planner", [DOUBLING, planner_named("doubling-exploratory")])
curves = st.lists(st.floats(1.0, 500.0), min_size=1, max_size=16).map(
    lambda values: dict(enumerate(values, start=1))
)


sublinear = st.builds(
    lambda alone, exponent, most: {gpus: alone * gpus**exponent for gpus in range(1, most + 1)},
    st.floats(1.0, 500.0),
    st.floats(0.3, 1.0),
    st.integers(1, 16),
)
some = settings(deadline=None, max_examples=50)


@st.composite
def requests(draw: st.DrawFn, curves: st.SearchStrategy[dict[int, float]] = curves) -> Request:
    """A cluster on which some members train, the rest of its GPUs free, and others wait."""
    cluster = Cluster.of(draw(st.integers(1, 24)), draw(st.sampled_from([1, 4, 6, 8])))
    members = [
        Workload(
            f"m{i}",
            curve,
            draw(st.floats(0.0, 1e6)),
            restart_s=10.0,
            family=draw(st.sampled_from("ab ")).strip(),
        )
        for i, curve in enumerate(draw(st.lists(curves, max_size=9)))
    ]
    training = members[: draw(st.integers(0, len(members)))]
    counts = [(m.name, draw(st.integers(1, m.max_gpus))) for m in training]
    placements, _ = pack(counts, cluster.nodes, 1)
    now_s = draw(st.floats(0.0, 1000.0))
    held = tuple(
        RunningMember(
            m,
            Allocation(m.name, n, DATA_PARALLEL, m.rates[n], placements[m.name]),
            draw(st.floats(0.0, now_s)),
            draw(st.booleans()),
        )
        for m, (_, n) in zip(training, counts, strict=True)
        if m.name in placements
    )
    taken = {(p.node, gpu) for h in held for p in h.allocation.placement for gpu in p.gpus}
    free = (
        replace(node, gpus=tuple(gpu for gpu in node.gpus if (node.name, gpu) not in taken))
        for node in cluster.nodes
    )
    return Request(
        tuple(m for m in members if m.name not in placements),
        tuple(node for node in free if node.gpus),
        cluster.gpus,
        0,
        Options(exploration=draw(st.sampled_from(["shared", "each"]))),
        held,
        cluster.nodes,
        now_s,
    )


def after(request: Request, decision: Decision) -> dict[str, Allocation]:
    stays = {h.workload.name: h.allocation for h in request.held if h.workload.name not in decision.stop}
    return stays | {allocation.member: allocation for allocation in decision.start}


@some
@given(requests())
def test_no_member_waits_while_another_holds_more_than_one_gpu(request_: Request) -> None:
    everybody = after(request_, DOUBLING.decide(request_))
    waits = len(request_.workloads) + len(request_.held) - len(everybody)
    larger = [a for h in request_.held if not h.fixed and (a := everybody[h.workload.name]).gpus > 1]
    assert not waits or not larger


@elastic
@some
@given(requests(sublinear))
def test_an_immediate_second_call_changes_nothing(planner: Planner, request_: Request) -> None:
    request_ = replace(request_, options=Options())
    decision = planner.decide(request_)
    everybody = after(request_, decision)
    known = {c.name: c for c in (*request_.workloads, *(h.workload for h in request_.held))}
    since = {h.workload.name: h.since_s for h in request_.held}
    since.update({a.member: request_.now_s for a in decision.start})
    fixed = {h.workload.name for h in request_.held if h.fixed}
    taken = {(p.node, gpu) for a in everybody.values() for p in a.placement for gpu in p.gpus}
    free = (
        replace(n, gpus=tuple(gpu for gpu in n.gpus if (n.name, gpu) not in taken)) for n in request_.cluster
    )
    again = replace(
        request_,
        workloads=tuple(c for name, c in known.items() if name not in everybody),
        nodes=tuple(node for node in free if node.gpus),
        held=tuple(RunningMember(known[n], a, since[n], n in fixed) for n, a in everybody.items()),
        planner_state=decision.planner_state,
    )
    assert planner.decide(again).start == ()


def test_a_member_that_finds_no_node_to_grow_on_keeps_its_gpu() -> None:
    cluster = Cluster.of(4, 2)
    wide = Workload("m", {1: 1.0, 2: 2.0}, 1000.0)
    fixed = Workload("fixed", {1: 1.0}, 1000.0)
    others = [(replace(fixed, name=f"fixed-{node.name}"), node.name, 0, True) for node in cluster.nodes]
    held = tuple(
        RunningMember(
            workload,
            Allocation(workload.name, 1, DATA_PARALLEL, 1.0, (Placement(node, (gpu,)),)),
            0.0,
            is_fixed,
        )
        for workload, node, gpu, is_fixed in [*others, (wide, cluster.nodes[0].name, 1, False)]
    )
    free = (replace(cluster.nodes[1], gpus=(1,)),)
    request = Request((), free, cluster.gpus, 0, Options(), held, cluster.nodes, 0.0)
    decision = DOUBLING.decide(request)
    assert (decision.start, decision.stop) == ((), ())


def test_no_member_overtakes_one_that_needs_more_gpus() -> None:
    """Four members on 4 GPUs: when one ends, the wide one waits, and the narrow one behind it, too."""
    cluster = Cluster.of(4, 4)
    linear = {gpus: 10.0 * gpus for gpus in range(1, 5)}
    held = [Workload(f"h{i}", linear, 1e4) for i in range(3)]
    wide, narrow = Workload("wide", {2: 20.0, 3: 30.0, 4: 40.0}, 1e4), Workload("narrow", linear, 1e4)
    placements, _ = pack([(each.name, 1) for each in held], cluster.nodes, 1)
    training = tuple(
        RunningMember(each, Allocation(each.name, 1, DATA_PARALLEL, 10.0, placements[each.name]), 0.0)
        for each in held
    )

    def asked(held: tuple[RunningMember, ...]) -> Request:
        taken = {gpu for each in held for part in each.allocation.placement for gpu in part.gpus}
        free = tuple(gpu for gpu in range(4) if gpu not in taken)
        return Request(
            (wide, narrow), (replace(cluster.nodes[0], gpus=free),), 4, 0, Options(), held, cluster.nodes
        )

    assert {a.member for a in DOUBLING.decide(asked(training)).start} <= {"h0", "h1", "h2"}
    fewer = DOUBLING.decide(asked(training[:2]))
    assert {a.member: a.gpus for a in fewer.start}["wide"] == 2
