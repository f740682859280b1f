"""Initial schema."""

from __future__ import annotations

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    project = op.create_table(
        "project",
        sa.Column("identity", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("identity", name=op.f("pk_project")),
    )
    op.bulk_insert(project, [{"identity": uuid.uuid4().hex}])
    op.create_table(
        "ensembles",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("framework", sa.String(), nullable=False),
        sa.Column("saved", sa.Integer(), nullable=False),
        sa.Column("value", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_ensembles")),
    )
    op.create_table(
        "layer_points",
        sa.Column("ensemble", sa.String(), nullable=False),
        sa.Column("site", sa.String(), nullable=False),
        sa.Column("member", sa.String(), nullable=False),
        sa.Column("gpu_type", sa.String(), nullable=False),
        sa.Column("fingerprint", sa.String(), nullable=False),
        sa.Column("driver", sa.String(), nullable=False),
        sa.Column("framework", sa.String(), nullable=False),
        sa.Column("batch_size", sa.Integer(), nullable=False),
        sa.Column("measured_at", sa.Float(), nullable=False),
        sa.Column("samples_per_epoch", sa.Integer(), nullable=False),
        sa.Column("context_bytes", sa.Integer(), nullable=False),
        sa.Column("layers", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint(
            "ensemble", "site", "member", "gpu_type", "fingerprint", name=op.f("pk_layer_points")
        ),
    )
    op.create_table(
        "link_points",
        sa.Column("site", sa.String(), nullable=False),
        sa.Column("link", sa.String(), nullable=False),
        sa.Column("nodes", sa.JSON(), nullable=False),
        sa.Column("measured_at", sa.Float(), nullable=False),
        sa.Column("points", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("site", "link", name=op.f("pk_link_points")),
    )
    op.create_table(
        "plans",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("ensemble", sa.String(), nullable=False),
        sa.Column("site", sa.String(), nullable=False),
        sa.Column("planner", sa.String(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("predicted_makespan_s", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("value", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_plans")),
    )
    op.create_index(
        op.f("ix_plans_ensemble_site_created_at"), "plans", ["ensemble", "site", "created_at"], unique=False
    )
    op.create_table(
        "preprocess_points",
        sa.Column("ensemble", sa.String(), nullable=False),
        sa.Column("site", sa.String(), nullable=False),
        sa.Column("cores", sa.Integer(), nullable=False),
        sa.Column("rate", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("ensemble", "site", "cores", name=op.f("pk_preprocess_points")),
    )
    op.create_table(
        "profile_points",
        sa.Column("ensemble", sa.String(), nullable=False),
        sa.Column("site", sa.String(), nullable=False),
        sa.Column("member", sa.String(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("gpu_type", sa.String(), nullable=False),
        sa.Column("fingerprint", sa.String(), nullable=False),
        sa.Column("driver", sa.String(), nullable=False),
        sa.Column("framework", sa.String(), nullable=False),
        sa.Column("batch_size", sa.Integer(), nullable=False),
        sa.Column("measured_at", sa.Float(), nullable=False),
        sa.Column("rate", sa.Float(), nullable=False),
        sa.Column("samples", sa.Float(), nullable=True),
        sa.Column("samples_per_epoch", sa.Integer(), nullable=True),
        sa.Column("startup_s", sa.Float(), nullable=False),
        sa.Column("evaluate_s", sa.Float(), nullable=False),
        sa.Column("checkpoint_s", sa.Float(), nullable=False),
        sa.Column("peak_memory_bytes", sa.Integer(), nullable=False),
        sa.Column("epoch_s", sa.Float(), nullable=False),
        sa.Column("save_s", sa.Float(), nullable=True),
        sa.Column("rate_error", sa.Float(), nullable=True),
        sa.Column("step_spread", sa.Float(), nullable=True),
        sa.Column("steps", sa.Integer(), nullable=False),
        sa.Column("slow_steps_s", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint(
            "ensemble", "site", "member", "gpus", "gpu_type", "fingerprint", name=op.f("pk_profile_points")
        ),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("ensemble", sa.String(), nullable=False),
        sa.Column("site", sa.String(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("reason", sa.String(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("plan", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("name", name=op.f("uq_runs_name")),
    )
    op.create_table(
        "sites",
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("batch_system", sa.String(), nullable=False),
        sa.Column("launcher", sa.String(), nullable=False),
        sa.Column("value", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_sites")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("run", sa.String(), nullable=False),
        sa.Column("member", sa.String(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=True),
        sa.Column("part_samples", sa.Integer(), nullable=True),
        sa.Column("path", sa.String(), nullable=True),
        sa.Column("bytes", sa.Integer(), nullable=True),
        sa.Column("sha256", sa.String(), nullable=True),
        sa.Column("seconds", sa.Float(), nullable=True),
        sa.Column("saved_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.name"], name=op.f("fk_checkpoints_runs")),
        sa.PrimaryKeyConstraint("run", "member", "seq", name=op.f("pk_checkpoints")),
    )
    op.create_table(
        "epochs",
        sa.Column("run", sa.String(), nullable=False),
        sa.Column("member", sa.String(), nullable=False),
        sa.Column("epoch", sa.Integer(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=False),
        sa.Column("rate", sa.Float(), nullable=True),
        sa.Column("batch_size", sa.Integer(), nullable=True),
        sa.Column("gpu_type", sa.String(), nullable=True),
        sa.Column("overhead_s", sa.Float(), nullable=True),
        sa.Column("reported_at", sa.Float(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.name"], name=op.f("fk_epochs_runs")),
        sa.PrimaryKeyConstraint("run", "member", "epoch", name=op.f("pk_epochs")),
    )
    op.create_table(
        "events",
        sa.Column("run", sa.String(), nullable=False),
        sa.Column("source", sa.String(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.name"], name=op.f("fk_events_runs")),
        sa.PrimaryKeyConstraint("run", "source", "seq", name=op.f("pk_events")),
    )
    op.create_table(
        "jobs",
        sa.Column("run", sa.String(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("batch_id", sa.String(), nullable=False),
        sa.Column("state", sa.String(), nullable=False),
        sa.Column("nodes", sa.Integer(), nullable=False),
        sa.Column("wall_s", sa.Integer(), nullable=False),
        sa.Column("submitted_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("detail", sa.String(), nullable=False),
        sa.Column("failed_nodes", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.name"], name=op.f("fk_jobs_runs")),
        sa.PrimaryKeyConstraint("run", "number", name=op.f("pk_jobs")),
        sa.UniqueConstraint("name", name=op.f("uq_jobs_name")),
    )
    op.create_table(
        "members",
        sa.Column("ensemble", sa.String(), nullable=False),
        sa.Column("name", sa.String(), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("fingerprint", sa.String(), nullable=False),
        sa.Column("batch_size", sa.Integer(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["ensemble"], ["ensembles.name"], name=op.f("fk_members_ensembles"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("ensemble", "name", name=op.f("pk_members")),
    )
    op.create_table(
        "rounds",
        sa.Column("run", sa.String(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("job", sa.Integer(), nullable=True),
        sa.Column("predicted_s", sa.Float(), nullable=True),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("ended_by", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(["run"], ["runs.name"], name=op.f("fk_rounds_runs")),
        sa.PrimaryKeyConstraint("run", "round", name=op.f("pk_rounds")),
    )
    op.create_table(
        "allocations",
        sa.Column("run", sa.String(), nullable=False),
        sa.Column("round", sa.Integer(), nullable=False),
        sa.Column("member", sa.String(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=True),
        sa.Column("mode", sa.String(), nullable=True),
        sa.Column("rate", sa.Float(), nullable=True),
        sa.Column("placement", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("ended_at", sa.Float(), nullable=True),
        sa.Column("exit_code", sa.Integer(), nullable=True),
        sa.Column("cause", sa.String(), nullable=True),
        sa.ForeignKeyConstraint(
            ["run", "round"], ["rounds.run", "rounds.round"], name=op.f("fk_allocations_rounds")
        ),
        sa.PrimaryKeyConstraint("run", "round", "member", name=op.f("pk_allocations")),
    )
