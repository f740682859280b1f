"""Memory of a stage by the minibatches that it holds in flight (HetPipe, sections 4 and 7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.pipeline.layers import LayerProfile


def minibatches_held(stages_after: int, in_flight: int) -> int:
    """Return the number of minibatches that a stage holds between their forward and backward passes.

    The last stage runs both passes as one and holds one minibatch, the first one up to all (section 4). In
    a pipeline in which each stage runs each pass once per period, a minibatch takes at most two periods per
    following stage to return, so no stage needs to hold more to be always busy.
    """
    return min(in_flight, 2 * stages_after + 1)


def most_in_flight(gpus: int) -> int:
    """Return the minibatches that keep any pipeline of `gpus` GPUs busy; more need no more memory."""
    return 2 * gpus - 1


def stage_bytes(profile: LayerProfile, held: int) -> NDArray[np.int64]:
    """Return the bytes of every stage, shape (layers, layers): first and last layer.

    For each minibatch held: its version of the weights (w_p in section 4), the data kept by its layers,
    and the activations received. Once: the accumulated updates of the wave. The value is meaningless if
    the last layer comes before the first.
    """
    received = np.concatenate([[0], profile.activation_bytes[:-1]])
    weights = np.concatenate([[0], np.cumsum(profile.parameter_bytes)])
    kept = np.concatenate([[0], np.cumsum(profile.kept_bytes)])
    of_each = (weights + kept)[None, 1:] - (weights + kept - np.append(received, 0))[:-1, None]
    bytes_: NDArray[np.int64] = held * of_each + weights[None, 1:] - weights[:-1, None]
    return bytes_


def least_bytes(profile: LayerProfile) -> NDArray[np.int64]:
    """Return the bytes that each layer needs in any stage, shape (layers,): those of one minibatch held."""
    return 2 * profile.parameter_bytes + profile.kept_bytes
