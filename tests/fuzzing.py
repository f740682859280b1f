"""Mutations of files and messages, and how many of them a suite tries."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

TIMES = int(os.environ.get("HETCTL_FUZZ", "1"))
"""Factor of the number of inputs; `.ci/fuzz` sets it."""
OF_YAML = (
    rb"""{ } [ ] : - , # & * ! | > ' " % @ ? ~ \ .nan &a *a !!set !!binary <<: grid random extends ..:.."""
)
OF_JSON = rb"""null true NaN -Infinity [] {} "" 1e999 -1 0 99999999999999999999 "\ud800" """
SEPARATORS = (b" ", b"\n", b"\t", b"\0", b"\xff", b"\xc3\xa9")
DEEP = (b"[" * 10_000, b'{"a":' * 10_000, b"9" * 5000)
SCRAPS = st.sampled_from((*OF_YAML.split(), *OF_JSON.split(), *SEPARATORS, *DEEP))
"""Pieces at which readers of YAML and JSON stumble."""


def fuzzed(examples: int = 100) -> settings:
    """Return the settings of a test that tries so many inputs, other ones in each long run."""
    return settings(
        max_examples=examples * TIMES,
        deadline=None,
        derandomize=TIMES == 1 and "CI" in os.environ,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@st.composite
def mutations(draw: st.DrawFn, original: bytes) -> bytes:
    """Replace a few pieces by others, and sometimes cut the end off."""
    data = original
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 12)))
        data = data[:start] + draw(SCRAPS | st.binary(max_size=3)) + data[end:]
    return data[: draw(st.integers(0, len(data)))] if draw(st.integers(0, 9)) == 0 else data
