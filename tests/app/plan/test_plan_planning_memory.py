"""Members in parts: their memory, and what does not go with them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.app.plan.planning import PlanRequest, demand_in_parts, plan_from, refuse_large_parts
from hetctl.methods.parallelism import Demand, ModeLimits
from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.errors import BadInputError, InfeasibleError
from hetctl.model.job import JobSize
from hetctl.model.site import Queue, Site

PARTS, WHOLE = Member("parts", shard=True, min_gpus=2, max_gpus=4), Member("whole")
BOTH = Ensemble("e", "pytorch", Functions("n:i", "n:m"), (WHOLE, PARTS), "/x")
ROOM = ModeLimits(8, "a slot", 100, 0)
SITE = Site("lab", "slurm", "srun", 4, 2, 8, 2**30, (Queue("main"),))
SIZE = JobSize(SITE.queues[0], 8, 4, 3600, 60)


@pytest.mark.parametrize(
    ("member", "gpus", "needs"), [(WHOLE, 8, 600), (PARTS, 8, 300), (PARTS, 3, 400), (PARTS, 1, 600)]
)
def test_more_gpus_have_smaller_parts(member, gpus, needs):
    assert demand_in_parts(member, 600, gpus) == needs
    assert demand_in_parts(member, None, gpus) is None


def test_only_parts_that_fit_no_gpu_are_refused():
    refuse_large_parts(BOTH, [Demand("whole", 999), Demand("parts", 100)], ROOM)
    with pytest.raises(InfeasibleError, match="a part of parts on each of its GPUs needs"):
        refuse_large_parts(BOTH, [Demand("parts", 101)], ROOM)


@pytest.mark.parametrize(
    ("option", "request_of"),
    [
        ("--mode hopper", {"mode": "hopper"}),
        ("--balance on", {"options": {"balance": "on"}}),
        ("--sharing lockstep", {"ensemble": replace(BOTH, members=(replace(WHOLE, code=BOTH.code),))}),
    ],
)
def test_options_that_do_not_go_together_have_no_plan(option, request_of):
    given = {"ensemble": BOTH, "sharing": "lockstep", "site": SITE, **request_of}
    with pytest.raises(BadInputError, match=f"^e: (shard does not go with )?{option}"):
        plan_from(PlanRequest(**given, size=SIZE))
