"""Trials that a search asks for in a job."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.inputs.ensemble_file import read_ensemble
from hetctl.model.events import DRIVER
from hetctl.model.profile import MemberProfile
from hetctl.model.run import NOTHING_USED, RunSpec
from hetctl.model.site import Queue, Site
from hetctl.model.training_progress import Progress
from hetctl.runtime.driver.trial_queue import TrialQueue
from hetctl.storage.event_files import EventQueue, EventWriter, read_events
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_state import RunState

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
    run, spec = run_of(tmp_path, space, options)
    trials = TrialQueue(run, spec, 2, lambda _: False, EventQueue(run.events, pytest.fail), pytest.fail)
    trials.advance({}, NOTHING_USED, 0.0)
    assert sum(name in trials for name in spec.ensemble.search.members) == asked


@pytest.mark.parametrize("is_known", [True, False], ids=["from earlier runs", "as a trial tells it"])
def test_a_search_asks_for_no_more_trials_than_gpus_once_its_shape_is_known_not_to_gain(tmp_path, is_known):
    run, spec = run_of(tmp_path, RATE, FUSE)
    first, second, *_ = names = spec.ensemble.search.members
    told = (("", 1, 100.0), ("", 4, 101.0))
    if is_known:
        spec = replace(spec, profiles=(MemberProfile(first, {}, fused_rates=told),))
    trials = TrialQueue(run, spec, 2, lambda _: False, EventQueue(run.events, pytest.fail), pytest.fail)
    trials.advance({}, NOTHING_USED, 0.0)
    asked = 2 if is_known else 32
    assert sum(name in trials for name in names) == asked
    progress = {name: Progress(name) for name in names}
    failed = Progress(second, failed="it diverged", fused_rates=told)
    trials.advance({**progress, second: failed}, NOTHING_USED, 0.0)
    # Another one follows only if no others wait.
    assert sum(name in trials for name in names) == asked + is_known


def run_of(folder, space, options=None):
    (folder / "nets.py").write_text("def input_fn(data): ...\n\ndef model_fn(config): ...\n")
    (folder / "e.yaml").write_text(ENSEMBLE.replace("SPACE", space))
    spec = RunSpec(
        run="r",
        ensemble=read_ensemble(folder / "e.yaml"),
        site=Site(*("local", "local", "local", 1, 2, 2, 2**30, (Queue("local"),))),
        planner="fluid", gpus=2, queue="local", wall_s=3600, grace_s=60, checkpoints=str(folder),
        profiles=(), options=options or {},
    )  # fmt: skip
    return RunFolder(folder).create(), spec


@pytest.mark.parametrize("keeps", [False, True], ids=["from events", "from a snapshot"])
def test_a_trial_behind_the_median_is_reported_within_its_epoch(tmp_path, keeps):
    run, spec = run_of(tmp_path, f"{RATE}}}, parallel: 3, prune: {{metric: val_accuracy, trials: 2")
    queue = EventQueue(run.events, pytest.fail)
    trials = TrialQueue(run, spec, 3, lambda _: True, queue, pytest.fail)
    trials.advance({}, NOTHING_USED, 0.0)
    names = spec.ensemble.search.members[:3]
    for name, accuracy in zip(names, (0.5, 0.7, 0.9), strict=True):
        writer = EventWriter(run.events, name, 0)
        writer.write(
            "part", epoch=1, samples=64, metrics={"val_accuracy": accuracy, "val_loss": 1 - accuracy}
        )
    state = RunState(run, spec.ensemble, 0)
    state.refresh()
    if keeps:
        state.keep()
        state = RunState(run, spec.ensemble, 0)
        state.refresh()
    assert trials.advance(state.progress, NOTHING_USED, 0.0, state.facts.parts)
    told = [event for event in read_events(run.events_of(DRIVER)) if event.kind == "trial_report"]
    assert [(event.record.member, event.record.loss) for event in told] == [(names[0], 0.5)]
    # It is asked for no more, so that it leaves.
    state.refresh()
    assert [name for name in names if not state.progress[name].is_awaited] == [names[0]]
