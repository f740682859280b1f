"""Rendezvous of Horovod's ranks: keys that the server has, and their ends."""

from __future__ import annotations

import http.client

from hetctl.runtime.worker.scripts.horovod_rendezvous import RendezvousStore, horovod_rendezvous


def test_values_stay_until_all_ranks_have_met():
    store = RendezvousStore({"global": 2})
    assert store.answer("GET", "/global/0") == (404, b"")
    assert store.answer("PUT", "/global/0", b"address") == (200, b"")
    assert store.answer("DELETE", "/global/0") == (200, b"")
    assert store.answer("GET", "/global/0") == (200, b"address")
    assert store.answer("DELETE", "/global/1") == (200, b"")
    assert store.answer("GET", "/global/0") == (404, b"")


def test_keys_of_other_scopes_are_deleted_one_by_one():
    store = RendezvousStore({})
    for key in "ab":
        store.answer("PUT", f"/own/{key}", key.encode())
    store.answer("DELETE", "/own/a")
    assert store.answer("GET", "/own/a") == (404, b"")
    assert store.answer("GET", "/own/b") == (200, b"b")


def test_other_paths_are_refused():
    store = RendezvousStore({})
    assert [store.answer("GET", path)[0] for path in ("/", "/one", "/one/two/three", "")] == [400] * 4


def test_the_server_speaks_http():
    with horovod_rendezvous({"global": 1}) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("PUT", "/global/0", body=b"\x00address")
        assert connection.getresponse().read() == b""
        connection.request("GET", "/global/0")
        assert connection.getresponse().read() == b"\x00address"
        connection.request("GET", "/global/1")
        assert connection.getresponse().status == 404
        connection.close()
