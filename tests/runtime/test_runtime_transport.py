"""Connections: values in order, and listeners that require a key."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from workbench import wait_for

from hetctl.runtime.tls import new_certificate
from hetctl.runtime.transport import MOST_PENDING, Address, Connection, JobIdentity, Listener, connect

PATIENCE_S = 60.0


IDENTITY = JobIdentity(new_certificate())
IN_CLEAR = replace(IDENTITY, encrypts_data=False)


def away(address, identity=IDENTITY):
    """Return an address as on another machine, where nobody has the name of the socket."""
    return replace(address, name="nobody") if identity else address


@pytest.fixture(params=[None, IDENTITY, IN_CLEAR], ids=["here", "encrypted", "data in clear"])
def pair(request):
    """Two ends of a connection on one machine, or between two."""
    listener = Listener("key", "", request.param)
    near = connect(away(listener.address, request.param), "somebody", PATIENCE_S, request.param)
    _, far = listener.wait(PATIENCE_S)
    listener.close()
    yield near, far
    near.close()
    far.close()


def test_values_and_bytes_arrive_whole_and_in_order_in_both_directions_at_once(pair):
    """A rank's thread of heartbeats sends while another one reads."""
    values = [True, None, {"long": "x" * 200_000}, [1, 2.5], "a line\nand another", *range(300)]
    data = os.urandom(3_000_000)

    def send(end):
        for value in values:
            end.send(value)
        end.send_bytes(memoryview(data))
        end.send("after")

    senders = [threading.Thread(target=send, args=(end,)) for end in pair]
    for sender in senders:
        sender.start()
    for end in pair:
        received = bytearray(len(data))
        assert [end.receive(PATIENCE_S) for _ in values] == values
        end.receive_bytes(memoryview(received))
        assert received == data
        assert end.receive(PATIENCE_S) == "after"
    for sender in senders:
        sender.join()
    one, other = pair
    assert list(other.arrived()) == []
    one.send("later")
    wait_for(lambda: list(other.arrived()) == ["later"])


def test_silence_is_limited_where_it_is_asked_for(pair):
    one, other = pair
    one.send_bytes(memoryview(b"abc"))
    other.set_timeout(0.05)
    with pytest.raises(TimeoutError):
        other.receive_bytes(memoryview(bytearray(4)))
    other.send("value")
    assert one.receive(PATIENCE_S) == "value"
    one.set_timeout(0.05)
    with pytest.raises(TimeoutError):
        one.send_bytes(memoryview(bytes(2**26)))


@pytest.mark.parametrize("number", [errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT])
def test_an_unreachable_host_is_a_lost_connection(number):
    """The kernel gives these errors when nothing was acknowledged for too long."""

    class Unreachable(socket.socket):
        def recv(self, *_):
            raise OSError(number, os.strerror(number))

        recv_into = sendall = recv

    one, other = socket.socketpair()
    other.sendall(b"x")
    lost = Connection(Unreachable(fileno=one.detach()))
    uses = (
        lambda: lost.receive(10),
        lambda: list(lost.arrived()),
        lambda: lost.send("x"),
        lambda: lost.send_bytes(memoryview(b"x")),
        lambda: lost.receive_bytes(memoryview(bytearray(1))),
    )
    for use in uses:
        with pytest.raises(ConnectionError, match=re.escape(os.strerror(number))):
            use()
    lost.close()
    other.close()


def test_what_was_sent_before_the_close_arrives(pair):
    one, other = pair
    with pytest.raises(TimeoutError):
        other.receive(0.05)
    one.send("last words")
    one.send_bytes(memoryview(b"abc"))
    one.close()
    assert other.receive(5) == "last words"
    with pytest.raises(ConnectionError, match="closed the connection"):
        other.receive_bytes(memoryview(bytearray(4)))
    with pytest.raises(ConnectionError, match="closed the connection"):
        other.receive()


def test_connections_are_accepted_with_their_names():
    listener = Listener("key")
    guests = [connect(listener.address, {"seat": number}, PATIENCE_S) for number in range(3)]
    seen = sorted(listener.wait(PATIENCE_S)[0]["seat"] for _ in guests)
    assert seen == [0, 1, 2]
    assert list(listener.accepted()) == []
    listener.close()


def reach(listener):
    """Connect as a process of this user that knows where a listener is, but not the key."""
    if listener.address.port:
        return socket.create_connection(("127.0.0.1", listener.address.port), PATIENCE_S)
    end = socket.socket(socket.AF_UNIX)
    end.settimeout(PATIENCE_S)
    end.connect(f"\0{listener.address.name}")
    return end


def ends(stranger):
    """Wait for the end of a connection, and return what came before it."""
    came = b""
    with contextlib.suppress(ConnectionResetError):
        while data := stranger.recv(100):
            came += data
    return came


@pytest.mark.parametrize("identity", [None, IDENTITY], ids=["here", "from another machine"])
@pytest.mark.parametrize(
    "said",
    [
        b'"no key"\n1\n',
        b"[" * 10**6,
        b"x" * 100_000,
        b'"right"\nno name\n',
        b'"right"\n' + b"[" * 60_000 + b"\n",
        b"\n\n",
        b"\x16\x03\x01\x40\x00" + b"\0" * 100_000,
        b"",
    ],
    ids=["wrong", "deep", "long", "no JSON", "deep name", "empty", "long TLS", "nothing"],
)
def test_strangers_are_closed_without_an_answer(said, identity):
    listener = Listener("right", "", identity)
    with reach(listener) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
        # Nothing but an alert of TLS.
        assert len(ends(stranger)) < 10
    connect(listener.address, "a friend", PATIENCE_S).close()
    assert listener.wait(PATIENCE_S)[0] == "a friend"
    assert list(listener.accepted()) == []
    listener.close()


def test_a_listener_has_one_thread_for_all_strangers():
    before = threading.active_count()
    listener = Listener("key", "", IDENTITY)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(reach(listener)).sendall(b"k")
        connect(away(listener.address), "a friend", PATIENCE_S, IDENTITY).close()
        assert threading.active_count() == before + 1
    listener.close()
    assert threading.active_count() == before


def test_a_handshake_by_drops_ends_at_the_limit():
    listener = Listener("key" * 100, handshake_s=0.5)
    began, sent = time.monotonic(), 0
    with reach(listener) as stranger, contextlib.suppress(ConnectionError):
        while time.monotonic() < began + PATIENCE_S:
            stranger.sendall(b"k")
            sent += 1
            time.sleep(0.1)
    assert 0 < sent < 300
    listener.close()


@pytest.mark.parametrize("identity", [None, IDENTITY], ids=["here", "from another machine"])
@pytest.mark.parametrize("said", [b"", b'"'], ids=["silent", "slow"])
def test_friends_get_in_while_strangers_hold_all_places(said, identity):
    listener = Listener("key", "", identity, handshake_s=PATIENCE_S)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(reach(listener)) for _ in range(MOST_PENDING + 20)]
        for stranger in strangers:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(said)
        for name in range(3):
            connect(away(listener.address, identity), name, PATIENCE_S, identity).close()
            assert listener.wait(PATIENCE_S)[0] == name
        # The oldest strangers had to leave.
        assert ends(strangers[0]) == b""
    listener.close()


IN_NEED = """
import os, resource, sys
from hetctl.runtime.transport import Listener
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
listener = Listener("key")
print(listener.address.name, flush=True)
sys.stdin.readline()
files = [os.open("/dev/null", os.O_RDONLY) for _ in range(70)]
print(listener.wait(60)[0])
"""


def test_strangers_cannot_use_up_the_descriptors():
    program = subprocess.Popen(
        [sys.executable, "-c", IN_NEED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    address = Address("", None, "key", program.stdout.readline().strip())
    with contextlib.ExitStack() as stack:
        for _ in range(120):
            stack.enter_context(reach(SimpleNamespace(address=address)))
        program.stdin.write("now\n")
        program.stdin.flush()
        connect(address, "a friend", PATIENCE_S).close()
        assert program.communicate(timeout=PATIENCE_S)[0] == "a friend\n"
    assert program.returncode == 0


@contextlib.contextmanager
def impostor(answer):
    """Give all connections at a port an answer, and close them; yield an address there, and what came."""
    heard = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer_all():
            with contextlib.suppress(OSError):
                while True:
                    end, _ = server.accept()
                    with end, contextlib.suppress(ConnectionError):
                        heard.append(end.recv(10_000))
                        end.sendall(answer)

        program = threading.Thread(target=answer_all)
        program.start()
        yield Address("127.0.0.1", server.getsockname()[1], "secret"), heard
        server.shutdown(socket.SHUT_RDWR)
        program.join(PATIENCE_S)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n", b"true\n"])
def test_an_impostor_at_the_port_gets_no_key(answer):
    with impostor(answer) as (address, heard), pytest.raises(ConnectionError) as found:
        connect(address, "a guest", 0.1, IDENTITY)
    assert f"127.0.0.1:{address.port} cannot be reached: " in str(found.value)
    assert re.search("certificate|closed|reset", str(found.value))
    assert not re.search(b"secret|guest", b"".join(heard))


@pytest.mark.parametrize("only", ["listener", "guest"])
def test_another_certificate_is_refused_by_both_sides(only):
    """Who listens with a certificate of their own gets no key, and who connects with one no answer."""
    other = JobIdentity(new_certificate())
    listener = Listener("key", "", other if only == "listener" else IDENTITY)
    with pytest.raises(ConnectionError, match=r"certificate|closed|reset"):
        connect(away(listener.address), "a guest", 0.1, IDENTITY if only == "listener" else other)
    assert list(listener.accepted()) == []
    listener.close()


def test_a_side_without_certificate_is_refused():
    listener = Listener("key", "", IDENTITY)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with reach(listener) as end, context.wrap_socket(end) as stranger, contextlib.suppress(OSError):
        stranger.sendall(b'"key"\n1\n')
        assert stranger.recv(100) == b""
    assert list(listener.accepted()) == []
    listener.close()


def test_a_program_of_another_user_is_refused(monkeypatch):
    listener = Listener("key")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConnectionError, match="another user"):
        connect(listener.address, "a guest", 0.1)
    with reach(listener) as stranger:
        assert ends(stranger) == b""
    listener.close()


def readable(ends):
    return select.select(list(ends), [], [], PATIENCE_S)[0]


def test_a_guest_comes_again_until_the_listener_is_there():
    listener = Listener("key", "", IDENTITY)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pass_on():
            server.accept()[0].close()
            end, _ = server.accept()
            with end, reach(listener) as beyond:
                others = {end: beyond, beyond: end}
                while all(others[one].sendall(data := one.recv(10_000)) or data for one in readable(others)):
                    pass

        between = threading.Thread(target=pass_on)
        between.start()
        address = Address("127.0.0.1", server.getsockname()[1], "key")
        connect(address, "a guest", PATIENCE_S, IDENTITY).close()
        between.join(PATIENCE_S)
    listener.close()


def test_a_listener_for_this_machine_alone_has_no_port():
    listener = Listener("key")
    assert listener.address.port is None
    with pytest.raises(ConnectionRefusedError, match="cannot be reached"):
        connect(away(listener.address), "a guest", 0.1, IDENTITY)
    listener.close()


def test_changed_bytes_break_an_encrypted_connection():
    listener = Listener("key", "", IDENTITY)
    near = connect(away(listener.address), "somebody", PATIENCE_S, IDENTITY)
    _, far = listener.wait(PATIENCE_S)
    near._end.sendall(b"\x17\x03\x03\x00\x20" + b"x" * 32)
    with pytest.raises(ConnectionError, match="tampered"):
        far.receive(PATIENCE_S)
    listener.close()


def test_a_closed_listener_accepts_no_connection():
    listener = Listener("key")
    address = listener.address
    listener.close()
    with pytest.raises(ConnectionError, match="cannot be reached"):
        connect(address, "late", 0.3)


@contextlib.contextmanager
def descriptors_up_to(limit):
    """Let this process open descriptors below `limit`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_listener_accepts_again_after_descriptors_ran_out():
    listener = Listener("key")
    callers, came = [socket.socket(socket.AF_UNIX) for _ in range(2)], []
    # Only 0, 1 and 2 are below this limit, and they are open: no thread can free a descriptor that helps.
    with descriptors_up_to(3):
        for who, caller in enumerate(callers):
            caller.connect(f"\0{listener.address.name}")
            caller.sendall(f'"key"\n{who}\n'.encode())
        time.sleep(0.3)
        came += [who for who, _ in listener.accepted()]
    assert came == []
    came += [listener.wait(PATIENCE_S)[0] for _ in callers]
    assert sorted(came) == [0, 1]
    for caller in callers:
        caller.close()
    listener.close()


def test_a_listener_accepts_after_an_aborted_connection(monkeypatch):
    listener = Listener("key")
    accept, errors = socket.socket.accept, [ConnectionAbortedError()]
    monkeypatch.setattr(socket.socket, "accept", lambda s: _raise(errors.pop()) if errors else accept(s))
    for name in ("first", "second"):
        connect(listener.address, name, PATIENCE_S)
        assert listener.wait(PATIENCE_S)[0] == name
    assert not errors
    listener.close()


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="no IPv6 on this machine")


def opens(listener, host):
    """Return true if a listener accepts connections at an address."""
    try:
        connect(Address(host, listener.address.port, "key"), host, 0.1, IDENTITY).close()
    except ConnectionError:
        return False
    return listener.wait(PATIENCE_S)[0] == host


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_listener_at_an_address_accepts_there_alone(host):
    listener = Listener("key", host, IDENTITY)
    assert listener.address.host == host
    others = {"127.0.0.1", "127.0.0.2", "::1"} - {host}
    assert [opens(listener, address) for address in (host, *others)] == [True, False, False]
    listener.close()


@needs_ipv6
def test_a_listener_without_address_accepts_ipv4_and_ipv6():
    listener = Listener("key", "", IDENTITY)
    assert listener.address.host == socket.gethostname()
    assert [opens(listener, host) for host in ("127.0.0.1", "127.0.0.2", "::1")] == [True] * 3
    listener.close()


def _raise(error):
    raise error


def test_connections_work_on_descriptors_above_1023():
    with descriptors_up_to(2048), contextlib.ExitStack() as stack:
        for _ in range(1100):
            stack.callback(os.close, os.dup(0))
        listener = Listener("key")
        stack.callback(listener.close)
        lowest = 0
        # Objects of other tests that are collected meanwhile close theirs, which are given out again.
        while lowest < 1024:
            near = connect(listener.address, "somebody", PATIENCE_S)
            _, far = listener.wait(PATIENCE_S)
            stack.callback(near.close)
            stack.callback(far.close)
            lowest = min(near._end.fileno(), far._end.fileno())
        near.send("far away")
        assert far.receive(PATIENCE_S) == "far away"
        assert list(near.arrived()) == []
