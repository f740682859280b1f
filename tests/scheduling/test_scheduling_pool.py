from __future__ import annotations

from hetctl.model.plan import Placement
from hetctl.model.site import Cluster, Node
from hetctl.scheduling.pool import Pool

CLUSTER = Cluster.of_types({"v100": (4, 2), "p100": (2, 2)})
BOTH = (Placement("node-1", (0, 1)), Placement("node-0", (1,)))


def test_free_gpus_are_listed_in_the_clusters_order() -> None:
    gpus = Pool(CLUSTER.nodes)
    gpus.take(BOTH)
    assert gpus.free == (Node("node-0", (0,), "v100"), Node("node-2", (0, 1), "p100"))
    assert (gpus.free_gpus, gpus.gpus, gpus.can_hold(BOTH)) == (3, 6, False)
    gpus.release(BOTH)
    assert gpus.free == tuple(gpus.nodes.values()) == CLUSTER.nodes
    assert (gpus.free_gpus, gpus.can_hold(BOTH)) == (6, True)


def test_gpus_of_a_lost_node_are_gone_whoever_holds_them() -> None:
    gpus = Pool(CLUSTER.nodes)
    gpus.take(BOTH)
    gpus.remove("node-1")
    gpus.remove("node-1")
    assert (gpus.gpus, gpus.free_gpus, gpus.has(BOTH), gpus.can_hold(BOTH)) == (4, 3, False, False)
    gpus.release(BOTH)
    assert gpus.free == tuple(gpus.nodes.values()) == (CLUSTER.nodes[0], CLUSTER.nodes[2])
    gpus.add([CLUSTER.nodes[1]])
    assert (gpus.gpus, gpus.free_gpus, gpus.can_hold(BOTH)) == (6, 6, True)


def test_a_shared_gpu_is_free_when_its_last_member_has_left() -> None:
    gpus = Pool(CLUSTER.nodes)
    first, second = ((Placement("node-0", (1,), seat),) for seat in (1, 2))
    whole = (Placement("node-0", (1,)),)
    gpus.take(first)
    assert (gpus.can_hold(first), gpus.can_hold(second), gpus.can_hold(whole)) == (False, True, False)
    gpus.take(second)
    gpus.release(first)
    assert (gpus.free_gpus, gpus.can_hold(first), gpus.can_hold(whole)) == (5, True, False)
    gpus.release(second)
    assert (gpus.free_gpus, gpus.can_hold(whole)) == (6, True)
    gpus.take(whole)
    assert not gpus.can_hold(first)
