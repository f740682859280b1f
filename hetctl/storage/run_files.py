"""Files of a run that are replaced as a whole: its specification, its record, the planner's state, ..."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from hetctl.model.errors import DamagedFileError
from hetctl.model.job import Job
from hetctl.model.plan import Plan
from hetctl.model.run import RunSpec
from hetctl.model.serialization import encode, parse
from hetctl.model.training_progress import LiveMetrics
from hetctl.model.values import dataclass
from hetctl.storage.atomic_io import json_text, read_json, write_json, write_private
from hetctl.storage.paths import JobFiles, RunFolder, member_folder

T = TypeVar("T")
LOGGER = logging.getLogger(__name__)


def write_spec(folder: RunFolder, spec: RunSpec) -> None:
    """Write ``run.json``."""
    keep_spec(folder, json_text(encode(spec)))


def keep_spec(folder: RunFolder, text: str) -> None:
    """Write ``run.json``, an encoded specification, if it differs from the one in the file."""
    _write_changed(folder.spec, text)


def read_spec(folder: RunFolder) -> RunSpec:
    """Read ``run.json``; DamagedFileError if it is damaged."""
    return read_json(folder.spec, RunSpec, "`hetctl submit` writes it anew from the catalog")


@dataclass(frozen=True)
class CatalogRecord:
    """Record of a run: all that the catalog has of it besides its specification and its events.

    Parameters
    ----------
    identity : str
        Identity of the catalog, from which the names of jobs are derived.
    created_at, state, reason, plan
        Same as in `hetctl.catalog.catalog.RunRecord`.
    jobs : tuple of Job
        Jobs of the run, sorted by number.
    """

    identity: str
    created_at: float
    state: str
    reason: str
    plan: Plan
    jobs: tuple[Job, ...]


def write_record(folder: RunFolder, encoded: Mapping[str, Any]) -> None:
    """Write ``record.json``, an encoded `CatalogRecord`, if it differs from the one in the file."""
    _write_changed(folder.record, json_text(encoded))


def _write_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_bytes() != text.encode():
        write_private(path, text)


def read_record(folder: RunFolder) -> CatalogRecord | None:
    """Read ``record.json``; None if it is missing or damaged; the next change writes it anew."""
    return _read_optional(folder.record, CatalogRecord)


def _read_optional(path: Path, kind: type[T]) -> T | None:
    """Read a dispensable file; None if it is missing or damaged."""
    try:
        return read_json(path, kind, "")
    except FileNotFoundError:
        return None
    except DamagedFileError as error:
        LOGGER.warning("%s; it is not used", error.message)
        return None


def read_claim(files: JobFiles) -> str:
    """Return the batch system's id of the job that has claimed a number; empty if none has started.

    Raises
    ------
    DamagedFileError
        If the file has no text.
    """
    try:
        return files.claim.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return ""
    except ValueError as error:
        repair = f"write the batch system's id of job {files.number} into it, or delete it if it has none"
        raise DamagedFileError(f"{files.claim} is damaged: {error}", repair) from None


def checkpoint_folder(spec: RunSpec, member: str) -> Path:
    """Return the folder of a member's checkpoints."""
    return member_folder(Path(spec.checkpoints), spec.run, member)


def write_planner_state(folder: RunFolder, state: Any) -> None:
    """Write ``planner.json`` if the planner's state differs from the one in the file."""
    if state != read_planner_state(folder):
        write_json(folder.planner_state, state)


def read_planner_state(folder: RunFolder) -> Any:
    """Return the planner's state at the start of the run's newest round; None if it is missing or damaged."""
    return _read_optional(folder.planner_state, Any)


STALE_S = 30.0
"""Age in seconds above which live metrics are ignored."""


def write_live_metrics(path: Path, live_metrics: Mapping[str, LiveMetrics]) -> None:
    """Replace the file of a job's live metrics atomically."""
    write_private(path, json.dumps(encode(live_metrics)) + "\n", durable=False)


def read_live_metrics(path: Path, now: float | None = None) -> dict[str, LiveMetrics]:
    """Return the recent live metrics of a job by member."""
    now = time.time() if now is None else now
    try:
        found = parse(dict[str, LiveMetrics], path.read_bytes())
    except (OSError, ValueError):
        return {}
    return {
        member: metrics
        for member, metrics in found.items()
        if now - metrics.time < STALE_S and math.isfinite(metrics.rate)
    }
