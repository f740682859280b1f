"""Last lines of a log, for display."""

from __future__ import annotations

from pathlib import Path

LINES = 5
READ_BYTES = 64_000


def tail_of(path: Path, said: str = "") -> tuple[str, ...]:
    """Return the last lines of a log, without those that `said` contains; none if there is no log."""
    try:
        with path.open("rb") as log:
            log.seek(max(0, path.stat().st_size - READ_BYTES))
            # Reading may begin within a character of several bytes.
            text = log.read().decode(errors="replace")
    except OSError:
        return ()
    lines = (line.rstrip() for line in text.splitlines())
    return tuple(line for line in lines if line.strip() and line.strip() not in said)[-LINES:]
