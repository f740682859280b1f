"""Whatever a file holds, reading it gives a value or a BadInputError."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzzing import fuzzed, mutations
from hypothesis import given
from hypothesis import strategies as st

from hetctl.inputs.csv_table import read_rates, read_workers
from hetctl.inputs.ensemble_file import read_ensemble, read_partition_table
from hetctl.inputs.layer_profile import read_cluster, read_layers
from hetctl.inputs.site_file import find_site
from hetctl.inputs.visit_times import read_unit_times
from hetctl.model.errors import BadInputError

ENSEMBLE = b"""\
name: digits
functions: {input_fn: digits:input_fn, model_fn: digits:model_fn}
stop: {metric: val_accuracy, patience: 5, target: null}
members:
  - name: mlp
    config: {hidden: [64]}
    stop: {max_epochs: 3}
  - grid: {name: cnn, config: {kind: cnn}, over: {filters: [16, 32]}, batch_size: 64}
  - random:
      name: rand
      count: 5
      over: {lr: {log_uniform: [1.0e-4, 1.0e-1]}, units: {integer: [16, 256]}, act: {choice: [a, b]}}
"""
SITE = b"""\
extends: slurm
nodes: 4
memory_per_node: 512GB
queues:
  - {name: main, max_nodes: 4, max_wall: 2:00:00}
setup: [module load x]
environment: {A: "1"}
"""
RATES = b"member,gpus,rate,gpu_type,samples\na,1,10.5,V100,100\na,2,20,V100,100\nb,1,3e2,,\n"
TIMES = b"forward_compute_time=1.5, backward_compute_time=3.0"
GRAPH = b"""\
node1 -- Input0 -- %s, activation_size=0.0, parameter_size=0.000
node2 -- Linear(4, 4) -- %s, activation_size=[4; 8.0], parameter_size=64.0
node3 -- ReLU(inplace) -- %s, activation_size=16.0, parameter_size=0.000
\tnode1 -- node2
\tnode2 -- node3
""" % (TIMES, TIMES, TIMES)
LAYERS = b"""\
layer,gpu_type,forward_s,backward_s,activation_bytes,parameter_bytes
conv,V100,0.5,1.0,1000,2000
fc,V100,0.25,0.5,10,4000
"""
CLUSTER = b"""\
gpu_types: {big: {memory: 24GB}, small: {memory: 8GB, time_ratio: 2.5, context_bytes: 500MB}}
nodes: [{big: 2}, {small: 4}]
links:
  intra_node: {bytes_per_s: 10.0e+9, scaling: 0.7}
  inter_node: {points: [[1000, 0.1], [2000, 0.2]]}
"""
WORKERS = b"worker,batch,seconds,max_batch\na,8,0.5,64\na,16,0.9,64\nb,8,1e-1,\n"
PARTITIONS = b"partition,path,nodes\n0,/data/p0,n1;n2\n1,/data/p1,n3\n"
UNITS = b"config,partition,worker,seconds\na,0,w1,10\na,1,w2,5\n"
READERS: dict[str, tuple[Callable[[Path], Any], bytes]] = {
    "ensemble": (read_ensemble, ENSEMBLE),
    "site": (lambda path: find_site(str(path), project=None, home=None), SITE),
    "rates": (read_rates, RATES),
    "graph": (read_layers, GRAPH),
    "layers": (read_layers, LAYERS),
    "cluster": (read_cluster, CLUSTER),
    "workers": (read_workers, WORKERS),
    "partitions": (read_partition_table, PARTITIONS),
    "units": (read_unit_times, UNITS),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "digits.py").write_text("def input_fn(data): ...\ndef model_fn(config): ...\n")
    return tmp_path


@pytest.mark.parametrize("kind", READERS)
def test_the_originals_are_read(folder: Path, kind: str):
    reader, original = READERS[kind]
    (folder / "f.yaml").write_bytes(original)
    assert reader(folder / "f.yaml")


@pytest.mark.parametrize("kind", READERS)
@fuzzed(80)
@given(data=st.data())
def test_mutations_are_read_or_refused(folder: Path, kind: str, data: st.DataObject):
    reader, original = READERS[kind]
    path = folder / "f.yaml"
    path.write_bytes(data.draw(mutations(original)))
    with contextlib.suppress(BadInputError):
        assert reader(path)
