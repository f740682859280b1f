"""Names that are safe as file names, and generated names of members."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from typing import Annotated, Any

from hetctl.inputs.validation import Matching
from hetctl.model.events import DRIVER

LONGEST = 64
NAME_RULE = "must be 1 to 64 of A-Z a-z 0-9 . _ - and start with a letter or digit"
MEMBER_RULE = f"{NAME_RULE}; '{DRIVER}' is reserved"
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# A member's events lie in a file of its name, beside `driver.jsonl`.
MEMBER_NAME = re.compile(rf"(?!{DRIVER}$){SAFE_NAME.pattern}")

SafeName = Annotated[str, Matching(SAFE_NAME.pattern, NAME_RULE)]
MemberName = Annotated[str, Matching(MEMBER_NAME.pattern, MEMBER_RULE)]


def grid_names(prefix: str, points: list[dict[str, Any]]) -> list[str]:
    """Name every point of a grid ``<prefix>-<key>-<value>...``, with its keys in the order of the file.

    A name depends on its own point alone, unless two points would get the same name: then both have a
    hash of their values appended, like names that would be longer than 64 characters.
    """
    plain = ["-".join([prefix, *(f"{_slug(k)}-{_slug(v)}" for k, v in point.items())]) for point in points]
    uses = Counter(plain)
    return [fitted(name, point, hashed=uses[name] > 1) for name, point in zip(plain, points, strict=True)]


def fitted(name: str, values: Any, hashed: bool = False) -> str:
    """Return the name, cut to 64 characters with a hash of `values` where it is longer."""
    if len(name) <= LONGEST and not hashed:
        return name
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()[:8]
    return f"{name[: LONGEST - 9]}-{digest}"


def _slug(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-") if _is_unsafe(text) else text


def _is_unsafe(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9._-]+", text) is None
