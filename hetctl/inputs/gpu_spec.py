"""GPUs of a cluster in user-written form."""

from __future__ import annotations

import re

from hetctl.inputs.input_errors import shown
from hetctl.model.errors import BadInputError

COUNT = re.compile(r"[0-9]{1,7}")
MOST = 1_000_000
PART = re.compile(r"([^\s:,][^:,]*):\s*([0-9]{1,7})")


def parse_gpus(text: str) -> dict[str, int]:
    """Return the number of GPUs by type for ``v100:40,p100:40``, or under the type "" for ``80``.

    Raises
    ------
    BadInputError
        If the text has another form, names a type twice, or gives no GPUs.
    """
    if COUNT.fullmatch(text.strip()):
        return {"": _count(text, text)}
    found: dict[str, int] = {}
    for part in text.split(","):
        match = PART.fullmatch(part.strip())
        if match is None:
            raise BadInputError(
                f"{shown(part.strip())} in GPUs {shown(text)} is not a type and a number",
                "write a number such as 80, or types such as v100:40,p100:40",
            )
        gpu_type = match[1].strip()
        if gpu_type in found:
            raise BadInputError(f"GPUs {shown(text)} name type {shown(gpu_type)} twice")
        found[gpu_type] = _count(match[2], text)
    return found


def _count(digits: str, text: str) -> int:
    count = int(digits)
    if not 1 <= count <= MOST:
        raise BadInputError(f"GPUs {shown(text)} must be at least 1 of each type, and at most {MOST}")
    return count
