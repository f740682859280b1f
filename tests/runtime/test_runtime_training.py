"""Real training: what is resumed equals what was never stopped; groups equal one rank."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hetctl.core.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.core.errors import BadInputError
from hetctl.runtime.checkpoint import CheckpointFolder
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.functions import load_functions
from hetctl.runtime.group import SingleRank
from hetctl.runtime.trainer import StopSignal, Trainer

pytestmark = pytest.mark.training
ENSEMBLES = Path(__file__).parent.parent / "ensembles"
STOP = StopRule(metric="val_accuracy", mode="max", patience=3, max_epochs=3)


class Events(list):
    def write(self, kind, **data):
        self.append((kind, data))

    def kinds(self):
        return [kind for kind, _ in self]


class StopAfter(StopSignal):
    """Stops after a number of looks, one of which is taken before each batch."""

    def __init__(self, looks):
        super().__init__((), float("inf"))
        self.looks = looks

    def __call__(self):
        self.looks -= 1
        self.reason = "test" if self.looks < 0 else None
        return self.reason is not None


def trainer(folder, config, *, stop=None, gpus=1, epochs=3, train_fn=None, seed=5):
    functions = Functions("tiny:input_fn", "tiny:model_fn", train_fn)
    ensemble = Ensemble("tiny", "tensorflow", functions, (), str(ENSEMBLES))
    member = Member("m", config, 32, seed, replace(STOP, max_epochs=epochs))
    framework, loaded = load_framework("tensorflow"), load_functions(ensemble)
    import keras

    keras.utils.set_random_seed(seed)
    training, validation = loaded.input_fn(None)
    network = framework.build(member, loaded, SingleRank(), training)
    return Trainer(
        member, network, training, validation, CheckpointFolder(folder), SingleRank(), Events(),
        stop or StopAfter(10**9), gpus, 1.0, time.time(),
    )  # fmt: skip


def weights(folder):
    loaded = CheckpointFolder(folder).load()
    return loaded.arrays, loaded.state


CONFIGS = {
    "adam with dropout": {"dropout": 0.3, "optimizer": "adam"},
    "sgd with decay and batch norm": {"optimizer": "sgd", "batch_norm": True, "decay": True},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("train_fn", [None, "tiny:fit_train_fn"])
def test_resumed_training_equals_uninterrupted_training_to_the_bit(tmp_path, config, train_fn):
    trainer(tmp_path / "whole", config, train_fn=train_fn).run()
    for looks in (0, 7, 20, 13, 10**9):
        trainer(tmp_path / "parts", config, stop=StopAfter(looks), train_fn=train_fn).run()
    whole, whole_state = weights(tmp_path / "whole")
    parts, parts_state = weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    for name, array in whole.items():
        assert np.array_equal(array, parts[name]), name
    for one, other in zip(whole_state.epochs, parts_state.epochs, strict=True):
        assert one.metrics["val_loss"] == other.metrics["val_loss"]
        assert one.metrics["val_accuracy"] == other.metrics["val_accuracy"]
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-5)


def test_two_runs_of_one_seed_are_equal_and_of_two_seeds_are_not(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        trainer(tmp_path / name, CONFIGS["adam with dropout"], epochs=1, seed=seed).run()
    a, b, c = (weights(tmp_path / name)[0]["model/0000"] for name in "abc")
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


def test_an_epoch_is_reported_again_when_its_event_may_be_lost(tmp_path):
    first = trainer(tmp_path, {}, epochs=2)
    first.run()
    again = trainer(tmp_path, {}, epochs=2)
    again.run()
    assert first.events.kinds().count("epoch") == 2
    assert again.events.kinds() == ["epoch", "started", "converged"]
    assert again.events[0][1]["epoch"] == 2


def test_a_corrupt_checkpoint_is_reported_and_the_one_before_it_used(tmp_path):
    trainer(tmp_path, {}, epochs=2).run()
    newest = sorted(tmp_path.glob("*.npz"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    resumed = trainer(tmp_path, {}, epochs=2)
    resumed.run()
    assert "checkpoint_invalid" in resumed.events.kinds()
    epochs = [data["epoch"] for kind, data in resumed.events if kind == "epoch"]
    assert epochs == [1, 2]


def test_the_learning_rate_follows_the_gpus(tmp_path):
    """Capes et al., Equation 7: on k GPUs k times the rate of one."""
    one = trainer(tmp_path, {"learning_rate": 0.01}, epochs=1)
    one.run()
    four = trainer(tmp_path, {"learning_rate": 0.01}, epochs=2, gpus=4)
    four.run()
    assert float(four.network._optimizer.learning_rate) == pytest.approx(0.04)
    two = trainer(tmp_path, {"learning_rate": 0.01}, epochs=3, gpus=2)
    two.run()
    assert float(two.network._optimizer.learning_rate) == pytest.approx(0.02)


def test_a_schedule_follows_the_gpus_too(tmp_path):
    for epochs, gpus in enumerate((2, 2, 4, 1), start=1):
        member = trainer(tmp_path, {"decay": True, "learning_rate": 0.01}, epochs=epochs, gpus=gpus)
        member.run()
        rate = float(member.network._optimizer.learning_rate)
        steps = int(member.network._optimizer.iterations)
        assert rate == pytest.approx(0.01 * gpus * 0.9 ** (steps / 10), rel=1e-4)


def test_no_epoch_is_started_that_would_not_fit(tmp_path):
    late = trainer(tmp_path, {}, stop=StopSignal((), time.time() + 0.5))
    late.expected_epoch_s = 60.0
    late.run()
    assert late.events.kinds() == ["started", "stopped"]
    assert late.events[-1][1]["reason"] == "deadline"


@pytest.mark.parametrize("name", ["stop", "stop-m"])
def test_a_stop_file_ends_an_epoch_in_its_midst(tmp_path, name):
    (tmp_path / name).write_text("why\n")
    stop = StopSignal((tmp_path / "stop", tmp_path / "stop-m"), float("inf"))
    stopped = trainer(tmp_path / "m", {}, stop=stop)
    stopped.run()
    assert stopped.events[-1] == ("stopped", {"reason": "why", "part_samples": 0})
    assert weights(tmp_path / "m")[1].part_samples == 0


def test_a_missing_metric_is_refused_with_those_there_are(tmp_path):
    wrong = trainer(tmp_path, {})
    wrong.member = replace(wrong.member, stop=replace(STOP, metric="val_f1"))
    with pytest.raises(BadInputError, match="val_f1 is not among the results: loss, val_accuracy, val_loss"):
        wrong.run()


def test_a_changed_network_does_not_take_an_old_checkpoint(tmp_path):
    trainer(tmp_path, {"units": 32}, epochs=1).run()
    with pytest.raises(BadInputError, match="other variables"):
        trainer(tmp_path, {"units": 16}, epochs=2).run()


RANKS = """
import json, sys
import numpy as np
sys.path.insert(0, {ensembles!r})
from hetctl.core.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.runtime.data import Batches, epoch_order
from hetctl.runtime.step import build_rank
import keras
gpus, batch, config, folder, train_fn = json.loads(sys.argv[1])
member = Member("m", config, batch, 5, StopRule())
functions = Functions("tiny:input_fn", "tiny:model_fn", train_fn)
ensemble = Ensemble("t", "tensorflow", functions, (member,), {ensembles!r})
rank = build_rank(ensemble, member, gpus, "slot")
samples = 600
for epoch in (1, 2):
    order = epoch_order(samples, 5, epoch)
    loss = rank.network.train(Batches(rank.training, order, 0, batch, rank.group, lambda: False))
metrics = rank.network.evaluate(rank.validation)
np.savez(f"{{folder}}/{{gpus}}-{{rank.group.rank}}.npz", **rank.network.save())
json.dump([loss, metrics], open(f"{{folder}}/{{gpus}}-{{rank.group.rank}}.json", "w"))
rank.group.leave()
"""


def train_on(gpus, batch, config, folder, train_fn=None):
    script = folder / "ranks.py"
    script.write_text(RANKS.format(ensembles=str(ENSEMBLES)))
    mpirun = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(gpus)]
    argument = json.dumps([gpus, batch, config, str(folder), train_fn])
    command = [*(mpirun if gpus > 1 else []), sys.executable, str(script), argument]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    states = [dict(np.load(folder / f"{gpus}-{rank}.npz")) for rank in range(gpus)]
    results = [json.loads((folder / f"{gpus}-{rank}.json").read_text()) for rank in range(gpus)]
    return states, results


@pytest.mark.parametrize("train_fn", [None, "tiny:fit_train_fn"])
def test_a_group_equals_one_rank_with_the_larger_batch(tmp_path, train_fn):
    """600 samples in batches of 2 x 64: the last batch has 88 samples, 44 on each rank."""
    config = {"optimizer": "sgd", "learning_rate": 0.1}
    (one,), _ = train_on(1, 128, config, tmp_path, train_fn)
    group, results = train_on(2, 64, config, tmp_path, train_fn)
    assert results[0] == results[1]
    for name, array in one.items():
        assert np.array_equal(group[0][name], group[1][name]), name
        np.testing.assert_allclose(group[0][name], array, rtol=2e-4, atol=2e-5, err_msg=name)


def test_ranks_stay_equal_with_adam_dropout_and_batch_norm(tmp_path):
    states, results = train_on(3, 32, {"dropout": 0.2, "batch_norm": True, "optimizer": "adam"}, tmp_path)
    assert results[0] == results[1] == results[2]
    trained = [name for name in states[0] if name.startswith("model/") and states[0][name].dtype.kind == "f"]
    assert len(trained) >= 8
    for name in trained:
        assert np.array_equal(states[0][name], states[1][name]), name
        assert np.array_equal(states[0][name], states[2][name]), name
