"""The table of what goes with what: all of its rows are refused, and nothing else is."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import combinations

import pytest

from hetctl.model.combinations import CONFLICTS, FEATURES, OWN_CODE, conflicts, features_of, refuse_conflicts
from hetctl.model.ensemble import COMMAND, Ensemble, Functions, Member, Partitions
from hetctl.model.errors import BadInputError
from hetctl.model.searches import PruneRule, SearchSpec

NETS = Functions("n:i", "n:m")
PLAIN = Ensemble("e", "pytorch", NETS, (Member("a"), Member("m")), "/x")
CHANGES = {
    "commands": {"framework": COMMAND},
    "functions": {},
    "search": {"search": SearchSpec("grid", (), {}, 1, {})},
    "search.prune": {"search": SearchSpec("grid", (), {}, 1, {}, prune=PruneRule("loss"))},
    OWN_CODE: {"members": (Member("a"), Member("m", code=PLAIN.code))},
    "shard": {"members": (Member("a"), Member("m", shard=True))},
    "global_batch_size": {"members": (Member("a"), Member("m", global_batch_size=64))},
    "functions.train_fn": {"functions": replace(NETS, train_fn="n:t")},
    "functions.evaluate_fn": {"functions": replace(NETS, evaluate_fn="n:e")},
    "data without partitions": {},
    "partitions without paths": {"partitions": Partitions(2)},
    "partitions with paths": {"partitions": Partitions(2, "/{partition}")},
    "partitions.source": {"partitions": Partitions(2, "/{partition}", "/s/{partition}")},
}


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: f"{row.one} {row.other}")
def test_two_features_of_a_row_are_refused(row):
    with pytest.raises(
        BadInputError, match=re.escape(f"e: {row.one} does not go with {row.other}")
    ) as caught:
        refuse_conflicts("e", row.other, row.one)
    assert caught.value.hint == row.hint


def test_pairs_outside_of_the_table_are_accepted():
    rows = {frozenset(row[:2]) for row in CONFLICTS}
    assert len(rows) == len(CONFLICTS)
    pairs = {frozenset(pair) for pair in combinations(set().union(*rows), 2)}
    assert {pair for pair in pairs if any(conflicts(pair))} == rows


@pytest.mark.parametrize("feature", FEATURES)
def test_a_feature_is_seen_in_an_ensemble(feature):
    assert feature in features_of(replace(PLAIN, **CHANGES[feature]))
    assert (feature in features_of(PLAIN)) == (not CHANGES[feature])
