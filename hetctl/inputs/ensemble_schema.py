"""Keys of the ensemble file, with their types and meanings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, ConfigDict, Discriminator, Field, Tag, ValidationInfo, field_validator

from hetctl.inputs.input_errors import shown
from hetctl.inputs.names import MemberName, SafeName
from hetctl.inputs.validation import Matching, Strict
from hetctl.model.frameworks import FRAMEWORKS

FUNCTION_RULE = "must be module:function"
FunctionName = Annotated[
    str, Matching(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*", FUNCTION_RULE)
]


def _distinct(values: list[Any]) -> list[Any]:
    seen: set[str] = set()
    for value in values:
        text = json.dumps(value)
        if text in seen:
            raise ValueError(f"must not hold {shown(value)} twice")
        seen.add(text)
    return values


def _rising(bounds: list[Any]) -> list[Any]:
    if bounds[0] >= bounds[1]:
        raise ValueError("must be [lower, upper] with lower < upper")
    return bounds


Values = Annotated[list[Any], Field(min_length=1), AfterValidator(_distinct)]
Config = Annotated[dict[str, Any], Field(description="Handed to model_fn and train_fn as it is.")]


class FunctionsModel(Strict):
    """The user's functions, each module:function; the modules lie beside the ensemble file."""

    input_fn: FunctionName = Field(description="input_fn(data) returns the training and validation samples.")
    model_fn: FunctionName = Field(description="model_fn(config) returns the network and its optimizer.")
    train_fn: FunctionName | None = Field(
        default=None,
        description="train_fn(data, model, optimizer, config) trains an epoch; null for the default.",
    )


class StopModel(Strict):
    """Conditions under which a member has converged."""

    metric: str = Field(default="val_loss", min_length=1, description="A key of the epoch's results.")
    mode: Literal["max", "min"] | None = Field(
        default=None,
        description="Whether more or less of the metric is better; if not given, max for metrics whose name "
        "contains acc, auc, f1, precision or recall, else min.",
    )
    patience: int = Field(
        default=5, ge=1, description="Epochs without an improvement of more than min_delta before it stops."
    )
    min_delta: float = Field(default=0.0, ge=0, description="The least change of the metric that counts.")
    target: float | None = Field(default=None, description="Stop as soon as the metric reaches this value.")
    max_epochs: int = Field(default=100, ge=1, description="Stop after this many epochs in any case.")
    expected_epochs: int | None = Field(
        default=None,
        ge=1,
        description="Epochs that predictions assume, at most max_epochs; null for max_epochs.",
    )


class Settings(Strict):
    """Settings that an ensemble makes for all its members, and a member for itself."""

    batch_size: int = Field(default=32, ge=1, description="Samples per GPU and step.")
    min_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Out of memory, a member's batch size is halved down to this; null to let it fail.",
    )
    validation_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Samples per GPU and step of an evaluation; null for as many as in training.",
    )
    seed: int = Field(default=0, ge=0, description="A member's own seed is a hash of this one and its name.")
    max_gpus: int | None = Field(
        default=None, ge=1, description="Never give a member more GPUs; null leaves it to the planner."
    )
    rescale_learning_rate: bool = Field(
        default=True,
        description="Scale the learning rate with the number of GPUs (Capes et al., Equation 7).",
    )
    stop: StopModel = Field(
        default_factory=StopModel,
        description="When a member has converged; a member's keys go over the ensemble's, but for mode and "
        "target, which it must repeat if it names its own metric.",
    )


def _without_inherited_defaults(schema: dict[str, Any]) -> None:
    """Drop defaults that the schema cannot know: a member's default is the ensemble's value."""
    for name in Settings.model_fields:
        schema["properties"][name].pop("default", None)


class MemberSettings(Settings):
    """Settings whose defaults are the ensemble's."""

    model_config = ConfigDict(json_schema_extra=_without_inherited_defaults)


class MemberModel(MemberSettings):
    """One member."""

    name: MemberName = Field(description="Unique in the ensemble and safe as a file name.")
    config: Config = Field(default_factory=dict)
    layers: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Profile of its layers, for a pipeline; a relative path is taken from the file's folder.",
    )


class GridModel(MemberSettings):
    """A member for every combination of the values in `over`."""

    name: SafeName = Field(description="The members are named NAME-KEY-VALUE-..., keys as in over.")
    config: Config = Field(default_factory=dict)
    over: dict[str, Values] = Field(min_length=1, description="Keys of config, each with its list of values.")

    @field_validator("over")
    @classmethod
    def _not_in_config(cls, over: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return _apart_from_config(over, info)


class DrawModel(Strict):
    """Distribution of a random value: exactly one of these keys."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    uniform: Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_rising)] = Field(
        default_factory=list, description="[lower, upper], any float between."
    )
    log_uniform: Annotated[
        list[Annotated[float, Field(gt=0)]], Field(min_length=2, max_length=2), AfterValidator(_rising)
    ] = Field(default_factory=list, description="[lower, upper], uniform in the logarithm; both above 0.")
    integer: Annotated[list[int], Field(min_length=2, max_length=2), AfterValidator(_rising)] = Field(
        default_factory=list, description="[lower, upper], any whole number from lower to upper."
    )
    choice: Values = Field(default_factory=list, description="One of these values.")


def _one_way(draw: DrawModel) -> DrawModel:
    if len(draw.model_fields_set) != 1:
        raise ValueError("must have exactly one of choice, integer, log_uniform, uniform")
    return draw


class RandomModel(MemberSettings):
    """Members whose values in `over` are drawn at random."""

    name: SafeName = Field(description="The members are named NAME-000, NAME-001, ...")
    count: int = Field(ge=1, description="How many; raising it keeps the others as they are.")
    config: Config = Field(default_factory=dict)
    over: dict[str, Annotated[DrawModel, AfterValidator(_one_way)]] = Field(
        min_length=1,
        description="Keys of config, each with how it is drawn, from the seed, the number and the key alone.",
    )

    @field_validator("over")
    @classmethod
    def _not_in_config(cls, over: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return _apart_from_config(over, info)


def _apart_from_config(over: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    for key in info.data.get("config", {}):
        if key in over:
            raise ValueError(f"key '{key}' must be in config or in over, not in both")
    return over


class GridEntry(Strict):
    """An entry of members that stands for a grid."""

    grid: GridModel = Field(description="A member for every combination of values.")


class RandomEntry(Strict):
    """An entry of members that stands for a random sample."""

    random: RandomModel = Field(description="Members whose values are drawn at random.")


def _kind_of(entry: Any) -> str:
    written = entry if isinstance(entry, dict) else {}
    return next((f"<{kind}>" for kind in ("grid", "random") if kind in written), "<member>")


Entry: TypeAlias = Annotated[
    Annotated[MemberModel, Tag("<member>")]
    | Annotated[GridEntry, Tag("<grid>")]
    | Annotated[RandomEntry, Tag("<random>")],
    Discriminator(_kind_of),
]


if TYPE_CHECKING:
    FrameworkName = str
else:
    FrameworkName = Literal[tuple(FRAMEWORKS)]


class EnsembleModel(Settings):
    """Networks that are trained on the same data."""

    name: SafeName = Field(description="Name of the ensemble, safe as a file name.")
    framework: FrameworkName = Field(default="tensorflow", description="What the networks are built with.")
    functions: FunctionsModel = Field(description="The user's functions.")
    data: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="Handed to input_fn; a relative path is taken from the file's folder."
    )
    partitions: int | None = Field(
        default=None,
        ge=1,
        description="Parts of the training data that lie on the nodes, each on one; null if there are none.",
    )
    samples_per_epoch: int | None = Field(
        default=None,
        ge=1,
        description="Training samples; null: as profiles say. It takes it where no member fits one GPU.",
    )
    members: list[Entry] = Field(min_length=1, description="Single members, grids and random samples.")
