"""Plans of members in parts: their memory, and what is refused."""

from __future__ import annotations

import pytest

from hetctl.app.plan.member_rules import demand_in_parts, refuse_large_parts, refuse_modes_of_sharded
from hetctl.methods.parallelism import Demand, ModeLimits
from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.errors import BadInputError, InfeasibleError

PARTS, WHOLE = Member("parts", shard=True, min_gpus=2, max_gpus=4), Member("whole")
BOTH = Ensemble("e", "pytorch", Functions("n:i", "n:m"), (WHOLE, PARTS), "/x")
ROOM = ModeLimits(8, "a slot", 100, 0)


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
    ("mode", "balance", "what"),
    [
        ("hopper", "auto", "--mode hopper"),
        ("pipeline", "off", "--mode pipeline"),
        ("auto", "on", "--balance on"),
    ],
)
def test_other_modes_are_refused(mode, balance, what):
    with pytest.raises(BadInputError, match=f"does not go with {what}"):
        refuse_modes_of_sharded(BOTH, mode, balance)
    whole = Ensemble("e", "pytorch", BOTH.functions, (WHOLE,), "/x")
    refuse_modes_of_sharded(whole, mode, balance)
    refuse_modes_of_sharded(BOTH, "auto", "auto")
