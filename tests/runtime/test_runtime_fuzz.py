"""Whatever another process sends, or an address file holds, is read or refused as documented."""

from __future__ import annotations

import contextlib
import json
import socket

import pytest
from fuzzing import fuzzed, mutations
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.serialization import encode, parse
from hetctl.runtime.agent.joining import DriverAddress
from hetctl.runtime.agent.messages import AgentFacts, GpuFacts
from hetctl.runtime.handshake import read_handshake
from hetctl.runtime.horovod_rendezvous import RendezvousStore
from hetctl.runtime.transport import Connection
from hetctl.runtime.worker.checkpoint import ArrayFile, Manifest, TrainingState

KEY = "0123456789abcdef"
HANDSHAKE = b"".join(json.dumps(one).encode() + b"\n" for one in (KEY, {"rank": 1, "host": "n1"}))
FACTS = AgentFacts("1", "host", {"A": "b"}, (0, 1), (GpuFacts("u", "H100", (0,)),))
MANIFEST = Manifest("a.npz", 3, "ab", TrainingState(), (ArrayFile("p", 1, "cd", ("x",)),))
FILES = {
    "driver": DriverAddress(host="host", port=4242, key=KEY, orphaned_s=30.0, cancel=("scancel", "7")),
    "facts": FACTS,
    "manifest": MANIFEST,
}


@fuzzed()
@given(data=st.data())
def test_a_handshake_is_read_refused_or_waited_for(data):
    sent = data.draw(mutations(HANDSHAKE) | st.binary(max_size=99))
    with contextlib.suppress(ValueError):
        found = read_handshake(sent, KEY)
        # Nobody gets in without the key.
        assert found is None or sent.startswith(json.dumps(KEY).encode() + b"\n")


@pytest.mark.parametrize("name", FILES)
@fuzzed()
@given(data=st.data())
def test_values_of_others_are_read_or_a_value_error(name, data):
    kind, text = type(FILES[name]), json.dumps(encode(FILES[name])).encode()
    assert parse(kind, text) == FILES[name]
    with contextlib.suppress(ValueError):
        assert isinstance(parse(kind, data.draw(mutations(text))), kind)


@fuzzed()
@given(data=st.data())
def test_a_message_is_read_or_the_connection_counts_as_lost(data):
    ours, theirs = socket.socketpair()
    connection, text = Connection(ours), json.dumps(encode(FACTS)).encode() + b"\n"
    with theirs:
        theirs.sendall(data.draw(mutations(text * 2)))
    try:
        with contextlib.suppress(ConnectionError):
            while True:
                connection.receive(5.0)
    finally:
        connection.close()


METHODS = st.sampled_from(["GET", "PUT", "DELETE", "POST"])


@fuzzed(30)
@given(st.lists(st.tuples(METHODS, st.text(max_size=9), st.binary(max_size=9))))
def test_any_request_has_an_answer_of_the_rendezvous(requests):
    store = RendezvousStore({"global": 2})
    for method, path, content in requests:
        assert store.answer(method, f"/global/{path}", content)[0] in {200, 400, 404, 409}
        assert store.answer(method, path, content)[0] in {200, 400, 404, 409}
