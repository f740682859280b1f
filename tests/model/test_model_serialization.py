"""Values to JSON and back."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.job import Job, JobState
from hetctl.model.plan import Allocation, Plan
from hetctl.model.profile import MemberProfile, ProfilePoint
from hetctl.model.run import Budget, RunSpec, Usage
from hetctl.model.run_status import RunStatus
from hetctl.model.serialization import decode, encode
from hetctl.model.site import Cluster, Queue, Site
from hetctl.model.training_progress import EpochResult
from hetctl.storage.profile_request import Measurements

OTHER = Member("c", stop=StopRule(patience=6))
numbers = st.floats(allow_nan=False, allow_infinity=False)
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
LEAVES = {int: st.integers(), float: numbers, str: st.text(max_size=10), bool: st.booleans()}
KINDS = [
    Allocation, Budget, Cluster, Ensemble, EpochResult, Job, Measurements, MemberProfile, Plan,
    ProfilePoint, RunSpec, RunStatus, Site, StopRule, Usage,
]  # fmt: skip


@functools.cache
def values_of(kind):
    """A strategy for any type that core's dataclasses use."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{f.name: values_of(hints[f.name]) for f in dataclasses.fields(kind)})
    if kind is JobState:
        return st.sampled_from(JobState)
    if kind is typing.Any:
        return plain_values
    if kind is type(None):
        return st.none()
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, arguments))
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*map(values_of, arguments))
    if origin in (tuple, Sequence):
        return st.lists(values_of(arguments[0]), max_size=2).map(tuple)
    if origin is not None:
        return st.dictionaries(values_of(arguments[0]), values_of(arguments[1]), max_size=2)
    return LEAVES[kind]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data(), garbage=plain_values)
def test_every_value_survives_json_and_garbage_in_a_field_is_an_error_or_a_value(kind, data, garbage):
    value = data.draw(values_of(kind))
    encoded = encode(value)
    assert decode(kind, json.loads(json.dumps(encoded))) == value
    name = data.draw(st.sampled_from([f.name for f in dataclasses.fields(kind)]))
    try:
        damaged = decode(kind, encoded | {name: garbage})
    except ValueError:
        return
    assert isinstance(damaged, kind)


@given(st.dictionaries(st.text(min_size=1).map(lambda name: f"later-{name}"), plain_values))
def test_keys_that_a_newer_writer_added_are_ignored(later):
    assert decode(Queue, {"name": "debug", **later}) == Queue("debug")


def test_missing_fields_take_their_defaults():
    assert decode(StopRule, {"patience": 2}) == StopRule(patience=2)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (Queue, {}),
        (Queue, {"name": 3}),
        (Queue, []),
        (Queue, None),
        (StopRule, {"patience": "5"}),
        (StopRule, {"patience": True}),
        (StopRule, {"patience": 2.5}),
        (StopRule, {"target": "high"}),
        (Allocation, {"member": "m", "gpus": 1, "mode": "x", "rate": 1.0, "placement": {}}),
        (EpochResult, {"epoch": 1, "metrics": [], "duration_s": 1.0, "gpus": 1, "finished_at": 0.0}),
        (MemberProfile, {"member": "m", "rates": {"one": 1.0}}),
        (Job, {"number": 0, "batch_id": "1", "state": "sleeping", "nodes": 1,
               "wall_s": 1, "submitted_at": 0.0}),
        (tuple[int, ...], "12"),
        (tuple[str, int], ["V100"]),
        (tuple[int, ...], {"first": 1, "others": []}),
        (tuple[Queue, ...], {"first": {}, "others": []}),
        (tuple[Queue, ...], {"first": {"name": "a"}, "others": 3}),
        (tuple[Queue, ...], {"first": {"name": "a"}, "others": [3]}),
        (tuple[Queue, ...], {"first": {"name": "a"}, "others": [{"name": 3}]}),
        (dict[str, int], [1]),
    ],
)  # fmt: skip
def test_another_shape_is_a_value_error(kind, data):
    with pytest.raises(ValueError, match=r"."):
        decode(kind, data)


def test_a_whole_number_decodes_as_float_but_not_the_reverse():
    assert isinstance(decode(StopRule, {"min_delta": 1}).min_delta, float)
    with pytest.raises(ValueError, match="expected"):
        decode(StopRule, {"max_epochs": 1.0})


def test_members_are_a_table_of_differences_from_the_first_one():
    configs = {"a": 1}, {"a": 1}, {"a": 1.0}, {"a": True}
    members = tuple(Member(f"m{number}", config) for number, config in enumerate(configs))
    encoded = encode(Ensemble("e", "torch", Functions("m:i", "m:f"), members, "/x"))
    assert encoded["members"]["others"] == [
        {"name": "m1"}, {"name": "m2", "config": {"a": 1.0}}, {"name": "m3", "config": {"a": True}},
    ]  # fmt: skip
    decoded = decode(Ensemble, json.loads(json.dumps(encoded))).members
    assert [repr(member.config) for member in decoded] == [repr(config) for config in configs]
    # Runs of earlier versions have all members in full.
    assert decode(Ensemble, encoded | {"members": [encode(member) for member in members]}).members == members


def test_equal_values_beside_one_another_are_one():
    members = Member("a"), Member("b"), OTHER
    ensemble = Ensemble("e", "torch", Functions("m:i", "m:f"), members, "/x")
    first, second, third = decode(Ensemble, encode(ensemble)).members
    assert first.stop is second.stop
    assert third.stop == OTHER.stop != first.stop


def test_an_ensemble_is_what_it_looks_like_in_json():
    member = Member("m", {"units": 3})
    ensemble = Ensemble("e", "tensorflow", Functions("a:b", "a:c"), (member,), "/x")
    encoded = encode(ensemble)
    assert encoded["members"][0]["config"] == {"units": 3}
    assert encoded["functions"] == {
        "input_fn": "a:b", "model_fn": "a:c", "train_fn": None, "evaluate_fn": None,
    }  # fmt: skip
