"""Whatever a file holds, reading it gives a value or a BadInputError."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.inputs.rate_table import read_rates
from hetctl.inputs.site_file import read_site
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
READERS: dict[str, tuple[Callable[[Path], Any], bytes]] = {
    "ensemble": (read_ensemble, ENSEMBLE),
    "site": (read_site, SITE),
    "rates": (read_rates, RATES),
}
SCRAPS = st.sampled_from(
    b"{ } [ ] : - , # & * ! | > ' \" % @ ? ~ \n \t \0 \\ .nan 1e999 -1 0 &a *a !!set !!binary <<: \xff "
    b'\xc3\xa9 null true grid random extends name: ..:.. 99999999999999999999 "\\ud800"'.split(b" ")
)


@st.composite
def mutations(draw: st.DrawFn, original: bytes) -> bytes:
    data = original
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 12)))
        data = data[:start] + draw(SCRAPS | st.binary(max_size=3)) + data[end:]
    return data


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
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_mutations_are_read_or_refused(folder: Path, kind: str, data: st.DataObject):
    reader, original = READERS[kind]
    path = folder / "f.yaml"
    path.write_bytes(data.draw(mutations(original)))
    with contextlib.suppress(BadInputError):
        assert reader(path)
