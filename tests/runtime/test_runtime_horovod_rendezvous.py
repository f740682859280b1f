"""Rendezvous of Horovod's ranks: keys that the server has and their ends, and who may connect to it."""

from __future__ import annotations

import http.client
import socket
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import psutil
import pytest
from workbench import wait_for

from hetctl.runtime import horovod_rendezvous as rendezvous
from hetctl.runtime.horovod_rendezvous import RendezvousStore


def test_values_stay_until_all_ranks_have_met():
    store = RendezvousStore({"global": 2})
    assert store.answer("GET", "/global/0") == (404, b"")
    # A value is stored once.
    for value, status in ((b"address", 200), (b"address", 200), (b"another's", 409)):
        assert store.answer("PUT", "/global/0", value)[0] == status
    # A client repeats a request whose answer is lost.
    for _ in range(2):
        assert store.answer("DELETE", "/global/0") == (200, b"")
    assert store.answer("GET", "/global/0") == (200, b"address")
    assert store.answer("DELETE", "/global/1") == (200, b"")
    assert store.answer("GET", "/global/0") == (404, b"")
    assert store.answer("PUT", "/global/0", b"next time") == (200, b"")


def test_keys_of_other_scopes_are_deleted_one_by_one():
    store = RendezvousStore({})
    for key in "ab":
        store.answer("PUT", f"/own/{key}", key.encode())
    store.answer("DELETE", "/own/a")
    assert store.answer("GET", "/own/a") == (404, b"")
    assert store.answer("GET", "/own/b") == (200, b"b")


def test_values_beyond_the_limit_are_refused(monkeypatch):
    monkeypatch.setattr(rendezvous, "MOST_BYTES", 5 * rendezvous.KEY_BYTES)
    store = RendezvousStore({})
    answers = [store.answer("PUT", f"/scope-{number}/0", b"1")[0] for number in range(6)]
    assert answers == [200] * 4 + [413] * 2


def test_other_paths_and_methods_are_refused():
    store = RendezvousStore({})
    assert [store.answer("GET", path)[0] for path in ("/", "/one", "/one/two/three", "")] == [400] * 4
    assert store.answer("POST", "/one/two")[0] == 400


@contextmanager
def served(**how):
    """Yield Horovod's own address of the server for a scope."""
    with rendezvous.horovod_rendezvous({"global": 1}, "127.0.0.1", **how) as found:
        place = found["HOROVOD_GLOO_RENDEZVOUS_ADDR"], found["HOROVOD_GLOO_RENDEZVOUS_PORT"]
        yield "http://{}:{}/global".format(*place)


@pytest.fixture
def url():
    with served() as url:
        yield url


def ask(url, method, key="0", body=None, root=None):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    connection.request(method, (parts.path if root is None else root) + f"/{key}", body=body)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, content


def test_the_server_speaks_http(url):
    assert ask(url, "PUT", body=b"\x00address") == (200, b"")
    assert ask(url, "GET") == (200, b"\x00address")
    assert ask(url, "GET", key="1") == (404, b"")
    assert ask(url, "DELETE") == (200, b"")
    assert ask(url, "GET") == (404, b"")


def test_without_the_secret_nothing_is_read_or_written(url):
    ask(url, "PUT", body=b"mine")
    secret = urlsplit(url).path.split("/")[1]
    for root in ("/global", "", f"/{'0' * len(secret)}/global", f"/{secret[1:]}/global"):
        assert [ask(url, method, root=root)[0] for method in ("GET", "DELETE", "PUT")] == [403] * 3
    assert ask(url, "GET") == (200, b"mine")


def raw(url, data):
    """Send bytes, and return what is answered until the server closes the connection."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), 30) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(2**16), b""))


def test_a_large_value_is_refused_before_it_is_sent(url):
    head = f"PUT {urlsplit(url).path}/0 HTTP/1.1\r\nContent-Length: {50 * 2**20}\r\n\r\n"
    assert raw(url, head.encode()).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "request_of_another",
    [b"\r\n\r\n", b"GET\r\n\r\n", b"\xff" * 2**14, b"PUT /a b\r\nContent-Length: -1\r\n\r\n"],
)
def test_what_is_no_request_ends_its_connection_alone(url, request_of_another):
    assert not raw(url, request_of_another).startswith(b"HTTP/1.1 200")
    assert ask(url, "GET") == (404, b"")


def test_a_slow_request_is_cut_off():
    with served(request_s=0.2) as url:
        assert raw(url, b"GET /") == b""


def test_a_flood_of_connections_is_closed(url, monkeypatch):
    monkeypatch.setattr(rendezvous, "MOST_CONNECTIONS", 1)
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port), 30) as first:
        first.sendall(b"GET")
        with socket.create_connection((parts.hostname, parts.port), 30) as second:
            assert second.recv(1) == b""

    def is_served():
        with suppress(ConnectionError):
            return ask(url, "GET") == (404, b"")
        return False

    wait_for(is_served)


def test_the_server_listens_at_one_address(url):
    port = urlsplit(url).port
    own = [one.laddr for one in psutil.Process().net_connections("tcp") if one.status == "LISTEN"]
    assert [address.ip for address in own if address.port == port] == ["127.0.0.1"]
