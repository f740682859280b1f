"""Averages of the weights of members with one shape ("soups"), and what such a network predicts."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hetctl.app.run.export import NO_GPU, Source
from hetctl.model.errors import BadInputError
from hetctl.runtime.agent.binding import Binding
from hetctl.runtime.data.batches import validation_batches
from hetctl.runtime.data.input_pipeline import Sharing
from hetctl.runtime.data.round_inputs import InputShare
from hetctl.runtime.frameworks.packed_state import STRUCTURE
from hetctl.runtime.worker.checkpoint import CheckpointFolder, Loaded
from hetctl.runtime.worker.context import WorkerContext
from hetctl.runtime.worker.group import RankInfo
from hetctl.runtime.worker.member_trainer import own_arrays

Trained = tuple[Source, int]
"""A member, and the epoch of its checkpoint."""
MODEL = "model/"
"""Prefix of the names of a network's weights and statistics in a checkpoint."""
SIXTEEN_BITS = b'"bfloat16"'
MOST_BYTES = 2**40


def of_one_shape(trained: Sequence[Trained]) -> list[int]:
    """Return the places of the most members whose weights have the same names and shapes, and one code."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for place, (source, epoch) in enumerate(trained):
        loaded = _loaded(source, epoch)
        # Parts of a network in several files are not averaged.
        if loaded.arrays is not None and not loaded.shards:
            shapes = [
                (name, array.shape, array.dtype.str)
                for name, array in sorted(loaded.arrays.items())
                if name.startswith(MODEL)
            ]
            groups[str(source.member.code), str(shapes)] += [place] if shapes else []
    return max(groups.values(), key=len, default=[])


def averaged_network(trained: Sequence[Trained]) -> Loaded:
    """Return the checkpoint of the first member, with the average of all members' weights.

    Raises
    ------
    BadInputError
        If a checkpoint is damaged, or several have weights of 16 bits.
    """
    (first, epoch), *others = trained
    loaded = _loaded(first, epoch)
    if loaded.arrays is None:
        raise BadInputError(f"the checkpoint of epoch {epoch} of {first.member.name} is damaged")
    if not others:
        return loaded
    if SIXTEEN_BITS in loaded.arrays.get(STRUCTURE, np.empty(0, np.uint8)).tobytes():
        raise BadInputError("weights of 16 bits are not averaged", "leave out --soups")
    names = [
        name for name, array in loaded.arrays.items() if name.startswith(MODEL) and array.dtype.kind == "f"
    ]
    sums = {name: loaded.arrays[name].astype(np.float64) for name in names}
    for source, number in others:
        arrays = _loaded(source, number).arrays
        if arrays is None:
            raise BadInputError(f"the checkpoint of epoch {number} of {source.member.name} is damaged")
        for name in names:
            sums[name] += arrays[name]
    means = {name: (total / len(trained)).astype(loaded.arrays[name].dtype) for name, total in sums.items()}
    return replace(loaded, arrays=loaded.arrays | means)


def _loaded(source: Source, epoch: int) -> Loaded:
    folder = CheckpointFolder(source.checkpoints, member=source.member)
    return folder.load(lambda state: len(state.epochs) == epoch and not state.part_samples)


def outputs_of_averages(
    trained: Sequence[Trained], stack: ExitStack
) -> Callable[[tuple[int, ...]], npt.NDArray[Any]]:
    """Return a function of some members' places: what the network with their average weights predicts.

    It predicts all validation samples, in this process, without a GPU.

    Parameters
    ----------
    trained : sequence of Trained
        Members with one shape; the first one's config builds the network.
    stack : ExitStack
        Stack that ends what reads the samples.
    """
    os.environ.update(NO_GPU)
    context = WorkerContext(Binding("", 0, None, tuple(sorted(os.sched_getaffinity(0)))), stack)
    built = context.build(trained[0][0].ensemble, RankInfo(0, 1), Sharing(), InputShare(), stack)
    built.network.keep_predictions(built.validation.samples, MOST_BYTES)

    @cache
    def outputs(members: tuple[int, ...]) -> npt.NDArray[Any]:
        loaded = averaged_network([trained[place] for place in members])
        built.network.restore(own_arrays(loaded.arrays or {}))
        built.network.evaluate(validation_batches(built.validation, 1, lambda: None))
        return built.network.predictions()["outputs"]

    return outputs
