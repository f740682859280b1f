"""Trials of a run: reported results go in, and requests come out as events."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from hetctl.methods.automl.search_run import SearchRun, UsedResources
from hetctl.methods.automl.trials import Curve, is_behind
from hetctl.model.ensemble import Member
from hetctl.model.events import DRIVER, Event
from hetctl.model.profile import MemberProfile, rate_config, shape_digest
from hetctl.model.run import RunSpec, Usage
from hetctl.model.searches import OF_SEARCHES, REPORT, SEARCH_ENDED, TRIAL, Trial
from hetctl.model.training_progress import CANCELLED, Progress
from hetctl.perf.rate_prediction import nearest_config
from hetctl.perf.sharing import may_gain
from hetctl.runtime.worker.checkpoint import CheckpointFolder
from hetctl.scheduling.fusing import fused_shape, places
from hetctl.scheduling.planners.base import options_from
from hetctl.storage.event_files import EventQueue, EventWriter, read_events
from hetctl.storage.paths import RunFolder
from hetctl.storage.patience import PATIENT
from hetctl.storage.run_files import checkpoint_folder


class TrialQueue:
    """Search of a run by its events; each request and report is on the disk before it counts.

    Parameters
    ----------
    gpus : int
        Number of GPUs of the job.
    is_busy : callable
        Function that returns true for a member whose task has not ended.
    queue : EventQueue
        Events of the driver.
    on_failure : callable
        Function called with the error if a trial cannot get its parent's files; the search then asks for
        nothing more.
    note_written : callable
        Function called with the name of a trial, and the length of its event file with its parent's epochs.
    """

    def __init__(
        self,
        folder: RunFolder,
        spec: RunSpec,
        gpus: int,
        is_busy: Callable[[str], bool],
        queue: EventQueue,
        on_failure: Callable[[OSError], None],
        note_written: Callable[[str, int], None] = lambda *_: None,
    ) -> None:
        search = spec.ensemble.search
        assert search is not None
        self._folder, self._spec = folder, spec
        self._is_busy, self._queue, self._on_failure = is_busy, queue, on_failure
        self._note_written = note_written
        self._slots = {name: spec.ensemble.member(name) for name in search.members}
        self._numbers = {name: number for number, name in enumerate(search.members)}
        self._parallel = max(1, gpus // self._slots[search.members[0]].min_gpus)
        terms = spec.ensemble, spec.site.launch, spec.sharing, options_from(spec.options)
        gains = all(may_gain(one.fused_rates) for one in spec.profiles if one.member in self._slots)
        shapes = (fused_shape(slot, *terms) for slot in self._slots.values())
        parallel = self._parallel * (places(shapes) if gains and search.configs_are_known else 1)
        events = [e for e in read_events(folder.events_of(DRIVER)) if e.kind in OF_SEARCHES]
        self._search = SearchRun(search, parallel, [(event.kind, event.data) for event in events])
        self._is_over = any(event.kind == SEARCH_ENDED for event in events)
        for trial in self._search.waiting:
            PATIENT.call(self._inherit, trial)

    def member(self, name: str) -> Member:
        """Return a trial as a member: with its config, up to the epochs asked for."""
        slot = self._slots[name]
        trial = self._search.trials[self._numbers[name]]
        stop = replace(slot.stop, max_epochs=trial.epochs, expected_epochs=None)
        return replace(slot, config={**slot.config, **trial.config}, stop=stop)

    def __contains__(self, name: object) -> bool:
        """Return true for the name of a requested trial."""
        return self._numbers.get(str(name), len(self._search.trials)) < len(self._search.trials)

    def profile(self, name: str, profiles: Mapping[str, MemberProfile]) -> MemberProfile:
        """Return the profile of a trial: that of its shape if planned, else one without rates.

        Parameters
        ----------
        profiles : mapping of str to MemberProfile
            Profiles of the trials with their planned configs.
        """
        keys, member = self._spec.ensemble.rate_keys, self.member(name)
        planned = self.planned_like(name)
        if member.profile_as or planned == name:
            return profiles[name]
        if shape_digest(member, keys) == shape_digest(self._slots[planned], keys):
            return replace(profiles[planned], member=name)
        return MemberProfile(name, {}, samples_per_epoch=profiles[planned].samples_per_epoch)

    def planned_like(self, name: str) -> str:
        """Return the trial whose planned config has the same shape as a trial's config, or the nearest one.

        For a trial planned with its own shape, and for any other member, return its own name.
        """
        if name not in self:
            return name
        keys, member = self._spec.ensemble.rate_keys, self.member(name)
        if shape_digest(member, keys) == shape_digest(self._slots[name], keys):
            return name
        shapes = {slot: rate_config(planned, keys) for slot, planned in self._slots.items()}
        return nearest_config(rate_config(member, keys), shapes) or name

    def advance(
        self,
        progress: Mapping[str, Progress],
        used: Usage,
        run_s: float,
        parts: Mapping[str, Sequence[Event]] = MappingProxyType({}),
    ) -> bool:
        """Report finished trials, and ask for the next; return true if there are new events.

        Parameters
        ----------
        run_s : float
            Seconds since the start of the run.
        parts : mapping of str to sequence of Event
            Reports within epochs, by trial.
        """
        if self._is_over:
            return False
        resources = UsedResources(used.gpu_seconds / 3600, run_s)
        curves, is_new = self._curves(parts), False
        events = self._queue.writer(DRIVER, used.rounds)
        try:
            for trial in self._search.waiting:
                name = self._search.member_of(trial)
                seen = progress[name]
                if not may_gain(seen.fused_rates):
                    # The others would only wait, and the search would know less when it asks for them.
                    self._search.parallel = self._parallel
                is_behind = self._is_behind(name, seen.last_epoch, curves)
                is_over = seen.failed or seen.converged or seen.withheld == CANCELLED
                is_done = is_over or seen.last_epoch >= trial.epochs
                if is_behind or (is_done and not self._is_busy(name)):
                    last = parts[name][-1].record.metrics if is_behind else {}
                    fields = self._search.report(trial, self._losses(name, trial, seen, last))
                    if fields is not None:
                        events.write(REPORT, **fields)
                        is_new = True
            for request in self._search.requests(resources):
                events.write(TRIAL, **request)
                is_new = True
                PATIENT.call(self._inherit, self._search.trials[request["number"]])
            if reason := self._search.reason_to_end(resources):
                events.write(SEARCH_ENDED, reason=reason)
                self._is_over = is_new = True
        except OSError as error:
            # The history in memory is ahead of the disk, from which the next job goes on.
            self._is_over = is_new = True
            self._on_failure(error)
        return is_new

    def _curves(self, parts: Mapping[str, Sequence[Event]]) -> dict[str, Curve]:
        """Return the losses that trials have reported within epochs by the metric that may end them."""
        rule = self._spec.ensemble.search and self._spec.ensemble.search.prune
        if not rule:
            return {}
        sign = -1.0 if rule.mode == "max" else 1.0
        return {
            name: [
                ((event.record.epoch, event.record.samples), sign * event.record.metrics[rule.metric])
                for event in events
                if rule.metric in event.record.metrics
            ]
            for name, events in parts.items()
        }

    def _is_behind(self, name: str, done: int, curves: Mapping[str, Curve]) -> bool:
        search, own = self._spec.ensemble.search, curves.get(name, ())
        # Finished epochs are judged by the search's method.
        if not (search and search.prune and own and own[-1][0][0] > done and self._is_busy(name)):
            return False
        return is_behind(own, [each for other, each in curves.items() if other != name], search.prune.trials)

    def _losses(
        self, name: str, trial: Trial, progress: Progress, last: Mapping[str, float]
    ) -> list[float] | None:
        """Return the metrics after the requested epochs, negated if more is better; None if the trial failed.

        A command may train further before it stops; a converged trial has fewer epochs, and one that is ended
        within an epoch the values that it has reported there, where it has.
        """
        objective, search = self._slots[name].objective, self._spec.ensemble.search
        modes = {objective.metric: objective.mode, **(search.also if search else {})}
        done = [{}, *(e.metrics for e in progress.epochs if e.epoch <= trial.epochs)]
        known = {**done[-1], **last}
        if progress.failed or progress.withheld == CANCELLED or not modes.keys() <= known.keys():
            return None
        return [-known[metric] if mode == "max" else known[metric] for metric, mode in modes.items()]

    def _inherit(self, trial: Trial) -> None:
        """Give a trial its parent's checkpoint and epochs, unless it has begun.

        No training starts until this returns, so the parent's checkpoint stays that of the report.
        """
        if trial.parent is None:
            return
        name, parent = map(self._search.member_of, (trial, self._search.trials[trial.parent.trial]))
        own, origin = (CheckpointFolder(checkpoint_folder(self._spec, each)) for each in (name, parent))
        own.inherit(origin)
        done = {e.record.epoch for e in read_events(self._folder.events_of(name)) if e.kind == "epoch"}
        events = EventWriter(self._folder.events, name, 0, partial(self._note_written, name))
        for event in read_events(self._folder.events_of(parent)):
            epoch = event.record.epoch if event.kind == "epoch" else math.inf
            # After a restart the parent may have trained on.
            if epoch <= trial.parent.epochs and epoch not in done:
                done.add(epoch)
                events.write("epoch", **event.data)
