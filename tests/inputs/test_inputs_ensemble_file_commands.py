"""Members that are commands, in ensemble files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.model.ensemble import COMMAND
from hetctl.model.errors import BadInputError

ENSEMBLE = """\
name: own
command: python train.py --lr {lr} --json '{"a":1}' --tag {name}-{batch_size}
environment: {THREADS: 4, MODE: fast}
members:
  - {name: a, config: {lr: 1e-3}}
  - {name: b, config: {on: true}, command: [run, "{on}", two words], environment: {MODE: slow}}
  - grid: {name: c, over: {lr: [1, x]}, batch_size: 8}
"""


def read(folder: Path, text: str = ENSEMBLE):
    (folder / "e.yaml").write_text(text)
    return read_ensemble(folder / "e.yaml")


def test_commands_are_inherited_and_filled(tmp_path):
    ensemble = read(tmp_path)
    a, b, *grid = ensemble.members
    assert (ensemble.framework, ensemble.preloaded) == (COMMAND, ())
    assert a.command_line("ckpt") == (
        "python",
        "train.py",
        "--lr",
        "0.001",
        "--json",
        '{"a":1}',
        "--tag",
        "a-32",
    )
    assert b.command_line("ckpt") == ("run", "true", "two words")
    assert [member.command_line("ckpt")[3] for member in grid] == ["1", "x"]
    assert [member.command_line("ckpt")[-1] for member in grid] == ["c-lr-1-8", "c-lr-x-8"]
    assert (a.environment, b.environment) == (
        {"THREADS": "4", "MODE": "fast"},
        {"THREADS": "4", "MODE": "slow"},
    )


def test_keys_with_dots_are_filled(tmp_path):
    text = "name: own\ncommand: python t.py model.units={model.units} {model}.x\nmembers:\n"
    config = "{model.units: [64, 32], model: m}"
    (member,) = read(tmp_path, f"{text}  - {{name: a, config: {config}}}\n").members
    assert member.command_line("ckpt") == ("python", "t.py", "model.units=[64, 32]", "m.x")
    with pytest.raises(BadInputError, match=r"no 'model.units' for the placeholder"):
        read(tmp_path, f"{text}  - {{name: a, config: {{model: m}}}}\n")


def test_a_command_names_the_folder_of_its_results(tmp_path):
    text = ENSEMBLE.replace("--tag {name}", "--out_dir={checkpoint_dir}/out --tag {name}")
    a, *_ = read(tmp_path, text).members
    assert "--out_dir=some where/out" in a.command_line("some where")


def test_a_script_continues_by_its_options(tmp_path):
    text = (
        "name: own\ncommand: run '{{seed}}' {resume_from}\nresume: {checkpoint: c, options: '--go {seed}'}\n"
    )
    (member,) = read(tmp_path, f"{text}members: [{{name: a}}]\n").members
    assert member.command_line("ckpt") == ("run", "{seed}", "")
    assert member.command_line("ckpt", "x") == ("run", "{seed}", "x", "--go", str(member.seed))


@pytest.mark.parametrize(
    ("keys", "limits"),
    [
        ("", (1, 1)),
        (", min_gpus: 2", (2, 2)),
        (", max_gpus: 8", (1, 8)),
        (", gpus: 4", (4, 4)),
        (", ranks: none", (1, 1)),
    ],
)
def test_a_command_has_one_gpu_unless_it_says_more(tmp_path, keys, limits):
    (member,) = read(tmp_path, f"name: own\ncommand: run\nmembers: [{{name: a{keys}}}]\n").members
    assert (member.min_gpus, member.max_gpus) == limits


def test_another_command_has_other_rates(tmp_path):
    one = read(tmp_path).members[0]
    other = read(tmp_path, ENSEMBLE.replace("train.py", "train2.py")).members[0]
    assert one.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("{lr} --json", "{rate} --json", ":2: command: the config of a has no 'rate'"),
        ("{lr} --json", "{lt} --json", "checkpoint_dir, lr, name, resume_from, seed; as text it is {{lt}}"),
        ("name: own\n", "name: own\nresume: {checkpoint: /c}\n", ":2: resume.checkpoint: must be relative"),
        ("lr: 1e-3}}", "lr: 1}, ranks: none, gpus: 2}", ":5: members[0].gpus: must be 1, or left out"),
        ("lr: 1e-3}}", "lr: 1}, ranks: null}", "ranks: must be"),
        ('"{on}"', '"{off}"', ":6: members[1].command: the config of b has no 'off'"),
        ("command: [run,", "command: ['',", ":6: members[1].command: must name a program"),
        ("train.py --lr", "train.py 'x --lr", ":2: command: No closing quotation"),
        ("name: own\n", "name: own\nframework: pytorch\n", ":2: framework: does not go with"),
        ("name: own\n", "name: own\ndata: x\n", ":2: data: does not go with"),
        ("command: python", "data: python", "members[0].command: is missing: all members"),
        ("lr: 1e-3}}", "lr: 1}, layers: l.csv}", ":5: members[0].layers: does not go with"),
        ("lr: 1e-3}}", "lr: 1}, global_batch_size: 8}", "members[0].global_batch_size: does not go"),
        ("lr: 1e-3}}", "lr: 1}, deterministic: true}", "members[0].deterministic: does not go"),
        ("lr: 1e-3}}", "lr: 1}, shard: true}", "members[0].shard: does not go"),
        ("lr: 1e-3}}", "lr: 1}, checkpoint: {every: 9s}}", ":5: members[0].checkpoint: does not go"),
        ("name: own\n", "name: own\ncheckpoint: {every: 9s}\n", ":2: checkpoint: does not go with"),
        ("{THREADS: 4", "{4x: 4", "environment"),
    ],
)
def test_wrong_commands_are_refused_with_their_line(tmp_path, before, after, said):
    assert ENSEMBLE.count(before) == 1
    with pytest.raises(BadInputError) as caught:
        read(tmp_path, ENSEMBLE.replace(before, after))
    assert said in caught.value.message


def test_members_need_functions_or_commands(tmp_path):
    with pytest.raises(BadInputError, match="functions: is required, unless all members have a command"):
        read(tmp_path, "name: own\nmembers: [{name: a}]\n")
