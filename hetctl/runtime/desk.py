"""What a rank keeps from one member to the next: its device, its framework, and the samples."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

from hetctl.core.ensemble import Ensemble, Member
from hetctl.runtime.feeds import Feed, Lockstep, Samples
from hetctl.runtime.frameworks import Framework, Network, load_framework
from hetctl.runtime.functions import UserFunctions, load_functions
from hetctl.runtime.group import Group, Place, SingleRank, join_group
from hetctl.runtime.pipeline import OpenFeed, Sharing, all_samples, open_pipeline
from hetctl.runtime.sources import Source, as_sources
from hetctl.runtime.stream import Stream
from hetctl.runtime.wire import Address

DATA_SEED = 0
"""What ``input_fn`` chooses at random is the same for every member, on every rank, in every job."""
SIGN_EVERY_S = 2.0


@dataclass(frozen=True)
class Share:
    """How a member comes by its batches on this rank.

    Parameters
    ----------
    preprocessors : int or None
        How many of the rank's work for it; None: all.
    """

    preprocessors: int | None = None
    lockstep: Lockstep | None = None


@dataclass(frozen=True)
class Built:
    """A member on this rank, ready to be trained."""

    group: Group
    framework: Framework
    network: Network
    training: Feed
    validation: Samples


@dataclass(frozen=True)
class Supplies:
    """What all members of an ensemble need."""

    framework: Framework
    functions: UserFunctions
    samples: int
    open_feed: OpenFeed
    held_out: Source

    @cached_property
    def validation(self) -> Samples:
        """What members are evaluated on; only ranks that evaluate hold it in memory."""
        return all_samples(self.held_out)


class Desk:
    """The place where a rank works on one member after another, all of one ensemble.

    Parameters
    ----------
    cores : tuple of int
        Those that the rank may use.
    keep : ExitStack
        Gives back what was taken of the node.
    announce : callable
        Told where this rank waits for the others of a group that it leads.
    give_sign : callable
        Called every few seconds while there is progress.
    """

    def __init__(
        self,
        cores: tuple[int, ...],
        keep: ExitStack,
        announce: Callable[[Address], None] = lambda _: None,
        give_sign: Callable[[], None] = lambda: None,
    ) -> None:
        self.group: Group = SingleRank()
        self._cores = cores
        self._keep = keep
        self._announce = announce
        self._give_sign = give_sign
        self._next_sign = 0.0
        self._supplies: Supplies | None = None

    def supply(self, ensemble: Ensemble, sharing: Sharing) -> Supplies:
        """Get what all members of the ensemble need, unless it is there."""
        self._supplies = self._supplies or self._get_supplies(ensemble, sharing)
        self.sign()
        return self._supplies

    def build(
        self,
        ensemble: Ensemble,
        member: Member,
        place: Place,
        sharing: Sharing,
        share: Share,
        stack: ExitStack,
    ) -> Built:
        """Get supplies; meet the group; build the network.

        Parameters
        ----------
        stack : ExitStack
            Ends what is this member's own.
        """
        supplies = self.supply(ensemble, sharing)
        self.group = SingleRank()
        self.group = join_group(place, supplies.framework, self._announce)
        self.sign()
        # Meeting takes random numbers, too.
        supplies.framework.prepare(self._cores, member.seed)
        chunk = member.batch_size * place.size
        stream = Stream(supplies.samples, chunk, member.seed, rank=place.rank, ranks=place.size)
        feed = supplies.open_feed(stream, share.preprocessors, share.lockstep)
        stack.callback(feed.close)
        network = supplies.framework.build(member, supplies.functions, self.group, feed.sample)
        validation = supplies.validation if place.rank == 0 else feed.sample
        self.sign()
        return Built(self.group, supplies.framework, network, feed, validation)

    def sign(self) -> None:
        """Give a sign of life, if the last one was some time ago."""
        now = time.monotonic()
        if now >= self._next_sign:
            self._next_sign = now + SIGN_EVERY_S
            self._give_sign()

    def clear(self) -> None:
        """Let go of what the last member needed."""
        if self._supplies is not None:
            self._supplies.framework.clear()

    def _get_supplies(self, ensemble: Ensemble, sharing: Sharing) -> Supplies:
        framework = load_framework(ensemble.framework)
        framework.prepare(self._cores, DATA_SEED)
        functions = load_functions(ensemble)
        training, validation = as_sources(functions.input_fn(ensemble.data))
        open_feed = open_pipeline(training, sharing, self._keep)
        # What stays need not be looked through each time that a member's leavings are collected.
        gc.collect()
        gc.freeze()
        return Supplies(framework, functions, len(training), open_feed, validation)
