from __future__ import annotations

import math
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.model.ensemble import Ensemble, Partitions
from hetctl.model.errors import BadInputError
from hetctl.model.training_settings import EVERY_EPOCH, SECONDS, STEPS, CheckpointInterval

HEAD = """\
name: digits
functions: {input_fn: digits:input_fn, model_fn: digits:model_fn}
"""
MODULE = "from other import train_fn\ndef input_fn(data): ...\nmodel_fn = lambda config: None\n"


def read(folder: Path, text: str, module: str = MODULE) -> Ensemble:
    (folder / "digits.py").write_text(module)
    (folder / "e.yaml").write_text(text)
    return read_ensemble(folder / "e.yaml")


def refused(folder: Path, text: str, module: str = MODULE) -> str:
    with pytest.raises(BadInputError) as caught:
        read(folder, text, module)
    return caught.value.message.replace(f"{folder}/", "")


def members(folder: Path, entries: str) -> dict[str, object]:
    return {member.name: member for member in read(folder, f"{HEAD}members:\n{entries}").members}


def test_every_key_of_an_ensemble_file_is_read(tmp_path: Path):
    ensemble = read(
        tmp_path,
        """\
name: digits
framework: tensorflow
functions: {input_fn: digits:input_fn, model_fn: digits:model_fn, train_fn: digits:train_fn}
data: samples/train
batch_size: 16
seed: 1
max_gpus: 4
rescale_learning_rate: false
deterministic: true
stop: {metric: val_accuracy, target: 0.97, max_epochs: 40}
members:
  - {name: plain, config: {hidden: [64]}}
  - {name: own, batch_size: 8, max_gpus: null, seed: 7, rescale_learning_rate: true,
     deterministic: false, stop: {patience: 2}}
  - grid: {name: cnn, config: {kind: cnn}, over: {filters: [16, 32], lr: [0.1, 1e-3]}, batch_size: 64}
  - random: {name: rand, count: 2, config: {kind: mlp}, over: {act: {choice: [relu, tanh]}}}
""",
    )
    plain, own, *others = ensemble.members
    assert (ensemble.folder, ensemble.data) == (str(tmp_path), str(tmp_path / "samples/train"))
    assert ensemble.functions.train_fn == "digits:train_fn"
    assert (plain.config, plain.batch_size, plain.max_gpus) == ({"hidden": [64]}, 16, 4)
    assert (plain.stop.mode, plain.stop.target, plain.stop.patience) == ("max", 0.97, 5)
    assert plain.seed == zlib.crc32(b"1/plain")
    assert (own.batch_size, own.max_gpus, own.rescale_learning_rate) == (8, None, True)
    assert [member.deterministic for member in (plain, own)] == [True, False]
    assert (own.stop.patience, own.stop.target, own.seed) == (2, 0.97, zlib.crc32(b"7/own"))
    assert [m.name for m in others] == [
        "cnn-filters-16-lr-0.1",
        "cnn-filters-16-lr-0.001",
        "cnn-filters-32-lr-0.1",
        "cnn-filters-32-lr-0.001",
        "rand-000",
        "rand-001",
    ]
    assert others[1].config == {"kind": "cnn", "filters": 16, "lr": 0.001}
    assert others[1].batch_size == 64


def test_what_modes_go_by(tmp_path: Path):
    text = HEAD + "partitions: 8\nsamples_per_epoch: 5000\nmembers:\n"
    ensemble = read(tmp_path, text + "  - {name: a, layers: sub/../a.csv}\n  - {name: b}\n")
    assert (ensemble.partitions, ensemble.samples_per_epoch) == (Partitions(8), 5000)
    assert [member.layers for member in ensemble.members] == [str(tmp_path / "a.csv"), None]
    plain = read(tmp_path, HEAD + "members:\n  - {name: b}\n")
    assert (plain.partitions, plain.samples_per_epoch) == (None, None)


def test_members_divide_their_networks_or_not(tmp_path: Path):
    text = f"{HEAD}framework: pytorch\nshard: true\nmembers: [{{name: a}}, {{name: b, shard: false}}]\n"
    assert [member.shard for member in read(tmp_path, text).members] == [True, False]


def test_a_global_batch_leaves_the_learning_rate_alone(tmp_path: Path):
    found = members(tmp_path, "  - {name: a, global_batch_size: 64}\n  - {name: b}\n")
    a, b = (found[name] for name in "ab")
    assert (a.step_samples(1), a.step_samples(4), a.micro_batch_size, a.rescales) == (64, 64, 32, False)
    assert (b.step_samples(1), b.step_samples(4), b.micro_batch_size, b.rescales) == (32, 128, None, True)
    assert a.fingerprint != b.fingerprint


def test_checkpoints_of_a_member_go_before_the_ensembles(tmp_path: Path):
    text = HEAD + "checkpoint: {every: 10m}\nmembers:\n"
    ensemble = read(tmp_path, text + "  - {name: a, checkpoint: {every: 500 steps}}\n  - {name: b}\n")
    assert [member.checkpoint for member in ensemble.members] == [
        CheckpointInterval(500, STEPS),
        CheckpointInterval(600, SECONDS),
    ]
    (plain,) = read(tmp_path, HEAD + "members:\n  - {name: b}\n").members
    assert plain.checkpoint == EVERY_EPOCH


PARTS = "partitions: {count: 4, path: '$TMPDIR/{partition}.npz'}\n"
STAGED = "partitions: {{count: 4, path: '$TMPDIR/{{partition}}.npz', source: '{}', replicas: 2}}\n"


@pytest.mark.parametrize(
    ("written", "partitions"),
    [
        ("partitions: 8\n", Partitions(8)),
        ("partitions: {count: 8}\n", Partitions(8)),
        (PARTS + "samples_per_epoch: 100\n", Partitions(4, "$TMPDIR/{partition}.npz")),
        (
            STAGED.format("$HOME/{partition}.npz") + "samples_per_epoch: 100\n",
            Partitions(4, "$TMPDIR/{partition}.npz", "$HOME/{partition}.npz", 2),
        ),
    ],
)
def test_partitions_are_a_number_or_a_mapping(tmp_path: Path, written: str, partitions: Partitions):
    ensemble = read(tmp_path, f"{HEAD}{written}members:\n  - {{name: a}}\n")
    assert ensemble.partitions == partitions
    assert ensemble.reads_partitions == bool(partitions.path)


@pytest.mark.parametrize(
    ("written", "settings"),
    [
        ("", ("auto", "curve", "narx")),
        ("balance: off\n", ("off", "curve", "narx")),
        ("balance: on\n", ("on", "curve", "narx")),
        ("balance: auto\n", ("auto", "curve", "narx")),
        ("balance: {mode: on, manager: cpu, predictor: memoryless}\n", ("on", "cpu", "memoryless")),
    ],
)
def test_balance_is_a_mode_or_a_mapping(tmp_path: Path, written: str, settings: tuple[str, ...]):
    balance = read(tmp_path, f"{HEAD}{written}members:\n  - {{name: a}}\n").balance
    assert (balance.mode, balance.manager, balance.predictor) == settings


@pytest.mark.parametrize(
    ("metric", "mode"),
    [("val_accuracy", "max"), ("AUC", "max"), ("val_F1", "max"), ("val_loss", "min"), ("mse", "min")],
)
def test_mode_follows_from_the_metric(tmp_path: Path, metric: str, mode: str):
    ensemble = read(tmp_path, f"{HEAD}stop: {{metric: {metric}}}\nmembers: [{{name: a}}]\n")
    assert ensemble.members[0].stop.mode == mode


def test_an_own_metric_drops_the_mode_and_target_of_the_other(tmp_path: Path):
    stop = "stop: {metric: val_accuracy, mode: max, target: 0.9, patience: 3}\n"
    ensemble = read(tmp_path, f"{HEAD}{stop}members: [{{name: a, stop: {{metric: val_loss}}}}]\n")
    rule = ensemble.members[0].stop
    assert (rule.metric, rule.mode, rule.target, rule.patience) == ("val_loss", "min", None, 3)


def test_data_that_is_absolute_or_an_address_is_left_alone(tmp_path: Path):
    for data in ("/data/x", "s3://bucket/x"):
        assert read(tmp_path, f"{HEAD}data: {data}\nmembers: [{{name: a}}]\n").data == data


A = "members: [{name: a}]\n"
SHARD = "shard: true\nframework: pytorch\n"
REFUSALS = [
    ("members: []\n", "e.yaml:3: members: must have at least 1, got []"),
    ("members: 3\n", "e.yaml:3: members: must be a list, got 3"),
    ("{}", "e.yaml:3: not YAML: while scanning a simple key could not find expected ':'"),
    ("members: [3]\n", "e.yaml:3: members[0]: must be a mapping, got 3"),
    (
        "members: [{name: a, command: 3}]\n",
        ".command: must be text (put it in quotes), or a list, got 3",
    ),
    (
        "members: [{name: a, environment: {A-B: []}}]\n",
        "environment.A-B: must be letters, digits and _, not",
    ),
    ("members: [{name: a, nme: b}]\n", "members[0].nme: unknown key 'nme'; did you mean 'name'?"),
    ("members: [{gird: {}, name: a}]\n", "members[0].gird: unknown key 'gird'; did you mean 'grid'?"),
    ("batchsize: 3\nmembers: [{name: a}]\n", "e.yaml:3: batchsize: unknown key 'batchsize'; did you mean "),
    ("batch_size: 0\nmembers: [{name: a}]\n", "e.yaml:3: batch_size: must be at least 1, got 0"),
    ("batch_size: 8.0\nmembers: [{name: a}]\n", "e.yaml:3: batch_size: must be a whole number, got 8.0"),
    ("batch_size: true\nmembers: [{name: a}]\n", "e.yaml:3: batch_size: must be a whole number, got True"),
    ("max_gpus: 0\nmembers: [{name: a}]\n", "e.yaml:3: max_gpus: must be at least 1, got 0"),
    (
        "members: [{name: a, global_batch_size: 64, rescale_learning_rate: true}]\n",
        "e.yaml:3: members[0].rescale_learning_rate: does not go with global_batch_size",
    ),
    (
        "rescale_learning_rate: true\nglobal_batch_size: 64\nmembers: [{name: a}, {name: b}]\n",
        "e.yaml:3: rescale_learning_rate: does not go with global_batch_size",
    ),
    (
        "checkpoint: {every: 600}\nmembers: [{name: a}]\n",
        "e.yaml:3: checkpoint.every: '600' is not an interval such as 10m, 500 steps or 2 epochs",
    ),
    ("checkpoint: {often: 3}\nmembers: [{name: a}]\n", "e.yaml:3: checkpoint.often: unknown key 'often'"),
    ("seed: -1\nmembers: [{name: a}]\n", "e.yaml:3: seed: must be at least 0, got -1"),
    (
        "framework: torch\nmembers: [{name: a}]\n",
        "e.yaml:3: framework: must be 'tensorflow' or 'pytorch', got 'torch'",
    ),
    ("data: 3\nmembers: [{name: a}]\n", "e.yaml:3: data: must be text (put it in quotes), got 3"),
    (
        "rescale_learning_rate: yes\nmembers: [{name: a}]\n",
        "e.yaml:3: rescale_learning_rate: must be true or false, got 'yes'",
    ),
    ("stop: {patience: 0}\nmembers: [{name: a}]\n", "e.yaml:3: stop.patience: must be at least 1, got 0"),
    ("stop: {mode: up}\nmembers: [{name: a}]\n", "e.yaml:3: stop.mode: must be 'max' or 'min', got 'up'"),
    ("stop: {target: .nan}\nmembers: [{name: a}]\n", "e.yaml:3: '.nan' is not a finite number"),
    ("stop: {min_delta: 1e999}\nmembers: [{name: a}]\n", "e.yaml:3: '1e999' is not a finite number"),
    (
        "stop: {expected_epochs: 9, max_epochs: 8}\nmembers: [{name: a}]\n",
        "e.yaml:3: stop.expected_epochs: must be at most max_epochs (8), got 9",
    ),
    (
        "members:\n  - name: a\n    stop:\n      expected_epochs: 101\n",
        "e.yaml:6: members[0].stop.expected_epochs: must be at most max_epochs (100), got 101",
    ),
    (f"partitions: 0\n{A}", "e.yaml:3: partitions.count: must be at least 1"),
    (f"{PARTS}{A}", "e.yaml:3: partitions.path: needs samples_per_epoch"),
    (
        f"partitions: {{count: 4, path: /tmp/all.npz}}\n{A}",
        "e.yaml:3: partitions.path: must have {partition}",
    ),
    (f"partitions: {{path: '/tmp/{{partition}}'}}\n{A}", "e.yaml:3: partitions"),
    (STAGED.format("parts/{partition}") + A, "e.yaml:3: partitions.source: must be absolute"),
    (STAGED.format("/{partition}/all.npz") + A, "e.yaml:3: partitions.source: must have {partition}"),
    (f"partitions: {{count: 4, source: '/{{partition}}'}}\n{A}", "e.yaml:3: partitions.source: needs path"),
    (f"partitions: {{count: 4, replicas: 0}}\n{A}", "e.yaml:3: partitions.replicas: must be at least 1"),
    (f"balance: sometimes\n{A}", "e.yaml:3: balance.mode: must be 'auto', 'on' or 'off'"),
    (f"balance: {{manager: tpu}}\n{A}", "e.yaml:3: balance.manager: must be 'cpu', 'gpu' or 'curve'"),
    (f"gpus: 4\nmax_gpus: 4\n{A}", "e.yaml:3: gpus: is the exact number, and does not go with max_gpus"),
    (
        "members: [{name: a, gpus: 2, min_gpus: 2, max_gpus: 3}]\n",
        "[0].gpus: is the exact number, and does",
    ),
    (f"min_gpus: 4\nmax_gpus: 2\n{A}", "e.yaml:3: min_gpus: the least number of GPUs, 4, must be"),
    (
        "min_gpus: 4\nmembers: [{name: a, max_gpus: 2}]\n",
        "[0].max_gpus: the least number of GPUs, 4, must",
    ),
    ("global_batch_size: 2\nmembers: [{name: a, gpus: 4}]\n", "4, must be at most global_batch_size, 2"),
    (f"shard: true\n{A}", "e.yaml:3: shard: does not go with a framework that cannot divide networks"),
    (f"{SHARD}partitions: 2\n{A}", "e.yaml:3: shard: does not go with partitions: they have unequal"),
    (f"{SHARD}balance: on\n{A}", "e.yaml:3: shard: does not go with balance: on: GPUs wait for one another"),
    (SHARD + "members: [{name: a, layers: l.csv}]\n", "shard: does not go with layers: pipelines are cut"),
    (
        "framework: pytorch\nmembers: [{name: a, shard: true, layers: l.csv}]\n",
        "e.yaml:4: members[0].shard: does not go with layers: pipelines are cut",
    ),
    ("members: [{config: {}}]\n", "e.yaml:3: members[0].name: is required"),
    (
        "members: [{name: ../a}]\n",
        "e.yaml:3: members[0].name: must be 1 to 64 of A-Z a-z 0-9 . _ - and start",
    ),
    ("members: [{name: driver}]\n", "'driver' is reserved, got 'driver'"),
    (f"members: [{{name: {'a' * 65}}}]\n", "e.yaml:3: members[0].name: must be 1 to 64 of"),
    (
        "members:\n  - name: a\n  - name: b\n  - name: a\n",
        "e.yaml:6: members[2].name: member 'a' is already defined by members[0]",
    ),
    ("members: [{grid: {name: g, over: {}}}]\n", "members[0].grid.over: must have at least 1, got {}"),
    ("members: [{grid: {name: g, over: {a: []}}}]\n", "members[0].grid.over.a: must have at least 1, got []"),
    (
        "members: [{grid: {name: g, over: {a: [1, 1]}}}]\n",
        "e.yaml:3: members[0].grid.over.a: must not hold 1 twice, got [1, 1]",
    ),
    (
        "members: [{grid: {name: g, config: {a: 1}, over: {a: [2]}}}]\n",
        "members[0].grid.over: key 'a' must be in config or in over, not in both",
    ),
    (
        "members:\n  - grid: {name: g, over: {a: [1]}}\n    batch_size: 3\n",
        "e.yaml:5: members[0].batch_size: unknown key 'batch_size'; known: grid, random",
    ),
    (
        "members: [{random: {name: r, count: 0, over: {a: {uniform: [0, 1]}}}}]\n",
        "e.yaml:3: members[0].random.count: must be at least 1, got 0",
    ),
    (
        "members: [{random: {name: r, count: 1, over: {a: {log_uniform: [0, 1]}}}}]\n",
        "members[0].random.over.a.log_uniform[0]: must be greater than 0, got 0",
    ),
    (
        "members: [{random: {name: r, count: 1, over: {a: {log_uniform: [2, 1]}}}}]\n",
        "over.a.log_uniform: must be [lower, upper] with lower < upper, got [2",
    ),
    (
        "members: [{random: {name: r, count: 1, over: {a: {integer: [1, 2.5]}}}}]\n",
        "over.a.integer[1]: must be a whole number, got 2.5",
    ),
    (
        "members: [{random: {name: r, count: 1, over: {a: {uniform: [1]}}}}]\n",
        "over.a.uniform: must have at least 2, got [1]",
    ),
    (
        "members: [{random: {name: r, count: 1, over: {a: {uniform: [0, 1], choice: [1]}}}}]\n",
        "over.a: must have exactly one of choice, integer, log_uniform, uniform",
    ),
    (
        "members: [{random: {name: r, count: 9999999999, over: {a: {uniform: [0, 1]}}}}]\n",
        "e.yaml:3: members: must expand to at most 10,000 members",
    ),
]


@pytest.mark.parametrize(("text", "message"), REFUSALS)
def test_a_wrong_ensemble_file_is_refused_at_its_line(tmp_path: Path, text: str, message: str):
    assert message in refused(tmp_path, HEAD + text)


def test_every_problem_is_listed_in_order_of_lines(tmp_path: Path):
    text = "batch_size: 0\nmembers: [{name: /}]\nseed: x\nstop: {paitence: 1}\n"
    lines = refused(tmp_path, HEAD + text).splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["e.yaml:3", "batch_size"],
        ["e.yaml:4", "members[0].name"],
        ["e.yaml:5", "seed"],
        ["e.yaml:6", "stop.paitence"],
    ]


def functions_refused(folder: Path, function: str, module: str = MODULE) -> str:
    text = (
        f"name: d\nfunctions:\n  input_fn: digits:input_fn\n  model_fn: {function}\nmembers: [{{name: a}}]\n"
    )
    return refused(folder, text, module)


def test_functions_that_do_not_exist_are_refused(tmp_path: Path):
    at = "e.yaml:4: functions.model_fn:"
    assert functions_refused(tmp_path, "digits:modle_fn") == (
        f"{at} digits.py defines no 'modle_fn'; did you mean 'model_fn'?"
    )
    assert functions_refused(tmp_path, "digit:model_fn") == (
        f"{at} there is no digit.py or digit/__init__.py in this file's folder"
    )
    assert functions_refused(tmp_path, "digits.model_fn") == (
        f"{at} must be module:function, got 'digits.model_fn'"
    )
    inner = "def input_fn(d):\n    def model_fn(c): ...\nclass A:\n    model_fn = 1\n"
    assert functions_refused(tmp_path, "digits:model_fn", inner).startswith(f"{at} digits.py defines no ")
    broken = functions_refused(tmp_path, "digits:model_fn", "def input_fn(:\n")
    assert f"{at} digits.py is not Python: invalid syntax in line 1" in broken


@pytest.mark.parametrize(
    "definition",
    [
        "async def model_fn(config): ...",
        "class model_fn: ...",
        "from models import build as model_fn",
        "import model_fn",
        "from models import *",
        "model_fn, other = 1, 2",
        "model_fn: object = None",
        "try:\n    from a import model_fn\nexcept ImportError:\n    pass",
    ],
)
def test_ways_to_define_a_function_without_running_the_module(tmp_path: Path, definition: str):
    module = f"raise SystemExit('imported')\ndef input_fn(data): ...\n{definition}\n"
    assert read(tmp_path, f"{HEAD}members: [{{name: a}}]\n", module).name == "digits"


def test_the_module_may_be_a_package(tmp_path: Path):
    (tmp_path / "nets").mkdir()
    (tmp_path / "nets" / "__init__.py").write_text("def model_fn(config): ...\n")
    (tmp_path / "nets" / "deep.py").write_text("def input_fn(data): ...\n")
    text = (
        "name: d\nfunctions: {input_fn: nets.deep:input_fn, model_fn: nets:model_fn}\nmembers: [{name: a}]\n"
    )
    assert read(tmp_path, text).functions.input_fn == "nets.deep:input_fn"


GRID = "  - grid: {{name: g, over: {{{}}}}}\n"
RANDOM = "  - random: {{name: r, seed: 3, count: {}, over: {{{}}}}}\n"


def test_grid_members_do_not_depend_on_other_entries_or_values(tmp_path: Path):
    before = members(tmp_path, GRID.format("lr: [0.1, 0.01], act: [relu]"))
    after = members(tmp_path, "  - name: x\n" + GRID.format("lr: [0.01, 0.5, 0.1], act: [tanh, relu]"))
    assert before.items() <= after.items()


def test_grid_names_that_collide_or_are_long_get_a_hash(tmp_path: Path):
    names = list(members(tmp_path, GRID.format("h: [a b, a/b, [64, 32], -1, 1e-05, true, null]")))
    assert names[2:] == ["g-h-64-32", "g-h--1", "g-h-1e-05", "g-h-true", "g-h-null"]
    assert [name[:-8] for name in names[:2]] == ["g-h-a-b-", "g-h-a-b-"]
    assert names[0] != names[1]
    (long,) = members(tmp_path, GRID.format(f"h: [{'x' * 80}]"))
    assert len(long) == 64
    assert long.startswith("g-h-xxxxx")


def test_random_members_stay_when_keys_or_members_are_added(tmp_path: Path):
    few = members(tmp_path, RANDOM.format(3, "lr: {log_uniform: [1e-4, 1e-1]}"))
    many = members(tmp_path, RANDOM.format(1001, "z: {integer: [1, 9]}, lr: {log_uniform: [1e-4, 1e-1]}"))
    assert list(many)[:2] == ["r-000", "r-001"]
    assert list(many)[-1] == "r-1000"
    for name, member in few.items():
        assert many[name].config["lr"] == member.config["lr"]
        assert many[name].seed == member.seed


def test_random_draws_keep_to_their_bounds_and_reach_all_of_them(tmp_path: Path):
    over = "l: {log_uniform: [1e-4, 1e-1]}, u: {uniform: [0, 0.5]}, i: {integer: [1, 3]}, c: {choice: [a, b]}"
    configs = [member.config for member in members(tmp_path, RANDOM.format(300, over)).values()]
    assert all(1e-4 <= c["l"] <= 1e-1 and 0 <= c["u"] <= 0.5 for c in configs)
    assert {c["i"] for c in configs} == {1, 2, 3}
    assert {c["c"] for c in configs} == {"a", "b"}
    assert sum(math.log10(c["l"]) for c in configs) / 300 == pytest.approx(-2.5, abs=0.2)
    assert sum(c["u"] for c in configs) / 300 == pytest.approx(0.25, abs=0.04)


def test_random_draws_are_the_same_on_every_machine(tmp_path: Path):
    (member,) = members(tmp_path, RANDOM.format(1, "lr: {log_uniform: [1e-4, 1e-1]}")).values()
    assert member.config == {"lr": 0.00013805}


@pytest.mark.parametrize(
    ("written", "own", "limits"),
    [
        ("", "", (1, None)),
        ("min_gpus: 2\nmax_gpus: 4\n", "", (2, 4)),
        ("gpus: 4\n", "", (4, 4)),
        ("min_gpus: 2\nmax_gpus: 4\n", ", gpus: 3", (3, 3)),
        ("gpus: 4\n", ", max_gpus: 8", (1, 8)),
        ("gpus: 4\n", ", gpus: null", (1, None)),
        ("min_gpus: 2\n", ", max_gpus: 4", (2, 4)),
    ],
)
def test_numbers_of_gpus_are_limits_or_exact(tmp_path: Path, written: str, own: str, limits):
    (member,) = read(tmp_path, f"{HEAD}{written}members:\n  - {{name: a{own}}}\n").members
    assert (member.min_gpus, member.max_gpus) == limits


def test_a_member_with_seeds_is_several_that_differ_in_their_seed_alone(tmp_path):
    ensemble = read(
        tmp_path,
        HEAD
        + """\
members:
  - {name: a, seeds: 3, batch_size: 4}
  - {name: b}
  - grid: {name: g, seeds: 2, over: {units: [1, 2]}}
""",
    )
    names = ["a", "a-seed-1", "a-seed-2", "b"]
    names += ["g-units-1", "g-units-1-seed-1", "g-units-2", "g-units-2-seed-1"]
    assert [member.name for member in ensemble.members] == names
    first, *others = ensemble.members[:3]
    assert [replace(one, name="a", seed=first.seed) for one in others] == [first, first]
    assert len({member.seed for member in ensemble.members}) == len(names)
    assert [member.seeds_of for member in ensemble.members] == [
        *["a"] * 3, "", "g-units-1", "g-units-1", "g-units-2", "g-units-2",
    ]  # fmt: skip
