"""Modes that are refused for members in parts."""

from __future__ import annotations

import pytest

from hetctl.app.plan.member_rules import refuse_modes_of_sharded
from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.errors import BadInputError

PARTS, WHOLE = Member("parts", shard=True, min_gpus=2, max_gpus=4), Member("whole")
BOTH = Ensemble("e", "pytorch", Functions("n:i", "n:m"), (WHOLE, PARTS), "/x")


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
