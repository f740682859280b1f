"""Stores of states: copies between nodes are whole or absent."""

from __future__ import annotations

import selectors
import threading
from contextlib import suppress

import pytest
from workbench import wait_for

from hetctl.runtime.agent.state_store import SpareFile, StateStore
from hetctl.runtime.data.sharing.node_folder import node_folder
from hetctl.runtime.transport import Listener

NODE = "n1"


@pytest.fixture
def stores(request):
    """Two stores, as on two nodes."""
    made = [StateStore(request.node.name[:40], f"n{number}") for number in range(2)]
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
    """Files of a store that are no states, but for the spare one, which may come at any time."""
    known = (".users", ".spare", ".spare-in-making", "m-1", "m-2")
    return [path.name for path in store.folder.iterdir() if path.name not in known]


def test_a_state_arrives_as_it_was(stores):
    source, target = stores
    content = bytes(range(256)) * 5000
    (source.folder / "m-1").write_bytes(content)
    target.fetch("m-1", source.address)
    (result,) = results(target)
    assert (result.state, result.bytes, result.error) == ("m-1", len(content), "")
    assert (target.folder / "m-1").read_bytes() == content
    assert hidden(target) == []


@pytest.mark.parametrize("later", [100, 3_000_000, 1])
def test_states_of_other_sizes_follow(stores, later):
    source, target = stores
    for name, size_bytes in (("m-1", 1_500_000), ("m-2", later)):
        (source.folder / name).write_bytes(name[-1:].encode() * size_bytes)
        target.fetch(name, source.address)
        assert results(target)[0].bytes == size_bytes
        wait_for((target.folder / ".spare").exists)
        assert (target.folder / name).read_bytes() == name[-1:].encode() * size_bytes


def test_several_states_are_copied_at_once(stores):
    source, target = stores
    for name in ("m-1", "m-2"):
        (source.folder / name).write_bytes(name.encode())
        target.fetch(name, source.address)
    assert {result.state for result in results(target, 2)} == {"m-1", "m-2"}
    target.fetch("m-1", source.address)
    assert (results(target)[0].bytes, target.fetched()) == (0, [])


def test_a_state_under_way_is_not_copied_twice(stores):
    source, target = stores
    listener, halves = Listener("key"), []
    half_sent(listener, halves.append)
    target.fetch("m-1", listener.address)
    wait_for(lambda: halves)
    target.fetch("m-1", listener.address)
    (source.folder / "m-2").write_bytes(b"state")
    target.fetch("m-2", source.address)
    assert [result.state for result in results(target)] == ["m-2"]
    halves.pop().close()
    assert [(result.state, bool(result.error)) for result in results(target)] == [("m-1", True)]
    assert list(listener.accepted()) == []
    listener.close()


@pytest.mark.parametrize("name", ["m-1", "../m-1", ".users", ""])
def test_a_state_that_is_not_there(stores, name):
    source, target = stores
    target.fetch(name, source.address)
    assert results(target)[0].error
    assert hidden(target) == []


def half_sent(listener, then):
    """Send the first half of a state to whoever connects."""

    def send():
        _, connection = listener.wait(20)
        with suppress(ConnectionError):
            connection.send(4 * 2**20)
            connection.send_bytes(memoryview(bytes(2 * 2**20)))
        then(connection)

    threading.Thread(target=send, daemon=True).start()


def test_a_transfer_that_breaks_leaves_nothing(stores):
    _, target = stores
    listener = Listener("key")
    half_sent(listener, lambda connection: connection.close())
    target.fetch("m-1", listener.address)
    assert "closed the connection" in results(target)[0].error
    assert hidden(target) == []
    assert not (target.folder / "m-1").exists()
    listener.close()


def test_a_copy_from_a_node_that_falls_silent_fails(request):
    target, listener, silent = StateStore(request.node.name, NODE, silent_s=0.2), Listener("key"), []
    half_sent(listener, silent.append)
    target.fetch("m-1", listener.address)
    assert "TimeoutError" in results(target)[0].error
    assert hidden(target) == []
    target.close()
    listener.close()


def test_the_folder_ends_with_the_store_while_a_state_comes(request):
    target, listener, silent = StateStore(request.node.name, NODE), Listener("key"), []
    half_sent(listener, silent.append)
    target.fetch("m-1", listener.address)
    wait_for(lambda: hidden(target))
    target.close()
    assert not target.folder.exists()
    listener.close()


def test_a_store_is_empty_at_first(request):
    """What an agent that was killed has left is deleted, though a rank of it may still use the folder."""
    with node_folder(request.node.name) as folder:
        for name in ("m-1", ".m-2.half", ".spare"):
            (folder / name).write_bytes(b"state")
        store = StateStore(request.node.name, NODE)
        assert [path.name for path in store.folder.iterdir()] == [".users"]
        store.close()
        assert (folder / ".users").exists()


def test_a_forgotten_state_is_gone(stores):
    store, _ = stores
    (store.folder / "m-1").write_bytes(b"state")
    store.forget(["m-1", "m-2"])
    assert not (store.folder / "m-1").exists()


def test_the_folder_ends_with_the_store():
    store = StateStore("test-store-that-ends", NODE)
    folder = store.folder
    (folder / "m-1").write_bytes(b"state")
    store.close()
    assert not folder.exists()


@pytest.fixture
def spare(tmp_path):
    return SpareFile(tmp_path, most_bytes=8192)


@pytest.mark.parametrize(("size_bytes", "found"), [(5000, 5000), (8192, 8192), (9000, 8192)])
def test_a_file_is_as_large_as_the_last_one_up_to_a_limit(spare, tmp_path, size_bytes, found):
    spare.renew(size_bytes)
    spare.renew(1)
    spare.rename_to(tmp_path / "next")
    assert (tmp_path / "next").stat().st_size == found
    assert (tmp_path / "next").stat().st_blocks * 512 >= found
    assert not spare.path.exists()


def test_there_is_no_file_of_a_size_that_is_none_or_does_not_fit_or_after_the_close(spare, tmp_path):
    spare.renew(0)
    spare.rename_to(tmp_path / "next")
    SpareFile(tmp_path, most_bytes=2**60).renew(2**60)
    assert list(tmp_path.iterdir()) == []
    spare.renew(100)
    spare.close()
    spare.renew(100)
    assert list(tmp_path.iterdir()) == []
