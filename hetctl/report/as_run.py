"""What was simulated, as the finished run that it stands for: charts are drawn of runs."""

from __future__ import annotations

from hetctl.core.status import RoundSpan, RunStatus, StepSpan


def as_run(
    title: str,
    *,
    device: str,
    planner: str,
    gpus: int,
    lower_bound_s: float,
    makespan_s: float,
    steps: tuple[StepSpan, ...],
    rounds: tuple[RoundSpan, ...] = (),
) -> RunStatus:
    """Return the run; without rounds it is a single one."""
    return RunStatus(
        run=title,
        ensemble=title,
        site="",
        device=device,
        planner=planner,
        gpus=gpus,
        state="finished",
        reason="",
        submitted_at=0.0,
        predicted_s=lower_bound_s,
        measured_s=makespan_s,
        members=(),
        rounds=rounds or (RoundSpan(0, 0, 0.0, makespan_s, 0.0, None),),
        steps=steps,
        jobs=(),
        history={},
    )
