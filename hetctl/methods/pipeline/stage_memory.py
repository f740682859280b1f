"""Memory of a stage, by the minibatches that it holds in flight (HetPipe, sections 4 and 7)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetctl.methods.pipeline.layers import LayerProfile


def minibatches_held(stages_after: int, in_flight: int) -> int:
    """Return how many minibatches a stage holds between their forward and backward passes.

    The last stage does both passes at once and holds one, the first one up to all (section 4). A
    pipeline that does each pass of each stage once in a period hands a minibatch down and up in two
    periods for each stage that follows, so no stage needs to hold more than that to be always busy.
    """
    return min(in_flight, 2 * stages_after + 1)


def most_in_flight(gpus: int) -> int:
    """Return what keeps a pipeline of so many GPUs busy, whatever its stages: more hold no more memory."""
    return 2 * gpus - 1


def stage_bytes(profile: LayerProfile, held: int) -> NDArray[np.int64]:
    """Return the bytes of every stage, shape (layers, layers): first and last layer.

    For each minibatch held: the weights that it began with (w_p in section 4), what its layers keep,
    and the activations received. Once: the updates of the wave so far. Where the last layer comes
    before the first, the value means nothing.
    """
    received = np.concatenate([[0], profile.activation_bytes[:-1]])
    weights = np.concatenate([[0], np.cumsum(profile.parameter_bytes)])
    kept = np.concatenate([[0], np.cumsum(profile.kept_bytes)])
    of_each = (weights + kept)[None, 1:] - (weights + kept - np.append(received, 0))[:-1, None]
    bytes_: NDArray[np.int64] = held * of_each + weights[None, 1:] - weights[:-1, None]
    return bytes_


def least_bytes(profile: LayerProfile) -> NDArray[np.int64]:
    """Return what each layer needs in any stage, shape (layers,): that of one minibatch held."""
    return 2 * profile.parameter_bytes + profile.kept_bytes
