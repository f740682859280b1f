"""Profile points, measured by real training on one rank."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial

import pytest
from ranks import result_of
from tiny_networks import ENSEMBLES, MODULES, functions_of

from hetctl.model.ensemble import Ensemble, Member, StopRule
from hetctl.model.profile import ProfilePoint
from hetctl.model.serialization import decode
from hetctl.model.site import Queue, Site
from hetctl.perf.step_times import LEAST_TIMED_S
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.data.batches import Batches
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import Stream
from hetctl.runtime.data.sources import ArraySource
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.group import Group, RankInfo
from hetctl.runtime.worker.measuring.measure import FullBatches, measure
from hetctl.runtime.worker.messages import MEASURE, Assignment, TaskMessage
from hetctl.runtime.worker.step_clock import EpochClock, SteadyClock
from hetctl.storage.atomic_io import make_private_folder
from hetctl.storage.event_files import read_folder
from hetctl.storage.profile_request import Measurements, ProfileTarget, write_measurements

SITE = Site("here", "local", "local", 1, 1, 1, 2**30, (Queue("local"),), device="slot", gpu_type="test")
PAUSE_S = 0.1


def measured(folder, framework, pause_s, **launch):
    """Measure a network with a pause after each step, in batches that do not divide its 640 samples."""
    member = Member("m", {"pause_s": pause_s}, 96, 5, StopRule(metric="val_accuracy", mode="max"))
    functions = functions_of(framework, "fit_train_fn")
    ensemble = Ensemble("tiny", framework, functions, (member,), str(ENSEMBLES))
    point = ProfileTarget("m", 1)
    make_private_folder(folder)
    for name in ("events", "logs"):
        make_private_folder(folder / name)
    write_measurements(folder, Measurements(ensemble, SITE, (point,), ()))
    with ExitStack() as keep:
        task = TaskMessage(MEASURE, str(folder), point.source)
        measure(
            Assignment(task, RankInfo(0, 1), **{"launched_at": time.time(), **launch}),
            WorkerContext(Binding("localhost", 0, None, (0,)), keep),
        )
    (event,) = (event for event in read_folder(folder / "events") if event.kind == "point")
    return decode(ProfilePoint, dict(event.data))


@pytest.mark.training
@pytest.mark.parametrize("framework", MODULES)
def test_a_point_has_the_rate_of_full_batches_and_the_overheads(tmp_path, framework):
    # In a separate process: TensorFlow accepts no number of threads after its first operation.
    point = result_of(measured, tmp_path / "profile", framework, PAUSE_S)
    assert 0 < point.rate < 96 / PAUSE_S
    assert point.steps * PAUSE_S >= 0.2 * LEAST_TIMED_S
    assert point.rate_error is not None
    assert point.step_spread is not None
    # The last batch of an epoch has 64 samples and pauses as long as a full one, which adds a third.
    assert point.epoch_s > 0
    assert point.save_s is not None
    assert point.checkpoint_s > 0
    assert point.startup_s > 0
    assert list((tmp_path / "profile").glob("scratch/*/*")) == []


@pytest.mark.training
def test_the_start_of_a_step_of_its_own_counts_as_start_up(tmp_path):
    launch = {"launched_at": time.time() - 1000.0, "own_step": True}
    point = result_of(partial(measured, **launch), tmp_path / "profile", "pytorch", PAUSE_S)
    assert point.startup_s > 1000.0


def feed_of(samples, chunk):
    values = ArraySource(range_of(samples), range_of(samples), "training")
    return ArrayLoader(values, Stream(samples, chunk, 3))


def range_of(samples):
    import numpy as np

    return np.arange(samples)


@pytest.mark.parametrize(("samples", "sizes"), [(100, {32}), (64, {32}), (20, {20})])
def test_only_full_batches_are_timed_epoch_after_epoch(samples, sizes):
    steps = []
    batches = Batches(
        FullBatches(feed_of(samples, 32), 32), 1, 0, Group(), lambda: len(steps) == 9, steps.append
    )
    assert {len(x) for x, _ in batches} == sizes
    assert len(steps) == 9


def test_clock_of_steps_is_done_when_their_rate_is_known():
    now = [0.0]
    clock = SteadyClock(lambda: now[0])
    for seconds in (9.0, *[0.25] * 50):
        if clock.done:
            break
        now[0] += seconds
        clock.note(None)
    assert clock.first_step_s == 9.0
    assert clock.steps == 6
    assert clock.result().mean_s == 0.25


def test_the_rate_of_an_epoch_excludes_first_and_partial_batches():
    now = [0.0]
    clock = EpochClock(samples=350, chunk=100, clock=lambda: now[0])
    for seconds, position in ((5.0, 100), (1.0, 200), (1.0, 300), (7.0, 350)):
        now[0] += seconds
        clock.note(position, None)
    assert clock.rate == 100.0


@pytest.mark.parametrize("positions", [[], [100], [100, 150]])
def test_the_rate_is_unknown_without_a_second_full_batch(positions):
    clock = EpochClock(samples=150, chunk=100)
    for position in positions:
        clock.note(position, None)
    assert clock.rate is None
