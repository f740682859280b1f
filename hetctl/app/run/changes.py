"""Rules for changes of a run from one job to the next, and comparison of a run with new input."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

from hetctl.inputs.quantities import format_duration
from hetctl.model.errors import BadInputError
from hetctl.model.plan import DATA_PARALLEL
from hetctl.model.profile import some_of
from hetctl.model.run import RunSpec
from hetctl.model.serialization import encode
from hetctl.model.values import dataclass
from hetctl.scheduling.planners.base import Options, options_from

MOST_NAMED, MOST_LINES, LONGEST = 3, 20, 60
"""Limits: members in a line, lines in a message, and characters in a value."""
TIME = "time"
KEPT, EDITED = "kept", "edited"
"""Modules with which an edited run goes on: those of its submission, or the present ones."""
MANY = "*"
"""Placeholder for the members in a change that concerns several."""


class ChangeRule(NamedTuple):
    """Permission to change a key, with its reason."""

    may: bool
    reason: str


_may, _kept = partial(ChangeRule, True), partial(ChangeRule, False)
RUN: Mapping[str, ChangeRule] = {
    "planner": _kept("a run keeps its planner, which goes by what it has learned in earlier rounds"),
    "sharing": _kept("a run keeps how its members share samples"),
    "mode": _kept("a run keeps the modes that its plan chose"),
    "replay": _kept("a run keeps the visits that it repeats"),
    "gpus": _may("members go on from their checkpoints on any number of GPUs"),
    "queue": _may("only the next jobs are submitted to it"),
    "time": _may("each job ends with checkpoints"),
    "chain": _may("only the next jobs are queued so"),
    "ahead": _may("only the next jobs are queued so"),
    "track": _may("its epochs so far are sent as well"),
    "retries": _may("failures are counted anew from the events"),
    "max_jobs": _may("it is granted anew"),
    "max_rounds": _may("it is granted anew"),
    "gpu_hours": _may("it is granted anew"),
    "node_hours": _may("it is granted anew"),
}
PLANNER: Mapping[str, ChangeRule] = {
    **{field.name: _kept("a run keeps the options of its planner") for field in fields(Options)},
    "fuse": _may("checkpoints are those of single members"),
}
SITE: Mapping[str, ChangeRule] = {
    "name": _kept("a run stays where its members were profiled"),
    "batch_system": _kept("its jobs are known there by their numbers"),
    "launcher": _kept("it starts the ranks whose rates were measured"),
    "launch": _may("each job starts its ranks anew"),
    "device": _kept("its rates are those of such devices"),
    "gpus_per_node": _kept("its rates are those of nodes with so many"),
    "gpu_type": _kept("its rates are those of such GPUs"),
    "node_types": _may("the driver goes by the names of the nodes that a job got"),
    "nodes": _may("it limits what jobs may ask for"),
    "cores_per_node": _may("jobs ask for them"),
    "memory_per_node": _may("jobs ask for it"),
    "queues": _may("they limit what jobs may ask for"),
    "queue": _may("the next jobs are submitted to it"),
    "billing": _may("only what is told of costs depends on it"),
    "queue_option": _may("it is the option that takes the queue"),
    "account": _may("the next jobs are paid by it"),
    "request": _may("each job asks for its resources anew"),
    "job_options": _may("they go into the script of each job"),
    "requeue": _may("it goes into the script of each job"),
    "query_interval_s": _may("only commands that watch go by it"),
    "submit_by": _may("it is how the submit command gets the script"),
    "max_queued_jobs": _may("only profiling goes by it"),
    "template": _may("the script of each job is made anew"),
    "directives": _may("they go into the script of each job"),
    "setup": _may("it goes into the script of each job"),
    "environment": _may("each job sets it anew"),
    "mpi": _may("each job starts its ranks anew"),
    "container": _may("each job starts its ranks anew"),
    "python": _may("each job starts its ranks anew"),
    "stage": _may("each job starts its ranks anew"),
    "stage_folder": _may("each job starts its ranks anew"),
    "shared_with": _may("each command makes its files anew"),
    "purge": _may("only the warning of it depends on it"),
    "visible_devices": _may("each job starts its ranks anew"),
    "host_patterns": _may("only the detection of the site depends on them"),
    "gpu_memory": _may("only pipelines and members that share GPUs are planned with it"),
    "max_per_gpu": _may("it is a default of --max-per-gpu"),
    "mps": _may("each job starts its agents anew"),
    "gpu_cores": _may("each job starts its ranks anew"),
    "links": _may("only pipelines are planned with them"),
    "network": _may("each job connects its processes anew"),
    "timeouts": _may("each job starts its ranks anew"),
}
OF_JOBS = {*SITE, TIME, "the site's queue", "gpus", "chain", "ahead"}
"""Names of changes that only jobs which are submitted later have."""
ENSEMBLE: Mapping[str, ChangeRule] = {
    "name": _kept("it names the run"),
    "framework": _kept("checkpoints are those of its networks"),
    "functions": _kept("checkpoints are those of their networks"),
    "folder": _kept("the modules of its functions lie there"),
    "data": _kept("members go on in the midst of an epoch of it"),
    "partitions": _kept("the data lie on the nodes in so many"),
    "samples_per_epoch": _may("only predictions depend on it"),
    "balance": _kept("a run keeps how its batches are balanced"),
    "rate_keys": _may("only profiling depends on them"),
    "search": _kept("its trials so far were chosen by it"),
    "fuse": _kept("it is a default of --fuse, which may change"),
    "max_per_gpu": _may("it is a default of --max-per-gpu"),
}
MODULES = _may("the next jobs train with a copy of the edited ones")
MEMBERS = _kept("a run keeps its members, unless `hetctl drop` takes them out")
DROPPED = _may("it trains no more")
ADDED = _may("it is trained beside the others")
FIXED = _kept("only members of a run without hops, pipelines and search come and go")
MEMBER: Mapping[str, ChangeRule] = {
    "name": MEMBERS,
    "config": _kept("its checkpoints are those of such a network"),
    "batch_size": _kept("it has trained with it so far"),
    "global_batch_size": _kept("it has trained with it so far"),
    "min_batch_size": _kept("it has trained with it so far"),
    "seed": _kept("it orders the samples of an epoch"),
    "rescale_learning_rate": _kept("it has trained with it so far"),
    "deterministic": _kept("its rates are those of such algorithms"),
    "shard": _kept("its checkpoints are divided so, or not"),
    "min_gpus": _may("it goes on from its checkpoint on any number of GPUs"),
    "max_gpus": _may("it goes on from its checkpoint on any number of GPUs"),
    "layers": _may("only pipelines are planned with them"),
    "validation_batch_size": _may("metrics do not depend on it"),
    "profile_as": _may("only profiling depends on it"),
    "checkpoint": _may("its next checkpoints are written by it"),
    "keep": _may("its next checkpoints replace others by it"),
    "command": _kept("its checkpoints are those of such a command"),
    "environment": _kept("its checkpoints are those of such a command"),
    "ranks": _kept("its checkpoints are those of such a command"),
    "resume": _may("its next start goes by it"),
    "preload": _may("its next start goes by it"),
    "code": _kept("its checkpoints are those of such a network"),
    "search_objective": _kept("its search has judged it by that"),
    "seeds_of": _may("only what is shown of its results depends on it"),
}
STOP: Mapping[str, ChangeRule] = {
    "metric": _kept("its epochs were judged by it"),
    "mode": _kept("its epochs were judged by it"),
    "min_delta": _kept("its epochs were judged by it"),
    "target": _may("it ends the training that is left"),
    "patience": _may("it is a limit of epochs"),
    "max_epochs": _may("it is a limit of epochs"),
    "expected_epochs": _may("only predictions depend on it"),
}


@dataclass(frozen=True)
class Change:
    """Change of a run from now on.

    Parameters
    ----------
    what : str
        Name of the option or key: ``account``, ``max_epochs of d017``, .. Times are in seconds.
    """

    what: str
    now: Any
    was: Any

    def __str__(self) -> str:
        words = format_duration if self.what == TIME else _format_value
        return f"{self.what}: {words(self.now)} (was {words(self.was)})"


class Difference(NamedTuple):
    """Difference between a run and new input.

    Parameters
    ----------
    member : str
        Member with the difference; empty if it concerns the run.
    given : bool
        True if it comes from the command line or a variable, not from a file.
    """

    what: str
    now: Any
    was: Any
    rule: ChangeRule
    member: str = ""
    given: bool = False


def differences(spec: RunSpec, now: RunSpec) -> list[Difference]:
    """Return the differences of a run from the present options, site file and ensemble file."""
    options = ({**vars(each), **vars(each.budget), TIME: each.wall_s} for each in (spec, now))
    planned = (vars(options_from(each.options)) for each in (spec, now))
    given = [*_compared(RUN, *options), *_compared(PLANNER, *planned)]
    if spec.site.name == now.site.name:
        found = _compared(SITE, vars(spec.site), vars(now.site))
        sites = [one._replace(what=SITE_WORDS.get(one.what, one.what)) for one in found]
    else:
        # Of another site only the name is compared.
        sites = [Difference("site", now.site.name, spec.site.name, SITE["name"], given=True)]
    return [
        *(one._replace(given=True) for one in given),
        *sites,
        *_compared(ENSEMBLE, vars(spec.ensemble), vars(now.ensemble)),
        *_of_members(spec, now),
        *_of_modules(spec.modules, now.modules),
    ]


def changes_among(found: Iterable[Difference]) -> tuple[Change, ...]:
    """Return the permitted changes; equal ones of several members are combined."""
    return tuple(
        Change(what, one.now, one.was) for what, one in _grouped(one for one in found if one.rule.may)
    )


def refusals(found: Iterable[Difference], run: str) -> list[str]:
    """Return a line for each change that is not permitted, the last ones of many as a number."""
    lines = [_refusal(what, one, run) for what, one in _grouped(one for one in found if not one.rule.may)]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"and {len(lines) - MOST_LINES} more"]
    return lines


def refuse_what_is_kept(found: Iterable[Difference], run: str) -> None:
    """Raise BadInputError with a line for each change that is not permitted."""
    kept = [one for one in found if not one.rule.may]
    if not kept:
        return
    lines = refusals(kept, run)
    undo = [UNDO[given] for given in (True, False) if any(one.given is given for one in kept)]
    raise BadInputError(
        "\n".join(lines), f"{' and '.join(undo)}, or start another run with `hetctl submit --new`"
    )


def refuse_edited_modules(found: Iterable[Difference], run: str, imported: Set[str]) -> None:
    """Raise BadInputError if imported modules were edited: the user has to choose the ones to go on with."""
    names = [one.what for one in found if one.rule is MODULES and one.what in imported]
    if names:
        raise BadInputError(
            f"modules were edited since run {run} was submitted, which trains with a copy:"
            f" {some_of(names, MOST_NAMED)}",
            "go on with those by `hetctl submit --modules kept`, or with the edited ones by"
            " `--modules edited`, or start another run with `hetctl submit --new`",
        )


UNDO = {True: "leave the options out", False: "undo the edits"}
SITE_WORDS = {"queue": "the site's queue"}
"""Keys of site files whose names mean something else among a run's options."""
THERE = {True: "there", False: "not there"}


def _refusal(what: str, one: Difference, run: str) -> str:
    if one.given:
        option = what.replace("_", "-")
        value = "" if one.now is True else f" {_format_value(one.now)}"
        was = _format_value(one.was)
        return f"run {run} has {option} {was}, and --{option}{value} was given: {one.rule.reason}"
    return f"{what} differs from what run {run} was submitted with ({_contrast(one)}): {one.rule.reason}"


def _compared(
    rules: Mapping[str, ChangeRule], was: Mapping[str, Any], now: Mapping[str, Any]
) -> list[Difference]:
    return [Difference(key, now[key], was[key], rule) for key, rule in rules.items() if was[key] != now[key]]


def _of_members(spec: RunSpec, now: RunSpec) -> Iterator[Difference]:
    """Compare members by name; their order does not matter."""
    before, after = ({member.name: member for member in each.ensemble.members} for each in (spec, now))
    is_open = set(spec.phases) <= {DATA_PARALLEL} and spec.ensemble.search is None
    for name in before | after:
        if name in before and name in after:
            old, new = before[name], after[name]
            own = _compared(MEMBER, vars(old), vars(new)) + _compared(STOP, vars(old.stop), vars(new.stop))
            yield from (one._replace(what=f"{one.what} of {MANY}", member=name) for one in own)
        else:
            edit = now.edited.get(name)
            rule = ADDED if name in after else DROPPED if edit and edit.dropped else MEMBERS
            rule = FIXED if rule.may and not is_open else rule
            yield Difference(f"member {MANY}", THERE[name in after], THERE[name in before], rule, name)


def _of_modules(was: Mapping[str, str], now: Mapping[str, str]) -> Iterator[Difference]:
    for name in sorted(was.keys() ^ now.keys()):
        yield Difference(name, THERE[name in now], THERE[name in was], MODULES)
    for name in sorted(was.keys() & now.keys()):
        if was[name] != now[name]:
            yield Difference(name, EDITED, "as submitted", MODULES)


def _grouped(found: Iterable[Difference]) -> Iterator[tuple[str, Difference]]:
    """Yield names and differences; equal ones of several members have one name."""
    groups: dict[str, list[Difference]] = defaultdict(list)
    for one in found:
        groups[json.dumps([one.what, encode(one.now), encode(one.was)], default=str)].append(one)
    for ones in groups.values():
        yield ones[0].what.replace(MANY, some_of([one.member for one in ones], MOST_NAMED)), ones[0]


def _contrast(one: Difference) -> str:
    """Return a text with the new and the old value; of mappings, only keys that differ."""
    was, now = encode(one.was), encode(one.now)
    if not isinstance(was, Mapping) or not isinstance(now, Mapping):
        return f"{_format_value(now)}, was {_format_value(was)}"
    # A key with the value None differs from a key that is not there.
    keys = [key for key in {**was, **now} if (key in was, was.get(key)) != (key in now, now.get(key))]
    return "; ".join(f"{key}: {_text_of(now, key)}, was {_text_of(was, key)}" for key in keys)


def _text_of(values: Mapping[str, Any], key: str) -> str:
    return _format_value(values[key]) if key in values else THERE[False]


def _format_value(value: Any) -> str:
    if isinstance(value, str):
        return value
    text = json.dumps(encode(value), default=str) if value or value in (0, False) else "none"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."
