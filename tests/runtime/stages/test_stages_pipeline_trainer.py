"""What rank 0 of a pipeline reports of its stages, in events and for TensorBoard."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hetctl.model.ensemble import Member
from hetctl.model.event_records import record_of
from hetctl.model.pipelines import PipelineLayout, StagePlan
from hetctl.model.plan import Allocation
from hetctl.runtime.stages.pipeline_trainer import PartSaver, PipelineTrainer
from hetctl.runtime.stages.stage_worker import EpochPart
from hetctl.runtime.worker.group import Group

ALONE = PipelineLayout(((StagePlan(0, 0, 3, 1),),), 2)


class Events:
    """Events that are kept."""

    def __init__(self):
        self.written = []

    def write(self, kind, **data):
        record_of(kind, data)
        self.written.append(data)


@pytest.fixture
def trainer():
    """A pipeline of one stage, which has not begun."""
    transport = SimpleNamespace()
    transport.take_sent = lambda: {"between_nodes": {"forward": vars(transport).pop("sent")}}
    return PipelineTrainer(
        member=Member("a", batch_size=8),
        network=None,
        training=SimpleNamespace(samples=80, preparation_rate=None),
        validation=None,
        checkpoints=None,
        group=Group(),
        events=Events(),
        stop=None,
        allocation=Allocation("a", 1, "pipeline", 80.0, ()),
        launched_at=0.0,
        stage=SimpleNamespace(worker=0, stage=0, heads=[0], layout=ALONE, transport=transport),
        saver=PartSaver(None, None, None, None, 1),
        worker_names=("n1:0",),
    )


def train(trainer, epoch, idle_s, sent=0):
    trainer.stage.transport.sent = sent
    part = EpochPart(epoch - 1, epoch, 0, 80, 8, 0)
    times = {"forward_s": 1.0, "backward_s": 2.0, "wave_wait_s": 0.0, "idle_s": idle_s}
    trainer._account(part, SimpleNamespace(minibatches=10, loss=40.0, samples=80, times=times), 4.0)


def test_times_and_bytes_of_each_part_are_reported(trainer):
    train(trainer, 1, idle_s=1.0, sent=500)
    train(trainer, 2, idle_s=3.0)
    first, second = (event["stages"][0] for event in trainer.events.written)
    assert (first["worker"], first["layers"], first["idle_s"]) == ("n1:0", [0, 3], 1.0)
    assert (first["between_nodes"], second["between_nodes"]) == ({"forward": 500}, {"forward": 0})
    assert [event["epoch"] for event in trainer.events.written] == [1, 2]


def test_an_epoch_keeps_its_figures_while_the_next_one_ends(trainer):
    for epoch, idle_s in ((1, 0.0), (2, 1.0), (3, 3.0)):
        train(trainer, epoch, idle_s, sent=100 * epoch)
    assert trainer.figures_of(2)["pipeline/busy"] == pytest.approx(0.75)
    assert trainer.figures_of(2)["pipeline/bytes_between_nodes"] == 200
    assert trainer.figures_of(3)["pipeline/idle"] == pytest.approx(0.5)


def test_one_checkpoint_at_a_time_waits_for_its_wave(trainer):
    part = EpochPart(0, 1, 0, 80, 8, 0)
    trainer._saved_at -= 100
    assert trainer._is_save_due()
    trainer._saved_at -= 100
    assert not trainer._is_save_due()
    trainer._save_wave(part, 2, {})
    assert trainer._is_save_due()
