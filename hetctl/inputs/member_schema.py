"""Keys of members in the ensemble file, and of an ensemble's settings for all of them."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from hetctl.inputs.input_errors import shown
from hetctl.inputs.quantities import parse_interval
from hetctl.inputs.validation import Matching, MemberName, SafeName, Strict, converting, model_of
from hetctl.model.ensemble import Functions, Member
from hetctl.model.training_settings import FRAMEWORKS

Value = str | int | float
VariableName = Annotated[
    str, Matching(r"[A-Za-z_][A-Za-z0-9_]*", "must be letters, digits and _, not starting with a digit")
]


def distinct(values: list[Any]) -> list[Any]:
    """Return the values; ValueError if two are equal."""
    seen: set[str] = set()
    for value in values:
        # Compared as JSON: 1 and 1.0 or true are equal in Python, but different values in a config.
        text = json.dumps(value)
        if text in seen:
            raise ValueError(f"must not hold {shown(value)} twice")
        seen.add(text)
    return values


def apart_from_config(values: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """Return the values; ValueError if a key is also in the config."""
    for key in info.data.get("config", {}):
        if key in values:
            raise ValueError(f"key '{key}' must be in config or in {info.field_name}, not in both")
    return values


def _rising(bounds: list[Any]) -> list[Any]:
    if bounds[0] >= bounds[1]:
        raise ValueError("must be [lower, upper] with lower < upper")
    return bounds


def _words(command: str | list[str]) -> str | list[str]:
    """Split a command as a shell would; no shell is involved, so nothing else is expanded."""
    words = shlex.split(command) if isinstance(command, str) else command
    if not words or not words[0]:
        raise ValueError("must name a program")
    return words


def _interval(value: Any) -> str:
    # As text, even for a number in YAML, so that the message says which unit is missing.
    parse_interval(str(value))
    return str(value)


Interval = Annotated[
    str,
    converting(_interval),
    WithJsonSchema({"type": "string", "examples": ["10m", "500 steps", "2 epochs"]}),
]
Command = Annotated[str | list[str], AfterValidator(_words)]
ModuleName = Annotated[str, Matching(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "must be the name of a module")]
Modules = Annotated[
    list[ModuleName] | ModuleName, AfterValidator(lambda given: [given] if isinstance(given, str) else given)
]
Values = Annotated[list[Any], Field(min_length=1), AfterValidator(distinct)]
ConfigKey = Annotated[str, Field(min_length=1)]
Config = Annotated[dict[str, Any], Field(description="Passed to model_fn and train_fn unchanged.")]

# A type checker cannot evaluate a Literal that is built from a table.
if TYPE_CHECKING:
    FrameworkName = str
else:
    FrameworkName = Literal[tuple(FRAMEWORKS)]


# For a type checker, the model of a dataclass has the dataclass's fields.
if TYPE_CHECKING:
    FunctionsModel = Functions

    class _MemberKeys(Strict):
        seed: int
        stop: Strict

else:
    FunctionsModel = model_of(Functions)
    _MemberKeys = model_of(Member)


class CheckpointModel(Strict):
    """Times of checkpoints in training; a member that stops or converges always writes one."""

    every: Interval = Field(
        default="1 epoch",
        description="Training after which the next checkpoint is written: a time such as 10m, 500 steps, or"
        " 2 epochs. Times and steps also end in the middle of an epoch.",
    )


class ResumeModel(Strict):
    """Start of a command that continues from a checkpoint."""

    checkpoint: Annotated[str, Matching(r"|[^/].*", "must be relative to {checkpoint_dir}")] = Field(
        default="",
        description="Pattern of the script's checkpoints in {checkpoint_dir}, of which the newest is"
        " {resume_from}; empty: those that the script names.",
    )
    options: Command | None = Field(
        default=None,
        description="Words added to the command if there is a checkpoint, with placeholders as in command.",
    )


class Settings(_MemberKeys):
    """Settings of an ensemble for all its members, and of a member for itself."""

    gpus: int | None = Field(
        default=None,
        ge=1,
        description="Exact number of GPUs of a member, in place of min_gpus and max_gpus; null: those.",
    )
    checkpoint: CheckpointModel = Field(
        default_factory=CheckpointModel, description="Times of checkpoints in training."
    )
    command: Command | None = Field(
        default=None,
        description="Command that trains a member, in place of functions: text that is split into words, or"
        " a list of words, with placeholders {key} for values of config.",
    )
    environment: dict[VariableName, Value] = Field(
        default_factory=dict,
        description="Variables of the command; those of a member are added to the ensemble's.",
    )
    resume: ResumeModel = Field(
        default_factory=ResumeModel, description="How the command continues from a checkpoint."
    )
    preload: Modules = Field(
        default_factory=list,
        description="Modules of Python that are imported once for all starts of the command: a name, or a"
        " list of names.",
    )


def _without_inherited_defaults(schema: dict[str, Any]) -> None:
    """Drop defaults: a member's default is the value of its ensemble, which the schema does not contain."""
    for name in Settings.model_fields:
        schema["properties"][name].pop("default", None)


class MemberSettings(Settings):
    """Settings whose defaults are the ensemble's."""

    model_config = ConfigDict(json_schema_extra=_without_inherited_defaults)


class EntrySettings(MemberSettings):
    """Settings of an entry of members that an ensemble does not have."""

    profile_as: MemberName | None = Field(
        default=None,
        description="Name of the member whose measured rates it has, whatever its own config; null: those of"
        " its own shape.",
    )
    layers: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="File with a profile of its layers, for pipelines, relative to the ensemble file.",
    )
    framework: FrameworkName | None = Field(
        default=None, description="Framework of its network; null: the ensemble's."
    )
    functions: FunctionsModel | None = Field(
        default=None, description="Functions of its own, in place of all of the ensemble's; null: those."
    )
    data: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="Argument of input_fn; null: the ensemble's."
    )
    seeds: int = Field(
        default=1,
        ge=1,
        description="Number of members NAME, NAME-seed-1, NAME-seed-2, .. that differ in their seed alone;"
        " their results are also shown together.",
    )


class MemberModel(EntrySettings):
    """Single member."""

    name: MemberName = Field(description="Name, unique in the ensemble and valid as a file name.")
    config: Config = Field(default_factory=dict)


class GridModel(EntrySettings):
    """Members for all combinations of the values in `over`."""

    name: SafeName = Field(
        description="Prefix of the names NAME-KEY-VALUE-..., with keys in the order of over."
    )
    config: Config = Field(default_factory=dict)
    over: dict[str, Values] = Field(min_length=1, description="Keys of config, each with its list of values.")

    _apart = field_validator("over")(apart_from_config)


class DrawModel(Strict):
    """Distribution of a random value: exactly one of these keys."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    uniform: Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_rising)] = Field(
        default_factory=list, description="[lower, upper]: a float, uniform between the bounds."
    )
    log_uniform: Annotated[
        list[Annotated[float, Field(gt=0)]], Field(min_length=2, max_length=2), AfterValidator(_rising)
    ] = Field(
        default_factory=list, description="[lower, upper], both above 0: a float, uniform in the logarithm."
    )
    integer: Annotated[list[int], Field(min_length=2, max_length=2), AfterValidator(_rising)] = Field(
        default_factory=list, description="[lower, upper]: a whole number, bounds included."
    )
    choice: Values = Field(default_factory=list, description="List of values, of which one is drawn.")


def one_of(*keys: str) -> AfterValidator:
    """Return a check that a mapping has exactly one of some keys."""

    def check(model: Strict) -> Strict:
        if len(model.model_fields_set.intersection(keys)) != 1:
            raise ValueError(f"must have exactly one of {', '.join(keys)}")
        return model

    return AfterValidator(check)


ONE_DISTRIBUTION = one_of("choice", "integer", "log_uniform", "uniform")


class RandomModel(EntrySettings):
    """Members with values of `over` that are drawn at random."""

    name: SafeName = Field(description="Prefix of the names NAME-000, NAME-001, ...")
    count: int = Field(ge=1, description="Number of members; raising it does not change those that exist.")
    config: Config = Field(default_factory=dict)
    over: dict[str, Annotated[DrawModel, ONE_DISTRIBUTION]] = Field(
        min_length=1,
        description="Keys of config, each with its distribution; values depend on seed, number and key only.",
    )

    _apart = field_validator("over")(apart_from_config)


class GridEntry(Strict):
    """Entry of members that expands to a grid."""

    grid: GridModel = Field(description="Members for all combinations of values.")


class RandomEntry(Strict):
    """Entry of members that expands to a random sample."""

    random: RandomModel = Field(description="Members with values that are drawn at random.")


def _kind_of(entry: Any) -> str:
    # A choice by key gives the errors of one kind; a plain union would report all three kinds.
    written = entry if isinstance(entry, dict) else {}
    return next((f"<{kind}>" for kind in ("grid", "random") if kind in written), "<member>")


Entry: TypeAlias = Annotated[
    Annotated[MemberModel, Tag("<member>")]
    | Annotated[GridEntry, Tag("<grid>")]
    | Annotated[RandomEntry, Tag("<random>")],
    Discriminator(_kind_of),
]
