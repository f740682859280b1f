"""Groups of ranks: connection, broadcasts, end, and the loss of a rank."""

from __future__ import annotations

import threading
from queue import Queue

import pytest

from hetctl.model.errors import TransientInputError
from hetctl.model.site import ANY_INTERFACES, NetworkInterfaces, Timeouts
from hetctl.runtime.transport import Address
from hetctl.runtime.worker import group
from hetctl.runtime.worker.group import Group, LostPeerError, RankInfo, all_gather, join_group


class BackendOfTests:
    needs = "cables and plugs"

    def __init__(self, missing=""):
        self.missing = missing
        self.initialized, self.shut_down = [], []

    def load(self):
        if self.missing:
            raise ImportError(f"No module named {self.missing}")

    def initialize(self, group):
        self.initialized.append((group.rank, group.size, group.host, group.interface))

    def shutdown(self):
        self.shut_down.append(True)


def unexpected(_address):
    raise AssertionError("no other rank is awaited")


class Ranks:
    """Threads in place of the ranks of a group, each with a function to run in it."""

    def __init__(self, *bodies, interfaces=ANY_INTERFACES):
        self.interfaces = interfaces
        self.backend = BackendOfTests()
        self.results = {}
        self.masters = Queue()
        size = len(bodies)
        self.threads = [
            threading.Thread(target=self._run, args=(rank, size, body)) for rank, body in enumerate(bodies)
        ]
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join(timeout=60)
            assert not thread.is_alive()

    def _run(self, rank, size, body):
        master = None
        if rank:
            master = self.masters.get(timeout=60)
            self.masters.put(master)
        try:
            group = join_group(
                RankInfo(rank, size, "key", master), self.backend, self.masters.put, self.interfaces
            )
            self.results[rank] = body(group)
        except LostPeerError as error:
            self.results[rank] = error


def test_one_gpu_needs_no_connection():
    group = join_group(RankInfo(0, 1), BackendOfTests(missing="plugs"), unexpected)
    assert type(group) is Group
    assert (group.rank, group.size, group.broadcast("value"), group.peer_failed()) == (0, 1, "value", False)
    group.barrier_and_close()


def test_several_gpus_are_refused_without_a_collective_backend():
    with pytest.raises(TransientInputError, match="needs cables and plugs: No module named plugs") as caught:
        join_group(RankInfo(0, 2, "key"), BackendOfTests(missing="plugs"), unexpected)
    assert "gpus: 1" in caught.value.hint


def test_ranks_receive_the_broadcasts_of_rank_0():
    def body(group):
        said = [
            group.broadcast(value if group.rank == 0 else "ignored") for value in (True, None, {"a": 1.5})
        ]
        group.barrier_and_close()
        return said

    ranks = Ranks(body, body, body)
    assert ranks.results == {key: [True, None, {"a": 1.5}] for key in range(3)}
    assert sorted(ranks.backend.initialized) == [(rank, 3, "127.0.0.1", "lo") for rank in range(3)]
    assert len(ranks.backend.shut_down) == 3


def test_every_rank_gets_the_values_of_all():
    def body(group):
        values = all_gather(group, [group.rank, "a"])
        group.barrier_and_close()
        return values

    assert list(Ranks(body, body, body).results.values()) == 3 * [[[0, "a"], [1, "a"], [2, "a"]]]
    assert all_gather(Group(), 5) == [5]


def let_go(group):
    for connection in group._connections:
        connection.close()


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_remaining_ranks_notice_a_lost_rank(gone):
    def left(group):
        broken = group.peer_failed(patience_s=60.0)
        let_go(group)  # as a process does that fails
        return broken

    bodies = [left, left, left]
    bodies[gone] = let_go
    ranks = Ranks(*bodies)
    assert [ranks.results[rank] for rank in range(3) if rank != gone] == [True, True]


def test_a_silent_rank_does_not_count_as_lost():
    over = threading.Barrier(2)

    def body(group):
        broken = group.peer_failed()
        over.wait(timeout=60)
        return broken

    assert Ranks(body, body).results == {0: False, 1: False}


@pytest.mark.parametrize("how", ["broadcast", "barrier_and_close"])
def test_ranks_do_not_wait_for_a_lost_rank(how):
    def waiting(group):
        if how == "broadcast":
            return group.broadcast(None)
        return group.barrier_and_close()

    assert isinstance(Ranks(let_go, waiting).results[1], LostPeerError)


@pytest.mark.parametrize("gone", [0, 1])
def test_the_loss_of_a_rank_is_told_while_the_others_are_busy(gone):
    def busy(group):
        told = threading.Event()
        group.on_peer_loss(told.set)
        return told.wait(timeout=60)

    bodies = [busy, busy]
    bodies[gone] = let_go
    assert Ranks(*bodies).results[1 - gone] is True


def test_no_loss_is_told_of_ranks_that_end_in_order():
    def body(group):
        told = threading.Event()
        group.on_peer_loss(told.set)
        if group.rank == 0:
            group.broadcast("a message that waits for the other rank")
        is_told = told.wait(timeout=0.2)
        if group.rank:
            group.broadcast(None)
        group.barrier_and_close()
        return is_told or told.is_set()

    assert Ranks(body, body).results == {0: False, 1: False}


def test_ranks_that_do_not_meet_say_so():
    soon, nowhere = (
        {"timeouts": Timeouts(meeting_s=0.3)},
        RankInfo(1, 2, "key", Address("127.0.0.1", 9, "key")),
    )
    with pytest.raises(LostPeerError, match=r"did not connect: no connection within 0.3 s"):
        join_group(RankInfo(0, 2, "key"), BackendOfTests(), lambda _address: None, **soon)
    with pytest.raises(LostPeerError, match=r"did not connect: .* cannot be reached"):
        join_group(nowhere, BackendOfTests(), unexpected, **soon)


THERE = {"lo": ["127.0.0.1"], "hsn0": [], "hsn1": ["10.0.0.1"]}
INTERFACES = {
    "the control network": (NetworkInterfaces(control=("none*", "lo")), "lo"),
    "that of gloo": (NetworkInterfaces(("lo",), ("hsn*",)), "hsn1"),
}


@pytest.mark.parametrize(("interfaces", "chosen"), INTERFACES.values(), ids=INTERFACES)
def test_ranks_of_two_hosts_connect_at_the_sites_interfaces(monkeypatch, interfaces, chosen):
    monkeypatch.setattr(group.socket, "gethostname", lambda: threading.current_thread().name)
    monkeypatch.setattr("hetctl.runtime.interfaces.addresses", lambda: THERE)
    ranks = Ranks(*[lambda ranks: ranks.barrier_and_close()] * 2, interfaces=interfaces)
    assert ranks.results == {0: None, 1: None}
    assert ranks.masters.get(timeout=60).host == "127.0.0.1"
    assert sorted(ranks.backend.initialized) == [(rank, 2, "127.0.0.1", chosen) for rank in (0, 1)]


@pytest.mark.parametrize("key", ["control", "gloo"])
def test_a_node_without_the_named_interface_says_which_it_has(key):
    interfaces = NetworkInterfaces(**{key: ("none*", "ib7")})
    with pytest.raises(TransientInputError, match=rf"network.{key} .* names none\*, ib7, but .* has .*lo"):
        join_group(RankInfo(0, 2, "key"), BackendOfTests(), unexpected, interfaces)
