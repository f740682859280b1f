"""Visits of members that hop: equal to training in one process, whatever ranks they visit and what fails."""

from __future__ import annotations

import contextlib
import errno
import json
import signal
import time
from dataclasses import replace

import numpy as np
import pytest
from tiny_networks import MODULES, context_in, seed_all
from visiting_ranks import (
    PARTS,
    PATIENCE_S,
    VisitedGroup,
    VisitedRank,
    Visits,
    digest,
    digest_in,
    ensemble_of,
    hops,
    order_of,
    serve_without_saving,
    state_after,
    train_alone,
    trained_alone,
    visit_to,
    write_parts,
)
from workbench import wait_for

from hetctl.model.ensemble import Member, StopRule
from hetctl.model.errors import BadInputError, TransientInputError
from hetctl.model.events import EXIT_CODES, LOST_PEER, ExitReason
from hetctl.model.plan import Allocation
from hetctl.model.training_progress import EpochResult
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.data import state_file
from hetctl.runtime.data.loaders import ArrayLoader
from hetctl.runtime.data.sampler import UNSHUFFLED, Stream
from hetctl.runtime.data.sharing import node_folder
from hetctl.runtime.data.sources import as_sources
from hetctl.runtime.frameworks import load_framework
from hetctl.runtime.worker.checkpoint import CheckpointFolder, TrainingState
from hetctl.runtime.worker.context import SilentWriter, WorkerContext
from hetctl.runtime.worker.group import Group
from hetctl.runtime.worker.hop_resources import open_hops
from hetctl.runtime.worker.member_trainer import StopSignal
from hetctl.runtime.worker.training import Trainer
from hetctl.runtime.worker.user_functions import load_functions
from hetctl.runtime.worker.visiting import check_fits, visit
from hetctl.storage.event_files import read_folder

pytestmark = pytest.mark.training
STOP = StopRule(metric="val_accuracy", mode="max", patience=9, max_epochs=9)
DECAYING = Member("sgd", {"optimizer": "momentum", "decay": True, "batch_norm": True}, 32, 5, STOP)
DROPPING = Member("adam", {"optimizer": "adam", "dropout": 0.3, "overlaps": 1}, 24, 6, STOP)
ORDERS = {
    "sgd": ((2, 0, 3, 1), (0, 1, 2, 3), (1, 2, 0, 3), (3, 2, 1, 0)),
    "adam": ((0, 1, 2, 3), (3, 1, 0, 2), (3, 0, 2, 1), (1, 0, 3, 2)),
}


@pytest.fixture
def ranks():
    """Start ranks of a node; they are killed at the end."""
    started = []

    def start(visits, gpu=0, **how):
        started.append(VisitedRank(visits, gpu, **how))
        return started[-1]

    yield start
    for rank in started:
        rank.process.kill()
        rank.end()


# In several processes


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_parts(tmp_path_factory.mktemp("parts"))


@pytest.mark.parametrize("framework", MODULES)
def test_hops_equal_training_in_one_process_bit_for_bit(tmp_path, path, ranks, framework):
    """Two members change places after each visit; one of the ranks keeps networks, the other builds them."""
    ensemble = ensemble_of(framework, path)
    tasks = Visits(tmp_path, ensemble)
    pair = ranks(tasks, 0), ranks(tasks, 1, networks_bytes=0)
    members = DECAYING, DROPPING
    visits = [tuple(hops(member, ORDERS[member.name], first, 2)) for first, member in enumerate(members)]
    reports = {member.name: [] for member in members}
    for index, at_once in enumerate(zip(*visits, strict=True)):
        for place, (member, one) in enumerate(zip(members, at_once, strict=True)):
            pair[(place + index) % 2].start(member, one)
        for place, member in enumerate(members):
            reports[member.name].append(pair[(place + index) % 2].finish())
    for place, member in enumerate(members):
        own, planned = reports[member.name], visits[place]
        alone, metrics = train_alone(tmp_path, ensemble, member, order_of(planned))
        assert digest_in(pair[0].store, state_after(own[-1])) == alone
        check_reports(own, planned, metrics, member)
        check_checkpoint(pair[(place + len(own) - 1) % 2], own[-1], tasks.checkpoints(member), alone)


def check_reports(reports, visits, metrics, member):
    """Check samples and results; `metrics` are of all validation samples at once."""
    assert [report.samples for report in reports] == [PARTS[v.partition_number][v.evaluates] for v in visits]
    assert all((report.loss is None) is report.evaluates for report in reports)
    assert all(report.ended_at > report.began_at for report in reports)
    results = [report.result for report in reports if report.result is not None]
    assert [result.epoch for result in results] == [1, 2]
    assert [report.result is not None for report in reports] == ([False] * 7 + [True]) * 2
    for result, expected in zip(results, metrics, strict=True):
        assert {name: result.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
        trained = [r for r in reports if r.epoch == result.epoch and not r.evaluates]
        total = sum(r.loss * r.samples for r in trained)
        assert result.metrics["loss"] == pytest.approx(total / sum(samples for samples, _ in PARTS))
        assert result.duration_s == pytest.approx(sum(r.train_s for r in trained))
        assert (result.gpus, result.batch_size) == (1, member.batch_size)
    assert results[-1].metrics["val_accuracy"] > 0.6


def check_checkpoint(rank, report, folder, expected):
    saved = rank.saved(report.number)
    loaded = CheckpointFolder(folder).load()
    assert digest(loaded.arrays) == expected
    assert (saved.epoch, saved.part_samples) == (len(loaded.state.epochs), 0) == (2, 0)
    assert saved.path.startswith(str(folder))
    assert len(list(folder.glob("*.npz"))) == 2


def test_a_schedule_of_pytorch_steps_once_an_epoch(tmp_path, path, ranks):
    member = replace(DECAYING, config={**DECAYING.config, "learning_rate": 0.05})
    tasks = Visits(tmp_path, ensemble_of("pytorch", path))
    rank = ranks(tasks)
    rates = []
    for one in hops(member, ORDERS["sgd"]):
        rank.visit(member, one)
        rates.append(rate_in(rank.store / f"sgd-{one.number}"))
    assert rates == pytest.approx([0.05] * 3 + [0.045] * 8 + [0.0405] * 5)


@pytest.mark.parametrize("framework", MODULES)
def test_the_context_of_train_fn_hops_with_its_member(tmp_path, path, ranks, framework):
    """Visits end between two steps of the optimizer; one rank keeps the network, the other builds it anew."""
    member = Member("adam", {"scaled": framework == "pytorch"}, 24, 6, STOP)
    ensemble = ensemble_of(framework, path, "mixed_train_fn")
    tasks = Visits(tmp_path, ensemble)
    pair = ranks(tasks, 0), ranks(tasks, 1, networks_bytes=0)
    visits = tuple(hops(member, ORDERS["adam"][:2]))
    reports = [pair[one.number % 2].visit(member, one) for one in visits]
    alone, _ = train_alone(tmp_path, ensemble, member, order_of(visits[:4]))
    assert digest_in(pair[0].store, state_after(reports[3])) == alone
    arrays, _ = state_file.read(pair[0].store, state_after(reports[-1]))
    context = context_in(arrays, framework)
    steps = sum(-(-samples // 24) for samples, _ in PARTS)
    assert (context["step"], context["state"]["values"]["ended"]) == (steps, [[1, steps]])
    assert context["metrics"] == reports[-1].result.metrics


def rate_in(file):
    """Return the learning rate of PyTorch's optimizer in a state."""
    arrays, _ = state_file.read(file.parent, file.name)
    structure = dict(json.loads(arrays["structure"].tobytes())["items"])
    (group,) = dict(structure["optimizer"]["items"])["param_groups"]["list"]
    return dict(group["items"])["lr"]


def test_a_killed_visit_is_repeated_with_equal_bits(tmp_path, path, ranks):
    done = tmp_path / "done"
    config = {**DROPPING.config, "rank": 0, "done": str(done), "how": "kill"}
    member = replace(DROPPING, config=config)
    tasks = Visits(tmp_path, ensemble_of("pytorch", path, "doomed_train_fn"))
    done.touch()
    first, *others = hops(member, ORDERS["adam"][:1])
    survivor = ranks(tasks, 1)
    assert survivor.visit(member, first)
    before = digest_in(survivor.store, "adam-0")
    done.unlink()
    victim = ranks(tasks, 0)
    victim.start(member, others[0])
    assert victim.end() == -signal.SIGKILL
    assert states_in(survivor.store) == ["adam-0"]
    assert digest_in(survivor.store, "adam-0") == before
    assert survivor.visit(member, others[0])
    again = replace(others[0], number=9)
    assert ranks(tasks, 0).visit(member, again)
    assert digest_in(survivor.store, "adam-9") == digest_in(survivor.store, "adam-1") != before


def states_in(store):
    return sorted(entry.name for entry in store.iterdir() if entry.name != node_folder.USERS)


def slow(pause_s, began):
    """Return a member that rests after each step, and leaves a file after the first one."""
    return replace(DROPPING, config={**DROPPING.config, "pause_s": pause_s, "began": str(began)})


AT = {
    "while it waits": ("adam-99", False, 3600.0, "stop"),
    "in training": ("adam-0", False, 3600.0, "stop"),
    "in training, by SIGTERM": ("adam-0", False, 3600.0, "signal"),
    "at the deadline": ("adam-0", False, 1.0, ""),
    "before it begins": (None, False, 0.0, ""),
}


@pytest.mark.parametrize(("state", "evaluates", "deadline_s", "how"), AT.values(), ids=AT)
def test_a_visit_that_is_stopped_leaves_no_trace(tmp_path, path, ranks, state, evaluates, deadline_s, how):
    tasks = Visits(tmp_path, ensemble_of("pytorch", path, "fit_train_fn"))
    rank = ranks(tasks)
    assert rank.visit(DROPPING, visit_to(0, 1, 0, False))
    rank.saved(0)
    files = states_in(rank.store), sorted(tasks.checkpoints(DROPPING).iterdir())
    one = visit_to(1, 1, 1, evaluates, state)
    rank.start(slow(0.5, tmp_path / "began"), one, deadline_s=deadline_s)
    if state == "adam-99":
        rank.sign()
    elif how:
        wait_for((tmp_path / "began").exists)
    if how == "stop":
        rank.stop()
    elif how == "signal":
        rank.process.terminate()
    assert rank.finish() is None
    assert (states_in(rank.store), sorted(tasks.checkpoints(DROPPING).iterdir())) == files
    assert any("signalled" in message for message in rank.messages) is (how == "signal")
    # The rank goes on, and the same visit may come again.
    assert rank.visit(DROPPING, replace(one, state="adam-0"))


def test_a_visit_starts_once_its_state_arrives(tmp_path, path, ranks):
    """The next visit is assigned before the one before it has ended, on another rank."""
    tasks = Visits(tmp_path, ensemble_of("pytorch", path, "fit_train_fn"))
    member = replace(DROPPING, config={**DROPPING.config, "pause_s": 0.1})
    one, two, *_ = hops(member, ORDERS["adam"][:1])
    here, there = ranks(tasks, 0), ranks(tasks, 1)
    here.start(member, one)
    there.start(member, two)
    first, second = here.finish(), there.finish()
    # Times are counted back from the ends: neither rank reports how long it takes to open its partition.
    assert second.ended_at - second.save_s - second.train_s > first.ended_at - first.save_s
    assert second.ended_at > first.ended_at


def test_a_released_rank_writes_what_it_has_not_saved(tmp_path, path, ranks):
    tasks = Visits(tmp_path, ensemble_of("pytorch", path))
    rank = ranks(tasks)
    for one in hops(DROPPING, ORDERS["adam"][:1]):
        assert rank.visit(DROPPING, one)
    assert rank.release() == 0
    assert CheckpointFolder(tasks.checkpoints(DROPPING)).newest_state().visited == (0, 1, 2, 3)


def test_a_rank_ends_if_a_checkpoint_cannot_be_read(tmp_path, path, ranks):
    tasks = Visits(tmp_path, ensemble_of("pytorch", path))
    tasks.checkpoints(DROPPING).parent.mkdir()
    tasks.checkpoints(DROPPING).write_text("no folder")
    rank = ranks(tasks)
    with pytest.raises(AssertionError, match="the rank has ended"):
        rank.visit(DROPPING, visit_to(0, 1, 0, False))
    assert rank.end() == EXIT_CODES[ExitReason.PROGRAM_ERROR]
    (event,) = read_folder(tmp_path / "run/events")
    assert (event.kind, event.source) == ("failed", "adam")


def test_an_idle_rank_ends_if_a_checkpoint_cannot_be_written(tmp_path, path, ranks):
    """After the time for which it is tried again."""
    rank = ranks(Visits(tmp_path, ensemble_of("pytorch", path)), serving=serve_without_saving)
    assert rank.visit(DROPPING, visit_to(0, 1, 0, False))
    assert rank.end() == EXIT_CODES[ExitReason.DISK_ERROR]
    (event,) = read_folder(tmp_path / "run/events")
    assert (event.kind, event.source, event.data["reason"]) == ("failed", "adam", "disk-error")


# In groups


@pytest.mark.parametrize(("framework", "gpus", "epochs"), [("pytorch", 3, 2), ("tensorflow", 2, 1)])
def test_groups_equal_one_process_with_the_same_batches(tmp_path, path, ranks, framework, gpus, epochs):
    """A group of ranks, whose leader also makes visits alone; with PyTorch, one keeps no networks."""
    how = {"optimizer": "momentum", "decay": framework == "pytorch", "noted": str(tmp_path / "noted")}
    member = Member("sgd", {**how, "learning_rate": 0.02}, 12, 5, STOP)
    ensemble = ensemble_of(framework, path, "noted_train_fn")
    tasks = Visits(tmp_path, ensemble)
    kept = [2**30, 0 if framework == "pytorch" else 2**30, 2**30][:gpus]
    group = VisitedGroup(*(ranks(tasks, gpu, networks_bytes=size) for gpu, size in enumerate(kept)))
    visits = tuple(hops(member, ORDERS["sgd"][: 2 * epochs]))
    sizes = (gpus, gpus, 1, gpus) * 2 * epochs
    makers = [group if size > 1 else group.ranks[0] for size in sizes]
    reports = [maker.visit(member, one) for maker, one in zip(makers, visits, strict=True)]
    assert [report.samples for report in reports] == [PARTS[v.partition_number][v.evaluates] for v in visits]
    assert [r.result.gpus for r in reports if r.result] == [gpus] * epochs
    expected, metrics = trained_alone(tmp_path, ensemble, member, order_of(visits, sizes))
    arrays, state = state_file.read(group.ranks[0].store, state_after(reports[-1]))
    assert state.gpus == gpus
    assert_near(arrays, expected)
    for result, own in zip((r.result for r in reports if r.result), metrics, strict=True):
        assert {name: result.metrics[name] for name in own} == pytest.approx(own, rel=1e-5)
    noted = [(tmp_path / f"noted-{gpu}").read_text().split() for gpu in range(gpus)]
    together = [size > 1 for one, size in zip(visits, sizes, strict=True) if not one.evaluates]
    shared = [line for line, at in zip(noted[0], together, strict=False) if at]
    assert noted[1:] == [shared] * (gpus - 1)


def assert_near(arrays, expected):
    """Assert that arrays are equal but for the order in which gradients were added up."""
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_killed_rank_costs_its_group_one_visit(tmp_path, path, ranks):
    tasks = Visits(tmp_path, ensemble_of("pytorch", path, "fit_train_fn"))
    quick = Member("adam", {"optimizer": "adam"}, 16, 6, STOP)
    slow = replace(quick, config={**quick.config, "pause_s": 1.5})
    one, two, *_ = hops(quick, ORDERS["adam"][:1])
    survivor, first, second = (ranks(tasks, gpu) for gpu in (2, 0, 1))
    assert survivor.visit(quick, one)
    VisitedGroup(first, second).start(slow, two)
    first.wait_for("metrics")
    second.process.kill()
    first.process.join(PATIENCE_S)
    assert first.process.exitcode == LOST_PEER
    again = VisitedGroup(ranks(tasks, 0), ranks(tasks, 1))
    assert states_in(survivor.store) == ["adam-0"]
    assert again.visit(quick, two)
    assert again.visit(quick, replace(two, number=9))
    assert digest_in(survivor.store, "adam-9") == digest_in(survivor.store, "adam-1")


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_group_that_is_told_to_stop_leaves_no_trace(tmp_path, path, ranks, evaluates):
    tasks = Visits(tmp_path, ensemble_of("pytorch", path, "fit_train_fn"))
    group = VisitedGroup(ranks(tasks, 0), ranks(tasks, 1))
    assert group.visit(DROPPING, visit_to(0, 1, 0, False))
    files = states_in(group.ranks[0].store)
    state = "adam-9" if evaluates else "adam-0"
    group.start(slow(0.2, tmp_path / "began"), visit_to(1, 1, 1, evaluates, state))
    if evaluates:
        group.ranks[0].sign()
    else:
        wait_for((tmp_path / "began").exists)
    for rank in group.ranks:
        rank.stop()
    assert [rank.finish() for rank in group.ranks] == [None, None]
    assert states_in(group.ranks[0].store) == files
    assert group.visit(DROPPING, visit_to(2, 1, 1, False, "adam-0"))


# In this process


@pytest.fixture
def here(tmp_path, path, monkeypatch):
    """Return a function that performs visits in this process, and the tasks that they belong to."""
    monkeypatch.setattr(node_folder, "MEMORY", tmp_path / "memory")
    tasks = Visits(tmp_path, ensemble_of("pytorch", path))
    reports = []
    with contextlib.ExitStack() as keep:

        def send(visited=None, **_):
            reports.extend([visited] if visited else [])

        context = WorkerContext(Binding("n1", 0, None, (0,)), keep, send)

        def perform(member, one):
            visit(tasks.assignment(member, one), context)
            context.clear()
            return reports[-1]

        perform.tasks, perform.context = tasks, context
        yield perform


def train(member, tasks, *, looks=10**9, epochs=1):
    """Train a member on all partitions as one, as far as a number of steps."""
    left = iter(range(looks))
    functions = load_functions(tasks.ensemble)
    seed_all("pytorch", member.seed)
    training, validation = as_sources(functions.input_fn(None))
    loader = ArrayLoader(training, Stream(len(training), 32, member.seed))
    held_out = ArrayLoader(validation, Stream(len(validation), 32, UNSHUFFLED))
    network = load_framework("pytorch").build(member, functions, Group(), loader.sample)
    stop = StopSignal(lambda: None if next(left, None) is not None else "test", float("inf"))
    member = replace(member, stop=replace(STOP, max_epochs=epochs))
    trainer = Trainer(
        member, network, loader, held_out, CheckpointFolder(tasks.checkpoints(member)), Group(),
        SilentWriter(), stop, Allocation("m", 1, "data-parallel", 640.0, ()), time.time(),
    )  # fmt: skip
    trainer.run()
    return trainer


def test_members_change_between_modes_at_the_end_of_an_epoch(here):
    train(DROPPING, here.tasks)
    for one in hops(DROPPING, ORDERS["adam"][:2]):
        report = here(DROPPING, replace(one, epoch=one.epoch + 2))
    here.context.kept.saver.finish()
    assert report.result.epoch == 2
    trained = train(DROPPING, here.tasks, epochs=3)
    assert [epoch.epoch for epoch in trained.state.epochs] == [1, 2, 3]
    assert trained.state.visit == report.number


def test_the_middle_of_an_epoch_in_parallel_is_refused(here):
    train(DROPPING, here.tasks, looks=5)
    with pytest.raises(BadInputError, match="middle of epoch 1 of data-parallel training") as caught:
        here(DROPPING, visit_to(0, 1, 0, False))
    assert "--mode data-parallel" in caught.value.hint


@pytest.mark.parametrize("visits", [1, 4, 5], ids=["in training", "after training", "in evaluation"])
def test_the_middle_of_an_epoch_of_hops_is_refused(here, visits):
    for one, _ in zip(hops(DROPPING, ORDERS["adam"][:2]), range(visits), strict=False):
        here(DROPPING, one)
    here.context.kept.saver.finish()
    with pytest.raises(BadInputError, match="middle of epoch 1 of hops") as caught:
        train(DROPPING, here.tasks)
    assert "--mode hopper" in caught.value.hint


def test_a_member_continues_from_its_checkpoint_alike(here):
    visits = tuple(hops(DROPPING, ORDERS["adam"][:2]))
    for one in visits[:6]:
        here(DROPPING, one)
    here.context.kept.saver.finish()
    anew = here(DROPPING, replace(visits[6], number=20, state=None))
    kept = here(DROPPING, visits[6])
    store = open_hops(here.context, "r", here.tasks.ensemble).store
    assert digest_in(store, state_after(anew)) == digest_in(store, state_after(kept))


def test_an_evaluation_changes_nothing_that_is_trained(here):
    visits = tuple(hops(DROPPING, ORDERS["adam"][:2]))
    for one in visits:
        here(DROPPING, one)
    store = open_hops(here.context, "r", here.tasks.ensemble).store
    states = {digest_in(store, f"adam-{one.number}") for one in visits[3:]}
    assert len(states) == 1


def test_a_full_disk_ends_the_next_visit(here, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CheckpointFolder, "save", full)
    here(DROPPING, visit_to(0, 1, 0, False))
    error, _ = here.context.kept.saver.finish()
    assert error.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space left"):
        here(DROPPING, visit_to(1, 1, 1, False, "adam-0"))


def test_training_that_diverges_fails(here):
    member = replace(DROPPING, config={"optimizer": "sgd", "learning_rate": float("nan")})
    with pytest.raises(BadInputError, match="loss is nan after the visit: training diverged"):
        here(member, visit_to(0, 1, 0, False))


def test_a_partition_that_is_not_there_is_named(here):
    partitions = replace(here.tasks.ensemble.partitions, count=8)
    here.tasks.ensemble = replace(here.tasks.ensemble, partitions=partitions)
    with pytest.raises(TransientInputError, match=r"partition 7 is not on .*: there is no .*/7\.npz"):
        here(DROPPING, visit_to(0, 1, 7, False))


EPOCH = EpochResult(1, {"loss": 1.0}, 1.0, 1, 0.0)
TRAINED = TrainingState(part_samples=640, visited=(0, 1, 2, 3))
MISFITS = {
    "another epoch": (TrainingState(epochs=(EPOCH,)), visit_to(5, 1, 0, False)),
    "trained before": (TrainingState(part_samples=9, visited=(2, 0)), visit_to(5, 1, 0, False)),
    "all trained": (TRAINED, visit_to(5, 1, 0, False)),
    "evaluated before": (replace(TRAINED, visited=(0,), evaluating=True), visit_to(5, 1, 0, True)),
    "training in an evaluation": (
        replace(TRAINED, visited=(0,), evaluating=True),
        visit_to(5, 1, 1, False),
    ),
    "evaluation of a part": (TrainingState(part_samples=9, visited=(2, 0)), visit_to(5, 1, 1, True)),
    "evaluation of a fresh network": (TrainingState(), visit_to(5, 1, 1, True)),
}


@pytest.mark.parametrize(("state", "one"), MISFITS.values(), ids=MISFITS)
def test_a_visit_that_does_not_fit_the_state_is_refused(state, one):
    with pytest.raises(TransientInputError, match=r"visit 5 to .* does not follow the state of m"):
        check_fits(replace(one, config="m"), state, 4)


def test_metrics_are_means_over_all_samples(here):
    """Of partitions of unequal sizes."""
    reports = [here(DROPPING, one) for one in hops(DROPPING, ORDERS["adam"][:2])]
    network = here.context.build_network(DROPPING, (np.zeros((1, 8, 8, 1), "f4"), np.zeros(1, int)))
    here.context.kept.saver.finish()
    network.restore(CheckpointFolder(here.tasks.checkpoints(DROPPING)).load().arrays)
    opened = open_hops(here.context, "r", here.tasks.ensemble).partitions
    every = [opened.open(number)[1] for number in range(len(PARTS))]
    x, y = (np.concatenate([getattr(source, name) for source in every]) for name in "xy")
    expected = network.evaluate([((x, y), len(x))])
    assert {name: reports[-1].result.metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)
