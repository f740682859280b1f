"""Values over wires, and doors that open to a key."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time

import pytest
from workbench import wait_for

from hetctl.runtime import wire as wires
from hetctl.runtime.wire import Address, Door, knock


@pytest.fixture
def pair():
    door = Door("key")
    near = knock(door.address, "somebody", 5)
    _, far = door.wait(5)
    door.close()
    yield near, far
    near.close()
    far.close()


def test_values_arrive_whole_and_in_order(pair):
    one, other = pair
    values = [True, None, {"long": "x" * 200_000}, [1, 2.5], "a line\nand another"]
    sender = threading.Thread(target=lambda: [one.send(value) for value in values])
    sender.start()
    assert [other.receive(10) for _ in values] == values
    sender.join()
    assert list(other.arrived()) == []
    one.send("later")
    wait_for(lambda: list(other.arrived()) == ["later"])


def test_what_was_sent_before_the_end_still_arrives(pair):
    one, other = pair
    one.send("last words")
    one.close()
    assert other.receive(5) == "last words"
    with pytest.raises(ConnectionError, match="gone"):
        other.receive()


def test_nothing_in_time(pair):
    with pytest.raises(TimeoutError):
        pair[0].receive(0.05)


def test_guests_are_known_by_what_they_say():
    door = Door("key")
    guests = [knock(door.address, {"seat": number}, 5) for number in range(3)]
    seen = sorted(door.wait(5)[0]["seat"] for _ in guests)
    assert seen == [0, 1, 2]
    assert list(door.guests()) == []
    door.close()


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"no json\n",
        b"[]\n",
        b"{}\n",
        json.dumps({"key": "wrong", "who": 1}).encode() + b"\n",
        json.dumps({"key": 7, "who": 1}).encode() + b"\n",
        b"x" * 100_000,
    ],
)
def test_strangers_are_not_let_in(greeting):
    door = Door("right")
    with socket.create_connection(("127.0.0.1", door.address.port), 5) as stranger:
        stranger.sendall(greeting)
        stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert list(door.guests()) == []
    door.close()


def test_a_stranger_who_says_nothing_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr(wires, "GREETING_S", 0.5)
    door = Door("key")
    with socket.create_connection(("127.0.0.1", door.address.port), 5) as stranger:
        began = time.monotonic()
        knock(door.address, "a friend", 5)
        assert door.wait(5)[0] == "a friend"
        assert stranger.recv(1) == b""
        assert time.monotonic() - began < 5
    door.close()


def test_a_door_that_is_closed_opens_to_nobody():
    door = Door("key")
    address = door.address
    door.close()
    with pytest.raises(ConnectionError, match="cannot be reached"):
        knock(Address("127.0.0.1", address.port, "key"), "late", 0.3)
