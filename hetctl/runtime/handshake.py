"""Handshake of a connection: a key, which the listener checks before it reads anything else, and a name."""

from __future__ import annotations

import hmac
import json
from typing import Any

MOST_KEY_BYTES = 2**10
"""Longest line from a process that has not shown the key."""
MOST_NAME_BYTES = 2**16
ACCEPTED = b"."
"""Answer to a handshake."""


def handshake(key: str, name: Any) -> bytes:
    """Return what a process sends first: a line with the key, and one with its name as JSON."""
    return f"{key}\n{json.dumps(name)}\n".encode()


def read_handshake(data: bytes, key: str) -> tuple[Any, bytes] | None:
    """Read the handshake in the first bytes of a connection; JSON comes from processes with the key alone.

    Returns
    -------
    tuple or None
        Name of the other process, and the bytes after its handshake; None if more bytes must come.

    Raises
    ------
    ValueError
        If the first line is not the key, or the second one no name.
    """
    shown, line_end, rest = data.partition(b"\n")
    if len(shown) > MOST_KEY_BYTES:
        raise ValueError(f"more than {MOST_KEY_BYTES} bytes without a key")
    if not line_end:
        return None
    # Any process that reaches the port may try keys: == would take longer the more of one is right.
    if not hmac.compare_digest(shown, key.encode()):
        raise ValueError("a wrong key")
    name, line_end, rest = rest.partition(b"\n")
    if len(name) > MOST_NAME_BYTES:
        raise ValueError(f"a name of more than {MOST_NAME_BYTES} bytes")
    if not line_end:
        return None
    try:
        return json.loads(name), rest
    except RecursionError:
        raise ValueError("a name of too many levels") from None
