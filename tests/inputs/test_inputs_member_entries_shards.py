"""What does not go with members in parts, in ensemble files."""

from __future__ import annotations

import pytest

from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.model.errors import BadInputError

ENSEMBLE = """\
name: e
framework: pytorch
functions: {input_fn: nets:input_fn, model_fn: nets:model_fn}
samples_per_epoch: 100
balance: auto
shard: true
members:
  - {name: a}
  - {name: b, shard: false}
"""


def read(folder, text=ENSEMBLE):
    (folder / "nets.py").write_text("input_fn = model_fn = None\n")
    (folder / "e.yaml").write_text(text)
    return read_ensemble(folder / "e.yaml")


def test_members_inherit_it_or_not(tmp_path):
    assert [member.shard for member in read(tmp_path).members] == [True, False]


@pytest.mark.parametrize(
    ("before", "after", "line", "rule"),
    [
        ("pytorch", "tensorflow", "6: shard", "a framework that cannot divide networks"),
        ("balance: auto", "partitions: 2", "6: shard", "partitions: they have unequal"),
        ("balance: auto", "balance: on", "6: shard", "balance: on: GPUs wait for one another"),
        ("{name: a}", "{name: a, layers: l.csv}", "6: shard", "layers: pipelines are cut"),
        ("shard: false", "shard: true, layers: l.csv", "9: members[1].shard", "layers: pipelines are cut"),
    ],
)
def test_the_rest_is_refused_by_line(tmp_path, before, after, line, rule):
    with pytest.raises(BadInputError) as caught:
        read(tmp_path, ENSEMBLE.replace(before, after))
    assert f"e.yaml:{line}: does not go with " in caught.value.message
    assert rule in caught.value.message
