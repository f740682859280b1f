"""Members in training as planners see them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.events import DRIVER, Event, ExitReason
from hetctl.model.plan import Allocation, Placement
from hetctl.model.profile import MemberProfile, PreprocessPoint
from hetctl.model.run import RunSpec
from hetctl.model.serialization import encode
from hetctl.model.site import Queue, Site
from hetctl.model.training_progress import EpochResult
from hetctl.model.workload import Workload
from hetctl.perf.preprocessing import seen_points
from hetctl.runtime.driver.run_members import RunMembers, as_of_now
from hetctl.storage.event_files import EventWriter
from hetctl.storage.paths import RunFolder
from hetctl.storage.run_files import write_spec
from hetctl.storage.task_fold import report_of

CANDIDATE = Workload("m", {1: 10.0}, samples_left=340.0, samples_per_epoch=100, startup_s=5.0)


def event(kind, time, **data):
    return Event("m", 0, kind, time, data)


def left(*events, now, part=60, workload=CANDIDATE):
    return as_of_now(workload, part, 10.0, report_of(events).epoch_since, now).samples_left


def test_before_its_first_step_a_member_has_trained_nothing():
    assert left(event("epoch", 1.0), event("started", 2.0), now=9.0) == 340


def test_samples_count_from_the_first_step_on():
    assert left(event("started", 1.0), event("first_step", 2.0), now=4.0) == 320


def test_other_fields_of_a_member_do_not_change():
    assert CANDIDATE.with_left(3.0) == replace(CANDIDATE, samples_left=3.0)
    assert CANDIDATE.samples_left == 340


def test_no_more_is_counted_than_the_epoch_holds():
    assert left(event("first_step", 0.0), now=99.0) == 300


def test_an_epoch_begins_when_the_one_before_is_reported():
    done = encode(EpochResult(1, {}, 10.0, 1, 10.0))
    events = event("first_step", 0.0), event("epoch", 10.0, **done, evaluate_s=0.1)
    assert left(*events, now=12.0, part=0) == 320


def test_without_known_epochs_nothing_is_guessed():
    unknown = Workload("m", {1: 10.0}, samples_left=340.0)
    assert left(event("first_step", 0.0), now=9.0, workload=unknown) == 340


def test_epochs_count_when_announced_or_at_the_end_of_the_step(tmp_path):
    members, written = members_in(tmp_path, "a", "b")
    driver = EventWriter(tmp_path / "events", DRIVER, 0)
    trainers = {
        "a": EventWriter(tmp_path / "events", "a", 0, lambda length: written.update(a=length)),
        "b": EventWriter(tmp_path / "events", "b", 0),
    }
    for name, trainer in trainers.items():
        driver.write("task_started", member=name, gpus=1, placement=[])
        trainer.write("epoch", **encode(EpochResult(1, {"loss": 1.0}, 1.0, 1, 1.0)), evaluate_s=0.1)
    assert samples_left(members) == {"a": 200, "b": 200}
    for trainer in trainers.values():
        trainer.write("epoch", **encode(EpochResult(2, {"loss": 1.0}, 1.0, 1, 1.0)), evaluate_s=0.1)
    assert samples_left(members) == {"a": 100, "b": 200}
    driver.write("task_ended", member="b", exit_code=0, reason="told", description="told")
    assert samples_left(members) == {"a": 100, "b": 100}


@pytest.mark.parametrize(("sharing", "rate"), [("cached", 7.0), ("lockstep", 10.0)])
def test_the_pace_of_others_is_not_a_members_rate(tmp_path, sharing, rate):
    members, _ = members_in(tmp_path, "a", sharing=sharing)
    driver, trainer = (EventWriter(tmp_path / "events", source, 0) for source in (DRIVER, "a"))
    driver.write("task_started", member="a", gpus=1, placement=[])
    epoch = EpochResult(1, {"loss": 1.0}, 1.0, 1, 1.0, rate=7.0, batch_size=32)
    trainer.write("epoch", **encode(epoch), evaluate_s=0.1)
    driver.write("task_ended", member="a", exit_code=0, reason="told", description="told")
    assert samples_left(members) == {"a": 200}
    assert members.workloads()["a"].rates[1] == rate


@pytest.mark.parametrize(
    ("reason", "mps"),
    [
        (ExitReason.OUT_OF_MEMORY, False),
        (ExitReason.GPU_BUSY, False),
        # With MPS it may be the fault of another process on the GPU.
        *((reason, True) for reason in (ExitReason.PROGRAM_ERROR, ExitReason.KILLED, ExitReason.HUNG)),
    ],
)
def test_rates_on_a_shared_gpu_are_not_the_members_own_and_one_without_room_there_gets_a_whole_one(
    tmp_path, reason, mps
):
    members, _ = members_in(tmp_path, "a", options={"max_per_gpu": 4}, busy=0.3, mps=mps)
    assert (members.workloads()["a"].busy, members.workloads()["a"].memory) == (0.3, 0.25)
    driver, trainer = (EventWriter(tmp_path / "events", source, 0) for source in (DRIVER, "a"))
    placement = (Placement("n", (0,), 2),)
    driver.write("task_started", member="a", gpus=1, placement=encode(placement))
    epoch = EpochResult(1, {"loss": 1.0}, 1.0, 0, 1.0, rate=7.0, batch_size=32)
    trainer.write("epoch", **encode(epoch), evaluate_s=0.1)
    allocation = Allocation("a", 1, "data-parallel", 10.0, placement)
    unfit_gpus = members.unfit_gpus(allocation, "", reason)
    ended = {"exit_code": 5, "reason": reason.value, "description": "no room"}
    driver.write("task_ended", member="a", **ended, unfit_gpus=unfit_gpus, gpu_seconds=0.4)
    (workload,) = members.workloads().values()
    assert (workload.rates[1], workload.busy, workload.samples_left) == (10.0, 1.0, 200)
    # Others of its shape may have begun beside it, too.
    again = (replace(allocation, alone=alone) for alone in (False, True))
    assert [unfit_gpus, *(members.unfit_gpus(one, "", reason) for one in again)] == [0, 0, None]
    own = [members.unfit_gpus(allocation, "", ExitReason.BAD_INPUT)]
    # Without MPS the other processes on a GPU train on.
    own += [] if mps else [members.unfit_gpus(allocation, "", ExitReason.PROGRAM_ERROR)]
    assert not any(gpus is not None for gpus in own)


def test_no_member_shares_a_gpu_any_more_where_it_takes_one_process(tmp_path):
    members, _ = members_in(tmp_path, "a", "b", options={"max_per_gpu": 4}, busy=0.3)
    assert [one.busy for one in members.workloads().values()] == [0.3, 0.3]
    members.keep_apart()
    assert [(one.busy, one.memory) for one in members.workloads().values()] == [(1.0, 1.0)] * 2


@pytest.mark.parametrize("known", [(), (PreprocessPoint(1, 50.0), PreprocessPoint(2, 90.0))])
def test_the_throughput_of_preprocessors_is_learned_unless_it_was_measured(tmp_path, known):
    members, written = members_in(tmp_path, "a", "b", preprocess=known)
    assert members.preprocess == known
    trainer = EventWriter(tmp_path / "events", "a", 0, lambda length: written.update(a=length))
    trainer.write("preprocess", cores=1, rate=40.0)
    members.workloads()
    assert members.preprocess == (known or seen_points([40.0]))


def members_in(folder, *names, sharing="none", options=None, busy=None, preprocess=(), mps=False):
    """Return a run's members of three epochs of 100 samples, and the announced lengths of files."""
    rule = StopRule("loss", max_epochs=3)
    spec = RunSpec(
        run="r",
        ensemble=Ensemble(
            *("e", "pytorch", Functions("m:i", "m:m")),
            tuple(Member(name, stop=rule) for name in names),
            "/x",
        ),
        site=Site(*("local", "local", "local", 1, 2, 2, 2**30, (Queue("local"),)), mps=mps),
        planner="fluid", gpus=2, queue="local", wall_s=3600, grace_s=60, checkpoints=str(folder),
        sharing=sharing, options=options or {}, preprocess=preprocess,
        profiles=tuple(MemberProfile(name, {1: 10.0}, None, 100, busy=busy) for name in names),
    )  # fmt: skip
    run = RunFolder(folder).create()
    write_spec(run, spec)
    written: dict[str, int] = {}

    def take_written():
        told = dict(written)
        written.clear()
        return told

    return RunMembers(run, spec, 2, take_written), written


def samples_left(members):
    return {name: workload.samples_left for name, workload in members.workloads().items()}


@given(st.floats(-10, 1e6), st.integers(0, 150), st.floats(0, 1e6))
def test_work_left_neither_grows_nor_falls_below_zero(now, part, samples):
    workload = Workload("m", {1: 10.0}, samples, 100)
    assert 0 <= left(event("first_step", 0.0), now=now, part=part, workload=workload) <= samples
