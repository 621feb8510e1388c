"""The complete configuration of a training run, as one flat, checked record.

A field is a command-line flag (`batch_size` is `--batch-size`), a key of a YAML file and an
attribute for recipes. The classes below group the flags in `--help`; `TrainConfig` is all of them.
What a value may be is said here and nowhere else, but for the options that strategies declare. This
module imports no TensorFlow.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    create_model,
    field_validator,
)

from tfdist.console import durations
from tfdist.models import MODELS
from tfdist.strategies import STRATEGIES, options_by_name

#: A time such as `2h`, `1h30m` or `90s`.
_TIME = r"^(\d+[dhms])+$"

if TYPE_CHECKING:
    ModelName = str
    StrategyName = str
else:
    ModelName = Literal[tuple(MODELS)]
    StrategyName = Literal[tuple(STRATEGIES)]


def default_data_dir() -> str:
    """The cache folder for data sets: `$XDG_CACHE_HOME/tfdist`, or `~/.cache/tfdist`."""
    return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tfdist")


class Run(BaseModel):
    """What to train and where to put it."""

    recipe: str = Field(
        "digits", description="what to train: a module of recipes/, ./mine.py, or a dotted name"
    )
    model: ModelName | None = Field(
        None, description="network, where the recipe lets one be chosen; left out: the recipe's"
    )
    set: dict[str, Any] = Field(
        default_factory=dict,
        description="a hyperparameter of the recipe's own or of --model; once for each",
    )
    data: str | None = Field(
        None, description="synthetic, small, a folder or tfds:NAME; left out: the recipe's"
    )
    run_dir: str | None = Field(
        None, description="folder for this run's files; left out: a new one under runs/"
    )
    data_dir: str = Field(
        default_factory=default_data_dir, description="cache folder for the data sets' shards"
    )
    seed: NonNegativeInt = Field(0, description="of weights, shuffling, augmentation and dropout")
    deterministic: bool = Field(
        False, description="two runs on one machine are equal to the bit; slower"
    )
    verbose: Literal["auto"] | Annotated[int, Field(ge=0, le=2)] = Field(
        "auto", description="0 silent, 1 progress line, 2 one line per epoch, auto: 1 on a terminal"
    )
    smoke: bool = Field(False, description="run three steps of everything, to see that it works")


class Spread(BaseModel):
    """How the work is spread over devices."""

    strategy: StrategyName = Field(
        "one_device", description="who computes, and how gradients cross"
    )
    devices: Annotated[int, Field(ge=1)] | list[str] | None = Field(
        None, description="how many, or names (GPU:0,GPU:1); left out: the strategy's choice"
    )
    memory: Literal["grow"] | PositiveInt = Field(
        "grow",
        description="of a GPU: grow takes what is needed, N at most so many MB; without GPUs N is "
        "for all devices of a process",
    )
    workers: list[str] | None = Field(
        None, description="host:port of each worker, by rank, where no launcher tells"
    )
    rank: NonNegativeInt | None = Field(None, description="this worker's number among --workers")
    watchdog_seconds: NonNegativeFloat = Field(
        300.0, description="silence after which a worker is given up; 0: wait for ever"
    )
    sync_batch_norm: bool = Field(False, description="BatchNorm statistics over all replicas")


class Optimisation(BaseModel):
    """How the model is trained."""

    epochs: PositiveInt = Field(10, description="passes over the training data")
    batch_size: PositiveInt = Field(
        64, description="global batch: examples per optimizer step over all replicas"
    )
    batch_warmup: list[Annotated[str, Field(pattern=r"^[1-9]\d*:[1-9]\d*$")]] | None = Field(
        None,
        description="32:3,64:2 takes batches of 32 for 3 epochs, of 64 for 2, then --batch-size; "
        "left out: none",
    )
    accumulate: PositiveInt = Field(1, description="rounds a global batch is computed in")
    learning_rate: PositiveFloat = Field(1e-3, description="its highest value")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="how the rate goes with --batch-size over --lr-reference-batch"
    )
    lr_reference_batch: PositiveInt | None = Field(
        None, description="the batch that --learning-rate is meant for; left out: none is known"
    )
    lr_rule: Literal["constant", "cosine", "polynomial", "step", "one_cycle"] = Field(
        "constant", description="constant, or how the rate falls over all epochs"
    )
    lr_decay_epochs: list[PositiveFloat] | None = Field(
        None, description="30,60,80: where the step rule lowers the rate; left out: nowhere"
    )
    lr_decay_factor: float = Field(
        0.1, gt=0, lt=1, description="of the step rule: from one rate to the next"
    )
    lr_power: PositiveFloat = Field(2.0, description="of the polynomial rule; 1 is a straight line")
    warmup_epochs: NonNegativeFloat = Field(
        0.0, description="epochs of linear rise before the rule"
    )
    warmup_start: NonNegativeFloat = Field(0.0, description="the rate that the rise begins at")
    optimizer: Literal["adam", "lamb", "lars", "sgd"] = Field(
        "adam", description="which rule the weights follow"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="of the optimizers sgd and lars")
    weight_decay: NonNegativeFloat = Field(
        0.0, description="of all weights but biases and those of normalisation"
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of each label that goes to all classes alike"
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="0.999 evaluates and keeps averages of the weights; left out: the weights",
    )
    early_stopping: Annotated[str, Field(pattern=r"^[^:]+:[1-9]\d*$")] | None = Field(
        None,
        description="val_loss:5 stops after 5 epochs without a better one; left out: never",
    )
    steps_per_call: Literal["auto"] | PositiveInt = Field(
        "auto", description="optimizer steps per call into the graph"
    )
    jit_compile: bool = Field(False, description="compile the step with XLA")
    run_eagerly: bool = Field(False, description="run without graphs, for debugging; slow")


class Saving(BaseModel):
    """How a run is saved, and goes on."""

    checkpoint_every: (
        Literal["epoch", "never"] | PositiveInt | Annotated[str, Field(pattern=_TIME)]
    ) = Field("epoch", description="epoch, steps, or a time: 10m; a run that is stopped, too")
    keep: PositiveInt = Field(3, description="how many of the newest checkpoints stay")
    keep_best: str | None = Field(
        None, description="val_loss keeps the best epoch's checkpoint, too; left out: none"
    )
    resume: str = Field(
        "never",
        description="auto: the same command goes on where its run stands; or a checkpoint's path",
    )
    checkpoint_errors: Literal["go_on", "stop"] = Field(
        "go_on", description="what a checkpoint that cannot be written does to the run"
    )


class Precision(BaseModel):
    """Number formats."""

    precision: Literal["float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16"] = Field(
        "float32", description="of computation and, unless mixed, of the weights"
    )
    loss_scale: Literal["auto", "none", "dynamic"] | PositiveFloat = Field(
        "auto", description="factor on the loss; auto: dynamic with float16, none otherwise"
    )
    loss_scale_initial: PositiveFloat = Field(32768.0, description="first dynamic loss scale")
    loss_scale_growth_interval: PositiveInt = Field(
        2000, description="finite steps before a dynamic scale grows"
    )
    loss_scale_growth_factor: float = Field(2.0, gt=1, description="by which it grows")
    loss_scale_backoff_factor: float = Field(
        0.5, gt=0, lt=1, description="by which it falls after a step that was not finite"
    )


def seconds_of(time: object) -> object:
    """The seconds of a time such as `2h`, `1h30m` or `90s`; numbers come back as they are.

    Raises:
        ValueError: A text of another form.
    """
    if not isinstance(time, str) or time.replace(".", "", 1).isdigit():
        return time
    if (seconds := durations.seconds(time.strip())) is None:
        raise ValueError(f"expected a time like 90s, 30m, 2h or 1h30m, got {time!r}.")
    return seconds


class Extent(BaseModel):
    """How much of a run to make."""

    limit_steps: PositiveInt | None = Field(
        None, description="most steps of an epoch, and of a validation; left out: all"
    )
    overfit_batches: PositiveInt | None = Field(
        None, description="train and validate on the same N batches; left out: on all"
    )
    max_time: Annotated[PositiveFloat, BeforeValidator(seconds_of)] | None = Field(
        None, description="90s, 30m, 2h, 1h30m: time after which to stop and save; left out: none"
    )


class Outcome(BaseModel):
    """What else comes of a run."""

    evaluate: str | None = Field(
        None, description="a saved model, .keras: evaluate it in place of training; left out: train"
    )
    profile: bool = Field(False, description="trace some steps, and tell where their time goes")
    logger: list[Literal["tensorboard", "csv", "mlflow", "wandb"]] = Field(
        ["tensorboard"],
        description="who is told the metrics besides metrics.jsonl; or several: a,b",
    )
    export: list[Literal["saved_model", "onnx", "tflite"]] = Field(
        [], description="forms of the trained model besides model.keras; or several: a,b"
    )


def _options_of_strategies() -> type[BaseModel]:
    """A field for each option that a strategy declares; None where it is left out.

    Raises:
        ValueError: One name means different things.
    """
    taken = {
        name
        for group in (Run, Spread, Optimisation, Precision, Saving, Extent, Outcome)
        for name in group.model_fields
    }
    fields: dict[str, Any] = {}
    for name, declared in options_by_name().items():
        option, *others = declared.values()
        if name in taken or any(other != option for other in others):
            raise ValueError(
                f"{' and '.join(declared)}: the option {name!r} means something else already, in "
                "another strategy or in TrainConfig: rename it."
            )
        text = f"{' and '.join(declared)}: {option.help}; left out: {option.default}"
        fields[name] = (option.type | None, Field(None, description=text))
    return create_model("StrategyOptions", __doc__="Options of strategies.", **fields)


if TYPE_CHECKING:

    class StrategyOptions(BaseModel):
        """Fields that are known when the table of strategies is."""

else:
    StrategyOptions = _options_of_strategies()


def scales_dynamically(precision: object, loss_scale: object) -> bool:
    """Whether the loss scale moves by itself: as asked, or because the format underflows."""
    in_float16 = precision in ("float16", "mixed_float16")
    return loss_scale == "dynamic" or (loss_scale == "auto" and in_float16)


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
