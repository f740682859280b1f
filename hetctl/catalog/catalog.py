"""Catalog of the login node: it stores and returns values, in one transaction per call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from sqlalchemy import (
    Connection,
    Engine,
    Executable,
    String,
    Table,
    delete,
    func,
    insert,
    select,
    type_coerce,
    update,
)
from sqlalchemy.dialects import sqlite

from hetctl.catalog.database import back_up, is_backup_due, open_database, open_to_read, translate_db_errors
from hetctl.catalog.schema import (
    ENSEMBLES,
    JOBS,
    LAYER_POINTS,
    LINK_POINTS,
    PLANS,
    PREPROCESS_POINTS,
    PROFILE_POINTS,
    PROJECT,
    RUNS,
    SITES,
)
from hetctl.catalog.stored_runs import RunRecord
from hetctl.model.ensemble import Ensemble
from hetctl.model.errors import BadInputError, is_transient
from hetctl.model.job import Job, RunReason, run_after
from hetctl.model.plan import Plan
from hetctl.model.profile import LayerPoint, LinkPoint, PreprocessPoint, ProfilePoint
from hetctl.model.run import RunSpec
from hetctl.model.serialization import decode, encode
from hetctl.model.site import Site
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.paths import Home, RunFolder
from hetctl.storage.run_files import CatalogRecord, write_record

Row = dict[str, Any]
T = TypeVar("T")
Point = ProfilePoint | LayerPoint | LinkPoint | PreprocessPoint
MEASURED: Mapping[type, tuple[Table, Sequence[str]]] = {
    ProfilePoint: (PROFILE_POINTS, ("member", "gpus", "measured_at", "fingerprint", "gpu_type")),
    LayerPoint: (LAYER_POINTS, ("member", "gpu_type", "measured_at", "fingerprint")),
    LinkPoint: (LINK_POINTS, ("link",)),
    PreprocessPoint: (PREPROCESS_POINTS, ("cores",)),
}
"""Tables of measurements by their kinds, and the columns by which they are sorted."""


class Catalog:
    """Open catalog of a project.

    Every method is one transaction. All of them raise LockedError if another process keeps the file locked,
    UnusableCatalogError if it is damaged, and BadInputError if it cannot be written; then nothing is stored.

    A change of a run or of its jobs is also written to the run's folder, so that the catalog can be rebuilt.
    The first change in a day checks the file, and makes a backup of it.
    """

    def __init__(self, path: Path, engine: Engine, *, is_protected: bool = False) -> None:
        self._path = path
        self.home = Home(path.parent)
        self._reader = engine
        self._is_protected = is_protected
        # A transaction that reads first fails at once, without the timeout, if another process has begun to
        # write: a wait could be a deadlock (https://www.sqlite.org/c3ref/busy_handler.html).
        self._writer = engine.execution_options(begin="BEGIN IMMEDIATE")

    @classmethod
    def open(cls, path: Path) -> Catalog:
        """Open the catalog at `path`; create it, or migrate it to the current schema, if needed.

        Raises
        ------
        BadInputError
            If the file is not a catalog, has the schema of a newer hetctl, or cannot be written.
        LockedError
            If another process keeps it locked.
        """
        is_new = not path.exists()
        # A backup of an empty catalog would delay the first real one by a day.
        return cls(path, open_database(path), is_protected=is_new)

    @classmethod
    def open_to_read(cls, path: Path) -> Catalog:
        """Open the catalog at `path` read-only.

        Raises
        ------
        BadInputError
            If the file is not a catalog, has the schema of a newer hetctl, or cannot be read.
        LockedError
            If another process keeps it locked.
        """
        return cls(path, open_to_read(path), is_protected=True)

    def close(self) -> None:
        """Close the file."""
        self._reader.dispose()

    def __enter__(self) -> Catalog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def identity(self) -> str:
        """Random identifier that distinguishes this catalog from those of other projects."""
        (row,) = self._rows(select(PROJECT.c.identity))
        return str(row["identity"])

    def back_up(self) -> None:
        """Check the file and make a backup of it; UnusableCatalogError if it is damaged."""
        back_up(self._reader, self._path)

    def restore_identity(self, identity: str) -> None:
        """Continue an earlier catalog, so that jobs keep their names."""
        with self._write() as connection:
            connection.execute(update(PROJECT).values(identity=identity))

    def restore_run(self, spec: RunSpec, record: CatalogRecord) -> None:
        """Store a run with its jobs in place of its earlier data; its events stay."""
        row = _run_row(spec, record.plan, record.created_at, record.state, record.reason)
        with self._write() as connection:
            connection.execute(delete(JOBS).where(JOBS.c.run == spec.run))
            statement = sqlite.insert(RUNS)
            connection.execute(statement.on_conflict_do_update(index_elements=[RUNS.c.name], set_=row), [row])
            if record.jobs:
                rows = [{"run": spec.run, **encode(job)} for job in record.jobs]
                connection.execute(_upsert(JOBS), rows)
            _write_record(connection, self.home.run(spec.run))

    def save_ensemble(self, ensemble: Ensemble) -> None:
        """Store an ensemble, replacing one of the same name."""
        saved = select(func.coalesce(func.max(ENSEMBLES.c.saved), 0) + 1).scalar_subquery()
        row = {"name": ensemble.name, "framework": ensemble.framework, "value": encode(ensemble)}
        with self._write() as connection:
            connection.execute(_upsert(ENSEMBLES).values(**row, saved=saved))

    def ensemble(self, name: str) -> Ensemble | None:
        """Return the ensemble of that name."""
        value = self._first(select(ENSEMBLES.c.value).where(ENSEMBLES.c.name == name))
        return decode(Ensemble, value["value"]) if value else None

    def ensembles(self) -> list[str]:
        """Return the names of all ensembles in the order of their last save."""
        return [row["name"] for row in self._rows(select(ENSEMBLES.c.name).order_by(ENSEMBLES.c.saved))]

    def save_site(self, site: Site) -> None:
        """Store a site, replacing one of the same name."""
        row = {"name": site.name, "batch_system": site.batch_system, "launcher": site.launcher}
        with self._write() as connection:
            connection.execute(_upsert(SITES).values(**row, value=encode(site)))

    def site(self, name: str) -> Site | None:
        """Return the site of that name."""
        value = self._first(select(SITES.c.value).where(SITES.c.name == name))
        return decode(Site, value["value"]) if value else None

    def save_points(self, ensemble: str, site: str, points: Iterable[Point]) -> None:
        """Store measurements of one kind; of those with one key in its table only the newest is kept."""
        found = list(points)
        # SQLAlchemy would insert a row of defaults for none.
        if found:
            table, _ = MEASURED[type(found[0])]
            of = {name: value for name, value in (("ensemble", ensemble), ("site", site)) if name in table.c}
            # The fields of a machine have columns of their own.
            rows = [{**of, **row.pop("machine", {}), **row} for row in map(encode, found)]
            with self._write() as connection:
                connection.execute(_upsert(table), rows)

    def points(self, ensemble: str, site: str) -> list[ProfilePoint]:
        """Return all measurements of rates, outdated ones included, sorted by member, GPUs and time."""
        return self._measured(ProfilePoint, ensemble=ensemble, site=site)

    def profiled_sites(self, ensemble: str) -> list[str]:
        """Return the names of the sites with a measurement of an ensemble."""
        site = PROFILE_POINTS.c.site
        rows = self._rows(select(site).where(PROFILE_POINTS.c.ensemble == ensemble).distinct().order_by(site))
        return [row["site"] for row in rows]

    def layers(self, ensemble: str, site: str) -> list[LayerPoint]:
        """Return all measured layers, outdated ones included, sorted by member, GPU type and time."""
        return self._measured(LayerPoint, ensemble=ensemble, site=site)

    def links(self, site: str) -> list[LinkPoint]:
        """Return the measured links of a site."""
        return self._measured(LinkPoint, site=site)

    def preprocess(self, ensemble: str, site: str) -> list[PreprocessPoint]:
        """Return the preprocessor's throughput by number of cores."""
        return self._measured(PreprocessPoint, ensemble=ensemble, site=site)

    def _measured(self, kind: type[T], **of: str) -> list[T]:
        table, order = MEASURED[kind]
        chosen = select(table).where(*(table.c[name] == value for name, value in of.items()))
        # Decoding ignores columns that are not fields of the machine, or of the point.
        return [
            decode(kind, {**row, "machine": row})
            for row in self._rows(chosen.order_by(*(table.c[name] for name in order)))
        ]

    def save_plan(self, ensemble: str, site: str, plan: Plan, created_at: float) -> None:
        """Store a plan in addition to the earlier ones."""
        row = {
            "ensemble": ensemble,
            "site": site,
            "planner": plan.planner,
            "gpus": plan.gpus,
            "predicted_makespan_s": plan.predicted_makespan_s,
            "created_at": created_at,
            "value": encode(plan),
        }
        with self._write() as connection:
            connection.execute(insert(PLANS), row)

    def latest_plan(self, ensemble: str, site: str) -> Plan | None:
        """Return the newest plan of an ensemble at a site."""
        row = self._first(
            select(PLANS.c.value)
            .where(PLANS.c.ensemble == ensemble, PLANS.c.site == site)
            .order_by(PLANS.c.created_at.desc(), PLANS.c.id.desc())
            .limit(1)
        )
        return decode(Plan, row["value"]) if row else None

    def add_run(self, spec: RunSpec, plan: Plan, created_at: float, job: Job) -> None:
        """Store a new run, queued, with its first job.

        Raises
        ------
        BadInputError
            If a run of that name exists.
        """
        row = _run_row(spec, replace(plan, rounds=()), created_at, run_after(None, RunReason.BEGUN), "")
        make_private_folder(self.home.run(spec.run).path)
        with self._write() as connection:
            if _has_run(connection, spec.run):
                raise BadInputError(
                    f"a run {spec.run!r} is in the catalog {self._path} already", "choose another name"
                )
            connection.execute(insert(RUNS), row)
            connection.execute(insert(JOBS), {"run": spec.run, **encode(job)})
            _write_record(connection, self.home.run(spec.run))

    def remove_run(self, run: str) -> None:
        """Remove a run; `remove_files` then removes its files."""
        with self._write() as connection:
            connection.execute(delete(JOBS).where(JOBS.c.run == run))
            connection.execute(delete(RUNS).where(RUNS.c.name == run))

    def save_spec(self, spec: RunSpec) -> None:
        """Store a changed specification of a run; BadInputError if the run is not in the catalog."""
        with self._write_run(spec.run) as connection:
            connection.execute(update(RUNS).where(RUNS.c.name == spec.run).values(spec=encode(spec)))

    def spec_text(self, run: str) -> str:
        """Return the specification of a run as JSON, with a line for each value."""
        (row,) = self._rows(select(type_coerce(RUNS.c.spec, String)).where(RUNS.c.name == run))
        return str(row["spec"])

    def runs(self, ensemble: str | None = None) -> list[RunRecord]:
        """Return all runs, or those of one ensemble, the oldest first."""
        chosen = select(RUNS) if ensemble is None else select(RUNS).where(RUNS.c.ensemble == ensemble)
        return [decode(RunRecord, row) for row in self._rows(chosen.order_by(RUNS.c.created_at, RUNS.c.id))]

    def newest_run(self, ensemble: str) -> RunRecord | None:
        """Return the newest run of an ensemble; None if it has none."""
        newest = select(RUNS).where(RUNS.c.ensemble == ensemble)
        row = self._first(newest.order_by(RUNS.c.created_at.desc(), RUNS.c.id.desc()).limit(1))
        return decode(RunRecord, row) if row else None

    def run_names(self) -> list[str]:
        """Return the names of all runs, the oldest first."""
        return [row["name"] for row in self._rows(select(RUNS.c.name).order_by(RUNS.c.created_at, RUNS.c.id))]

    def run(self, name: str) -> RunRecord | None:
        """Return the run of that name."""
        row = self._first(select(RUNS).where(RUNS.c.name == name))
        return decode(RunRecord, row) if row else None

    def run_state(self, run: str) -> str | None:
        """Return the state of a run without its specification, which may be large; None: there is no run."""
        row = self._first(select(RUNS.c.state).where(RUNS.c.name == run))
        return str(row["state"]) if row else None

    def set_run_state(self, run: str, state: str, reason: str = "") -> None:
        """Store the state of a run; BadInputError if the run is not in the catalog."""
        with self._changing(run) as connection:
            connection.execute(update(RUNS).where(RUNS.c.name == run).values(state=state, reason=reason))

    def save_job(self, run: str, job: Job) -> None:
        """Store a job of a run in place of its earlier data; BadInputError if the run does not exist."""
        with self._changing(run) as connection:
            connection.execute(_upsert(JOBS), {"run": run, **encode(job)})

    def remove_job(self, run: str, number: int) -> None:
        """Remove a job that the batch system does not have."""
        with self._changing(run) as connection:
            connection.execute(delete(JOBS).where(JOBS.c.run == run, JOBS.c.number == number))

    def jobs(self, run: str) -> list[Job]:
        """Return the jobs of a run, sorted by number."""
        rows = self._rows(select(JOBS).where(JOBS.c.run == run).order_by(JOBS.c.number))
        return [decode(Job, row) for row in rows]

    @contextmanager
    def _write(self) -> Iterator[Connection]:
        if not self._is_protected and is_backup_due(self._path):
            self.back_up()
        self._is_protected = True
        with translate_db_errors(self._path), self._writer.begin() as connection:
            yield connection

    @contextmanager
    def _changing(self, run: str) -> Iterator[Connection]:
        """Change a run; write it to its folder before the change is committed."""
        with self._write_run(run) as connection:
            yield connection
            _write_record(connection, self.home.run(run))

    @contextmanager
    def _write_run(self, run: str) -> Iterator[Connection]:
        with self._write() as connection:
            if not _has_run(connection, run):
                raise BadInputError(
                    f"there is no run {run!r} in the catalog {self._path}", "hetctl status names the runs"
                )
            yield connection

    def _rows(self, statement: Executable) -> list[Row]:
        with translate_db_errors(self._path), self._reader.begin() as connection:
            found = connection.execute(statement)
            # Three times as fast as `mappings` for the points of a large table.
            names = tuple(found.keys())
            return [dict(zip(names, row, strict=True)) for row in found]

    def _first(self, statement: Executable) -> Row | None:
        return next(iter(self._rows(statement)), None)


def _run_row(spec: RunSpec, plan: Plan, created_at: float, state: str, reason: str) -> Row:
    return {
        "name": spec.run,
        "ensemble": spec.ensemble.name,
        "site": spec.site.name,
        "created_at": created_at,
        "state": state,
        "reason": reason,
        "spec": encode(spec),
        "plan": encode(plan),
    }


def _write_record(connection: Connection, folder: RunFolder) -> None:
    """Write a run to its folder, unless the user has removed the folder."""
    if not folder.path.exists():
        return
    columns = RUNS.c.created_at, RUNS.c.state, RUNS.c.reason, RUNS.c.plan
    found = connection.execute(select(*columns).where(RUNS.c.name == folder.name)).mappings().one()
    of_jobs = (column for column in JOBS.c if column is not JOBS.c.run)
    jobs = connection.execute(select(*of_jobs).where(JOBS.c.run == folder.name).order_by(JOBS.c.number))
    identity = connection.execute(select(PROJECT.c.identity)).scalar_one()
    try:
        write_record(folder, {"identity": identity, **found, "jobs": list(map(dict, jobs.mappings()))})
    except OSError as error:
        if is_transient(error):
            raise
        raise BadInputError(
            f"{folder.record} cannot be written: {error.strerror}",
            "free some space, or make it writable, and try again; nothing of this change was stored",
        ) from error


def _upsert(table: Table) -> sqlite.Insert:
    """Insert rows in place of those with the same primary key; a measurement replaces only an older one."""
    statement = sqlite.insert(table)
    new = statement.excluded
    return statement.on_conflict_do_update(
        index_elements=table.primary_key.columns,
        set_={column.name: new[column.name] for column in table.columns if not column.primary_key},
        where=new.measured_at >= table.c.measured_at if "measured_at" in table.c else None,
    )


def _has_run(connection: Connection, run: str) -> bool:
    return connection.execute(select(RUNS.c.id).where(RUNS.c.name == run)).first() is not None
