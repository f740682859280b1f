"""The table of transitions of runs and jobs: complete, without contradictions, and as documented."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetctl.model.job import (
    ENDED,
    JOB_REASONS,
    JOB_TRANSITIONS,
    RESUMABLE,
    RUN_AFTER,
    RUN_TRANSITIONS,
    UNDER_WAY,
    Job,
    JobState,
    RunReason,
    check_job_removal,
    check_run_removal,
    moved,
    run_after,
)

PAGE = Path(__file__).parents[2] / "docs" / "running.md"
SHOWN = (RunReason.DRIVER_STARTED, RunReason.JOB_WAITS, RunReason.JOB_IN_SUBMISSION, RunReason.NO_JOB)
"""Reasons by which `hetctl status` shows a run that is under way; they are not stored."""
STATES = (*UNDER_WAY, *RESUMABLE, *ENDED)
run_states = st.sampled_from(STATES)
job_states = st.sampled_from(JobState)


def job(state):
    return Job(0, "hetctl-x", "1", state, 1, 60, 0.0)


def reached(start, edges):
    found, border = {start}, [start]
    while border:
        state = border.pop()
        border += [after for before, after in edges if before == state and after not in found]
        found |= {after for before, after in edges if before == state}
    return found - {None}


def test_every_state_of_a_run_is_reached_from_nothing():
    edges = [(before, after) for (before, _), after in RUN_AFTER.items()]
    assert reached(None, edges) == set(STATES)


def test_every_state_of_a_job_is_reached_from_nothing():
    assert reached(None, list(JOB_REASONS)) == set(JobState)


def test_every_reason_has_one_transition():
    assert Counter(reason for _, reason, _ in RUN_TRANSITIONS) == Counter(RunReason)
    pairs = Counter((state, after) for before, _, after in JOB_TRANSITIONS for state in before)
    assert set(pairs.values()) == {1}


def test_a_run_that_ended_can_only_continue():
    reasons = {reason for before, reason in RUN_AFTER if before in ENDED}
    assert reasons == {RunReason.CONTINUED, RunReason.REMOVED}


def test_a_job_has_no_transition_if_and_only_if_it_is_over():
    assert {before for before, _ in JOB_REASONS} == {None} | {s for s in JobState if not s.over}


def test_what_is_shown_of_a_run_stays_under_way():
    assert {RUN_AFTER[state, reason] for state in UNDER_WAY for reason in SHOWN} == set(UNDER_WAY)


@given(run_states, st.sampled_from(RunReason))
def test_a_transition_of_a_run_is_in_the_table_or_an_error(state, reason):
    if RUN_AFTER.get((state, reason)) is not None:
        assert run_after(state, reason) in STATES
    else:
        with pytest.raises(ValueError, match="no transition"):
            run_after(state, reason)


@given(st.lists(st.sampled_from(RunReason), max_size=30))
def test_a_walk_of_a_run_stays_in_the_table_until_it_ends(reasons):
    state = run_after(None, RunReason.BEGUN)
    for reason in reasons:
        if (state, reason) in RUN_AFTER and reason not in (RunReason.REFUSED, RunReason.REMOVED):
            assert state not in ENDED or reason is RunReason.CONTINUED
            state = run_after(state, reason)
    assert state in STATES


@given(job_states, job_states)
def test_a_transition_of_a_job_is_in_the_table_or_an_error(before, after):
    if before is after or (before, after) in JOB_REASONS:
        assert moved(job(before), after, ended_at=3.0).state is after
    else:
        with pytest.raises(ValueError, match=f"is {before.value} and cannot become {after.value}"):
            moved(job(before), after)


@given(run_states)
def test_only_a_run_that_was_refused_or_does_not_go_on_is_removed(state):
    may = {RunReason.REFUSED: ("queued",), RunReason.REMOVED: (*RESUMABLE, *ENDED)}
    for reason in RunReason:
        if state in may.get(reason, ()):
            check_run_removal(state, reason)
        else:
            with pytest.raises(ValueError, match="not to be removed"):
                check_run_removal(state, reason)


@given(job_states)
def test_only_a_job_in_submission_is_removed(state):
    if state is JobState.SUBMITTING:
        check_job_removal(state)
    else:
        with pytest.raises(ValueError, match="not to be removed"):
            check_job_removal(state)


def names(states):
    words = [f"`{getattr(state, 'value', state)}`" for state in states if state is not None]
    return ", ".join(words) or "-"


def table_of(heading):
    section = re.search(rf"^### {heading}\n(.*?)(?=^##|\Z)", PAGE.read_text("utf-8"), re.M | re.S)
    return [line for line in section[1].splitlines() if line.startswith("| ")][1:]


def test_documented_transitions_of_runs_are_those_of_the_code():
    assert table_of("Transitions of a run") == [
        f"| {names(before)} | {reason.value} | {names([after])} |"
        for before, reason, after in RUN_TRANSITIONS
    ]


def test_documented_transitions_of_jobs_are_those_of_the_code():
    assert table_of("Transitions of a job") == [
        f"| {names(before)} | {reason} | {names([after])} |" for before, reason, after in JOB_TRANSITIONS
    ]


def test_every_state_of_a_run_is_described():
    text = re.search(r"^## States of a run\n(.*?)^###", PAGE.read_text("utf-8"), re.M | re.S)[1]
    assert re.findall(r"^\| `([\w-]+)` \|", text, re.M) == list(STATES)
