from __future__ import annotations

import json
from dataclasses import replace

import pytest
from replays.rival_planners import HOMOGENEOUS

from hetctl.model.errors import BadInputError
from hetctl.model.site import Cluster, Node
from hetctl.model.workload import Workload
from hetctl.perf.bounds import makespan_bound
from hetctl.scheduling.planners import PLANNERS, planner_named
from hetctl.scheduling.planners.base import Decision, Options, Planner, Request, RunningMember, options_from
from hetctl.scheduling.planners.fluid import FLUID
from hetctl.scheduling.planners.heterogeneous import by_type
from hetctl.scheduling.simulate.scenario import Arrival, Failures, Scenario
from hetctl.scheduling.simulate.simulate_run import simulate

SLOW = {1: 10.0, 2: 19.0, 3: 27.0, 4: 34.0}
FAST = {gpus: 3 * rate for gpus, rate in SLOW.items()}
CLUSTER = Cluster.of_types({"v100": (8, 4), "p100": (8, 4)})
every_planner = pytest.mark.parametrize("name", [*PLANNERS, "fixed-2"])


def member(name: str, samples: float = 1000.0) -> Workload:
    return Workload(name, SLOW, samples, restart_s=1.0, rates_by_type={"v100": FAST, "p100": SLOW})


def asked(
    *members: Workload, cluster: Cluster = CLUSTER, nodes: tuple[Node, ...] = (), **values: object
) -> Request:
    given = {name: values.pop(name) for name in ("mix_types", "balance") if name in values}
    options = Options(solver_time_limit_s=0.05, **given)  # type: ignore[arg-type]
    return Request(
        members,
        nodes or cluster.nodes,
        cluster.gpus,
        0,
        options,
        cluster=cluster.nodes,
        **values,  # type: ignore[arg-type]
    )


def types_of(decision: Decision, cluster: Cluster = CLUSTER) -> dict[str, set[str | None]]:
    types = {node.name: node.gpu_type for node in cluster.nodes}
    return {a.member: {types[part.node] for part in a.placement} for a in decision.start}


def test_a_cluster_of_types_has_a_name_for_each_node() -> None:
    cluster = Cluster.of_types({"v100": (6, 4), "": (2, 2)})
    assert [(n.name, len(n.gpus), n.gpu_type) for n in cluster.nodes] == [
        ("node-0", 4, "v100"),
        ("node-1", 2, "v100"),
        ("node-2", 2, None),
    ]
    assert Cluster.of_types({"": (6, 4)}) == Cluster.of(6, 4)


def test_rates_are_those_of_the_type_or_else_the_general_ones() -> None:
    workload = member("a")
    assert workload.on_type("v100").rates == FAST
    assert workload.on_type("k80").rates == SLOW
    assert workload.on_slowest(["v100", "p100"]).rates == SLOW
    assert workload.highest_rates == FAST
    plain = Workload("b", SLOW, 1.0)
    assert plain.on_type("v100") is plain


def test_nodes_without_a_type_are_left_to_the_planner() -> None:
    plain = asked(member("a"), member("b"), cluster=Cluster.of(8, 4))
    assert by_type(FLUID).decide(plain) == FLUID.decide(plain)
    assert by_type(FLUID) is by_type(FLUID)


@every_planner
def test_each_member_is_on_one_type_at_the_rate_of_that_type(name: str) -> None:
    request = asked(*(member(f"m{i}", 100.0 * (i + 1)) for i in range(12)))
    decision = planner_named(name).decide(request)
    curves = {"v100": FAST, "p100": SLOW}
    used = types_of(decision)
    assert set().union(*used.values()) == {"v100", "p100"}
    for allocation in decision.start:
        (gpu_type,) = used[allocation.member]
        assert allocation.rate == curves[str(gpu_type)][allocation.gpus]
    assert json.loads(json.dumps(decision.planner_state)) == decision.planner_state


def test_the_longest_get_the_type_where_they_are_done_first() -> None:
    # 900 and 600 take 7.5 s on two fast GPUs each; the third is done first on the slow ones.
    cluster = Cluster.of_types({"v100": (2, 2), "p100": (2, 2)})
    decision = planner_named("independent").decide(
        asked(member("a", 900), member("b", 300), member("c", 600), cluster=cluster)
    )
    assert types_of(decision, cluster) == {"a": {"v100"}, "c": {"v100"}, "b": {"p100"}}


def test_freed_gpus_take_members_that_wait_for_another_type() -> None:
    independent = planner_named("independent")
    first = independent.decide(asked(*(member(f"m{i}") for i in range(30))))
    names = {a.member for a in first.start}
    waiting = [member(f"m{i}") for i in range(30) if f"m{i}" not in names]
    freed = (Node("node-2", (1,), "p100"),)
    for_fast = [m for m in waiting if first.planner_state["members"][m.name] == "v100"]
    again = independent.decide(asked(*for_fast, nodes=freed, planner_state=first.planner_state))
    assert [(a.rate, a.placement[0].node) for a in again.start] == [(10.0, "node-2")]


def test_a_member_in_training_keeps_its_type() -> None:
    fluid = planner_named("fluid")
    first = fluid.decide(asked(member("a"), member("b", 100.0)))
    before = types_of(first)
    held = tuple(RunningMember(member(a.member, 50.0), a, 0.0) for a in first.start)
    taken = {(p.node, gpu) for a in first.start for p in a.placement for gpu in p.gpus}
    free = tuple(
        Node(n.name, tuple(g for g in n.gpus if (n.name, g) not in taken), n.gpu_type) for n in CLUSTER.nodes
    )
    request = asked(member("c", 5000.0), nodes=free, held=held, planner_state=first.planner_state)
    decision = fluid.decide(request)
    after = types_of(decision)
    assert all(after[name] == before[name] for name in before if name in after)
    assert set(fluid.reasons(request, decision)) == {"a", "b", "c"}


def test_a_planner_remembers_by_type_even_while_one_is_down() -> None:
    seen: list[object] = []

    def decide(request: Request) -> Decision:
        seen.append(request.planner_state)
        return Decision(planner_state=(request.planner_state or 0) + 1)

    counting = by_type(Planner("counting", "local", decide))
    memory = counting.decide(asked(member("a"))).planner_state
    only = Cluster(CLUSTER.nodes[:2])
    memory = counting.decide(asked(member("a"), cluster=only, planner_state=memory)).planner_state
    memory = counting.decide(asked(member("a"), planner_state=json.loads(json.dumps(memory)))).planner_state
    assert memory["gpu_types"] == {"v100": 3, "p100": 2}
    assert seen == [None, None, 1, 1, 2]


def test_mixed_types_train_at_the_slowest_ones_rate() -> None:
    cluster = Cluster.of_types({"v100": (2, 2), "p100": (2, 2)})
    unbalanced = asked(member("a"), cluster=cluster, mix_types=True, balance="off")
    decision = planner_named("fixed-4").decide(unbalanced)
    (given,) = decision.start
    assert (given.gpus, given.rate) == (4, SLOW[4])
    assert types_of(decision, cluster) == {"a": {"v100", "p100"}}
    alone = planner_named("fixed-2").decide(asked(member("a"), cluster=cluster, mix_types=True))
    assert alone.start[0].rate == FAST[2]
    assert options_from({"mix_types": True}).mix_types
    with pytest.raises(BadInputError, match="mix_types is 1, but must be true or false"):
        options_from({"mix_types": 1})
    with pytest.raises(BadInputError, match="balance is True, but must be one of: auto, on, off"):
        options_from({"balance": True})


def test_balanced_batches_add_up_the_rates_of_the_types() -> None:
    cluster = Cluster.of_types({"v100": (1, 2), "p100": (3, 3)})
    both = asked(member("a"), cluster=cluster, mix_types=True)
    (given,) = planner_named("fixed-4").decide(both).start
    assert (given.gpus, given.rate) == (4, pytest.approx((FAST[4] + 3 * SLOW[4]) / 4))
    alone = asked(member("a"), cluster=Cluster.of_types({"v100": (2, 2)}), mix_types=True)
    assert planner_named("fixed-2").decide(alone).start[0].rate == FAST[2]


@every_planner
@pytest.mark.parametrize("mix_types", [False, True])
def test_whole_runs_on_two_types_respect_the_bound(name: str, mix_types: bool) -> None:
    members = [member(f"m{i}", 500.0 + 97 * i) for i in range(15)]
    arrivals = [Arrival(m, 3.0 * i) for i, m in enumerate(members)]
    options = Options(solver_time_limit_s=0.05, mix_types=mix_types)
    scenario = Scenario(
        CLUSTER, lockstep=True, failures=Failures(400.0, repair_s=50.0, checkpoint_every_s=20.0)
    )
    result = simulate(planner_named(name), arrivals, scenario, options)
    assert result.makespan_s >= makespan_bound([(a.at_s, a.workload) for a in arrivals], 16) - 1e-6
    done = {m.name: sum(i.samples for i in result.intervals if i.member == m.name) for m in members}
    assert done == pytest.approx({m.name: m.samples_left for m in members})


def test_a_lockstep_round_runs_at_the_rate_of_its_slowest_type() -> None:
    members = [member(f"m{i}") for i in range(8)]
    scenario = Scenario(CLUSTER, lockstep=True)
    result = simulate(HOMOGENEOUS, [Arrival(m) for m in members], scenario, Options())
    types = {node.name: node.gpu_type for node in CLUSTER.nodes}
    assert {types[i.allocation.placement[0].node] for i in result.intervals} == {"v100", "p100"}
    assert {i.round_index for i in result.intervals} == {0}
    assert [i.end_s - i.start_s for i in result.intervals] == pytest.approx([100.0] * 8)


@every_planner
def test_members_that_need_several_gpus_get_a_type_with_so_many(name: str) -> None:
    """Two slow nodes of 4 GPUs, and a fast one of 2: only the slow ones hold a member that needs 3."""
    cluster = Cluster.of_types({"v100": (2, 2), "p100": (8, 4)})
    least = {gpus: rate for gpus, rate in SLOW.items() if gpus >= 3}
    types = {"v100": {gpus: 3 * rate for gpus, rate in least.items()}, "p100": least}
    wide = [replace(member(f"w{i}"), rates=least, rates_by_type=types) for i in range(3)]
    arrivals = [Arrival(each) for each in (*wide, member("a"), member("b", 9000.0))]
    result = simulate(planner_named(name), arrivals, Scenario(cluster), Options(solver_time_limit_s=0.05))
    assert {interval.member for interval in result.intervals} == {"w0", "w1", "w2", "a", "b"}
    slow = {node.name for node in cluster.nodes if node.gpu_type == "p100"}
    for interval in result.intervals:
        if interval.member.startswith("w"):
            assert interval.gpus >= 3
            assert {part.node for part in interval.allocation.placement} <= slow


def test_a_member_that_needs_more_gpus_than_there_are_waits() -> None:
    least = {6: 60.0}
    wide = replace(member("w"), rates=least, rates_by_type={"v100": least, "p100": least})
    small = Cluster.of_types({"v100": (4, 4), "p100": (4, 4)})
    request = asked(wide, member("a"), cluster=small)
    fluid = planner_named("fluid")
    decision = fluid.decide(request)
    assert [allocation.member for allocation in decision.start] == ["a"]
    assert fluid.reasons(request, decision)["w"].startswith("waits for 6 GPUs: it trains on no fewer")
    mixed = asked(wide, cluster=small, mix_types=True)
    assert [allocation.gpus for allocation in fluid.decide(mixed).start] == [6]
