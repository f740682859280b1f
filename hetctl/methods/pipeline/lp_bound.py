"""Lower bound of the bottleneck of all partitions over a group of GPUs, by linear relaxation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.pipeline.layers import LayerProfile
from hetctl.methods.pipeline.stage_costs import least_bytes


def lower_bound_s(profile: LayerProfile, gpu_types: Sequence[str], memory_bytes: Mapping[str, int]) -> float:
    """Return tau, the least time in seconds of the slowest GPU with fractional layers and free transfers.

    min tau : sum_g x_lg = 1, sum_l c_lg x_lg <= tau, sum_l mem_l x_lg <= cap_g, x >= 0. GPUs of one type
    share their variables, since by symmetry there is an optimum in which these are equal.

    Parameters
    ----------
    gpu_types : sequence of str
        Type of each GPU of the group.

    Returns
    -------
    float
        The bound; infinite if the layers do not fit.
    """
    from scipy.optimize import linprog
    from scipy.sparse import csr_array, eye_array, hstack

    counts = Counter(gpu_types)
    kinds, layers = sorted(counts), len(profile.layers)
    needed = least_bytes(profile)
    # Scaled to about 1, since the solver's tolerances are absolute and bytes exceed seconds by far.
    most_bytes, most_s = max(1, int(needed.sum())), max(_seconds(profile, kind).sum() for kind in kinds)
    rows = []
    limits = []
    for number, kind in enumerate(kinds):
        seconds = np.zeros(len(kinds) * layers + 1)
        columns = slice(number * layers, (number + 1) * layers)
        seconds[columns] = _seconds(profile, kind) / most_s
        seconds[-1] = -counts[kind]
        used_bytes = np.zeros_like(seconds)
        used_bytes[columns] = needed / most_bytes
        rows += [seconds, used_bytes]
        limits += [0.0, counts[kind] * memory_bytes[kind] / most_bytes]
    whole = hstack([*[eye_array(layers)] * len(kinds), csr_array((layers, 1))], format="csr")
    goal = np.zeros(len(kinds) * layers + 1)
    goal[-1] = 1.0
    found = linprog(goal, csr_array(np.array(rows)), np.array(limits), whole, np.ones(layers), method="highs")
    return float(found.fun * most_s) if found.status == 0 else float(np.inf)


def _seconds(profile: LayerProfile, gpu_type: str) -> NDArray[np.float64]:
    return profile.forward_s(gpu_type) + profile.backward_s(gpu_type)
