from __future__ import annotations

import pytest

from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.profile import RateShape, shape_digest, shapes_of


def ensemble(*members: Member, rate_keys: tuple[str, ...] = ()) -> Ensemble:
    return Ensemble("e", "pytorch", Functions("m:i", "m:m"), members, "/nowhere", rate_keys=rate_keys)


def alike(a: dict, b: dict, *rate_keys: str) -> bool:
    return shape_digest(Member("a", a), rate_keys) == shape_digest(Member("b", b), rate_keys)


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ({"learning_rate": 0.1}, {"learning_rate": 0.01}, True),
        ({"lr": 0.1, "seed": 1}, {"seed": 2, "lr": 0.1}, True),
        ({"lr": 0.1}, {}, True),
        ({"optimizer": {"name": "sgd", "lr": 0.1}}, {"optimizer": {"name": "sgd", "lr": 1}}, True),
        ({"optimizer": {"name": "sgd"}}, {"optimizer": {"name": "adam"}}, False),
        ({"dropout": 0.2}, {"dropout": 0.5}, True),
        ({"dropout": 0.2}, {"dropout": 0.0}, False),
        ({"blocks": [{"units": 8, "l2": 0.1}]}, {"blocks": [{"units": 8, "l2": 0.2}]}, True),
        ({"units": 8}, {"units": 9}, False),
        ({"units": 1}, {"units": True}, False),
        ({"my_rate": 8}, {"my_rate": 9}, False),
    ],
)
def test_by_default_all_keys_count_that_can_change_the_rate(a: dict, b: dict, same: bool) -> None:
    assert alike(a, b) is same


def test_with_rate_keys_exactly_those_count() -> None:
    a, b = {"units": 8, "act": "relu", "lr": 0.1}, {"units": 8, "act": "tanh", "lr": 0.2}
    assert not alike(a, b)
    assert alike(a, b, "units")
    assert not alike(a, b, "units", "lr")


def test_the_batch_size_always_counts() -> None:
    assert shape_digest(Member("a", {}), ("units",)) != shape_digest(Member("a", {}, 64), ("units",))


def test_a_shape_has_the_largest_limit_of_its_members() -> None:
    found = shapes_of(
        ensemble(
            Member("a", {"units": 1, "lr": 1}, max_gpus=2),
            Member("b", {"units": 2}, max_gpus=1),
            Member("c", {"units": 1, "lr": 2}, max_gpus=4),
            Member("d", {"units": 2}),
        )
    )
    assert found == (RateShape("a", ("c",), 4), RateShape("b", ("d",), None))


def test_a_shape_has_the_least_number_of_its_members() -> None:
    wide, wider = (
        Member("a", {"lr": 1}, min_gpus=2, max_gpus=4),
        Member("b", {"lr": 2}, min_gpus=4, max_gpus=4),
    )
    assert shapes_of(ensemble(wide, wider)) == (RateShape("a", ("b",), 4, 2),)


def test_global_batches_of_other_sizes_are_other_shapes() -> None:
    found = shapes_of(
        ensemble(Member("a", global_batch_size=8), Member("b", global_batch_size=16), Member("c"))
    )
    assert [(shape.member, shape.max_gpus) for shape in found] == [("a", 8), ("b", 16), ("c", None)]


def test_deterministic_algorithms_are_another_shape() -> None:
    found = shapes_of(
        ensemble(Member("a"), Member("b", deterministic=True), Member("c", deterministic=False))
    )
    assert [(shape.member, shape.shared_by) for shape in found] == [("a", ("c",)), ("b", ())]


def test_a_network_in_parts_is_another_shape() -> None:
    found = shapes_of(ensemble(Member("a"), Member("b", shard=True), Member("c", shard=True)))
    assert [(shape.member, shape.shared_by) for shape in found] == [("a", ()), ("b", ("c",))]


def test_a_member_profiled_as_another_is_of_its_shape() -> None:
    found = shapes_of(
        ensemble(
            Member("a", {"units": 1}, profile_as="b"),
            Member("b", {"units": 2}, profile_as="c"),
            Member("c", {"units": 3}),
            Member("d", {"units": 1}),
        )
    )
    assert found == (RateShape("c", ("a", "b"), None), RateShape("d", (), None))
