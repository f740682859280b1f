"""Ensemble to be trained and its members."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Annotated, Any

from hetctl.model.file_keys import Key, Pattern
from hetctl.model.searches import SearchSpec
from hetctl.model.serialization import TABLE, encode
from hetctl.model.training_progress import EpochResult
from hetctl.model.training_settings import (
    AUTO,
    CHECKPOINT_DIR,
    NO_RANKS,
    RANKS,
    RESUME_FROM,
    BalanceSettings,
    CheckpointInterval,
    KeepSettings,
    Resume,
    filled,
    missing_for_groups,
)
from hetctl.model.values import dataclass

COMMAND = "command"
"""Framework of an ensemble whose members are commands: hetctl imports none."""
PARTITION = "{partition}"
"""Placeholder for the number of a partition in a path."""
RAISABLE = {
    "patience": re.compile(r"no better .+ in (\d+) epochs"),
    "max_epochs": re.compile(r"(\d+) epochs done"),
}
"""Limits of a stop rule that can be raised, each with the pattern of the reason that it reports."""
REACHED = re.compile(r".+ reached (\S+)")
"""Pattern of the reason that a target reports."""


@dataclass(frozen=True)
class Objective:
    """Metric of the results of an epoch by which members are compared; `mode` is ``max`` or ``min``."""

    metric: str
    mode: str


@dataclass(frozen=True)
class StopRule:
    """Conditions under which a member has converged."""

    metric: Annotated[str, Key("Key of the metric in the results of an epoch.", min_length=1)] = "val_loss"
    mode: Annotated[
        str,
        Key(
            "Direction of improvement",
            null="max for metrics whose name contains acc, auc, f1, precision or recall, else min",
            choices=("max", "min"),
        ),
    ] = "min"
    patience: Annotated[
        int,
        Key("Number of epochs without an improvement of more than min_delta after which it stops.", ge=1),
    ] = 5
    min_delta: Annotated[float, Key("Change of the metric that an improvement must exceed.", ge=0)] = 0.0
    target: Annotated[float | None, Key("Value of the metric at which training stops.")] = None
    max_epochs: Annotated[int, Key("Maximum number of epochs.", ge=1)] = 100
    expected_epochs: Annotated[
        int | None,
        Key("Number of epochs assumed in predictions, at most max_epochs; null: max_epochs.", ge=1),
    ] = None

    def reason_to_stop(self, history: Sequence[float]) -> str | None:
        """Return why a member with this metric per epoch has converged, or None if it has not."""
        if not history:
            return None
        sign = 1.0 if self.mode == "max" else -1.0
        scores = [sign * value for value in history]
        if self.target is not None and scores[-1] >= sign * self.target:
            return f"{self.metric} reached {self.target:g}"
        best, best_epoch = float("-inf"), 0
        for epoch, score in enumerate(scores, start=1):
            # The first epoch is the best so far even if its metric is NaN, which compares to nothing.
            if score > best + self.min_delta or best_epoch == 0:
                best, best_epoch = score, epoch
        if len(scores) - best_epoch >= self.patience:
            return f"no better {self.metric} in {self.patience} epochs"
        if len(scores) >= self.max_epochs:
            return f"{self.max_epochs} epochs done"
        return None

    def ranked(self, epochs: Sequence[EpochResult]) -> list[EpochResult]:
        """Return epochs from the best to the worst by its metric; of equal ones the first is the best."""
        sign = -1.0 if self.mode == "max" else 1.0
        return sorted(epochs, key=lambda done: sign * done.metrics[self.metric])

    def still_converged(self, reason: str, history: Callable[[], Sequence[float]]) -> str | None:
        """Return why a member that had converged under an earlier rule still counts as converged, or None.

        A limit that was raised since is not a reason, nor a target that was changed; any other stays valid.

        Parameters
        ----------
        reason : str
            Result of `reason_to_stop` of the earlier rule.
        history : callable
            Function that returns the metric per epoch.
        """
        return self.reason_to_stop(history()) if self._raised_since(reason) else reason

    def extends(self, earlier: StopRule) -> bool:
        """Return true if it differs from an earlier rule by higher limits alone: it may follow that one."""
        limits = {key: getattr(self, key) for key in RAISABLE}
        is_lower = any(limit < getattr(earlier, key) for key, limit in limits.items())
        raised = replace(earlier, **limits, expected_epochs=self.expected_epochs)
        return not is_lower and raised == self

    def _raised_since(self, reason: str) -> bool:
        # Only the text of the reason is stored with the event; it tells the limit in force at that time.
        ended_by = {key: pattern.fullmatch(reason) for key, pattern in RAISABLE.items()}
        reached = REACHED.fullmatch(reason)
        return any(found and getattr(self, key) > int(found[1]) for key, found in ended_by.items()) or (
            reached is not None and (self.target is None or f"{self.target:g}" != reached[1])
        )

    @property
    def planned_epochs(self) -> int:
        """Epochs that predictions assume for a member that has not started."""
        return min(self.expected_epochs or self.max_epochs, self.max_epochs)


FunctionName = Annotated[
    str,
    Pattern(
        r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*",
        "must be module:function",
    ),
]


@dataclass(frozen=True)
class Functions:
    """The user's functions, each as module:function; modules lie in the folder of the ensemble file.

    They are CEREBRO's API (section 3, Figure 3).
    """

    input_fn: Annotated[
        FunctionName,
        Key("input_fn(data), or input_fn(data, path), returns the training and validation samples."),
    ]
    model_fn: Annotated[FunctionName, Key("model_fn(config) returns the network and its optimizer.")]
    train_fn: Annotated[
        FunctionName | None,
        Key(
            "train_fn(data, model, optimizer, config), or with a fifth argument, context, trains an "
            "epoch; null: the default."
        ),
    ] = None
    evaluate_fn: Annotated[
        FunctionName | None,
        Key("evaluate_fn(outputs, targets, config) returns metrics of all validation samples."),
    ] = None


@dataclass(frozen=True)
class TrainingCode:
    """Framework, functions and data, which a rank loads once, before its first member.

    Parameters
    ----------
    framework : str
        Name of the framework, or `COMMAND`.
    data : str or None
        Argument of ``input_fn``.
    """

    framework: str
    functions: Functions
    data: str | None = None

    @property
    def preloaded(self) -> tuple[str, ...]:
        """Frameworks that an agent imports ahead of its ranks; commands import their own."""
        return () if self.framework == COMMAND else (self.framework,)

    @property
    def digest(self) -> str:
        """Short name of it."""
        return hashlib.sha256(json.dumps(encode(self)).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Member:
    """Settings of an ensemble for all its members, and of a member for itself.

    Parameters
    ----------
    name : str
        Name, unique in the ensemble and safe as a file name.
    config : mapping
        Hyper-parameters, passed to ``model_fn`` and ``train_fn`` unchanged.
    layers : str or None
        Absolute path of a profile of its layers, needed to cut it into a pipeline.
    profile_as : str or None
        Name of the member whose rates it has; None: its own shape's.
    command : tuple of str
        Words of the command that trains it, with placeholders; empty: the ensemble's functions do.
    environment : mapping of str to str
        Variables of the command.
    resume : Resume
        How its command continues from a checkpoint.
    preload : tuple of str
        Modules that a warm Python has imported for its command; empty: each start is a new Python.
    checkpoint : CheckpointInterval
        Training after which its next checkpoint is due; it also writes one whenever it stops.
    search_objective : Objective or None
        Metric that its search goes by; None: its stop rule's metric, or no trial.
    code : TrainingCode or None
        Framework, functions and data of its own; None: those of the ensemble.
    seeds_of : str
        Name of the first of the members that differ from it in their seed alone; empty: there are none.
    """

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    batch_size: Annotated[
        int,
        Key("Samples per GPU and step; with global_batch_size, the most that a GPU takes at once.", ge=1),
    ] = 32
    seed: Annotated[
        int, Key("Random seed; each member's own is a hash of it and the member's name.", ge=0)
    ] = 0
    stop: Annotated[
        StopRule,
        Key(
            "Conditions under which a member has converged. Keys of a member override those of the "
            "ensemble; a member with its own metric does not inherit mode and target."
        ),
    ] = field(default_factory=StopRule)
    max_gpus: Annotated[
        int | None,
        Key("Maximum number of GPUs of a member; null: no limit, for a command its min_gpus.", ge=1),
    ] = None
    rescale_learning_rate: Annotated[
        bool,
        Key(
            "Scale the learning rate with the number of GPUs (Capes et al., Equation 7). Never done"
            " with global_batch_size."
        ),
    ] = True
    min_batch_size: Annotated[
        int | None,
        Key("Lower limit for halving the batch size of members out of memory; null: they fail.", ge=1),
    ] = None
    layers: str | None = None
    validation_batch_size: Annotated[
        int | None, Key("Samples per GPU and step of an evaluation; null: as in training.", ge=1)
    ] = None
    global_batch_size: Annotated[
        int | None,
        Key("Samples of a step on any number of GPUs, which share them; null: batch_size times GPUs.", ge=1),
    ] = None
    min_gpus: Annotated[int, Key("Minimum number of GPUs of a member while it trains.", ge=1)] = 1
    profile_as: str | None = None
    deterministic: Annotated[
        bool, Key("Use deterministic algorithms only, so that training on GPUs is the same each time.")
    ] = False
    shard: Annotated[
        bool,
        Key("Divide parameters, gradients and optimizer state among a member's GPUs (FSDP of PyTorch)."),
    ] = False
    command: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: Annotated[
        str,
        Key(
            "Ranks of the command: one on each of its GPUs, or none, for a script that knows no ranks and"
            " has one GPU.",
            choices=(RANKS, NO_RANKS),
        ),
    ] = RANKS
    resume: Resume = field(default_factory=Resume)
    preload: tuple[str, ...] = ()
    checkpoint: CheckpointInterval = field(default_factory=CheckpointInterval)
    keep: Annotated[
        KeepSettings, Key("Checkpoints of finished epochs that are kept; others are deleted.")
    ] = field(default_factory=KeepSettings)
    search_objective: Objective | None = None
    code: TrainingCode | None = None
    seeds_of: str = ""

    @property
    def objective(self) -> Objective:
        """Metric by which it is compared with other members."""
        return self.search_objective or Objective(self.stop.metric, self.stop.mode)

    def most_gpus(self, gpus: int) -> int:
        """Return how many of `gpus` GPUs it may have: each needs a sample in every step."""
        return min(gpus, self.max_gpus or gpus, self.global_batch_size or gpus)

    def step_samples(self, gpus: int) -> int:
        """Return the samples in a step of a group of so many GPUs."""
        return self.global_batch_size or self.batch_size * gpus

    @property
    def micro_batch_size(self) -> int | None:
        """Largest batch, if a rank's part of a step may have several; None: it has one."""
        return self.batch_size if self.global_batch_size else None

    def largest_train_batch(self, gpus: int) -> int:
        """Return the largest number of samples that a rank trains at once, in a group of so many GPUs."""
        if self.global_batch_size is None:
            return self.batch_size
        share = -(-self.global_batch_size // gpus)
        return -(-share // -(-share // self.batch_size))

    @property
    def rescales(self) -> bool:
        """True if the learning rate follows the number of GPUs, as the global batch does."""
        return self.rescale_learning_rate and self.global_batch_size is None

    def command_line(self, checkpoint_dir: str, resume_from: str | None = None) -> tuple[str, ...]:
        """Return the words of its command, with values in place of placeholders.

        Parameters
        ----------
        resume_from : str or None
            Checkpoint from which it continues; None if there is none.
        """
        own = {"name": self.name, "seed": self.seed, "batch_size": self.batch_size}
        places = {CHECKPOINT_DIR: checkpoint_dir, RESUME_FROM: resume_from or ""}
        words = self.command + (self.resume.options if resume_from else ())
        return filled(words, {**self.config, **own, **places})

    @property
    def rows_evaluated(self) -> int:
        """Samples per GPU and step of an evaluation."""
        return self.validation_batch_size or self.batch_size

    def smaller_batch(self, batch_size: int) -> int | None:
        """Return the batch size to try after `batch_size` ran out of memory; None if there is none."""
        if self.min_batch_size is None or batch_size <= self.min_batch_size:
            return None
        return max(batch_size // 2, self.min_batch_size)

    @cached_property
    def fingerprint(self) -> str:
        """Digest of the network or its command, and its batch sizes."""
        return self.digest_with(self.config)

    def digest_with(self, config: Mapping[str, Any]) -> str:
        """Return a digest of a config and everything else that a measured rate depends on."""
        sizes = [size for size in (self.batch_size, self.global_batch_size) if size is not None]
        command = [self.command, encode(self.environment)] if self.command else []
        if self.ranks == NO_RANKS:
            command.append(NO_RANKS)
        algorithms = ["deterministic"] if self.deterministic else []
        layout = ["shard"] if self.shard else []
        code = [encode(self.code)] if self.code else []
        # Sorted keys: reordering the keys of `config` in the file must not make the measured rates stale.
        text = json.dumps([encode(config), *sizes, *command, *algorithms, *layout, *code], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Partitions:
    """Partitions of the training data, each stored on the disks of some nodes.

    Parameters
    ----------
    count : int
        Number of partitions.
    path : str
        Path of each on its node, with ``{partition}`` for its number from 0, and with environment variables
        of the node. Empty: the partitions are only planned with.
    source : str
        Path from which nodes copy partitions to `path` at the start of a job; empty: they are already there.
    replicas : int
        Number of nodes that have each partition, unless `nodes` names them.
    files : tuple of str
        Path of each partition, with environment variables, in place of `path`; empty: as `path` says.
    nodes : tuple of tuple of str
        Names of the nodes that have each, for plans and copies; empty if unknown.
    source_files : tuple of str
        Path from which each partition is copied, in place of `source`; "" if it is already there.
    """

    count: int
    path: str = ""
    source: str = ""
    replicas: int = 1
    files: tuple[str, ...] = ()
    nodes: tuple[tuple[str, ...], ...] = ()
    source_files: tuple[str, ...] = ()

    def paths(self) -> tuple[str, ...]:
        """Return the path of each on its nodes, with variables; empty if they are only planned with."""
        return self.files or self._numbered(self.path)

    def sources(self) -> tuple[str, ...]:
        """Return the path from which each partition is copied, "" if it is there; empty if none is copied."""
        return (self.source_files if any(self.source_files) else ()) or self._numbered(self.source)

    @property
    def described(self) -> str:
        """Paths of the partitions, for messages."""
        return self.path or ", ".join(self.files[:2]) + (", .." if len(self.files) > 2 else "")

    def homes(self, nodes: Sequence[str]) -> dict[str, frozenset[int]]:
        """Return the partitions that each node of a job is expected to have.

        Before a job runs, the names of its nodes are unknown. An unknown name stands for the node at the same
        place: the first name for the first node, and so on. A partition p without names is assigned to the
        nodes p, p + 1, .. p + replicas - 1 modulo their number.
        """
        found: dict[str, set[int]] = {node: set() for node in nodes}
        named = dict.fromkeys(name for names in self.nodes for name in names)
        at = {name: name if name in found else nodes[i % len(nodes)] for i, name in enumerate(named)}
        for number, names in enumerate(self.nodes or ((),) * self.count):
            in_turn = (nodes[(number + i) % len(nodes)] for i in range(min(self.replicas, len(nodes))))
            for node in map(at.__getitem__, names) if names else in_turn:
                found[node].add(number)
        return {node: frozenset(numbers) for node, numbers in found.items()}

    def _numbered(self, path: str) -> tuple[str, ...]:
        return tuple(path.replace(PARTITION, str(number)) for number in range(self.count if path else 0))


@dataclass(frozen=True)
class Ensemble:
    """Networks that are trained on the same data.

    Parameters
    ----------
    framework : str
        Name of the framework, or `COMMAND`.
    functions : Functions
        Functions of all members; their names are empty if the members are commands.
    folder : str
        Absolute folder of the ensemble file, which also holds the modules of `functions`. Commands run there.
    data : str or None
        Argument of ``input_fn``.
    partitions : Partitions or None
        Partitions of the training data on the nodes' own disks; None: the data are not partitioned.
    samples_per_epoch : int or None
        Training samples, for members without a profile; None: the profiles give the number.
    balance : BalanceSettings
        Settings of balanced batches; an option of the command line overrides the mode.
    rate_keys : tuple of str
        Config keys that can change a member's rate; empty: all except those known not to.
    search : SearchSpec or None
        Search whose trials are members; before a run their configs are certain or likely.
    fuse : str
        ``auto`` if waiting members of one shape train fused with others on a GPU; ``off`` if they wait.
    max_per_gpu : int, str or None
        Largest number of members on one GPU, or ``auto``; None: as the site says.
    """

    name: str
    framework: str
    functions: Functions
    members: tuple[Member, ...] = field(metadata=TABLE)
    folder: str
    data: str | None = None
    partitions: Partitions | None = None
    samples_per_epoch: int | None = None
    balance: BalanceSettings = field(default_factory=BalanceSettings)
    rate_keys: tuple[str, ...] = ()
    search: SearchSpec | None = None
    fuse: str = AUTO
    max_per_gpu: int | str | None = None

    @property
    def trials(self) -> frozenset[str]:
        """Names of the members that are trials of its search."""
        return frozenset(self.search.members if self.search else ())

    @property
    def code(self) -> TrainingCode:
        """Framework, functions and data of the members that have none of their own."""
        return TrainingCode(self.framework, self.functions, self.data)

    @property
    def codes(self) -> tuple[TrainingCode, ...]:
        """Code of all its members, each once."""
        return tuple(dict.fromkeys(member.code or self.code for member in self.members))

    @property
    def preloaded(self) -> tuple[str, ...]:
        """Frameworks that each node imports ahead of the ranks of all members."""
        return tuple(dict.fromkeys(name for code in self.codes for name in code.preloaded))

    def of(self, member: Member) -> Ensemble:
        """Return the ensemble of a member alone, with the code that trains it."""
        code = member.code or self.code
        return replace(
            self, members=(member,), framework=code.framework, functions=code.functions, data=code.data
        )

    def as_installed(self, python: str | None = None, *, one_gpu: bool = False) -> Ensemble:
        """Return it with one GPU for each member that could train on more only with a missing package.

        A member whose `min_gpus` is above one keeps its numbers: its ranks tell what is missing.

        Parameters
        ----------
        python : str or None
            Interpreter of the jobs, whose packages are not known; None: this one.
        one_gpu : bool
            True if no member can train on more, as MIG devices do not reach each other.
        """
        if python is not None and not one_gpu:
            return self
        missing = {code: one_gpu or bool(missing_for_groups(code.framework)) for code in self.codes}
        if not any(missing.values()):
            return self
        members = (
            replace(one, max_gpus=1) if missing[one.code or self.code] and one.min_gpus == 1 else one
            for one in self.members
        )
        return replace(self, members=tuple(members))

    @property
    def reads_partitions(self) -> bool:
        """True if each node reads its own partitions of the data."""
        return self.partitions is not None and bool(self.partitions.paths())

    def member(self, name: str) -> Member:
        """Return the member of that name; KeyError if there is none."""
        for member in self.members:
            if member.name == name:
                return member
        raise KeyError(name)
