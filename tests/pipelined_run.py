"""Events of a member that trains as a pipeline of two virtual workers, as they are in its files."""

from __future__ import annotations

from hetctl.model.pipelines import (
    PipelineEpoch,
    PipelineLayout,
    PipelineStatus,
    StagePlan,
    StageReport,
    pipeline_use,
)
from hetctl.model.serialization import encode

LAYOUT = PipelineLayout(
    workers=(
        (StagePlan(0, 0, 3, 3), StagePlan(1, 4, 6, 1)),
        (StagePlan(2, 0, 2, 3), StagePlan(3, 3, 6, 1)),
    ),
    in_flight=3,
    distance=1,
    servers=(0, 0, 0, 0, 1, 1, 1),
    node_bytes=(3 * 2**30, 2**30),
)
ALONE = PipelineLayout((LAYOUT.workers[0],), 3)
"""A single virtual worker, which has neither servers nor a clock distance."""
PLACEMENT = [{"node": "n1", "gpus": [0, 1]}, {"node": "n2", "gpus": [0, 1]}]
STAGES = (
    StageReport("n1:0", 0, 0, (0, 3), 2.0, 3.0, 1.0, 4.0, {"forward": 1000, "infer": 10}, {"weights": 70}),
    StageReport("n1:1", 0, 1, (4, 6), 6.0, 2.0, 0.0, 2.0, {"backward": 900, "push": 5}, {}),
    StageReport("n2:0", 1, 0, (0, 2), 1.0, 2.0, 3.0, 4.0, {"forward": 1000}, {"push": 30}),
    StageReport("n2:1", 1, 1, (3, 6), 7.0, 0.0, 0.0, 3.0, {"backward": 900}, {"forward": 8}),
)


def task_started(layout: PipelineLayout | None = LAYOUT, rate: float = 100.0, member: str = "a") -> dict:
    pipeline = {} if layout is None else {"pipeline": encode(layout)}
    return {"member": member, "gpus": 4, "placement": PLACEMENT, "rate": rate, **pipeline}


def stages(epoch: int = 1, reports: tuple[StageReport, ...] = STAGES) -> dict:
    return {"epoch": epoch, "duration_s": 10.0, "stages": encode(reports)}


def status(member: str = "a", *, trained: bool = True, layout: PipelineLayout = LAYOUT) -> PipelineStatus:
    """Return the status of a pipeline."""
    count = sum(len(worker) for worker in layout.workers)
    reports = STAGES[:count]
    last = PipelineEpoch(2, 10.0, 80.0, pipeline_use(reports), reports)
    return PipelineStatus(member, layout, 100.0, last if trained else None)
