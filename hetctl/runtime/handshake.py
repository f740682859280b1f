"""Handshake of a connection: a key, which the listener checks before it reads anything else, and a name."""

from __future__ import annotations

import hmac
import json
from typing import Any

MOST_KEY_BYTES = 2**10
"""Longest line from a process that has not shown the key."""
MOST_NAME_BYTES = 2**16


def read_handshake(data: bytes, key: str) -> Any:
    """Read a handshake: two lines of JSON, the key and the name of the process.

    The name is parsed only if the key is right.

    Returns
    -------
    object or None
        Name of the process; None if more bytes must come.

    Raises
    ------
    ValueError
        If the first line is not the key, the second one is no name, or more follows.
    """
    shown, line_end, rest = data.partition(b"\n")
    if len(shown) > MOST_KEY_BYTES:
        raise ValueError(f"more than {MOST_KEY_BYTES} bytes without a key")
    if not line_end:
        return None
    # Any process that reaches the port may guess, and == takes longer the more of a guess is right.
    if not hmac.compare_digest(shown, json.dumps(key).encode()):
        raise ValueError("a wrong key")
    said, line_end, rest = rest.partition(b"\n")
    if len(said) > MOST_NAME_BYTES:
        raise ValueError(f"a name of more than {MOST_NAME_BYTES} bytes")
    if not line_end:
        return None
    try:
        name = json.loads(said)
    except RecursionError:
        raise ValueError("a name of too many levels") from None
    if name is None or rest:
        raise ValueError("no name, or more than a handshake")
    return name
