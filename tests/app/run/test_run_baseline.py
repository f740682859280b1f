"""Times of a finished run with other planners, at the rates seen in training."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.app.plan.planning import ROUND_OVERHEAD_S
from hetctl.app.run import baseline
from hetctl.app.run.baseline import comparison_of
from hetctl.model.ensemble import Ensemble, Functions, Member, StopRule
from hetctl.model.events import Event
from hetctl.model.profile import MemberProfile
from hetctl.model.run import RunSpec
from hetctl.model.site import Queue, Site
from hetctl.model.training_progress import EpochResult, Progress

SITE = Site("here", "local", "local", 1, 2, 2, 2**30, (Queue("local"),), device="slot")
STOP = StopRule(max_epochs=40, expected_epochs=40)
MEMBERS = tuple(Member(name, stop=STOP) for name in "abc")
PROFILES = tuple(MemberProfile(m.name, {1: 100.0, 2: 150.0}, None, 1000, startup_s=1.0) for m in MEMBERS)
SPEC = RunSpec(
    *("r", Ensemble("e", "tensorflow", Functions("m:i", "m:m"), MEMBERS, "/x"), SITE, "fluid", 2, "local"),
    *(36000, 10, PROFILES, "/c"),
)


def epochs(
    count: int, rate: float, gpus: int = 1, overhead_s: float | None = None
) -> tuple[EpochResult, ...]:
    return tuple(
        EpochResult(n, {}, 1000 / rate, gpus, float(n), rate, 32, None, overhead_s)
        for n in range(1, count + 1)
    )


def done(name: str, count: int, rate: float) -> Progress:
    return Progress(name, epochs(count, rate), converged="done")


FINISHED = {"a": done("a", 4, 200.0), "b": done("b", 2, 100.0), "c": done("c", 3, 50.0)}


def test_the_baseline_trains_the_same_epochs_at_the_seen_rates() -> None:
    """On two slots: c takes 60 s on one, and a and b 20 s each on the other."""
    found = comparison_of(SPEC, FINISHED, [])
    assert found is not None
    assert (found.baseline, found.epochs) == ("independent", 9)
    assert found.baseline_s == pytest.approx(1 + 60)
    assert found.simulated_s <= found.baseline_s


def test_larger_clusters_train_the_same_epochs_and_say_up_to_where_rates_are_known() -> None:
    """With a GPU for each member all wait for c, which fluid gives more GPUs."""
    found = comparison_of(SPEC, FINISHED, [])
    assert found is not None
    assert [(one.nodes, one.gpus) for one in found.clusters] == [(1, 4), (2, 8), (4, 16)]
    assert [one.baseline_s for one in found.clusters] == [pytest.approx(1 + 60)] * 3
    assert all(one.fluid_s < 0.8 * one.baseline_s for one in found.clusters)
    assert found.known_gpus == 2


def test_clusters_too_small_for_a_member_are_left_out() -> None:
    wide = replace(MEMBERS[2], min_gpus=6)
    spec = replace(
        SPEC,
        gpus=8,
        site=replace(SITE, nodes=4),
        ensemble=replace(SPEC.ensemble, members=(*MEMBERS[:2], wide)),
    )
    found = comparison_of(spec, FINISHED, [])
    assert found is not None
    assert [one.gpus for one in found.clusters] == [8, 16]


def test_a_large_ensemble_is_simulated_on_no_other_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "MOST_SIMULATED", 2)
    found = comparison_of(SPEC, FINISHED, [])
    assert found is not None
    assert found.clusters == ()


def test_both_simulations_include_the_start_of_the_first_rank() -> None:
    plain = comparison_of(SPEC, FINISHED, [])
    late = comparison_of(SPEC, FINISHED, [Event("a", 0, "first_step", 5.0, {"startup_s": 8.0})])
    assert plain is not None
    assert late is not None
    assert late.baseline_s - plain.baseline_s == pytest.approx(7.0)
    assert late.simulated_s - plain.simulated_s == pytest.approx(7.0)
    # Without profiles, members have the start-up that the run has seen, with that of the rank in it.
    seen, events = (
        replace(FINISHED["a"], startup_s=8.0),
        [Event("a", 0, "first_step", 5.0, {"startup_s": 8.0})],
    )
    unmeasured = replace(SPEC, profiles=tuple(replace(one, rates={}, startup_s=0.5) for one in SPEC.profiles))
    results = [comparison_of(unmeasured, {**FINISHED, "a": seen}, given) for given in ([], events)]
    assert results[0] == results[1] is not None


def test_what_epochs_took_besides_counts() -> None:
    slow = {name: replace(p, epochs=epochs(len(p.epochs), 100.0, 1, 2.0)) for name, p in FINISHED.items()}
    found = comparison_of(SPEC, slow, [])
    assert found is not None
    assert found.baseline_s == pytest.approx(1 + 3 * 12 + ROUND_OVERHEAD_S + 1 + 2 * 12)


@pytest.mark.parametrize("left", [{"converged": None}, {"converged": None, "failed": "killed"}])
def test_run_that_is_not_finished_is_compared_with_nothing(left: dict[str, str | None]) -> None:
    assert comparison_of(SPEC, {**FINISHED, "a": replace(FINISHED["a"], **left)}, []) is None


def test_a_run_without_epochs_is_compared_with_nothing() -> None:
    """Commands may end without a report."""
    silent = {name: Progress(name, (), converged="its command has ended") for name in FINISHED}
    assert comparison_of(SPEC, silent, []) is None
