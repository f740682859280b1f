"""Tables of the catalog.

Times are seconds since the epoch, durations seconds. A column `value` (or `spec`, `plan`) holds a whole
value encoded by `hetctl.model.serialization`; the columns beside it are for users' own queries
(docs/files.md).
Measurements and plans (points, plans) refer to their ensemble and site by name, without a foreign key, so
that they survive changes of those.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
)

METADATA = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "fk": "fk_%(table_name)s_%(referred_table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)

PROJECT = Table(
    "project",
    METADATA,
    # Random, drawn when the catalog is created: jobs of another catalog are never taken for its own.
    Column("identity", String, primary_key=True),
)

ENSEMBLES = Table(
    "ensembles",
    METADATA,
    Column("name", String, primary_key=True),
    Column("framework", String, nullable=False),
    # Number of the save, increased by each one.
    Column("saved", Integer, nullable=False),
    Column("value", JSON, nullable=False),
)

SITES = Table(
    "sites",
    METADATA,
    Column("name", String, primary_key=True),
    Column("batch_system", String, nullable=False),
    Column("launcher", String, nullable=False),
    Column("value", JSON, nullable=False),
)

PROFILE_POINTS = Table(
    "profile_points",
    METADATA,
    Column("ensemble", String, primary_key=True),
    Column("site", String, primary_key=True),
    Column("member", String, primary_key=True),
    Column("gpus", Integer, primary_key=True),
    Column("gpu_type", String, primary_key=True),
    Column("fingerprint", String, primary_key=True),
    Column("driver", String, nullable=False),
    Column("framework", String, nullable=False),
    Column("batch_size", Integer, nullable=False),
    Column("measured_at", Float, nullable=False),
    Column("rate", Float, nullable=False),
    Column("samples", Float),
    Column("samples_per_epoch", Integer),
    Column("startup_s", Float, nullable=False),
    Column("evaluate_s", Float, nullable=False),
    Column("checkpoint_s", Float, nullable=False),
    Column("peak_memory_bytes", Integer, nullable=False),
    Column("epoch_s", Float, nullable=False),
    Column("save_s", Float),
    Column("rate_error", Float),
    Column("step_spread", Float),
    Column("steps", Integer, nullable=False),
    Column("slow_steps_s", JSON, nullable=False),
    Column("shape", String, nullable=False, server_default=""),
    Column("job_start_s", Float, nullable=False, server_default="0"),
    Column("busy", Float),
)

LAYER_POINTS = Table(
    "layer_points",
    METADATA,
    Column("ensemble", String, primary_key=True),
    Column("site", String, primary_key=True),
    Column("member", String, primary_key=True),
    Column("gpu_type", String, primary_key=True),
    Column("fingerprint", String, primary_key=True),
    Column("driver", String, nullable=False),
    Column("framework", String, nullable=False),
    Column("batch_size", Integer, nullable=False),
    Column("measured_at", Float, nullable=False),
    Column("samples_per_epoch", Integer, nullable=False),
    Column("context_bytes", Integer, nullable=False),
    Column("layers", JSON, nullable=False),
)

LINK_POINTS = Table(
    "link_points",
    METADATA,
    Column("site", String, primary_key=True),
    Column("link", String, primary_key=True),
    Column("nodes", JSON, nullable=False),
    Column("measured_at", Float, nullable=False),
    Column("points", JSON, nullable=False),
)

PREPROCESS_POINTS = Table(
    "preprocess_points",
    METADATA,
    Column("ensemble", String, primary_key=True),
    Column("site", String, primary_key=True),
    Column("cores", Integer, primary_key=True),
    Column("rate", Float, nullable=False),
)

PLANS = Table(
    "plans",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("ensemble", String, nullable=False),
    Column("site", String, nullable=False),
    Column("planner", String, nullable=False),
    Column("gpus", Integer, nullable=False),
    Column("predicted_makespan_s", Float, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("value", JSON, nullable=False),
    Index(None, "ensemble", "site", "created_at"),
)

RUNS = Table(
    "runs",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("name", String, nullable=False, unique=True),
    Column("ensemble", String, nullable=False),
    Column("site", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("state", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("spec", JSON, nullable=False),
    Column("plan", JSON, nullable=False),
)

JOBS = Table(
    "jobs",
    METADATA,
    Column("run", ForeignKey("runs.name"), primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("name", String, nullable=False, unique=True),
    Column("batch_id", String, nullable=False),
    Column("state", String, nullable=False),
    Column("nodes", Integer, nullable=False),
    Column("wall_s", Integer, nullable=False),
    Column("submitted_at", Float, nullable=False),
    Column("ended_at", Float),
    Column("exit_code", Integer),
    Column("reason", String, nullable=False),
    Column("failed_nodes", JSON, nullable=False),
)

ALEMBIC_VERSION = Table(
    "alembic_version",
    # Not in METADATA: this table is Alembic's own, and migrations are compared without it.
    MetaData(naming_convention={"pk": "%(table_name)s_pkc"}),
    Column("version_num", String(32), primary_key=True),
)
