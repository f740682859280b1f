"""Features that conflict: one table, for keys of ensemble files and for requests."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from typing import NamedTuple

from hetctl.model.ensemble import COMMAND, Ensemble
from hetctl.model.errors import BadInputError

HOPS, STAGES, NO_FLOTILLAS = "a member that hops", "a pipeline", "a planner without flotillas"
NO_DIVISION = "a framework that cannot divide networks"
"""Feature of a member whose framework conflicts with `shard`."""
SEVERAL_TYPES = "several types of GPU"
SHARED_GPUS = "--max-per-gpu"
OWN_CODE = "code of a member's own"
"""Feature of a member with a framework, functions or data of its own."""


class Conflict(NamedTuple):
    """Two conflicting features; an error in a file names the place of the first.

    Parameters
    ----------
    reason : str
        Clause that says why.
    hint : str
        Next step.
    """

    one: str
    other: str
    reason: str
    hint: str


TABLE: tuple[tuple[tuple[str, ...], tuple[str, ...], str, str], ...] = (
    (
        (
            *("framework", "functions", "data", "partitions", "layers", "global_batch_size"),
            *("deterministic", "shard", "checkpoint"),
        ),
        ("command",),
        "it reads, trains and saves by itself",
        "leave one of both out",
    ),
    (("ranks", "resume", "preload"), ("functions",), "it is of commands", "leave one of both out"),
    (
        ("--mode hopper", "--mode pipeline", "--mode auto"),
        ("commands",),
        "hetctl does not train them itself",
        "use --mode data-parallel",
    ),
    (
        ("--sharing lockstep",),
        ("commands",),
        "they read their samples themselves",
        "use --sharing cached",
    ),
    (("--layers",), ("commands",), "hetctl does not see their layers", "leave out --layers"),
    (
        ("hetctl partition",),
        ("commands",),
        "there is no input_fn whose data could be divided",
        "divide it yourself",
    ),
    (("--for",), ("functions",), "they are measured until their rates are known", "leave it out"),
    (("--sharing lockstep",), ("search",), "trials come while others train", "use --sharing cached"),
    (
        ("--replay", "--sample-members", "--arrival-mean", "--work predicted", "--learn-rates"),
        ("search",),
        "trials come when the search asks for them",
        "leave the option out",
    ),
    (
        ("search.prune",),
        ("--mode hopper", "--mode pipeline"),
        "nothing is reported there within an epoch",
        "leave it out in the ensemble file, or use --mode data-parallel",
    ),
    (("--learn-rates",), (SEVERAL_TYPES,), "the types have rates of their own", "use GPUs of one type"),
    (
        ("--sharing lockstep",),
        (OWN_CODE,),
        "the leader of a node reads the data of the ensemble",
        "use --sharing cached",
    ),
    (
        ("--sharing lockstep",),
        (NO_FLOTILLAS,),
        "a flotilla is what trains in lockstep",
        "choose --planner flotilla or flotilla-local, or --sharing cached",
    ),
    ((SHARED_GPUS,), (SEVERAL_TYPES,), "busy shares are of one type", "use GPUs of one type"),
    (
        (SHARED_GPUS,),
        ("--launch members",),
        "each member's step has its GPUs alone",
        "use --launch nodes",
    ),
    (
        (SHARED_GPUS,),
        ("--sharing lockstep",),
        "members in lockstep wait for one another",
        "use --sharing cached",
    ),
    ((OWN_CODE,), ("partitions",), "these are of one input_fn", "leave one of both out"),
    (("shard",), (NO_DIVISION,), "each GPU would have the whole network", "leave it out, or use pytorch"),
    (
        ("shard",),
        ("partitions",),
        "they have unequal numbers of batches",
        "leave it out, or give all nodes the whole data",
    ),
    (("shard",), ("layers",), "pipelines are cut by them", "leave one of both out"),
    (
        ("shard",),
        ("balance: on", "--balance on"),
        "GPUs wait for one another in each layer, so that their own speeds are unknown",
        "leave it out, or set balance to auto or off",
    ),
    (
        ("shard",),
        ("--mode hopper", "--mode pipeline"),
        "all GPUs of a member have a part of each layer",
        "leave it out, or use --mode data-parallel or auto",
    ),
    (
        ("rescale_learning_rate",),
        ("global_batch_size",),
        "this is the same on any number of GPUs",
        "leave it out, or set batch_size alone",
    ),
    (
        (HOPS,),
        ("--launch members",),
        "each visit would wait for a step of its own and an import of the framework, and no agent would stay"
        " to keep the states",
        "use --launch nodes, or --mode data-parallel",
    ),
    (
        (HOPS,),
        ("data without partitions",),
        "there is nothing to hop over",
        "add `partitions` to the ensemble file (`hetctl partition` makes them)",
    ),
    (
        (HOPS,),
        ("partitions without paths",),
        "ranks cannot read them",
        "add `path` or `file` to `partitions` in the ensemble file",
    ),
    (
        (HOPS,),
        ("functions.evaluate_fn",),
        "it needs the predictions of all validation samples at once, but hops evaluate one partition after"
        " another",
        "leave it out, or use --mode data-parallel",
    ),
    ((HOPS,), ("--sharing lockstep",), "each of them is at other samples", "use --sharing none"),
    (("--mode hopper",), ("--sharing cached",), "each of them is at other samples", "use --sharing none"),
    (
        ("--replay",),
        ("--mode data-parallel", "--mode pipeline", "--mode auto"),
        "it repeats visits of members that hop",
        "add --mode hopper",
    ),
    (
        ("--hop-scheduler",),
        ("--mode data-parallel", "--mode pipeline"),
        "it is of members in the mode hopper",
        "leave it out, or add --mode hopper, or --mode auto",
    ),
    (
        ("--policy", "--in-flight", "--clock-distance", "--ps-placement"),
        ("--mode data-parallel", "--mode hopper"),
        "it is of members in the mode pipeline",
        "leave it out, or add --mode pipeline, or --mode auto",
    ),
    ((STAGES,), ("--launch members",), "it starts each member in its own step", "use --launch nodes"),
    (
        (STAGES,),
        ("functions.train_fn", "functions.evaluate_fn"),
        "it is for a whole network, but stages have parts of it",
        "leave it out in the ensemble file",
    ),
    (
        (STAGES,),
        ("partitions with paths",),
        "first stages read samples of the whole data",
        "leave out `partitions` in the ensemble file, or use another --mode",
    ),
    (
        (STAGES,),
        ("--sharing lockstep",),
        "first stages read for themselves",
        "use --sharing cached or none",
    ),
    (
        (STAGES,),
        ("global_batch_size",),
        "it makes a step of each batch of a virtual worker",
        "give it a batch_size alone, or plan with --mode data-parallel",
    ),
    (
        ("partitions.source",),
        ("--launch members",),
        "agents of several steps would copy the same partitions",
        "use --launch nodes, or place the partitions on the nodes yourself and leave out source",
    ),
)
"""Features, those that conflict with each, the reason, and the next step; the first row that fits counts."""
CONFLICTS = tuple(
    Conflict(one, other, reason, hint)
    for ones, others, reason, hint in TABLE
    for one in ones
    for other in others
)
FEATURES: Mapping[str, Callable[[Ensemble], object]] = {
    "commands": lambda ensemble: ensemble.framework == COMMAND,
    "functions": lambda ensemble: ensemble.framework != COMMAND,
    "search": lambda ensemble: ensemble.search,
    "search.prune": lambda ensemble: ensemble.search and ensemble.search.prune,
    OWN_CODE: lambda ensemble: any(member.code for member in ensemble.members),
    "shard": lambda ensemble: any(member.shard for member in ensemble.members),
    "global_batch_size": lambda ensemble: any(member.global_batch_size for member in ensemble.members),
    "functions.train_fn": lambda ensemble: ensemble.functions.train_fn,
    "functions.evaluate_fn": lambda ensemble: ensemble.functions.evaluate_fn,
    "data without partitions": lambda ensemble: not ensemble.partitions,
    "partitions without paths": lambda ensemble: ensemble.partitions and not ensemble.reads_partitions,
    "partitions with paths": lambda ensemble: ensemble.reads_partitions,
    "partitions.source": lambda ensemble: ensemble.partitions and ensemble.partitions.sources(),
}
"""Features of ensembles, each with its test."""


def conflicts(features: Container[str]) -> Iterator[Conflict]:
    """Yield the conflicts among features."""
    return (each for each in CONFLICTS if each.one in features and each.other in features)


def features_of(ensemble: Ensemble) -> list[str]:
    """Return the features of an ensemble that conflict with some others."""
    return [name for name, holds in FEATURES.items() if holds(ensemble)]


def refuse_conflicts(who: str, *features: str, **options: str) -> None:
    """Refuse a request with two conflicting features.

    Parameters
    ----------
    who : str
        Name of the ensemble, member or planner with these features.
    options : mapping of str to str
        Values of options by name, such as ``mode="hopper"``.

    Raises
    ------
    BadInputError
        If two of these features conflict.
    """
    for each in conflicts({*features, *(f"--{name} {value}" for name, value in options.items())}):
        raise BadInputError(f"{who}: {each.one} does not go with {each.other}: {each.reason}", each.hint)
