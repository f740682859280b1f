"""Cost of a run: hours of nodes and GPUs that its jobs hold, the site's charge for them, and energy."""

from __future__ import annotations

from typing import Annotated

from hetctl.model.file_keys import Key
from hetctl.model.values import dataclass

NODES, GPUS = "nodes", "gpus"
"""Units that a site charges a job for: its whole nodes, or its GPUs."""
JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Billing:
    """Rule by which a site charges for jobs, and the footprint of its electricity."""

    unit: Annotated[
        str, Key("Unit that jobs are charged for: whole nodes, or the GPUs of a job.", choices=(NODES, GPUS))
    ] = NODES
    factor: Annotated[float, Key("Charge for an hour of a unit.", gt=0)] = 1.0
    co2_g_per_kwh: Annotated[
        float | None, Key("Grams of CO2 for a kWh of the site's electricity; null: not told.", ge=0)
    ] = None


USUAL_BILLING = Billing()


@dataclass(frozen=True)
class Cost:
    """Resources that jobs hold, or are predicted to hold.

    Parameters
    ----------
    node_hours, gpu_hours : float
        Hours of the jobs, times their nodes and the GPUs that are charged or, of whole nodes, all.
    charged : float
        Charge of the site for them, by its `Billing`.
    """

    node_hours: float
    gpu_hours: float
    charged: float


@dataclass(frozen=True)
class Energy:
    """Energy in kWh, and grams of CO2; None if the site file does not tell these."""

    kwh: float
    co2_g: float | None = None


def energy_of(joules: float | None, billing: Billing) -> Energy | None:
    """Return measured joules as energy with its CO2; None if nothing was measured."""
    if joules is None:
        return None
    kwh = joules / JOULES_PER_KWH
    return Energy(kwh, None if billing.co2_g_per_kwh is None else kwh * billing.co2_g_per_kwh)
