"""The complete configuration of a training run, as one flat, checked record.

A field is a command-line flag (`batch_size` is `--batch-size`), a key of a YAML file and an
attribute for recipes. The classes of `config_groups` group the flags in `--help`; `TrainConfig` is
all of them. What a value may be is said there and here and nowhere else, but for the options that
strategies declare. This module imports no TensorFlow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator

from tfdist.config_groups.optimisation import Optimisation, Precision, scales_dynamically
from tfdist.config_groups.outcome import Extent, Outcome, Saving
from tfdist.config_groups.run import Run, Spread
from tfdist.config_groups.strategy_options import options_of_strategies

if TYPE_CHECKING:

    class StrategyOptions(BaseModel):
        """Fields that are known when the table of strategies is."""

else:
    StrategyOptions = options_of_strategies(
        (Run, Spread, Optimisation, Precision, Saving, Extent, Outcome)
    )


class TrainConfig(Outcome, Extent, Saving, Precision, Optimisation, StrategyOptions, Spread, Run):
    """The complete, resolved configuration of a training run."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )

    @field_validator("lr_decay_epochs", "batch_warmup", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """`30,60` on a command line is a list."""
        return value.split(",") if isinstance(value, str) else value

    @field_validator("devices", "workers", "logger", "export", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        """`GPU:0,GPU:1` on a command line is a list of names; `2` is a number."""
        if isinstance(value, str) and not value.strip().lstrip("+-").isdigit():
            return [name.strip() for name in value.split(",")]
        return value

    @field_validator(
        "loss_scale_initial",
        "loss_scale_growth_interval",
        "loss_scale_growth_factor",
        "loss_scale_backoff_factor",
    )
    @classmethod
    def _only_of_a_dynamic_scale(cls, value: float, info: ValidationInfo) -> float:
        usual = cls.model_fields[str(info.field_name)].default
        if value != usual and not scales_dynamically(
            info.data.get("precision"), info.data.get("loss_scale")
        ):
            raise ValueError(
                "no effect without a dynamic loss scale: add --loss-scale dynamic, or leave it out."
            )
        return value

    @field_validator("limit_steps", "overfit_batches")
    @classmethod
    def _only_one_says_how_many(cls, value: int | None, info: ValidationInfo) -> int | None:
        for other in ("smoke", "limit_steps"):
            if value is not None and info.data.get(other):
                flag = f"--{other.replace('_', '-')}"
                raise ValueError(f"{flag} says how many steps already: leave one of the two out.")
        return value

    def strategy_options(self) -> dict[str, Any]:
        """Those options of strategies that are given, for `tfdist.strategies.create`."""
        values = {name: getattr(self, name) for name in StrategyOptions.model_fields}
        return {name: value for name, value in values.items() if value is not None}

    def to_yaml(self) -> str:
        """This configuration as a file that `--config` reads."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


#: The fields' groups, in the order of `--help`.
GROUPS: tuple[type[BaseModel], ...] = (
    Run,
    Spread,
    StrategyOptions,
    Optimisation,
    Precision,
    Saving,
    Extent,
    Outcome,
)
