"""Pipelines in real jobs on this machine: from the first layout to the last checkpoint."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from dataclasses import replace

import numpy as np
import pytest
from driven_job import Job
from piped_run import FollowedRun, by_layer, differences, follow_to, layouts_of, newest
from ranks import fork
from tiny_networks import ENSEMBLES
from workbench import ranks_of, wait_for

from hetctl.methods.pipeline.layouts import PipelineProblem
from hetctl.methods.pipeline.stage_costs import UNNAMED, Layer, LayerProfile, Links
from hetctl.methods.pipeline.transfers import Waves
from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.plan import PIPELINE
from hetctl.model.serialization import encode
from hetctl.model.training_settings import EVERY_EPOCH, STEPS, CheckpointInterval
from hetctl.storage.progress_fold import events_in
from hetctl.storage.run_files import checkpoint_folder

pytestmark = pytest.mark.training
SECONDS = {"pause": 2.0, "first": 2.0, "tanh": 0.1, "second": 2.0, "tanh2": 0.1, "last": 2.0}
LAYERS = LayerProfile(
    tuple(Layer(name, {UNNAMED: s}, {UNNAMED: s}, 1000, 1000) for name, s in SECONDS.items())
)


# Of three minibatches the first of two stages has room for the inputs, and of one for what its layers keep.
KEPT = LayerProfile(tuple(replace(layer, held_bytes=20_000) for layer in LAYERS.layers))
MODULES = {"pytorch": "piped_torch", "tensorflow": "piped_keras"}
SGD = {"optimizer": "momentum", "learning_rate": 0.02, "decay": 0.5}
ADAM = {"optimizer": "adam", "learning_rate": 0.005}


def problem(policy, in_flight, distance=0, layers=LAYERS, memory=2**30):
    return PipelineProblem(
        layers=layers,
        memory_bytes={UNNAMED: memory},
        links=Links(1e9, 1.0, 1e-4, 1e-9),
        batch_size=16,
        policy=policy,
        waves=Waves(distance),
        in_flight=in_flight,
    )


def job_of(tmp_path, members, slots=4, epochs=2, framework="pytorch", checkpoint=(), **spec):
    """Return a job of members, each by its config and its pipeline; `checkpoint` has other intervals."""
    module = MODULES[framework]
    for name in (module, "handwriting"):
        shutil.copy(ENSEMBLES / f"{name}.py", tmp_path)
    stop = StopRule("val_loss", patience=9, max_epochs=epochs)
    trained = [
        Member(name, config, 16, 5, stop, checkpoint=dict(checkpoint).get(name, EVERY_EPOCH))
        for name, (config, _) in members.items()
    ]
    functions = Functions(f"{module}:input_fn", f"{module}:model_fn")
    ensemble = Ensemble("e", framework, functions, tuple(trained), str(tmp_path))
    job = Job(
        tmp_path,
        {name: {} for name in members},
        slots=slots,
        rates={name: {slots: 500.0} for name in members},
        ensemble=ensemble,
        mode=PIPELINE,
        phases=(PIPELINE,),
        pipelines={name: encode(pipeline) for name, (_, pipeline) in members.items()},
        **spec,
    )
    job.python = sys.executable
    return job


def followed(job, name="m"):
    run = FollowedRun(job.run, job.spec, name)
    run.assert_within_bounds()
    return run


def in_one_process(run, epochs):
    """Return the weights and slots of plain training with the whole network, as a pipeline names them."""
    whole = run.network()
    for epoch in range(1, epochs + 1):
        whole.train(run.all_batches(epoch))
    return by_layer(whole)


TRAINED = {
    "momentum": (SGD, problem("np", 1)),
    "adam": (ADAM, problem("np", 1)),
    "np": (SGD, problem("np", 4)),
    "ed": (SGD, problem("ed", 2, distance=1)),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A job that has trained members on four slots, one after another."""
    job = job_of(tmp_path_factory.mktemp("job"), TRAINED)
    job.drive()
    assert job.reason == "finished"
    return job


@pytest.mark.parametrize("name", ["momentum", "adam"])
def test_one_minibatch_in_flight_equals_one_process(trained, name):
    arrays, state = newest(checkpoint_folder(trained.spec, name))
    assert len(state.epochs) == 2
    run = followed(trained, name)
    (layout,) = run.layouts.values()
    assert [len(stages) for stages in layout.workers] == [4]
    assert differences(in_one_process(run, 2), arrays, 0.0) == []
    assert state.epochs[-1].metrics["loss"] < state.epochs[0].metrics["loss"]


@pytest.mark.parametrize(("name", "workers"), [("np", 1), ("ed", 4)])
def test_waves_give_the_weights_that_their_log_says(trained, name, workers):
    arrays, _ = newest(checkpoint_folder(trained.spec, name))
    run = followed(trained, name)
    (layout,) = run.layouts.values()
    assert len(layout.workers) == workers
    assert differences(run.follow(), arrays, 1e-12) == []
    (report, *_) = trained.events("stages", name)
    assert len(report.data["stages"]) == 4


def test_learning_rates_go_on_in_other_stages(tmp_path):
    config = {**SGD, "pause_s": 0.02}
    job = job_of(tmp_path, {"m": (config, problem("np", 1))}, epochs=3)
    process = job.start()
    wait_for(lambda: job.events("epoch", "m"), 60)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    _, state = newest(checkpoint_folder(job.spec, "m"))
    assert len(state.epochs) in (1, 2)
    later = job_of(tmp_path, {"m": (config, problem("np", 1))}, slots=2, epochs=3)
    later.drive(number=1)
    arrays, _ = newest(checkpoint_folder(later.spec, "m"))
    run = followed(later)
    assert [len(layout.workers[0]) for layout in run.layouts.values()] == [4, 2]
    assert differences(in_one_process(run, 3), arrays, 0.0) == []


@pytest.mark.parametrize("framework", MODULES)
def test_stages_recompute_passes_that_do_not_fit_and_their_log_says_the_weights(tmp_path, framework):
    members = {
        "tight": (SGD, problem("np", 3, layers=KEPT, memory=120_000)),
        "roomy": (SGD, problem("np", 3)),
    }
    job = job_of(tmp_path, members, slots=2, framework=framework)
    job.drive()
    assert job.reason == "finished"
    # TensorFlow takes its number of threads once in a process.
    process = fork(follow_to, job.spec, job.run.path, members, tmp_path)
    process.join(120)
    assert process.exitcode == 0
    for name in members:
        (layout,) = layouts_of(events_in(job.run), name).values()
        assert [[plan.recomputes for plan in stages] for stages in layout.workers] == [
            [name == "tight", False]
        ]
        arrays, state = newest(checkpoint_folder(job.spec, name))
        assert state.epochs[-1].metrics["loss"] < state.epochs[0].metrics["loss"]
        with np.load(tmp_path / f"{name}.npz") as followed_arrays:
            # Terms may be rewritten across the layers of a stage, so that the last bits depend on the cuts.
            assert differences(dict(followed_arrays), arrays, 1e-9) == []


def trained_in_part(job, member):
    return any(event.data["part_samples"] for event in job.events("checkpoint", member))


def test_a_killed_stage_costs_the_waves_since_a_checkpoint(tmp_path):
    """The first stage of the one member is killed, and the last of the other."""
    config = {**SGD, "pause_s": 0.15}
    members = {name: (config, problem("np", 2)) for name in ("first", "last")}
    job = job_of(tmp_path, members, checkpoint={"last": CheckpointInterval(4, STEPS)})
    process = job.start()
    waiting = {"first": 0, "last": -1}
    while waiting:
        name = wait_for(lambda: next((name for name in waiting if trained_in_part(job, name)), None), 90)
        os.kill(ranks_of(job.run.path)[waiting.pop(name)], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    for name in members:
        assert job.task_gpus(name) == [4, 4]
        _, second = job.events("started", name)
        assert second.data["part_samples"] > 0
        arrays, state = newest(checkpoint_folder(job.spec, name))
        assert [epoch.epoch for epoch in state.epochs] == [1, 2]
        assert differences(followed(job, name).follow(), arrays, 1e-12) == []


def test_the_next_job_goes_on_with_other_stages(tmp_path):
    config = {**SGD, "pause_s": 0.1}
    job = job_of(tmp_path, {"m": (config, problem("np", 2))})
    process = job.start()
    wait_for(lambda: trained_in_part(job, "m"), 60)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert job.reason == "signal"
    _, state = newest(checkpoint_folder(job.spec, "m"))
    assert 0 < state.part_samples < 640
    later = job_of(tmp_path, {"m": (config, problem("ed", 2, distance=1))}, slots=2)
    later.drive(number=1)
    assert later.reason == "finished"
    arrays, state = newest(checkpoint_folder(later.spec, "m"))
    assert [epoch.epoch for epoch in state.epochs] == [1, 2]
    run = followed(later)
    assert [len(layout.workers) for layout in run.layouts.values()] == [1, 2]
    assert differences(run.follow(), arrays, 1e-12) == []
    assert np.isfinite(state.epochs[-1].metrics["val_loss"])
