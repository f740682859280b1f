"""Keys of the ensemble file beside those of members and searches, with their types and meanings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from hetctl.inputs.member_schema import ConfigKey, Entry, FrameworkName, FunctionsModel, Settings, distinct
from hetctl.inputs.names import SafeName
from hetctl.inputs.search_schema import SearchModel
from hetctl.inputs.validation import Strict
from hetctl.model.training_settings import BALANCE_MODES, MANAGERS, PREDICTORS, USUAL_FRAMEWORK

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

    @model_validator(mode="before")
    @classmethod
    def _count_alone(cls, given: Any) -> Any:
        return given if isinstance(given, dict) else {"count": given}


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
