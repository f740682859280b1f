"""Members with framework, functions or data of their own, and what is refused, with its line."""

from __future__ import annotations

import json

import pytest

from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.model.ensemble import COMMAND, Functions, TrainingCode
from hetctl.model.errors import BadInputError

NETS = {"input_fn": "nets:input_fn", "model_fn": "nets:model_fn"}
OTHERS = {"input_fn": "nets:other_input_fn", "model_fn": "nets:model_fn"}
MODULE = "def input_fn(data): ...\ndef other_input_fn(data): ...\ndef model_fn(config): ...\n"


def ensemble_of(tmp_path, members, **more):
    (tmp_path / "nets.py").write_text(MODULE)
    given = {"name": "e", "framework": "pytorch", "functions": NETS, "data": "images", **more}
    lines = [f"{key}: {json.dumps(value)}" for key, value in given.items() if value is not None]
    lines += ["members:", *(f"  - {json.dumps(member)}" for member in members)]
    (tmp_path / "e.yaml").write_text("\n".join([*lines, ""]))
    return read_ensemble(tmp_path / "e.yaml")


def test_each_member_has_its_own_code_or_the_ensembles(tmp_path):
    ensemble = ensemble_of(
        tmp_path,
        [
            {"name": "a"},
            {"name": "b", "framework": "tensorflow"},
            {"name": "c", "functions": OTHERS, "data": "https://here/there"},
            {"grid": {"name": "g", "over": {"lr": [1, 2]}, "data": "texts"}},
            {"name": "same", "framework": "pytorch", "functions": NETS},
        ],
    )
    common, others = Functions(*NETS.values()), Functions(*OTHERS.values())
    images, texts = f"{tmp_path}/images", f"{tmp_path}/texts"
    assert [member.code for member in ensemble.members] == [
        None,
        TrainingCode("tensorflow", common, images),
        TrainingCode("pytorch", others, "https://here/there"),
        TrainingCode("pytorch", common, texts),
        TrainingCode("pytorch", common, texts),
        None,
    ]
    assert len(ensemble.codes) == 4
    assert ensemble.preloaded == ("pytorch", "tensorflow")
    alone = ensemble.of(ensemble.member("c"))
    assert (alone.functions, alone.data, len(alone.members)) == (others, "https://here/there", 1)
    assert ensemble.of(ensemble.member("a")).code == ensemble.code


def test_rates_of_other_code_are_others(tmp_path):
    a, b, c, d = ensemble_of(
        tmp_path,
        [
            {"name": "a"},
            {"name": "b", "data": "texts"},
            {"name": "c", "framework": "tensorflow"},
            {"name": "d"},
        ],
    ).members
    assert len({member.fingerprint for member in (a, b, c)}) == 3
    assert a.fingerprint == d.fingerprint


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_one_framework_is_preloaded_for_all(framework, tmp_path):
    members = [{"name": "a", "framework": framework}, {"name": "b", "framework": framework, "data": "texts"}]
    assert ensemble_of(tmp_path, members).preloaded == (framework,)


@pytest.mark.parametrize(
    ("member", "more", "line", "words"),
    [
        ({"framework": "caffe"}, {}, 6, "members[0].framework: must be"),
        ({"functions": {"input_fn": "nets:input_fn"}}, {}, 6, "functions.model_fn: is required"),
        (
            {"functions": {**NETS, "model_fn": "nets:modle_fn"}},
            {},
            6,
            "members[0].functions.model_fn: nets.py defines no 'modle_fn'; did you mean 'model_fn'",
        ),
        (
            {"data": "texts"},
            {"partitions": 2},
            7,
            "members[0].data: does not go with partitions: these are of one input_fn",
        ),
        (
            {"functions": NETS},
            {"functions": None, "framework": None, "data": None, "command": "train"},
            4,
            "members[0].functions: needs functions of the ensemble",
        ),
        (
            {"framework": "tensorflow", "shard": True},
            {},
            6,
            "shard: does not go with a framework that cannot divide networks",
        ),
    ],
)
def test_own_code_without_room_is_refused_with_its_line(member, more, line, words, tmp_path):
    with pytest.raises(BadInputError) as caught:
        ensemble_of(tmp_path, [{"name": "a", **member}], **more)
    assert f"e.yaml:{line}: " in caught.value.message
    assert words in caught.value.message


def test_a_file_of_commands_has_no_code(tmp_path):
    ensemble = ensemble_of(
        tmp_path, [{"name": "a"}], functions=None, framework=None, data=None, command="train"
    )
    assert ensemble.codes == (TrainingCode(COMMAND, Functions("", "")),)
    assert ensemble.preloaded == ()
