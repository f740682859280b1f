"""Keys of the ensemble file beside those of members, with their types and meanings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, field_validator

from hetctl.inputs.member_schema import (
    ONE_DISTRIBUTION,
    Config,
    ConfigKey,
    DrawModel,
    Entry,
    EntrySettings,
    FrameworkName,
    FunctionsModel,
    Settings,
    Value,
    apart_from_config,
    distinct,
    one_of,
)
from hetctl.inputs.validation import SafeName, Strict, model_of, under
from hetctl.model.searches import ASHA_VARIANTS, NamedPart, PruneRule, SearchBudget
from hetctl.model.site import PER_GPU
from hetctl.model.training_settings import BalanceSettings


class MethodKeys(NamedTuple):
    """Keys that a method needs, and those that it may have."""

    needs: frozenset[str] = frozenset()
    may: frozenset[str] = frozenset()


METHOD_KEYS: Mapping[str, MethodKeys] = {
    "grid": MethodKeys(),
    "random": MethodKeys(frozenset({"trials"})),
    "hyperband": MethodKeys(may=frozenset({"eta", "sampler"})),
    "asha": MethodKeys(
        frozenset({"trials"}), frozenset({"min_epochs", "eta", "stop_rate", "variant", "sampler"})
    ),
    "pbt": MethodKeys(frozenset({"trials", "mutate"}), frozenset({"every", "sampler"})),
    "optuna": MethodKeys(frozenset({"trials"}), frozenset({"every", "sampler", "pruner"})),
}
OF_METHODS = frozenset[str]().union(*(keys.needs | keys.may for keys in METHOD_KEYS.values()))
"""Keys of `search` that not every method has."""


class SearchChoiceModel(DrawModel):
    """Distribution of a value in a search: as in a random sample, but a choice is among single values."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    choice: Annotated[list[Value | bool | None], Field(min_length=1), AfterValidator(distinct)] = Field(
        default_factory=list, description="List of values, all equally likely."
    )

    step: int | None = Field(default=None, ge=1, description="integer: distance of the values; null: 1.")
    when: dict[str, Annotated[list[Value | bool | None], Field(min_length=1)]] = Field(
        default_factory=dict,
        description="Keys above it in the space, each with the values with which a config has this key, too.",
    )
    prior: Value | bool | None = Field(
        default=None,
        description="Likely value, of random draws: half of a choice's, the middle of a bell over a range.",
    )


def _step_of_integer(draw: SearchChoiceModel) -> SearchChoiceModel:
    if draw.step is not None and not draw.integer:
        raise ValueError("has a step, which only integer may have")
    return draw


class MutationModel(Strict):
    """Change of a value from a parent to its child: exactly one of these keys."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1, "maxProperties": 1})

    add: Annotated[list[float], Field(min_length=1)] = Field(
        default_factory=list, description="Steps, of which one is added."
    )
    multiply: Annotated[list[float], Field(min_length=1)] = Field(
        default_factory=list, description="Factors, by one of which the value is multiplied."
    )


# A type checker cannot evaluate a Literal that is built from a table, and reads dataclasses for their models.
if TYPE_CHECKING:
    MethodName = str
    AshaVariant = str
    BalanceModel = BalanceSettings
    BudgetModel = SearchBudget
    OptunaPartModel = NamedPart
    PruneModel = PruneRule
    PerGpu = int | str
else:
    BalanceModel, BudgetModel, OptunaPartModel, PruneModel = map(
        model_of, (BalanceSettings, SearchBudget, NamedPart, PruneRule)
    )
    MethodName = Literal[tuple(METHOD_KEYS)]
    AshaVariant = Literal[ASHA_VARIANTS]
    PerGpu = Literal[PER_GPU]


OptunaPart = Annotated[OptunaPartModel, under("name")]


class SearchModel(EntrySettings):
    """Search for hyper-parameters, whose trials are members that arrive while the run goes on."""

    name: SafeName = Field(default="trial", description="Prefix of the names NAME-000, NAME-001, ...")
    method: MethodName = Field(description="Method that chooses the trials and their epochs.")
    config: Config = Field(default_factory=dict)
    space: dict[str, Annotated[SearchChoiceModel, ONE_DISTRIBUTION, AfterValidator(_step_of_integer)]] = (
        Field(min_length=1, description="Keys of config, each with the distribution of its values.")
    )
    start: list[Annotated[dict[str, Value | bool | None], Field(min_length=1)]] = Field(
        default_factory=list,
        description="Configs of the first trials, each with keys of space; what they leave out is drawn.",
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
    also: dict[Annotated[str, Field(min_length=1)], Literal["max", "min"]] = Field(
        default_factory=dict,
        description="Further metrics, each max or min: trials are ranked by the Pareto fronts of all.",
    )
    epochs: int = Field(ge=1, description="Epochs of a trial that reaches the end.")
    min_epochs: int | None = Field(default=None, ge=1, description="asha: epochs of every trial; null: 1.")
    eta: int | None = Field(
        default=None,
        ge=2,
        le=10**6,
        description="asha, hyperband: one in so many trials of a rung goes on; null: 4 and 3.",
    )
    stop_rate: int | None = Field(
        default=None,
        ge=0,
        le=64,
        description="asha: every trial gets min_epochs * eta^stop_rate epochs; null: 0.",
    )
    variant: AshaVariant | None = Field(
        default=None,
        description="asha: trials wait at a rung for their promotion (if delayed, most at the first rung"
        " until all have begun), or go on or end at once; null: delayed.",
    )
    every: int | None = Field(
        default=None, ge=1, description="pbt, pruners: epochs between two decisions; null: 1."
    )
    mutate: dict[str, Annotated[MutationModel, one_of("add", "multiply")]] | None = Field(
        default=None, min_length=1, description="pbt: changes of values from a parent to its child."
    )
    sampler: OptunaPart | None = Field(
        default=None,
        description="Class of optuna.samplers that draws configs: a name, or a mapping of name and options;"
        " null: TPESampler for optuna, random draws for all others.",
    )
    pruner: OptunaPart | None = Field(
        default=None, description="optuna: class of optuna.pruners that ends trials; null: none is ended."
    )
    prune: PruneModel | None = Field(
        default=None,
        description="Rule that ends a trial within an epoch; null: none. Not with pbt and pruners.",
    )
    parallel: int | None = Field(
        default=None, ge=1, description="Most trials at a time; null: as many as fit the GPUs of a job."
    )
    budget: BudgetModel = Field(
        default_factory=BudgetModel, description="Limits of resources, after which the search ends."
    )

    _apart = field_validator("space")(apart_from_config)


def _balance(given: Any) -> Any:
    """Return the settings; a mode may stand alone, and in YAML 1.1 on and off are booleans."""
    settings = given if isinstance(given, dict) else {"mode": given}
    mode = settings.get("mode")
    return {**settings, "mode": "on" if mode else "off"} if isinstance(mode, bool) else settings


def _switch(given: Any) -> Any:
    """Return a mode; in YAML 1.1 off is a boolean."""
    return "off" if given is False else given


class PartitionsModel(Strict):
    """Partitions of the training data on the nodes' own disks."""

    count: int | None = Field(default=None, ge=1, description="Their number; null: as many as in file.")
    file: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="CSV file partition,path,nodes with a line for each, instead of count and path; a"
        " column source says from where nodes copy it. Relative to the ensemble file.",
    )
    path: str = Field(
        default="",
        description="Path of each on its node, with {partition} for its number and variables of the node.",
    )
    source: str = Field(
        default="",
        description="Path on a shared file system from which nodes copy theirs to path in each job.",
    )
    replicas: int = Field(default=1, ge=1, description="Number of nodes that have, or copy, each partition.")


class EnsembleModel(Settings):
    """Networks that are trained on the same data."""

    name: SafeName = Field(description="Name of the ensemble, valid as a file name.")
    framework: FrameworkName | None = Field(
        default=None,
        description="Framework in which the networks are built; null: the one that the module of model_fn"
        " imports, or tensorflow.",
    )
    functions: FunctionsModel | None = Field(
        default=None, description="The user's functions; required unless all members have a command."
    )
    data: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description="Argument of input_fn; a relative path is relative to the folder of the ensemble file.",
    )
    partitions: Annotated[PartitionsModel, under("count")] | None = Field(
        default=None,
        description="Partitions of the data on the nodes' own disks: a number, or a mapping of count,"
        " path, source and replicas, or of file; null: not partitioned.",
    )
    samples_per_epoch: int | None = Field(
        default=None,
        ge=1,
        description="Number of training samples; null: as profiled. Required if no member fits on one GPU.",
    )
    rate_keys: Annotated[list[ConfigKey], Field(min_length=1), AfterValidator(distinct)] | None = Field(
        default=None,
        description="Keys of config that can change the training rate: members that differ in others only are"
        " of one shape, and measured once. null: all keys except learning rates, seeds and the like.",
    )
    balance: Annotated[BalanceModel, BeforeValidator(_balance)] = Field(
        default_factory=BalanceModel,
        description="Balanced batches: a mode, or a mapping of mode, manager and predictor.",
    )
    fuse: Annotated[Literal["auto", "off"], BeforeValidator(_switch)] = Field(
        default="auto",
        description="Whether members of one shape that wait for a GPU train as one computation with others"
        " of it (PyTorch), if that is faster.",
    )
    max_per_gpu: PerGpu | None = Field(
        default=None,
        description="Largest number of members on one GPU, unless --max-per-gpu says another; auto: as the"
        " site's gpu_memory permits; null: as the site says.",
    )
    members: list[Entry] = Field(
        default_factory=list,
        min_length=1,
        description="Single members, grids and random samples; required unless there is a search.",
    )
    search: SearchModel | None = Field(
        default=None, description="Search whose trials are members, beside those of members; null: none."
    )
