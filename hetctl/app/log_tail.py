"""Last lines of a log, for display."""

from __future__ import annotations

from pathlib import Path

LINES = 15
READ_BYTES = 64_000


def tail_of(path: Path) -> tuple[str, ...]:
    """Return the last lines of a log; none if there is no log."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - READ_BYTES))
            # Reading may begin within a character of several bytes.
            text = log.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(line.rstrip() for line in text.splitlines() if line.strip())[-LINES:]
