"""Stores of states: copies between nodes are whole or absent."""

from __future__ import annotations

import selectors
import threading

import pytest

from hetctl.runtime.agent.state_store import StateStore
from hetctl.runtime.transport import Listener


@pytest.fixture
def stores(request):
    """Two stores, as on two nodes."""
    made = [StateStore(f"{request.node.name[:40]}-{number}") for number in range(2)]
    yield made
    for store in made:
        store.close()


def results(store, count=1):
    """Wait for the ends of copies."""
    found = []
    with selectors.PollSelector() as selector:
        selector.register(store, selectors.EVENT_READ)
        while len(found) < count:
            assert selector.select(20), "no copy has ended"
            found += store.fetched()
    return found


def hidden(store):
    return [path.name for path in store.folder.iterdir() if path.name not in (".users", "m-1", "m-2")]


def test_a_state_arrives_as_it_was(stores):
    source, target = stores
    content = bytes(range(256)) * 5000
    (source.folder / "m-1").write_bytes(content)
    target.fetch("m-1", source.address)
    (result,) = results(target)
    assert (result.name, result.size_bytes, result.error) == ("m-1", len(content), "")
    assert (target.folder / "m-1").read_bytes() == content
    assert hidden(target) == []


def test_several_states_are_copied_at_once_and_none_twice(stores):
    source, target = stores
    for name in ("m-1", "m-2"):
        (source.folder / name).write_bytes(name.encode())
    for name in ("m-1", "m-2", "m-1"):
        target.fetch(name, source.address)
    assert {result.name for result in results(target, 2)} == {"m-1", "m-2"}
    target.fetch("m-1", source.address)
    assert (results(target)[0].size_bytes, target.fetched()) == (0, [])


@pytest.mark.parametrize("name", ["m-1", "../m-1", ".users", ""])
def test_a_state_that_is_not_there(stores, name):
    source, target = stores
    target.fetch(name, source.address)
    assert results(target)[0].error
    assert hidden(target) == []


def test_a_transfer_that_breaks_leaves_nothing(stores):
    _, target = stores
    listener = Listener("key")

    def break_off():
        _, connection = listener.wait(20)
        connection.send(10**6)
        connection.send_bytes(memoryview(b"half"))
        connection.close()

    threading.Thread(target=break_off, daemon=True).start()
    target.fetch("m-1", listener.address)
    assert results(target)[0].error
    assert hidden(target) == []
    listener.close()


def test_a_forgotten_state_is_gone(stores):
    store, _ = stores
    (store.folder / "m-1").write_bytes(b"state")
    store.forget(["m-1", "m-2"])
    assert not (store.folder / "m-1").exists()


def test_the_folder_ends_with_the_store():
    store = StateStore("test-store-that-ends")
    folder = store.folder
    (folder / "m-1").write_bytes(b"state")
    store.close()
    assert not folder.exists()
