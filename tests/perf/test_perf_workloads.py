from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.profile import MemberProfile
from hetctl.model.training_progress import EpochHistory, EpochResult, Progress, TimedRate
from hetctl.model.training_settings import EPOCHS, SECONDS, STEPS, CheckpointInterval
from hetctl.perf.sharing import GpuTerms
from hetctl.perf.workloads import Workloads, active_workloads


def ensemble(*members: Member) -> Ensemble:
    return Ensemble("e", "tensorflow", Functions("m:i", "m:m"), members, "/nowhere")


def member(name: str, epochs: int = 10, max_gpus: int | None = None, **limits: int) -> Member:
    return Member(name, stop=StopRule(max_epochs=100, expected_epochs=epochs), max_gpus=max_gpus, **limits)


def profile(name: str, **values: object) -> MemberProfile:
    fields: dict[str, object] = {"rates": {1: 10.0, 2: 18.0}, "samples_per_epoch": 100}
    return MemberProfile(name, **{**fields, **values})  # type: ignore[arg-type]


def progress(name: str, epochs: int = 0, part: int = 0, **values: str) -> Progress:
    done = tuple(EpochResult(e + 1, {}, 1.0, 1, 0.0) for e in range(epochs))
    return Progress(name, done, part_samples=part, **values)


def left(profiled: MemberProfile, done: Progress) -> float:
    (workload,) = active_workloads(ensemble(member("a")), {"a": profiled}, {"a": done}, 4)
    return workload.samples_left


def test_active_members_in_the_ensembles_order() -> None:
    whole = ensemble(member("b"), member("a"), member("c"), member("d"))
    found = active_workloads(
        whole,
        {name: profile(name) for name in "abd"},
        {"a": progress("a", failed="killed"), "c": progress("c", converged="done")},
        4,
    )
    assert [workload.name for workload in found] == ["b", "d"]


def test_work_left_counts_epochs_and_the_part_of_one() -> None:
    assert left(profile("a"), progress("a")) == 1000
    assert left(profile("a"), progress("a", epochs=4, part=30)) == 570


def test_a_restart_takes_what_the_last_ones_took() -> None:
    whole = ensemble(member("a"), member("b"))
    workloads = Workloads(whole, {name: profile(name, startup_s=9.0) for name in "ab"}, 4)
    workloads.update({name: progress(name) for name in "ab"})
    assert [c.interruption_s for c in workloads.left.values()] == [9.0, 9.0]
    workloads.update({"a": Progress("a", restarts_s=(0.5, 2.0, 1.0))})
    workloads.update({"b": progress("b", epochs=1)})
    assert [c.interruption_s for c in workloads.left.values()] == [1.0, 1.0]
    assert [c.startup_s for c in workloads.left.values()] == [9.0, 9.0]


@pytest.mark.parametrize(
    ("interval", "save_s"),
    [
        (CheckpointInterval(), 3.0),
        (CheckpointInterval(4, EPOCHS), 0.75),
        (CheckpointInterval(5, STEPS), 1.5),
        (CheckpointInterval(2, SECONDS), 15.0),
    ],
)
def test_an_epoch_loses_the_time_of_its_checkpoints(interval, save_s) -> None:
    """An epoch of 100 samples takes 10 s on one GPU, and 2.5 steps of 40 samples."""
    own = replace(member("a"), batch_size=40, checkpoint=interval)
    known = {"a": profile("a", checkpoint_s=5.0, save_s=3.0)}
    (workload,) = active_workloads(ensemble(own), known, {}, 4)
    assert workload.overhead_s == pytest.approx(save_s)
    assert workload.checkpoint_s == 5.0


def test_known_work_comes_before_expected_epochs() -> None:
    assert left(profile("a", samples=450.0), progress("a", epochs=2, part=30)) == 220
    assert left(profile("a", samples=450.0, samples_per_epoch=None), progress("a", part=50)) == 400


@pytest.mark.parametrize("done", [10, 15])
def test_a_member_beyond_its_expected_epochs_has_one_more(done: int) -> None:
    whole = ensemble(member("a"))
    (workload,) = active_workloads(whole, {"a": profile("a")}, {"a": progress("a", epochs=done, part=30)}, 4)
    assert workload.samples_left == 70
    assert "longer than expected" in workload.notes[-1]


def test_work_left_is_never_below_zero() -> None:
    assert left(profile("a"), progress("a", epochs=9, part=500)) == 0


def test_rates_end_at_the_members_limit_the_clusters_or_the_peak() -> None:
    whole = ensemble(member("a", max_gpus=3), member("b"), member("c"))
    linear = {1: 10.0, 2: 20.0}
    rates = {"a": linear, "b": linear, "c": {1: 10.0, 2: 18.0, 3: 12.0, 4: 11.0}}
    found = active_workloads(whole, {n: profile(n, rates=r) for n, r in rates.items()}, {}, 6)
    assert [workload.max_gpus for workload in found] == [3, 6, 2]


def test_rates_beyond_the_measured_ones_are_guesses() -> None:
    whole = ensemble(member("a"))
    (workload,) = active_workloads(whole, {"a": profile("a", rates={1: 10.0, 2: 18.0, 4: 30.0})}, {}, 8)
    assert (workload.max_gpus, list(workload.spread), workload.is_guess) == (8, [5, 6, 7, 8], False)


def test_uncertain_gains_on_one_type_are_not_those_of_another() -> None:
    by_type = {"slow": {1: 10.0}, "fast": {1: 30.0, 2: 58.0, 4: 110.0}}
    known = {"a": profile("a", rates=by_type["slow"], gpu_type="slow", rates_by_type=by_type)}
    (workload,) = active_workloads(ensemble(member("a")), known, {}, 4)
    fast = workload.on_type("fast")
    assert fast.rates == pytest.approx({1: 30.0, 2: 58.0, 3: 84.0, 4: 110.0})


def test_rates_begin_at_the_least_number_of_gpus() -> None:
    whole = ensemble(member("a", min_gpus=2), member("b", min_gpus=3), member("c", min_gpus=8), member("d"))
    dips = {1: 20.0, 2: 10.0, 3: 9.0, 4: 11.0}
    found = active_workloads(whole, {n: profile(n, rates=dips) for n in "abcd"}, {}, 4)
    assert [list(workload.rates) for workload in found] == [[2, 3, 4], [3, 4], [8], [1]]
    assert found[1].rates == {3: 9.0, 4: 11.0}


def test_no_gpu_is_without_a_sample_of_the_global_batch() -> None:
    whole = ensemble(member("a", global_batch_size=3))
    (workload,) = active_workloads(whole, {"a": profile("a", rates={1: 10.0, 4: 40.0})}, {}, 4)
    assert workload.max_gpus == 3


def test_a_workload_has_the_overheads_of_its_profile() -> None:
    measured = profile("a", startup_s=3.0, evaluate_s=2.0, checkpoint_s=1.0)
    (workload,) = active_workloads(ensemble(member("a")), {"a": measured}, {}, 4)
    assert (workload.startup_s, workload.evaluate_s, workload.checkpoint_s) == (3.0, 2.0, 1.0)
    assert workload.samples_per_epoch == 100


def timed(name: str, rate: float, gpus: int = 1) -> Progress:
    return Progress(name, (EpochResult(1, {}, 1.0, gpus, 0.0, rate=rate, batch_size=32),))


def test_members_without_any_measurement_are_equal_guesses() -> None:
    found = active_workloads(ensemble(member("a"), member("b", min_gpus=2)), {}, {}, 4)
    assert [(list(one.rates), list(one.spread), one.is_guess) for one in found] == [
        ([1, 2, 3, 4], [1, 2, 3, 4], True),
        ([2, 3, 4], [2, 3, 4], True),
    ]
    assert found[0].rates[1] == found[1].rates[2] / 2
    assert found[0].samples_left == 10 * (found[0].samples_per_epoch or 0) > 0
    assert "a guess" in found[0].notes[0]


def test_one_rate_teaches_members_that_are_alike() -> None:
    configs = {name: {"units": 1, "seed": number} for number, name in enumerate("ab")} | {"c": {"units": 4}}
    whole = ensemble(*(Member(name, config) for name, config in configs.items()))
    workloads = Workloads(whole, {}, 4)
    workloads.update({name: Progress(name) for name in "abc"})
    before = workloads.left
    workloads.update({"a": timed("a", 5.0)})
    a, b, c = workloads.left.values()
    assert a.rates == b.rates
    assert a.rates[1] == 5.0
    assert not a.is_guess
    assert list(b.spread) == [2, 3, 4]
    assert c.is_guess
    assert c.rates[1] < before["c"].rates[1] / 2
    assert c.spread[1] < before["c"].spread[1]
    workloads.update({"b": timed("b", 9.5, gpus=2)})
    a, b, c = workloads.left.values()
    assert a.rates == b.rates
    assert a.rates[2] == 9.5
    assert not a.spread.get(2)


def test_busy_shares_count_where_members_may_share_and_are_those_of_a_profile_or_of_their_shape() -> None:
    configs = {name: {"units": 1, "seed": number} for number, name in enumerate("ab")} | {"c": {"units": 4}}
    whole = ensemble(*(Member(name, config) for name, config in configs.items()))
    seen = TimedRate(10.0, 1, 32, None, 0.0, busy=0.3)
    known = {"a": Progress("a", EpochHistory().with_rate(seen)), "b": Progress("b"), "c": Progress("c")}
    profiles = {"c": profile("c", busy=0.7, peak_memory_bytes=500)}
    terms = GpuTerms(4, 1000, 50)
    found = {one.name: one for one in active_workloads(whole, profiles, known, 4, terms=terms)}
    assert [found[name].busy for name in "abc"] == pytest.approx([0.3, 0.3, 0.7])
    assert [found[name].memory for name in "abc"] == pytest.approx([0.25, 0.25, 500 / 700])
    # What one has shown to need, all of its shape need.
    workloads = Workloads(whole, profiles, 4, terms=terms)
    workloads.update(known)
    workloads.update({"a": replace(known["a"], peak_memory_bytes=350)})
    assert [workloads.left[name].memory for name in "abc"] == pytest.approx([0.5, 0.5, 500 / 700])
    # Beside one another they are half as fast as busy shares of 0.3 and 0.7 say.
    beside = TimedRate(5.0, 0, 32, None, 0.0, beside=("c",))
    known["a"] = Progress("a", EpochHistory().with_rate(seen).with_rate(beside))
    found = {one.name: one for one in active_workloads(whole, profiles, known, 4, terms=terms)}
    a, b, c = (found[name] for name in "abc")
    assert (a.shape, a.rates[1]) == (b.shape, 10.0)
    for one, mate in ((a, c), (b, c), (c, a), (c, b)):
        seen_once = one.slowed_beside(mate.shape)
        assert (seen_once.factor, seen_once.spread) == pytest.approx((2**0.9, 0.095), rel=0.01)
    # Of another shape that tells little, until it is seen beside several.
    assert a.slowed_beside(a.shape).factor == pytest.approx(2 ** (0.9 / 3))
    # Out of memory beside others: it shares no more, and neither do members of its shape.
    known["a"] = replace(known["a"], unfit=(("", 0),))
    found = {one.name: one for one in active_workloads(whole, profiles, known, 4, terms=terms)}
    assert [found[name].busy for name in "abc"] == pytest.approx([1.0, 1.0, 0.7])
    assert [one.busy for one in active_workloads(whole, profiles, known, 4)] == [1.0, 1.0, 1.0]


def test_a_regression_over_configs_finds_what_rates_depend_on() -> None:
    sizes = {f"m{size}": size for size in (1, 2, 4, 8, 16)}
    whole = ensemble(*(Member(name, {"width": size, "depth": 3}) for name, size in sizes.items()))
    known = {name: profile(name, rates={1: 800 / size}) for name, size in sizes.items() if size != 8}
    *_, wanted, _ = active_workloads(whole, known, {}, 1)
    assert wanted.is_guess
    assert wanted.rates[1] == pytest.approx(100, rel=0.15)
    assert wanted.spread[1] < 0.5


def test_the_length_of_an_epoch_is_that_of_the_others() -> None:
    known = {"a": profile("a", samples_per_epoch=70), "b": profile("b", samples_per_epoch=None)}
    _, b = active_workloads(ensemble(member("a"), member("b")), known, {}, 4)
    assert (b.samples_per_epoch, b.samples_left) == (70, 700)
    own = {"b": Progress("b", samples_per_epoch=30)}
    _, b = active_workloads(ensemble(member("a"), member("b")), known, own, 4)
    assert b.samples_left == 300


def test_a_trial_has_estimates_by_the_config_that_its_search_drew() -> None:
    units = {"a": 10, "b": 40, "c": 160}
    planned = [Member(name, {"units": size}) for name, size in units.items()]
    profiles = {name: profile(name, rates={1: 4000.0 / size}) for name, size in units.items()}
    workloads = Workloads(ensemble(*planned), profiles, 1)
    nothing = {name: Progress(name) for name in "abc"}
    workloads.update(nothing)
    workloads.replace_config(Member("a", {"units": 80}), MemberProfile("a", {}))
    workloads.update({"a": nothing["a"]})
    a = workloads.left["a"]
    # Its planned config, which was measured, tells of it as the others do.
    assert a.rates[1] == pytest.approx(50.0, rel=0.3)
    assert a.spread[1]
    seen = EpochResult(1, {}, 1.0, 1, 0.0, rate=45.0, batch_size=32)
    workloads.replace_config(Member("b", {"units": 80}), MemberProfile("b", {}))
    workloads.update({"a": Progress("a", (seen,)), "b": nothing["b"]})
    # The other trial has the same shape now.
    assert [(workloads.left[name].rates[1], workloads.left[name].spread) for name in "ab"] == [(45.0, {})] * 2


def test_rates_of_fused_members_are_those_of_their_shape_on_each_type_of_gpu() -> None:
    whole = ensemble(member("a"), member("b"))
    on_slow = (("slow", 1, 10.0), ("slow", 4, 11.0))
    profiles = {name: profile(name, fused_rates=on_slow) for name in "ab"}
    workloads = Workloads(whole, profiles, 1, fuses=lambda _: "one shape")
    workloads.update({name: Progress(name) for name in "ab"})
    assert (workloads.left["b"].fuses, workloads.left["b"].fused) == ("one shape", {1: 10.0, 4: 11.0})
    told = Progress("a", fused_rates=(("fast", 1, 20.0), ("fast", 4, 60.0)))
    workloads.update({"a": told})
    # A process begins with what its own type has shown; a plan takes the type with the greatest gain.
    by_type = {gpu_type: workloads.fused_rates("b", gpu_type) for gpu_type in ("slow", "fast", "other")}
    assert by_type == {"slow": {1: 10.0, 4: 11.0}, "fast": {1: 20.0, 4: 60.0}, "other": {}}
    assert workloads.left["b"].fused_gain(4) == 3.0
    newer = Progress("b", fused_rates=(("fast", 1, 20.0), ("fast", 8, 20.0)))
    for now in ({"b": newer}, {"a": replace(told, part_samples=3)}):
        workloads.update(now)
        assert workloads.fused_rates("a", "fast") == {1: 20.0, 8: 20.0}
    assert workloads.left["a"].fused == {1: 10.0, 4: 11.0}


def after(name: str, losses: list[float], **values: str | None) -> Progress:
    done = tuple(EpochResult(e, {"val_loss": loss}, 1.0, 1, 0.0) for e, loss in enumerate(losses, start=1))
    return Progress(name, done, **values)  # type: ignore[arg-type]


steps = st.tuples(st.sampled_from("abcde"), st.sampled_from([None, None, None, "converged", "failed"]))


@given(st.lists(steps, max_size=40), st.lists(st.floats(0.1, 0.9), min_size=5, max_size=5))
def test_workloads_kept_up_to_date_are_those_found_at_once(
    course: list[tuple[str, str | None]], slopes: list[float]
) -> None:
    rule = StopRule(patience=2, min_delta=0.02, max_epochs=60)
    whole = ensemble(member("e"), *(Member(name, stop=rule) for name in "abcd"))
    slope_of = dict(zip("abcde", slopes, strict=True))
    profiles = {name: profile(name) for name in "abcde"}
    now = {name: Progress(name) for name in "abcde"}
    workloads = Workloads(whole, profiles, 4)
    workloads.update(now)
    for name, end in course:
        epochs = len(now[name].epochs) + 1
        losses = [1 / (slope_of[name] * epoch + 0.2) + 0.5 for epoch in range(1, epochs + 1)]
        now[name] = after(name, losses, **({end: "done"} if end else {}))
        workloads.update({name: now[name]})
        assert tuple(workloads.left.values()) == active_workloads(whole, profiles, now, 4)


def test_edited_workloads_are_those_of_the_edited_members() -> None:
    rates = {"a": {1: 90.0, 2: 170.0}, "b": {1: 70.0}}
    profiles = {name: profile(name, rates=rates.get(name, {})) for name in "abcd"}
    units = {"a": 10, "b": 20, "c": 30, "d": 30}
    members = {name: Member(name, {"units": units[name]}, max_gpus=4) for name in "abcd"}
    members["d"] = replace(members["d"], profile_as="c")
    now = {name: progress(name, epochs=1) for name in units}
    new = Member("e", {"units": 20}, max_gpus=2)
    edits = [
        {},
        {"e": new},
        {"a": replace(members["a"], stop=StopRule(max_epochs=7)), "b": replace(members["b"], min_gpus=2)},
        {"d": replace(members["d"], profile_as=None), "e": new, "c": replace(members["c"], profile_as="a")},
    ]
    for edit in edits:
        workloads = Workloads(ensemble(*members.values()), profiles, 4)
        workloads.update(now)
        before, edited = workloads.left, ensemble(*(members | edit).values())
        others = {"b": profile("b", rates={1: 60.0, 4: 200.0})} if "b" in edit else {}
        workloads.edit(edited, others)
        progress_now = now | {name: progress(name) for name in edit if name not in now}
        workloads.update({name: progress_now[name] for name in edit if name not in now})
        assert tuple(workloads.left.values()) == active_workloads(edited, profiles | others, progress_now, 4)
        assert edit or workloads.left["a"] is before["a"]


def test_a_new_member_is_estimated_by_its_config_however_many_there_are() -> None:
    members = [Member(f"m{units}", {"units": units}, max_gpus=1) for units in range(10, 80)]
    profiles = {m.name: profile(m.name, rates={1: 1e5 / m.config["units"]}) for m in members}
    workloads = Workloads(ensemble(*members), profiles, 4)
    workloads.update({m.name: progress(m.name) for m in members})
    whole = ensemble(*members, Member("new", {"units": 40.5}, max_gpus=1))
    workloads.edit(whole, {})
    workloads.update({"new": progress("new")})
    assert workloads.left["new"].rates[1] == pytest.approx(1e5 / 40.5, rel=0.1)


def test_a_member_that_does_not_change_is_not_looked_at_again() -> None:
    workloads = Workloads(ensemble(member("a"), member("b")), {n: profile(n) for n in "ab"}, 4)
    workloads.update({"a": progress("a"), "b": progress("b")})
    before = workloads.left
    workloads.update({"a": progress("a", epochs=1)})
    assert workloads.left["b"] is before["b"]
    assert workloads.left["a"].samples_left < before["a"].samples_left


def test_a_command_that_reports_nothing_takes_as_long_as_those_that_have_ended() -> None:
    scripts = [Member(name, command=("run", name), max_gpus=1) for name in "abc"]
    workloads = Workloads(ensemble(*scripts), {}, 4)
    workloads.update({name: progress(name) for name in "abc"})
    guess, *others = (w.samples_left / w.least_rate for w in workloads.left.values())
    assert others == [guess, guess]
    workloads.update({"a": Progress("a", converged="exit code 0", script_s=50.0)})
    workloads.update({"b": Progress("b", script_s=20.0)})
    assert [w.samples_left / w.least_rate for w in workloads.left.values()] == pytest.approx([30.0, 50.0])
    assert {w.notes[-1] for w in workloads.left.values()} == {"as long as commands that have ended: 50 s"}
    # One that takes longer is not done.
    workloads.update({"b": Progress("b", script_s=500.0)})
    assert workloads.left["b"].samples_left > 0


def test_members_without_a_profile_learn_times_from_training() -> None:
    whole = ensemble(member("a"), member("b"), member("c"))
    workloads = Workloads(whole, {"c": profile("c", startup_s=9.0)}, 4)
    workloads.update({name: progress(name) for name in "abc"})
    timed = EpochHistory().with_rate(TimedRate(50.0, 1, whole.members[0].batch_size, None, 0.04))
    workloads.update({"a": Progress("a", timed, startup_s=4.0, checkpoint_s=1.0)})
    found = [(w.startup_s, w.checkpoint_s) for w in workloads.left.values()]
    assert found == [(4.0, 1.0), (4.0, 1.0), (9.0, 0.0)]
    # Nobody has restarted yet: a tenth of the start, and the checkpoint.
    assert [w.interruption_s for w in workloads.left.values()] == [1.4, 1.4, 9.0]


def numbers(workloads: Workloads) -> dict[str, list[int]]:
    return {name: list(workload.rates) for name, workload in workloads.left.items()}


def test_out_of_memory_at_a_first_start_leaves_other_numbers_of_gpus_to_a_shape() -> None:
    other = replace(member("other"), batch_size=7)
    workloads = Workloads(ensemble(member("a"), member("b"), other), {}, 8)
    workloads.update({name: progress(name) for name in ("a", "b", "other")})
    before = numbers(workloads)
    assert workloads.has_other_gpus("a", 1)
    workloads.update({"a": Progress("a", unfit=(("", 1),))})
    assert [least for least, *_ in numbers(workloads).values()] == [2, 2, 1]
    assert numbers(workloads)["other"] == before["other"]
    workloads.update({"a": Progress("a", unfit=(("", 1), ("", 2), ("", 4)))})
    assert workloads.has_other_gpus("b", 2)
    assert not workloads.has_other_gpus("a", 8)


def test_out_of_memory_where_a_member_has_trained_is_its_own() -> None:
    seen = EpochHistory.of([EpochResult(1, {}, 1.0, 2, 0.0, 90.0, 32)])
    workloads = Workloads(ensemble(replace(member("a"), batch_size=32)), {}, 8)
    workloads.update({"a": Progress("a", seen)})
    assert not workloads.has_other_gpus("a", 2)
    assert workloads.has_other_gpus("a", 8)
    workloads.update({"a": Progress("a", seen, unfit=(("", 8),))})
    assert numbers(workloads)["a"][-1] <= 4


def test_out_of_memory_counts_on_gpus_of_the_same_type() -> None:
    measured = MemberProfile("a", {1: 100.0}, None, 10, gpu_type="V100", rates_by_type={"V100": {1: 100.0}})
    for profiles in ({}, {"a": measured}):
        workloads = Workloads(ensemble(member("a"), member("b")), profiles, 8)
        workloads.update({name: progress(name) for name in "ab"})
        assert workloads.has_other_gpus("a", 1, "P100")
        assert workloads.has_other_gpus("a", 1, "V100") == (not profiles)
        workloads.update({"a": Progress("a", unfit=(("P100", 1), ("P100", 2)))})
        for name in "ab":
            own = workloads.left[name]
            assert list(own.on_type("P100").rates) == list(range(4, 9))
            assert own.on_type("V100").min_gpus == own.min_gpus == 1
        assert workloads.has_other_gpus("b", 4, "P100")


def test_out_of_memory_in_earlier_runs_counts_for_a_shape_with_its_batch() -> None:
    profiles = {"a": MemberProfile("a", {}, unfit=(("", 1),))}
    members = (replace(member(name), batch_size=32, min_batch_size=8) for name in "ab")
    workloads = Workloads(ensemble(*members), profiles, 8)
    workloads.update({name: progress(name) for name in "ab"})
    assert [least for least, *_ in numbers(workloads).values()] == [2, 2]
    workloads.update({"b": Progress("b", batch_size=16)})
    assert [least for least, *_ in numbers(workloads).values()] == [2, 1]


def test_a_smaller_batch_comes_before_more_gpus_but_after_fewer() -> None:
    shrinking = replace(member("a"), batch_size=32, min_batch_size=16)
    workloads = Workloads(ensemble(shrinking), {}, 8)
    workloads.update({"a": progress("a")})
    assert not workloads.has_other_gpus("a", 1)
    workloads.update({"a": Progress("a", [EpochResult(1, {}, 1.0, 1, 0.0, 90.0, 32)])})
    assert workloads.has_other_gpus("a", 4)
