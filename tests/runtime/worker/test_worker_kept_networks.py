"""Networks that a rank keeps between visits, as many as fit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hetctl.model.ensemble import Member
from hetctl.runtime.worker.kept_networks import KeptNetworks

A, B, C = (Member(name) for name in "abc")


def kept_of(limit_bytes: int, *members: Member) -> tuple[KeptNetworks, dict[str, Any]]:
    kept, networks = KeptNetworks(limit_bytes), {member.name: object() for member in members}
    for member in members:
        kept.keep(member, 1, networks[member.name], 10)  # type: ignore[arg-type]
    return kept, networks


def test_the_one_not_used_for_longest_is_released() -> None:
    kept, networks = kept_of(25, A, B)
    assert kept.take(A, 1) is networks["a"]
    kept.keep(A, 1, networks["a"], 10)
    kept.keep(C, 1, networks["b"], 10)
    assert len(kept) == 2
    assert kept.take(B, 1) is None
    assert kept.take(A, 1) is networks["a"]


def test_a_network_that_is_taken_is_kept_no_longer() -> None:
    kept, networks = kept_of(25, A)
    assert kept.take(A, 1) is networks["a"]
    assert kept.take(A, 1) is None


def test_a_network_of_other_settings_is_not_used() -> None:
    kept, _ = kept_of(25, A)
    assert kept.take(replace(A, batch_size=1), 1) is None
    assert len(kept) == 0


def test_a_network_for_another_group_is_not_used() -> None:
    kept, _ = kept_of(25, A)
    assert kept.take(A, 2) is None
    assert len(kept) == 0


def test_a_network_that_is_too_large_is_not_kept() -> None:
    kept, _ = kept_of(9, A)
    assert len(kept) == 0


def test_all_are_released() -> None:
    kept, _ = kept_of(25, A, B)
    kept.clear()
    assert len(kept) == 0
