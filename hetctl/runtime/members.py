"""Members as planners see them: what is left to do, from the profile and the events of the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hetctl.core.ensemble import Member
from hetctl.core.events import Event, read_events
from hetctl.core.layout import RunFolder
from hetctl.core.profile import Candidate, Progress
from hetctl.core.progress import progress_in
from hetctl.core.run import RunSpec
from hetctl.perf.work import candidates
from hetctl.planners.base import Held
from hetctl.runtime.rounds import OpenRound


@dataclass(frozen=True)
class Seen:
    """The members of a run at one moment.

    Parameters
    ----------
    left : mapping of str to Candidate
        All that still need training, with what they have left at most.
    waiting : tuple of Candidate
        Those that hold no GPU.
    held : tuple of Held
        Those in training that were not told to leave, with what they are likely to have left.
    """

    left: Mapping[str, Candidate]
    waiting: tuple[Candidate, ...]
    held: tuple[Held, ...]


class Members:
    """The members of a run that still need training.

    Parameters
    ----------
    gpus : int
        Of the job.
    began_at : float
        Start of the run, in seconds since the epoch.
    """

    def __init__(self, folder: RunFolder, spec: RunSpec, gpus: int, began_at: float) -> None:
        self._folder, self._spec, self._began_at = folder, spec, began_at
        self._profiles = {profile.member: profile for profile in spec.profiles}
        self._gpus = gpus

    def left(self) -> dict[str, Candidate]:
        """Return all, in training or not, as their finished epochs and their checkpoints tell."""
        return self._left(self._progress())

    def as_they_are(self, names: Iterable[str]) -> tuple[Member, ...]:
        """Return members with the batch sizes that they have come down to."""
        progress = self._progress()
        members = (self._spec.ensemble.member(name) for name in names)
        return tuple(replace(m, batch_size=progress[m.name].batch_size or m.batch_size) for m in members)

    def peak_memory(self, name: str) -> int:
        """Return the most bytes that the member held when it was profiled; 0 if nobody knows."""
        return self._profiles[name].peak_memory_bytes

    def seen(self, rounds: Iterable[OpenRound], now: float) -> Seen:
        """Look at all members; `now` is in seconds since the epoch."""
        progress, rounds = self._progress(), tuple(rounds)
        left = self._left(progress)
        busy = {name for open_round in rounds for name in open_round.active}
        waiting = tuple(candidate for candidate in left.values() if candidate.name not in busy)
        in_training = (
            self._held(left[name], progress[name].part_samples, open_round, now)
            for open_round in rounds
            for name in open_round.active
            if name in left and name not in open_round.leaving
        )
        return Seen(left, waiting, tuple(in_training))

    def _progress(self) -> dict[str, Progress]:
        return progress_in(self._folder, self._spec.ensemble, self._spec.retries)

    def _left(self, progress: Mapping[str, Progress]) -> dict[str, Candidate]:
        spec = self._spec
        found = candidates(spec.ensemble, self._profiles, progress, self._gpus, spec.site.gpus_per_node)
        return {candidate.name: candidate for candidate in found}

    def _held(self, candidate: Candidate, part_samples: int, open_round: OpenRound, now: float) -> Held:
        allocation = open_round.active[candidate.name]
        events = read_events(open_round.folder.events_of(candidate.name))
        now_left = as_of_now(candidate, part_samples, allocation.rate, events, now)
        return Held(now_left, allocation, open_round.opened_at - self._began_at)


def as_of_now(
    candidate: Candidate, part_samples: int, rate: float, events: Iterable[Event], now: float
) -> Candidate:
    """Return a member in training with what it is likely to have left.

    Since its last epoch, or since its first step, it has trained at the predicted rate, but for no
    longer than to the end of its epoch: the next event tells more. Where nobody knows how long an
    epoch is, nothing but events counts.

    Parameters
    ----------
    candidate : Candidate
        As its finished epochs and its last checkpoint tell.
    part_samples : int
        Samples of the unfinished epoch in that checkpoint.
    rate : float
        Samples/s, as allocated.
    events : iterable of Event
        The member's, of this step, in order.
    now : float
        Seconds since the epoch, as in the events.
    """
    steps = [event.time for event in events if event.kind == "first_step" or _is_new_epoch(event)]
    if not steps or not candidate.samples_per_epoch:
        return candidate
    rest = min(max(candidate.samples_per_epoch - part_samples, 0), candidate.samples_left)
    trained = min(max(now - steps[-1], 0.0) * rate, rest)
    return replace(candidate, samples_left=candidate.samples_left - trained)


def _is_new_epoch(event: Event) -> bool:
    """Tell an epoch that this step has trained from one that it only reports again."""
    return event.kind == "epoch" and "evaluate_s" in event.data
