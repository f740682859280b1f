"""Trials that a search asks for in a job."""

from __future__ import annotations

import pytest

from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.model.run import NOTHING_USED, RunSpec
from hetctl.model.site import Queue, Site
from hetctl.runtime.driver.trial_queue import TrialQueue
from hetctl.storage.event_files import EventQueue
from hetctl.storage.paths import RunFolder

RATE, WIDTH = "learning_rate: {log_uniform: [0.001, 0.1]}", "units: {choice: [8, 16]}"
FUSE = {"fuse": True}
ENSEMBLE = """
name: e
framework: pytorch
functions: {input_fn: nets:input_fn, model_fn: nets:model_fn}
search: {method: asha, trials: 40, epochs: 3, eta: 3, space: {SPACE}}
"""


@pytest.mark.parametrize(
    ("space", "options", "asked"),
    [(RATE, FUSE, 32), (RATE, {}, 2), (f"{RATE}, {WIDTH}", FUSE, 2)],
    ids=["one shape", "not fused", "several shapes"],
)
def test_a_search_of_one_shape_asks_for_as_many_trials_as_may_train_fused(tmp_path, space, options, asked):
    (tmp_path / "nets.py").write_text("def input_fn(data): ...\n\ndef model_fn(config): ...\n")
    (tmp_path / "e.yaml").write_text(ENSEMBLE.replace("SPACE", space))
    spec = RunSpec(
        run="r",
        ensemble=read_ensemble(tmp_path / "e.yaml"),
        site=Site(*("local", "local", "local", 1, 2, 2, 2**30, (Queue("local"),))),
        planner="fluid", gpus=2, queue="local", wall_s=3600, grace_s=60, checkpoints=str(tmp_path),
        profiles=(), options=options,
    )  # fmt: skip
    run = RunFolder(tmp_path).create()
    trials = TrialQueue(run, spec, 2, lambda _: False, EventQueue(run.events, pytest.fail), pytest.fail)
    trials.advance({}, NOTHING_USED, 0.0)
    assert sum(name in trials for name in spec.ensemble.search.members) == asked
