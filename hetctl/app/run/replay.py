"""Traces of visits that a run repeats."""

from __future__ import annotations

from pathlib import Path

from hetctl.inputs.visit_log import read_run_trace
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError
from hetctl.model.plan import HOPPER
from hetctl.storage.atomic_io import write_private
from hetctl.storage.paths import RunFolder


def check_replay(trace: Path, ensemble: Ensemble, mode: str) -> None:
    """Check a trace for a run of an ensemble; nothing is written.

    Raises
    ------
    BadInputError
        If the members do not hop or come from a search, or a line of the trace does not fit the ensemble.
    """
    if mode != HOPPER:
        raise BadInputError(
            f"--replay repeats visits of members that hop, but the mode is {mode}", "add --mode hopper"
        )
    if ensemble.search is not None:
        raise BadInputError(
            f"--replay repeats the visits of members that are known before, but {ensemble.name} has a search,"
            " whose trials come while the run goes on",
            "leave out --replay",
        )
    count = ensemble.partitions.count if ensemble.partitions else 0
    members = [member.name for member in ensemble.members]
    read_run_trace(trace, members, [f"p{number}" for number in range(count)])


def keep_replay(trace: Path, folder: RunFolder) -> None:
    """Copy a trace into the folder of a run, where its jobs read it."""
    write_private(folder.create().replay, trace.read_text(encoding="utf-8-sig"))


def replay_now(stored: str, trace: Path | None) -> str:
    """Return the path of the stored trace if a trace has the same content, else the trace's own.

    Parameters
    ----------
    stored : str
        Path of the trace of a run; empty if it has none.
    trace : Path or None
        Trace that is given now; None: none is given.
    """
    if trace is None or (stored and _text(Path(stored)) == _text(trace)):
        return stored
    return str(trace)


def _text(trace: Path) -> str:
    try:
        return trace.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{trace}: cannot be read: {error}") from None
