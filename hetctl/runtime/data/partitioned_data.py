"""Training data whose partitions lie on the nodes' own disks: which rank of a group holds which of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hetctl.model.ensemble import Member, Partitions
from hetctl.model.errors import BadInputError
from hetctl.model.site import NetworkInterfaces, Timeouts
from hetctl.runtime.data.loaders import ArrayLoader, Loader
from hetctl.runtime.data.partition_folder import path_on_node
from hetctl.runtime.data.partition_loader import PartitionLoader, SampleExchange
from hetctl.runtime.data.sample_accesses import SampleAccesses
from hetctl.runtime.data.sampler import UNSHUFFLED, Stream, parts_of, streams_of
from hetctl.runtime.data.sources import ArraySource, as_sources
from hetctl.runtime.worker.group import Group, RankInfo, all_gather


@dataclass(frozen=True)
class PartitionedData:
    """Partitions that this node has, for any member.

    Parameters
    ----------
    training, validation : mapping of int to ArraySource
        Samples by the number of the partition.
    """

    settings: Partitions
    training: Mapping[int, ArraySource]
    validation: Mapping[int, ArraySource]

    def open(
        self,
        group: Group,
        rank_info: RankInfo,
        member: Member,
        interfaces: NetworkInterfaces,
        timeouts: Timeouts,
        *,
        partial: bool = False,
    ) -> tuple[Loader, Loader]:
        """Return loaders of the training and of the validation samples of a member.

        If every rank can read all partitions, nothing has to migrate.

        Parameters
        ----------
        partial : bool
            Use the partitions that the nodes of the group have, even if others are missing.

        Raises
        ------
        BadInputError
            If a partition is missing, or a rank would hold none.
        """
        found = [set(numbers) for numbers in all_gather(group, sorted(self.training))]
        wanted = sorted(set.union(*found)) if partial else range(self.settings.count)
        homes = homes_of(found, wanted, self.settings.described)
        if all(here.issuperset(wanted) for here in found):
            return self._open_all(rank_info, member)
        own = [number for number, home in zip(wanted, homes, strict=True) if home == rank_info.rank]
        training = joined(self.training[number] for number in own)
        sizes = all_gather(group, {str(number): len(self.training[number]) for number in own})
        samples = {int(number): size for rank in sizes for number, size in rank.items()}
        accesses = SampleAccesses(np.repeat(homes, [samples[number] for number in wanted]), member.seed)
        loader = PartitionLoader(
            rank_info.rank,
            (training.x, training.y),
            accesses,
            parts_of(member.chunk(rank_info.size), (1,) * rank_info.size),
            SampleExchange(group, rank_info, training.spec, interfaces, timeouts),
        )
        validation = joined(self.validation[number] for number in own)
        return loader, ArrayLoader(validation, Stream(len(validation), member.rows_evaluated, UNSHUFFLED))

    def _open_all(self, rank_info: RankInfo, member: Member) -> tuple[Loader, Loader]:
        """Return loaders of a rank that has all samples."""
        training, validation = self._all
        stream, held_out = streams_of(member, len(training), len(validation), rank_info.rank, rank_info.size)
        return ArrayLoader(training, stream), ArrayLoader(validation, held_out)

    @cached_property
    def _all(self) -> tuple[ArraySource, ArraySource]:
        return joined(self.training.values()), joined(self.validation.values())


def load_partitions(settings: Partitions, data: str | None, input_fn: Callable[..., Any]) -> PartitionedData:
    """Read all partitions that exist on this node with ``input_fn(data, path)``.

    Raises
    ------
    BadInputError
        If there is none, or one does not consist of arrays.
    """
    paths = partition_paths(settings)
    if not paths:
        raise BadInputError(
            f"none of the {settings.count} partitions {settings.described} is on {os.uname().nodename}",
            "place them on the nodes, or correct `partitions:` in the ensemble file",
        )
    training: dict[int, ArraySource] = {}
    validation: dict[int, ArraySource] = {}
    for number, path in paths.items():
        training[number], validation[number] = read_partition(path, data, input_fn)
    return PartitionedData(settings, training, validation)


def read_partition(
    path: str, data: str | None, input_fn: Callable[..., Any]
) -> tuple[ArraySource, ArraySource]:
    """Return the training and the validation samples of a partition.

    Raises
    ------
    BadInputError
        If it does not consist of arrays.
    """
    training, validation = as_sources(input_fn(data, path))
    if not (isinstance(training, ArraySource) and isinstance(validation, ArraySource)):
        raise BadInputError(
            f"input_fn returned other data than arrays for partition {path}",
            "return pairs of arrays (x, y): only they can migrate between nodes",
        )
    return training, validation


def partition_paths(settings: Partitions) -> dict[int, str]:
    """Return the paths that exist on this node, by the number of the partition."""
    paths = {number: path_on_node(path) for number, path in enumerate(settings.paths())}
    return {number: str(path) for number, path in paths.items() if path.exists()}


def joined(sources: Iterable[ArraySource]) -> ArraySource:
    """Return the samples of several sources, one after another."""
    every_x, every_y = zip(*((np.asarray(source.x), np.asarray(source.y)) for source in sources), strict=True)
    return ArraySource(np.concatenate(every_x), np.concatenate(every_y), "partitioned")


def homes_of(found: Sequence[Collection[int]], wanted: Sequence[int], paths: str) -> tuple[int, ...]:
    """Return the rank that holds each partition: of those which have it, the one with the fewest so far.

    Parameters
    ----------
    found : sequence
        Partitions on the node of each rank.
    wanted : sequence of int
        Numbers of the partitions.
    paths : str
        Their paths, for messages.

    Raises
    ------
    BadInputError
        If a partition is on no node, or a rank would hold none.
    """
    ranks = {number: [rank for rank, here in enumerate(found) if number in here] for number in wanted}
    missing = [str(number) for number, having in ranks.items() if not having]
    if missing:
        raise BadInputError(
            f"partitions {', '.join(missing)} of {paths} are on none of the nodes of this group",
            "give the member GPUs on all nodes that have partitions, or place them on its nodes",
        )
    homes: dict[int, int] = {}
    load = [0] * len(found)
    # Those with the fewest choices first: later ones can still go where these could not.
    for number in sorted(ranks, key=lambda number: len(ranks[number])):
        homes[number] = min(ranks[number], key=load.__getitem__)
        load[homes[number]] += 1
    if 0 in load:
        raise BadInputError(
            f"rank {load.index(0)} of {len(found)} has no partition of {paths}",
            "make at least as many partitions on each node as it has GPUs, or use fewer GPUs",
        )
    return tuple(homes[number] for number in wanted)
