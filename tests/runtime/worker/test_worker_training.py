"""Real training: resumed equals uninterrupted training, and groups equal one rank."""

import json
import time
from dataclasses import replace
from itertools import repeat
from types import SimpleNamespace

import chosen_algorithms
import numpy as np
import pytest
from ranks import run_ranks
from resumed_ranks import EventList
from tiny_networks import ENSEMBLES, MODULES, functions_of, seed_all, train_on

from hetctl.model.ensemble import Ensemble, Member, StopRule
from hetctl.model.errors import BadInputError, TransientInputError
from hetctl.model.plan import Allocation, Placement
from hetctl.model.training_settings import EPOCHS, EVERY_EPOCH, SECONDS, STEPS, CheckpointInterval
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import UNSHUFFLED, Stream
from hetctl.runtime.data.sources import as_source, as_sources
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.member_trainer import StopSignal
from hetctl.runtime.worker.training import Trainer
from hetctl.runtime.worker.user_functions import load_functions

pytestmark = pytest.mark.training
STOP = StopRule(metric="val_accuracy", mode="max", patience=3, max_epochs=3)


class Events(EventList):
    def kinds(self):
        return [kind for kind, _ in self]


class StopAfter(StopSignal):
    """Stop signal that is true after a number of calls; there is one before each batch."""

    def __init__(self, looks):
        super().__init__(lambda: None, float("inf"))
        self.looks = looks

    def __call__(self):
        self.looks -= 1
        self.reason = "test" if self.looks < 0 else None
        return self.reason is not None


def trainer(
    folder, config, *, framework="pytorch", stop=None, gpus=1, epochs=3, train_fn=None, seed=5,
    checkpoint=EVERY_EPOCH, loader=ArrayLoader, batch_size=32,
):  # fmt: skip
    ensemble = Ensemble("tiny", framework, functions_of(framework, train_fn), (), str(ENSEMBLES))
    member = Member("m", config, batch_size, seed, replace(STOP, max_epochs=epochs), checkpoint=checkpoint)
    loaded = load_functions(ensemble)
    seed_all(framework, seed)
    training, validation = as_sources(loaded.input_fn(None))
    loader = loader(training, Stream(len(training), batch_size, seed))
    held_out = ArrayLoader(validation, Stream(len(validation), 32, UNSHUFFLED))
    network = load_framework(framework).build(member, loaded, Group(), loader.sample)
    return Trainer(
        member, network, loader, held_out, CheckpointFolder(folder, member=member), Group(),
        Events(), stop or StopAfter(10**9), Allocation("m", gpus, "data-parallel", 640.0, ()), time.time(),
    )  # fmt: skip


def weights(folder):
    loaded = CheckpointFolder(folder).load()
    return loaded.arrays, loaded.state


CONFIGS = {
    "adam with dropout": {"dropout": 0.3, "optimizer": "adam"},
    "sgd with decay and batch norm": {"optimizer": "sgd", "batch_norm": True, "decay": True},
}


@pytest.mark.parametrize(
    ("config", "train_fn"), [*zip(CONFIGS.values(), ("fit_train_fn", None), strict=True)], ids=CONFIGS
)
@pytest.mark.parametrize("framework", MODULES)
def test_resumed_training_equals_uninterrupted_bit_for_bit(tmp_path, framework, config, train_fn):
    how = {"framework": framework, "train_fn": train_fn}
    trainer(tmp_path / "whole", config, **how).run()
    for looks in (0, 7, 33, 10**9):
        trainer(tmp_path / "parts", config, stop=StopAfter(looks), **how).run()
    whole, whole_state = weights(tmp_path / "whole")
    parts, parts_state = weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    for name, array in whole.items():
        assert np.array_equal(array, parts[name]), name
    for one, other in zip(whole_state.epochs, parts_state.epochs, strict=True):
        assert one.metrics["val_loss"] == other.metrics["val_loss"]
        assert one.metrics["val_accuracy"] == other.metrics["val_accuracy"]
        assert one.metrics["loss"] == pytest.approx(other.metrics["loss"], rel=1e-5)


class KilledError(Exception):
    """End of a trainer in the middle of a step."""


def killed_after(trainer, steps):
    """Train so many steps of 20 in an epoch, and no further."""
    done = []

    def note(*_):
        done.append(None)
        if len(done) == steps:
            raise KilledError

    trainer.note = note
    with pytest.raises(KilledError):
        trainer.run()
    return trainer.events


def kept_in(events):
    return [(data["epoch"], data["part_samples"]) for kind, data in events if kind == "checkpoint"]


@pytest.mark.parametrize(
    ("framework", "train_fn"),
    [*zip(MODULES, repeat(None)), *zip(("tensorflow", "pytorch"), repeat("mixed_train_fn"))],
)
def test_a_killed_trainer_repeats_its_last_steps_alone(tmp_path, framework, train_fn):
    config = CONFIGS["adam with dropout"] | {"scaled": train_fn is not None}
    every = CheckpointInterval(8, STEPS)
    how = {"framework": framework, "train_fn": train_fn, "epochs": 2}
    trainer(tmp_path / "whole", config, **how).run()
    events = killed_after(trainer(tmp_path / "parts", config, checkpoint=every, **how), 31)
    # The end of the first epoch, the best so far, lies between two checkpoints of the interval.
    assert kept_in(events) == [(0, 256), (0, 512), (1, 0), (1, 128)]
    resumed = trainer(tmp_path / "parts", config, checkpoint=every, **how)
    resumed.run()
    assert dict(resumed.events)["started"] == {"epochs": 1, "part_samples": 128, "samples": 640}
    assert kept_in(resumed.events) == [(1, 384), (2, 0)]
    (whole, whole_state), (parts, parts_state) = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert whole.keys() == parts.keys()
    for name, array in whole.items():
        assert np.array_equal(array, parts[name]), name
    for one, other in zip(whole_state.epochs, parts_state.epochs, strict=True):
        assert one.metrics == pytest.approx(other.metrics, rel=1e-5)


def test_epochs_without_a_checkpoint_are_trained_again(tmp_path):
    how = {"epochs": 4, "checkpoint": CheckpointInterval(2, EPOCHS)}
    trainer(tmp_path / "whole", CONFIGS["adam with dropout"], **how).run()
    parts = tmp_path / "parts", CONFIGS["adam with dropout"]
    killed = killed_after(trainer(*parts, **how), 65)
    assert kept_in(killed) == [(2, 0)]
    resumed = trainer(*parts, **how)
    resumed.run()
    assert kept_in(resumed.events) == [(4, 0)]
    assert [data["epoch"] for kind, data in killed if kind == "epoch"] == [1, 2, 3]
    again = [data for kind, data in resumed.events if kind == "epoch"]
    assert [data["epoch"] for data in again] == [2, 3, 4]
    (third,) = [data for kind, data in killed if kind == "epoch" and data["epoch"] == 3]
    assert third["metrics"] == again[1]["metrics"]
    for name, array in weights(tmp_path / "whole")[0].items():
        assert np.array_equal(array, weights(tmp_path / "parts")[0][name]), name


@pytest.mark.parametrize("stop", [None, StopAfter(47)], ids=["converged", "stopped"])
def test_the_last_state_is_saved_whatever_the_interval(tmp_path, stop):
    last = trainer(tmp_path, {}, stop=stop, checkpoint=CheckpointInterval(10**6, SECONDS))
    last.run()
    assert kept_in(last.events) == [(3, 0)] if stop is None else [(2, 7 * 32)]
    assert last.events.kinds()[-2:] == ["checkpoint", "converged" if stop is None else "stopped"]


@pytest.mark.parametrize("framework", MODULES)
def test_training_from_the_disk_resumes_to_the_sample(tmp_path, framework):
    """Stopped in the middle of epochs, the weights have the bits of uninterrupted training from memory."""
    h5py = pytest.importorskip("h5py")
    whole = trainer(tmp_path / "whole", {}, framework=framework, epochs=2)
    whole.run()
    ensemble = Ensemble("tiny", framework, functions_of(framework), (), str(ENSEMBLES))
    memory, _ = as_sources(load_functions(ensemble).input_fn(None))
    with h5py.File(tmp_path / "digits.h5", "w") as file:
        x = file.create_dataset("x", data=memory.x, chunks=(16, 8, 8, 1), compression="gzip")
        source = as_source((x, file.create_dataset("y", data=memory.y)), "training")
        for looks in (7, 20, 10**9):
            part = trainer(tmp_path / "parts", {}, framework=framework, epochs=2, stop=StopAfter(looks))
            part.training = ArrayLoader(source, Stream(len(source), 32, 5))
            part.run()
    (expected, _), (found, _) = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert part.events.kinds()[-1] == "converged"
    for name, array in expected.items():
        assert np.array_equal(array, found[name]), name


@pytest.mark.parametrize("framework", MODULES)
def test_two_runs_of_one_seed_are_equal_and_of_two_seeds_are_not(tmp_path, framework):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        config = CONFIGS["adam with dropout"]
        trainer(tmp_path / name, config, framework=framework, epochs=1, seed=seed).run()
    arrays = [weights(tmp_path / name)[0] for name in "abc"]
    first = next(name for name in arrays[0] if name.startswith("model/"))
    a, b, c = (array[first] for array in arrays)
    assert np.array_equal(a, b)
    assert not np.array_equal(a, c)


@pytest.mark.parametrize("framework", chosen_algorithms.IS_DETERMINISTIC)
def test_a_member_has_deterministic_algorithms_if_it_says_so(tmp_path, framework):
    wishes = [False, True, False]
    run_ranks(chosen_algorithms.of_members, 1, tmp_path, framework, wishes, tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text()) == wishes


def test_an_epoch_is_reported_again_when_its_event_may_be_lost(tmp_path):
    first = trainer(tmp_path, {}, epochs=2)
    first.run()
    again = trainer(tmp_path, {}, epochs=2)
    again.run()
    assert first.events.kinds().count("epoch") == 2
    assert again.events.kinds() == ["epoch", "started", "best_checkpoint", "converged"]
    assert again.events[0][1]["epoch"] == 2


def test_training_resumes_before_a_corrupt_checkpoint_reported(tmp_path):
    trainer(tmp_path, {}, epochs=2).run()
    newest = sorted(tmp_path.glob("*.npz"))[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    resumed = trainer(tmp_path, {}, epochs=2)
    resumed.run()
    assert "checkpoint_invalid" in resumed.events.kinds()
    epochs = [data["epoch"] for kind, data in resumed.events if kind == "epoch"]
    assert epochs == [1, 2]


def test_a_member_that_has_trained_does_not_start_anew(tmp_path):
    trainer(tmp_path, {}, epochs=1).run()
    again = trainer(tmp_path, {}, epochs=2)
    again.has_saved = lambda: True
    for path in tmp_path.glob("epoch-*.npz"):
        path.write_bytes(b"")
    with pytest.raises(TransientInputError, match="only damaged checkpoints"):
        again.run()
    for path in tmp_path.glob("epoch-*"):
        path.unlink()
    with pytest.raises(TransientInputError, match="no checkpoint any more"):
        again.run()
    assert again.events.kinds() == ["checkpoint_invalid"]


RATES = {
    "tensorflow": lambda network: float(network._optimizer.learning_rate),
    "pytorch": lambda network: network._optimizer.param_groups[0]["lr"] * network._rate.factor,
}


@pytest.mark.parametrize("framework", MODULES)
def test_the_learning_rate_follows_the_gpus(tmp_path, framework):
    """Capes et al., Equation 7: on k GPUs k times the rate of one."""
    rates = []
    for epochs, gpus in ((1, 1), (2, 4), (3, 2)):
        member = trainer(tmp_path, {"learning_rate": 0.01}, framework=framework, epochs=epochs, gpus=gpus)
        member.run()
        rates.append(RATES[framework](member.network))
    assert rates == pytest.approx([0.01, 0.04, 0.02])


def test_a_schedule_follows_the_gpus_too(tmp_path):
    for epochs, gpus in enumerate((2, 2, 4, 1), start=1):
        config = {"decay": True, "learning_rate": 0.01}
        member = trainer(tmp_path, config, framework="tensorflow", epochs=epochs, gpus=gpus)
        member.run()
        rate = float(member.network._optimizer.learning_rate)
        steps = int(member.network._optimizer.iterations)
        assert rate == pytest.approx(0.01 * gpus * 0.9 ** (steps / 10), rel=1e-4)


def test_no_epoch_is_started_that_would_not_fit(tmp_path):
    late = trainer(tmp_path, {}, stop=StopSignal(lambda: None, time.time() + 0.5))
    late.allocation = replace(late.allocation, rate=late.training.samples / 60)
    late.run()
    assert late.events.kinds() == ["started", "stopped"]
    assert late.events[-1][1]["reason"] == "deadline"


def test_a_stop_request_ends_an_epoch_early(tmp_path):
    stop = StopSignal(lambda: "reason", float("inf"))
    stopped = trainer(tmp_path / "m", {}, stop=stop)
    stopped.run()
    assert stopped.events[-1] == ("stopped", {"reason": "reason", "part_samples": 0})
    assert weights(tmp_path / "m")[1].part_samples == 0


def mean_train_fn(data, *_):
    """Train nothing, and return the mean loss, which is no number without a batch."""
    return float(np.mean([0.5 for _ in data]))


@pytest.mark.parametrize("batches", [0, 20])
def test_a_stop_between_two_epochs_needs_no_empty_one(tmp_path, batches):
    requests = []
    stopped = trainer(tmp_path / "m", {}, stop=StopSignal(lambda: "told" if requests else None, float("inf")))
    stopped.network._train_fn = mean_train_fn
    if batches:
        stopped.note = lambda _epoch, samples, _loss: requests.append(1) if samples >= 640 else None
    else:
        requests.append(1)
    stopped.run()
    assert stopped.events[-1] == ("stopped", {"reason": "told", "part_samples": 0})
    assert len(weights(tmp_path / "m")[1].epochs) == batches // 20


class NotingLoader(ArrayLoader):
    """A loader that notes the numbers of the samples that it gives."""

    def batches(self, *arguments):
        self.numbers = []
        for samples, chunk in super().batches(*arguments):
            self.numbers.extend(chunk.numbers.tolist())
            yield samples, chunk


def test_an_epoch_begun_by_accesses_gets_the_other_samples(tmp_path):
    trainer(tmp_path, {}, stop=StopAfter(7), epochs=1).run()
    arrays, state = weights(tmp_path)
    visits = np.repeat([1, 0], [state.part_samples, 640 - state.part_samples])
    CheckpointFolder(tmp_path).save({**arrays, "visits/visits": visits}, state)
    # All nodes have all partitions now, and the loader draws by the order of the epoch.
    resumed = trainer(tmp_path, {}, epochs=1, loader=NotingLoader)
    resumed.run()
    assert sorted(resumed.training.numbers) == list(range(state.part_samples, 640))


def test_a_train_fn_that_leaves_batches_out_is_refused(tmp_path):
    leaving = trainer(tmp_path / "m", {})
    leaving.network._train_fn = lambda data, *_: float(sum(0.1 for _ in zip(range(4), data, strict=False)))
    with pytest.raises(BadInputError, match="train_fn took 96 of the 640 samples of an epoch"):
        leaving.run()


@pytest.mark.parametrize("framework", MODULES)
def test_a_missing_metric_is_refused_before_training_with_those_there_are(tmp_path, framework):
    wrong = trainer(tmp_path, {}, framework=framework)
    wrong.member = replace(wrong.member, stop=replace(STOP, metric="val_f1"))
    with pytest.raises(BadInputError, match="val_f1 is not among the results: loss, val_accuracy, val_loss"):
        wrong.run()
    assert wrong.events.kinds() == ["started"]


@pytest.mark.parametrize("framework", MODULES)
def test_a_changed_network_does_not_take_an_old_checkpoint(tmp_path, framework):
    trainer(tmp_path, {"units": 32}, framework=framework, epochs=1).run()
    with pytest.raises(BadInputError, match="other variables"):
        trainer(tmp_path, {"units": 16}, framework=framework, epochs=2).run()


@pytest.mark.parametrize(
    ("gpus", "batch", "samples", "train_fn"),
    [(2, 64, 601, None), (2, 48, 577, "fit_train_fn")],
    ids=["45 and 44 samples at last", "1 and 0 samples at last"],
)
@pytest.mark.parametrize("framework", MODULES)
def test_a_group_equals_one_rank_with_the_larger_batch(tmp_path, framework, gpus, batch, samples, train_fn):
    config = {"optimizer": "sgd", "learning_rate": 0.1}
    how = {"samples": samples, "train_fn": train_fn}
    (one,), _ = train_on(framework, 1, gpus * batch, config, tmp_path, **how)
    group, results = train_on(framework, gpus, batch, config, tmp_path, **how)
    assert all(result == results[0] for result in results)
    for name, array in one.items():
        assert all(np.array_equal(group[0][name], state[name]) for state in group), name
        np.testing.assert_allclose(group[0][name], array, rtol=2e-4, atol=2e-5, err_msg=name)


CHANGING = [[40, 8, 16], [1, 62, 1], [21, 21, 22], [21, 21, 22], [30, 4, 30]]


@pytest.mark.parametrize(
    ("train_fn", "samples"), [(None, 601), ("fit_train_fn", 577)], ids=["usual", "own loop"]
)
@pytest.mark.parametrize("framework", MODULES)
def test_a_group_with_uneven_batches_trains_as_one_big_batch(tmp_path, framework, train_fn, samples):
    """LB-BSP, Equation 7, in double precision: only the order of additions differs."""
    config = {"optimizer": "sgd", "learning_rate": 0.1, "float64": True}
    how = {"samples": samples, "train_fn": train_fn, "sizes": CHANGING}
    (one,), (alone,) = train_on(framework, 1, 64, config, tmp_path, **how)
    # A batch size that no rank of the group has: it must not matter.
    group, results = train_on(framework, 3, 64 // 3, config, tmp_path, **how)
    assert all(result == results[0] for result in results)
    assert results[0][1] == pytest.approx(alone[1], rel=1e-6)
    if train_fn is None:
        assert results[0][0] == pytest.approx(alone[0], rel=1e-9)
    for name, array in one.items():
        assert all(np.array_equal(group[0][name], state[name]) for state in group), name
        np.testing.assert_allclose(group[0][name], array, rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("framework", MODULES)
def test_ranks_stay_equal_with_adam_dropout_and_batch_norm(tmp_path, framework):
    config = {"dropout": 0.2, "batch_norm": True, "optimizer": "adam"}
    states, results = train_on(framework, 2, 32, config, tmp_path)
    assert results[0] == results[1]
    trained = [name for name in states[0] if name.startswith("model/") and states[0][name].dtype.kind == "f"]
    assert len(trained) >= 8
    for name in trained:
        assert np.array_equal(states[0][name], states[1][name]), name


@pytest.mark.parametrize("framework", MODULES)
def test_epochs_have_rates_and_evaluations_send_heartbeats(tmp_path, framework):
    training = trainer(tmp_path, {}, framework=framework)
    heartbeats = []
    training.heartbeat = lambda: heartbeats.append(time.perf_counter())
    training.allocation = replace(training.allocation, placement=(Placement("n", (0,), seat=1),))
    training.joined = lambda: len(heartbeats) > 27  # those of the first epoch
    training.run()
    epochs = [data for kind, data in training.events if kind == "epoch"]
    assert all(epoch["rate"] > 0 for epoch in epochs)
    # Once others have come to its GPU its rate is not its own.
    assert [epoch["gpus"] for epoch in epochs] == [1, 0, 0]
    assert all(epoch["batch_size"] == 32 for epoch in epochs)
    assert [epoch["overhead_s"] is None for epoch in epochs] == [True, False, False]
    # 640 training and 200 validation samples in batches of 32, three times.
    assert len(heartbeats) == 3 * (20 + 7)


def test_epochs_of_a_single_step_have_rates_from_the_second_on(tmp_path):
    training = trainer(tmp_path, {}, batch_size=640)
    training.run()
    epochs = [data for kind, data in training.events if kind == "epoch"]
    assert [epoch["rate"] is None for epoch in epochs] == [True, False, False]
    assert all(epoch["rate"] == 640 / epoch["duration_s"] for epoch in epochs[1:])
    assert all(epoch["overhead_s"] >= 0 for epoch in epochs[1:])


def test_horovod_refuses_ipv6_with_the_way_out():
    group = SimpleNamespace(rank=1, size=2, host="fd00::2", interface="eth0")
    with pytest.raises(TransientInputError, match=r"over IPv4 only, but rank 0 .* is at fd00::2") as caught:
        load_framework("tensorflow").initialize(group)
    assert "network: {control:" in caught.value.hint
