"""Specifications of runs by their plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetctl.app.run.spec import as_planned
from hetctl.model.ensemble import Ensemble, Functions, Member
from hetctl.model.plan import Plan
from hetctl.model.profile import MemberProfile
from hetctl.model.run import RunSpec
from hetctl.model.site import Queue, Site

SITE = Site("lab", "slurm", "srun", 4, 2, 8, 10**9, (Queue("gpu", 4, 3600),))
ENSEMBLE = Ensemble("e", "pytorch", Functions("m:i", "m:f"), (Member("a"), Member("b")), "/shared/e")
SPEC = RunSpec("e-001", ENSEMBLE, SITE, "fluid", 2, "gpu", 3600, 180, (), "/shared/c")
PLAN = Plan("fluid", "makespan", 2, 2, 50.0, 40.0, 1.25, ())
MEASURED = MemberProfile("a", {1: 100.0}, None, 1000)


@pytest.mark.parametrize(
    ("rates", "seen", "predicted_s"), [({1: 90.0}, {}, 50.0), ({}, {"": {1: 90.0}}, 50.0), ({}, {}, None)]
)
def test_measured_and_seen_rates_predict_a_run_and_guesses_do_not(rates, seen, predicted_s):
    profiles = (MEASURED, MemberProfile("b", rates, None, 1000, seen_rates=seen))
    assert as_planned(replace(SPEC, profiles=profiles), PLAN, None).predicted_s == predicted_s
