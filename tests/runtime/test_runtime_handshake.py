"""Handshakes, as a listener reads them from whoever connects."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.runtime.handshake import MOST_KEY_BYTES, MOST_NAME_BYTES, read_handshake

NAMES = st.recursive(
    st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@given(name=NAMES, at=st.integers(0, 200))
def test_a_handshake_is_read_once_it_is_complete(name, at):
    sent = f'"key"\n{json.dumps(name)}\n'.encode()
    assert read_handshake(sent, "key") == name
    assert read_handshake(sent[: min(at, len(sent) - 1)], "key") is None


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"k" * (MOST_KEY_BYTES + 1), "without a key"),
        (b'"kez"\n1\n', "wrong key"),
        (b'"key"\n' + b"[" * MOST_NAME_BYTES + b"\n", "too many levels"),
        (b'"key"\n' + b"1" * (MOST_NAME_BYTES + 1), "a name of more than"),
        (b'"key"\nno JSON\n', "Expecting value"),
        (b'"key"\n\xff\n', "decode"),
        (b'"key"\nnull\n', "no name"),
        (b'"key"\n1\n2', "more than a handshake"),
    ],
)
def test_wrong_handshakes_are_refused_with_reasons(data, reason):
    with pytest.raises(ValueError, match=reason):
        read_handshake(data, "key")
