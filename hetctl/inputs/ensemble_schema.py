"""Keys of the ensemble file, with their types and meanings."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from hetctl.inputs.input_errors import shown
from hetctl.inputs.names import MemberName, SafeName
from hetctl.inputs.quantities import parse_interval
from hetctl.inputs.search_keys import METHOD_KEYS
from hetctl.inputs.validation import Matching, Strict
from hetctl.model.errors import BadInputError
from hetctl.model.frameworks import FRAMEWORKS, USUAL_FRAMEWORK
from hetctl.model.searches import ASHA_VARIANTS
from hetctl.model.training_settings import BALANCE_MODES, MANAGERS, PREDICTORS

FUNCTION_RULE = "must be module:function"
Value = str | int | float
VariableName = Annotated[
    str, Matching(r"[A-Za-z_][A-Za-z0-9_]*", "must be letters, digits and _, not starting with a digit")
]
FunctionName = Annotated[
    str, Matching(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*", FUNCTION_RULE)
]


def _distinct(values: list[Any]) -> list[Any]:
    seen: set[str] = set()
    for value in values:
        # Compared as JSON: 1 and 1.0 or true are equal in Python, but different values in a config.
        text = json.dumps(value)
        if text in seen:
            raise ValueError(f"must not hold {shown(value)} twice")
        seen.add(text)
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
    # As text even if YAML has a number, for the message that says which unit is missing.
    try:
        parse_interval(str(value))
    except BadInputError as error:
        raise ValueError(f"{error.message}; {error.hint}".rstrip("; ")) from None
    return str(value)


Interval = Annotated[
    str,
    BeforeValidator(_interval),
    WithJsonSchema({"type": "string", "examples": ["10m", "500 steps", "2 epochs"]}),
]
Command = Annotated[str | list[str], AfterValidator(_words)]
Values = Annotated[list[Any], Field(min_length=1), AfterValidator(_distinct)]
ConfigKey = Annotated[str, Field(min_length=1)]
Config = Annotated[dict[str, Any], Field(description="Passed to model_fn and train_fn unchanged.")]


class FunctionsModel(Strict):
    """The user's functions, each as module:function; modules lie in the folder of the ensemble file."""

    input_fn: FunctionName = Field(
        description="input_fn(data), or input_fn(data, path), returns the training and validation samples."
    )
    model_fn: FunctionName = Field(description="model_fn(config) returns the network and its optimizer.")
    train_fn: FunctionName | None = Field(
        default=None,
        description="train_fn(data, model, optimizer, config), or with a fifth argument, context, trains an "
        "epoch; null: the default.",
    )
    evaluate_fn: FunctionName | None = Field(
        default=None,
        description="evaluate_fn(outputs, targets, config) returns metrics of all validation samples.",
    )


class StopModel(Strict):
    """Conditions under which a member has converged."""

    metric: str = Field(
        default="val_loss", min_length=1, description="Key of the metric in the results of an epoch."
    )
    mode: Literal["max", "min"] | None = Field(
        default=None,
        description="Direction of improvement; null: max for metrics whose name contains acc, auc, f1, "
        "precision or recall, else min.",
    )
    patience: int = Field(
        default=5,
        ge=1,
        description="Number of epochs without an improvement of more than min_delta after which it stops.",
    )
    min_delta: float = Field(
        default=0.0, ge=0, description="Change of the metric that an improvement must exceed."
    )
    target: float | None = Field(default=None, description="Value of the metric at which training stops.")
    max_epochs: int = Field(default=100, ge=1, description="Maximum number of epochs.")
    expected_epochs: int | None = Field(
        default=None,
        ge=1,
        description="Number of epochs assumed in predictions, at most max_epochs; null: max_epochs.",
    )


class CheckpointModel(Strict):
    """Times of checkpoints in training; a member that stops or converges always writes one."""

    every: Interval = Field(
        default="1 epoch",
        description="Training after which the next checkpoint is written: a time such as 10m, 500 steps, or"
        " 2 epochs. Times and steps also end in the middle of an epoch.",
    )


class Settings(Strict):
    """Settings of an ensemble for all its members, and of a member for itself."""

    batch_size: int = Field(
        default=32,
        ge=1,
        description="Samples per GPU and step; with global_batch_size, the most that a GPU takes at once.",
    )
    global_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Samples of a step on any number of GPUs, which share them; null: batch_size times GPUs.",
    )
    min_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Lower limit for halving the batch size of members out of memory; null: they fail.",
    )
    validation_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Samples per GPU and step of an evaluation; null: as in training.",
    )
    seed: int = Field(
        default=0, ge=0, description="Random seed; each member's own is a hash of it and the member's name."
    )
    gpus: int | None = Field(
        default=None,
        ge=1,
        description="Exact number of GPUs of a member, in place of min_gpus and max_gpus; null: those.",
    )
    min_gpus: int = Field(default=1, ge=1, description="Minimum number of GPUs of a member while it trains.")
    max_gpus: int | None = Field(
        default=None, ge=1, description="Maximum number of GPUs of a member; null: no limit."
    )
    rescale_learning_rate: bool = Field(
        default=True,
        description="Scale the learning rate with the number of GPUs (Capes et al., Equation 7). Never done"
        " with global_batch_size.",
    )
    deterministic: bool = Field(
        default=False,
        description="Use deterministic algorithms only, so that training on GPUs is the same each time.",
    )
    shard: bool = Field(
        default=False,
        description="Divide parameters, gradients and optimizer state among a member's GPUs (FSDP of"
        " PyTorch).",
    )
    stop: StopModel = Field(
        default_factory=StopModel,
        description="Conditions under which a member has converged. Keys of a member override those of the "
        "ensemble; a member with its own metric does not inherit mode and target.",
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

    @field_validator("over")
    @classmethod
    def _not_in_config(cls, over: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        return _apart_from_config(over, info)


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


def _one_way(draw: DrawModel) -> DrawModel:
    if len(draw.model_fields_set) != 1:
        raise ValueError("must have exactly one of choice, integer, log_uniform, uniform")
    return draw


class RandomModel(EntrySettings):
    """Members with values of `over` that are drawn at random."""

    name: SafeName = Field(description="Prefix of the names NAME-000, NAME-001, ...")
    count: int = Field(ge=1, description="Number of members; raising it does not change those that exist.")
    config: Config = Field(default_factory=dict)
    over: dict[str, Annotated[DrawModel, AfterValidator(_one_way)]] = Field(
        min_length=1,
        description="Keys of config, each with its distribution; values depend on seed, number and key only.",
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
    """Entry of members that expands to a grid."""

    grid: GridModel = Field(description="Members for all combinations of values.")


class RandomEntry(Strict):
    """Entry of members that expands to a random sample."""

    random: RandomModel = Field(description="Members with values that are drawn at random.")


def _kind_of(entry: Any) -> str:
    # The choice by key gives errors of one kind only; a plain union would report those of all three kinds.
    written = entry if isinstance(entry, dict) else {}
    return next((f"<{kind}>" for kind in ("grid", "random") if kind in written), "<member>")


Entry: TypeAlias = Annotated[
    Annotated[MemberModel, Tag("<member>")]
    | Annotated[GridEntry, Tag("<grid>")]
    | Annotated[RandomEntry, Tag("<random>")],
    Discriminator(_kind_of),
]


# A type checker cannot evaluate a Literal that is built from a table.
if TYPE_CHECKING:
    FrameworkName = str
else:
    FrameworkName = Literal[tuple(FRAMEWORKS)]


# A type checker cannot evaluate a Literal that is built from a table.
if TYPE_CHECKING:
    BalanceMode = str
    ManagerName = str
    PredictorName = str
else:
    BalanceMode = Literal[BALANCE_MODES]
    ManagerName = Literal[MANAGERS]
    PredictorName = Literal[PREDICTORS]


class BalanceModel(Strict):
    """Batch sizes that follow the speeds of a member's GPUs."""

    mode: BalanceMode = Field(
        default="auto",
        description="on, off, or auto: for groups on several types of GPU, and those that drift apart.",
    )
    manager: ManagerName = Field(
        default="curve", description="Algorithm that sets the sizes: cpu and gpu are those of LB-BSP."
    )
    predictor: PredictorName = Field(default="narx", description="Predictor of speeds of the manager cpu.")

    @model_validator(mode="before")
    @classmethod
    def _mode_alone(cls, given: Any) -> Any:
        # In YAML 1.1, on and off are booleans.
        words = {True: "on", False: "off"}
        if isinstance(given, dict):
            return {**given, "mode": words[given["mode"]]} if isinstance(given.get("mode"), bool) else given
        return {"mode": words[given] if isinstance(given, bool) else given}


class PartitionsModel(Strict):
    """Parts of the training data on the nodes' own disks."""

    count: int | None = Field(default=None, ge=1, description="Number of parts; null: as many as in file.")
    file: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="CSV file partition,path,nodes with a line for each part, instead of count and path; a"
        " column source says from where nodes copy it. Relative to the ensemble file.",
    )
    path: str = Field(
        default="",
        description="Path of a part on its node, with {partition} for its number and variables of the node.",
    )
    source: str = Field(
        default="",
        description="Path on a shared file system from which nodes copy their parts to path in each job.",
    )
    replicas: int = Field(default=1, ge=1, description="Number of nodes that have, or copy, each part.")

    @model_validator(mode="before")
    @classmethod
    def _count_alone(cls, given: Any) -> Any:
        return given if isinstance(given, dict) else {"count": given}


class SearchChoiceModel(DrawModel):
    """Distribution of a value in a search: as in a random sample, but a choice is among single values."""

    choice: Annotated[list[Value | bool | None], Field(min_length=1), AfterValidator(_distinct)] = Field(
        default_factory=list, description="List of values, all equally likely."
    )


class MutationModel(Strict):
    """Change of a value from a parent to its child: exactly one of these keys."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    add: Annotated[list[float], Field(min_length=1)] = Field(
        default_factory=list, description="Steps, of which one is added."
    )
    multiply: Annotated[list[float], Field(min_length=1)] = Field(
        default_factory=list, description="Factors, by one of which the value is multiplied."
    )


def _one_change(change: MutationModel) -> MutationModel:
    if len(change.model_fields_set) != 1:
        raise ValueError("must have exactly one of add, multiply")
    return change


class OptunaPartModel(Strict):
    """Class of Optuna by name, with the arguments that it is made with."""

    name: str = Field(min_length=1, description="Name of the class.")
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Its arguments; a mapping of name and options stands for a part inside of another.",
    )

    @model_validator(mode="before")
    @classmethod
    def _name_alone(cls, given: Any) -> Any:
        return given if isinstance(given, dict) else {"name": given}


class SearchBudgetModel(Strict):
    """Limits after which no trial is begun or continued."""

    epochs: int | None = Field(default=None, ge=1, description="Epochs of all trials together; null: any.")
    gpu_hours: float | None = Field(default=None, gt=0, description="GPU-hours of the run; null: any.")
    time: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="Time since the start of the run, such as 2h; null: any."
    )


# A type checker cannot evaluate a Literal that is built from a table.
if TYPE_CHECKING:
    MethodName = str
    AshaVariant = str
else:
    MethodName = Literal[tuple(METHOD_KEYS)]
    AshaVariant = Literal[ASHA_VARIANTS]


class SearchModel(EntrySettings):
    """Search for hyper-parameters, whose trials are members that arrive while the run goes on."""

    name: SafeName = Field(default="trial", description="Prefix of the names NAME-000, NAME-001, ...")
    method: MethodName = Field(description="Method that chooses the trials and their epochs.")
    config: Config = Field(default_factory=dict)
    space: dict[str, Annotated[SearchChoiceModel, AfterValidator(_one_way)]] = Field(
        min_length=1, description="Keys of config, each with the distribution of its values."
    )
    trials: int | None = Field(
        default=None, ge=1, description="Number of trials; of pbt, in a population. A grid has its own."
    )
    metric: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="Key of the metric that the search goes by; null: that of the stop rule."
    )
    mode: Literal["max", "min"] | None = Field(
        default=None, description="Direction in which that metric is better; null: as for stop rules."
    )
    epochs: int = Field(ge=1, description="Epochs of a trial that reaches the end.")
    min_epochs: int | None = Field(default=None, ge=1, description="asha: epochs of every trial; null: 1.")
    eta: int | None = Field(
        default=None,
        ge=2,
        description="asha, hyperband: one in so many trials of a rung goes on; null: 4 and 3.",
    )
    stop_rate: int | None = Field(
        default=None, ge=0, description="asha: every trial gets min_epochs * eta^stop_rate epochs; null: 0."
    )
    variant: AshaVariant | None = Field(
        default=None,
        description="asha: trials wait at a rung for their promotion, or go on or end at once;"
        " null: promotion.",
    )
    every: int | None = Field(
        default=None, ge=1, description="pbt, pruners: epochs between two decisions; null: 1."
    )
    mutate: dict[str, Annotated[MutationModel, AfterValidator(_one_change)]] | None = Field(
        default=None, min_length=1, description="pbt: changes of values from a parent to its child."
    )
    sampler: OptunaPartModel | None = Field(
        default=None,
        description="Class of optuna.samplers that draws configs: a name, or a mapping of name and options;"
        " null: TPESampler for optuna, random draws for all others.",
    )
    pruner: OptunaPartModel | None = Field(
        default=None, description="optuna: class of optuna.pruners that ends trials; null: none is ended."
    )
    parallel: int | None = Field(
        default=None, ge=1, description="Most trials at a time; null: as many as fit the GPUs of a job."
    )
    budget: SearchBudgetModel = Field(
        default_factory=SearchBudgetModel, description="Limits of resources, after which the search ends."
    )

    @field_validator("space")
    @classmethod
    def _not_in_config(cls, space: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        for key in info.data.get("config", {}):
            if key in space:
                raise ValueError(f"key '{key}' must be in config or in space, not in both")
        return space


class EnsembleModel(Settings):
    """Networks that are trained on the same data."""

    name: SafeName = Field(description="Name of the ensemble, valid as a file name.")
    framework: FrameworkName = Field(
        default=USUAL_FRAMEWORK, description="Framework in which the networks are built."
    )
    functions: FunctionsModel | None = Field(
        default=None, description="The user's functions; required unless all members have a command."
    )
    data: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Argument of input_fn; a relative path is relative to the folder of the ensemble file.",
    )
    partitions: PartitionsModel | None = Field(
        default=None,
        description="Parts of the training data on the nodes' own disks: a number, or a mapping of count,"
        " path, source and replicas, or of file; null: not partitioned.",
    )
    samples_per_epoch: int | None = Field(
        default=None,
        ge=1,
        description="Number of training samples; null: as profiled. Required if no member fits on one GPU.",
    )
    rate_keys: Annotated[list[ConfigKey], Field(min_length=1), AfterValidator(_distinct)] | None = Field(
        default=None,
        description="Keys of config that can change the training rate: members that differ in others only are"
        " of one shape, and measured once. null: all keys except learning rates, seeds and the like.",
    )
    balance: BalanceModel = Field(
        default_factory=BalanceModel,
        description="Balanced batches: a mode, or a mapping of mode, manager and predictor.",
    )
    members: list[Entry] = Field(
        default_factory=list,
        min_length=1,
        description="Single members, grids and random samples; required unless there is a search.",
    )
    search: SearchModel | None = Field(
        default=None, description="Search whose trials are members, beside those of members; null: none."
    )
