"""Keys of `search` in the ensemble file: those of all methods, and those that each has beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from hetctl.inputs.member_schema import Config, DrawModel, EntrySettings, Value, distinct, one_way
from hetctl.inputs.names import SafeName
from hetctl.inputs.validation import Strict
from hetctl.model.searches import ASHA_VARIANTS


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

    choice: Annotated[list[Value | bool | None], Field(min_length=1), AfterValidator(distinct)] = Field(
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
    space: dict[str, Annotated[SearchChoiceModel, AfterValidator(one_way)]] = Field(
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
