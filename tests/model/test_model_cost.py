"""The site's charge for a run."""

from __future__ import annotations

import pytest

from hetctl.model.cost import GPUS, NODES, Billing, Cost, Energy, energy_of
from hetctl.model.site import Queue, Site


@pytest.mark.parametrize(
    ("billing", "gpus", "cost"),
    [
        (Billing(), 8, Cost(4.0, 16.0, 4.0)),
        (Billing(NODES, 0.5), 6, Cost(4.0, 16.0, 2.0)),
        (Billing(GPUS), 8, Cost(4.0, 16.0, 16.0)),
        # Two nodes of four GPUs, of which six are charged.
        (Billing(GPUS, 2.0), 6, Cost(4.0, 12.0, 24.0)),
        (Billing(GPUS), 1, Cost(4.0, 4.0, 4.0)),
    ],
)
def test_jobs_are_charged_by_the_sites_rule(billing, gpus, cost):
    site = Site("s", "slurm", "srun", 2, 4, 8, 2**30, (Queue("q"),), billing=billing)
    assert site.cost(node_seconds=4 * 3600, gpus=gpus) == cost


def test_energy_has_co2_where_the_site_tells_it():
    assert energy_of(None, Billing()) is None
    assert energy_of(7.2e6, Billing()) == Energy(2.0, None)
    assert energy_of(7.2e6, Billing(co2_g_per_kwh=30.0)) == Energy(2.0, 60.0)
