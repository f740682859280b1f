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


MODULES = {"pytorch": "piped_torch", "tensorflow": "piped_keras"}


def job_of(tmp_path, config, policy, in_flight, distance=0, slots=4, epochs=2, framework="pytorch",
    checkpoint=EVERY_EPOCH, layers=LAYERS, memory=2**30, **spec,
):  # fmt: skip
    module = MODULES[framework]
    for name in (module, "handwriting"):
        shutil.copy(ENSEMBLES / f"{name}.py", tmp_path)
    stop = StopRule("val_loss", patience=9, max_epochs=epochs)
    member = Member("m", config, 16, 5, stop, checkpoint=checkpoint)
    functions = Functions(f"{module}:input_fn", f"{module}:model_fn")
    ensemble = Ensemble("e", framework, functions, (member,), str(tmp_path))
    problem = PipelineProblem(
        layers=layers,
        memory_bytes={UNNAMED: memory},
        links=Links(1e9, 1.0, 1e-4, 1e-9),
        batch_size=16,
        policy=policy,
        waves=Waves(distance),
        in_flight=in_flight,
    )
    job = Job(
        tmp_path,
        {"m": config},
        slots=slots,
        rates={"m": {slots: 500.0}},
        ensemble=ensemble,
        mode=PIPELINE,
        phases=(PIPELINE,),
        pipelines={"m": encode(problem)},
        **spec,
    )
    job.python = sys.executable
    return job


def followed(job):
    run = FollowedRun(job.run, job.spec, "m")
    run.assert_within_bounds()
    return run


SGD = {"optimizer": "momentum", "learning_rate": 0.02, "decay": 0.5}
ADAM = {"optimizer": "adam", "learning_rate": 0.005}


def in_one_process(run, epochs):
    """Return the weights and slots of plain training with the whole network, as a pipeline names them."""
    whole = run.network()
    for epoch in range(1, epochs + 1):
        whole.train(run.all_batches(epoch))
    return by_layer(whole)


@pytest.mark.parametrize("config", [SGD, ADAM], ids=["momentum", "adam"])
def test_one_minibatch_in_flight_equals_one_process(tmp_path, config):
    job = job_of(tmp_path, config, "np", 1)
    job.drive()
    assert job.reason == "finished"
    arrays, state = newest(checkpoint_folder(job.spec, "m"))
    assert len(state.epochs) == 2
    run = followed(job)
    assert [len(stages) for stages in run.layouts[0].workers] == [4]
    assert differences(in_one_process(run, 2), arrays, 0.0) == []
    assert state.epochs[-1].metrics["loss"] < state.epochs[0].metrics["loss"]


def test_learning_rates_go_on_in_other_stages(tmp_path):
    config = {**SGD, "pause_s": 0.02}
    job = job_of(tmp_path, config, "np", 1, epochs=3)
    process = job.start()
    wait_for(lambda: job.events("epoch", "m"), 60)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    _, state = newest(checkpoint_folder(job.spec, "m"))
    assert len(state.epochs) in (1, 2)
    later = job_of(tmp_path, config, "np", 1, slots=2, epochs=3)
    later.drive(number=1)
    arrays, _ = newest(checkpoint_folder(later.spec, "m"))
    run = followed(later)
    assert [len(layout.workers[0]) for layout in run.layouts.values()] == [4, 2]
    assert differences(in_one_process(run, 3), arrays, 0.0) == []


@pytest.mark.parametrize(("policy", "in_flight", "distance"), [("np", 4, 0), ("ed", 2, 1)])
def test_waves_give_the_weights_that_their_log_says(tmp_path, policy, in_flight, distance):
    job = job_of(tmp_path, SGD, policy, in_flight, distance)
    job.drive()
    arrays, _ = newest(checkpoint_folder(job.spec, "m"))
    run = followed(job)
    assert len(run.layouts[0].workers) == {"np": 1, "ed": 4}[policy]
    assert differences(run.follow(), arrays, 1e-12) == []
    (report, *_) = job.events("stages", "m")
    assert len(report.data["stages"]) == 4


@pytest.mark.parametrize("framework", MODULES)
def test_stages_without_memory_for_all_passes_recompute_them(tmp_path, framework):
    # Of three minibatches the first stage has room for the inputs, and of one for what its layers keep.
    kept = LayerProfile(tuple(replace(layer, held_bytes=20_000) for layer in LAYERS.layers))
    job = job_of(tmp_path, SGD, "np", 3, slots=2, framework=framework, layers=kept, memory=120_000)
    job.drive()
    assert job.reason == "finished"
    (layout,) = layouts_of(events_in(job.run), "m").values()
    assert [[plan.recomputes for plan in stages] for stages in layout.workers] == [[True, False]]
    arrays, _ = newest(checkpoint_folder(job.spec, "m"))
    # TensorFlow takes its number of threads once in a process.
    process = fork(follow_to, job.spec, job.run.path, "m", tmp_path / "followed.npz")
    process.join(120)
    assert process.exitcode == 0
    with np.load(tmp_path / "followed.npz") as followed_arrays:
        assert differences(dict(followed_arrays), arrays, 1e-9) == []


def test_keras_waves_give_the_weights_that_their_log_says(tmp_path):
    job = job_of(tmp_path, SGD, "np", 3, slots=2, framework="tensorflow")
    job.drive()
    assert job.reason == "finished"
    arrays, state = newest(checkpoint_folder(job.spec, "m"))
    assert state.epochs[-1].metrics["val_accuracy"] > 0.1
    (layout,) = layouts_of(events_in(job.run), "m").values()
    assert [len(stages) for stages in layout.workers] == [2]
    # TensorFlow takes its number of threads once in a process.
    process = fork(follow_to, job.spec, job.run.path, "m", tmp_path / "followed.npz")
    process.join(120)
    assert process.exitcode == 0
    with np.load(tmp_path / "followed.npz") as followed_arrays:
        # Terms may be rewritten across the layers of a stage, so that the last bits depend on the cuts.
        assert differences(dict(followed_arrays), arrays, 1e-9) == []


@pytest.mark.parametrize(
    ("of", "checkpoint"), [("first", EVERY_EPOCH), ("last", CheckpointInterval(4, STEPS))]
)
def test_a_killed_stage_costs_the_waves_since_a_checkpoint(tmp_path, of, checkpoint):
    job = job_of(tmp_path, {**SGD, "pause_s": 0.15}, "np", 2, checkpoint=checkpoint)
    process = job.start()
    wait_for(lambda: any(e.data["part_samples"] for e in job.events("checkpoint", "m")), 60)
    ranks = ranks_of(job.run.path)
    os.kill(ranks[0] if of == "first" else ranks[-1], signal.SIGKILL)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert job.task_gpus("m") == [4, 4]
    _, second = job.events("started", "m")
    assert second.data["part_samples"] > 0
    arrays, state = newest(checkpoint_folder(job.spec, "m"))
    assert [epoch.epoch for epoch in state.epochs] == [1, 2]
    assert differences(followed(job).follow(), arrays, 1e-12) == []


def test_the_next_job_goes_on_with_other_stages(tmp_path):
    job = job_of(tmp_path, {**SGD, "pause_s": 0.1}, "np", 2)
    process = job.start()
    wait_for(lambda: any(e.data["part_samples"] for e in job.events("checkpoint", "m")), 60)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert job.reason == "signal"
    _, state = newest(checkpoint_folder(job.spec, "m"))
    assert 0 < state.part_samples < 640
    later = job_of(tmp_path, {**SGD, "pause_s": 0.1}, "ed", 2, distance=1, slots=2)
    later.drive(number=1)
    assert later.reason == "finished"
    arrays, state = newest(checkpoint_folder(later.spec, "m"))
    assert [epoch.epoch for epoch in state.epochs] == [1, 2]
    run = followed(later)
    assert [len(layout.workers) for layout in run.layouts.values()] == [1, 2]
    assert differences(run.follow(), arrays, 1e-12) == []
    assert np.isfinite(state.epochs[-1].metrics["val_loss"])
