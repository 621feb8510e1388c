"""The complete configuration of a training run, as one flat, validated record.

Each field is a command-line flag (`batch_size` is `--batch-size`), a key of a YAML file, and an
attribute that recipes read. The base classes group the flags in `--help`. Constraints on values are
defined only here, except for those of the options that strategies declare. This module does not
import TensorFlow, so that `--help` is fast.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import (
    AfterValidator,
    AliasChoices,
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
    model_validator,
)
from pydantic_core import PydanticCustomError

from tfdist import cluster
from tfdist.console import folders, units
from tfdist.errors import ConfigurationError
from tfdist.models import MODELS
from tfdist.strategies import STRATEGIES, current_name, options_by_name
from tfdist.strategies.mesh import parse as parse_mesh

if TYPE_CHECKING:
    ModelName = str
    StrategyName = str
else:
    ModelName = Literal[tuple(MODELS)]
    StrategyName = Literal[tuple(STRATEGIES)]

_STAGE = r"^[1-9]\d*:[1-9]\d*$"
_PATIENCE = r"^[^:]+:[1-9]\d*$"
#: A value that matches each pattern, for messages.
EXAMPLES = {_STAGE: "32:3", _PATIENCE: "val_loss:5"}


def default_data_dir() -> str:
    """Returns the cache folder for datasets; see `console.folders.cache`."""
    return str(folders.cache())


def seconds_of(time: object) -> object:
    """Returns the seconds of a time such as `2h`, `1h30m` or `90s`; numbers are returned unchanged.

    Raises:
        ValueError: The syntax is invalid.
    """
    if not isinstance(time, str) or time.replace(".", "", 1).isdigit():
        return time
    if (seconds := units.seconds(time.strip())) is None:
        raise ValueError(f"expected a time like 90s, 30m, 2h or 1h30m, got {time!r}.")
    return seconds


def checked_time(text: str) -> str:
    """Returns a time such as `2h`, `1h30m` or `90s`.

    Raises:
        PydanticCustomError: It is 0, or the syntax is invalid.
    """
    if not units.seconds(text):
        raise PydanticCustomError("time", "a value like 10m or 1h30m")
    return text


def bytes_of(size: object) -> object:
    """Returns the bytes of a size such as `512MB`; numbers are returned unchanged.

    Raises:
        ValueError: The syntax is invalid.
    """
    return units.num_bytes(size) if isinstance(size, str) and not size.isdigit() else size


def scales_dynamically(precision: object, loss_scale: object) -> bool:
    """Returns whether the loss scale is dynamic: requested, or the default for float16."""
    in_float16 = precision in ("float16", "mixed_float16")
    return loss_scale == "dynamic" or (loss_scale == "auto" and in_float16)


class Run(BaseModel):
    """What to train, and where to write the results."""

    recipe: str = Field(
        "digits", description="what to train: a module of recipes/, ./mine.py, or a dotted name"
    )
    model: ModelName | None = Field(
        None, description="the network, if the recipe lets you choose; default: the recipe's"
    )
    set: dict[str, Any] = Field(
        default_factory=dict,
        description="a hyperparameter of the recipe or of --model; may be repeated",
    )
    data: str | None = Field(
        None,
        description="synthetic, small, a folder, s3://..., or tfds:NAME; default: the recipe's",
    )
    run_dir: str | None = Field(
        None,
        description="folder for the files of this run, or s3://...; default: a new folder in runs/",
    )
    data_dir: str = Field(
        default_factory=default_data_dir, description="cache folder for packed datasets"
    )
    read_ahead: Annotated[PositiveInt, BeforeValidator(bytes_of)] | None = Field(
        None,
        description="memory for data that is prefetched from a bucket; default: 512MB",
    )
    cache_dir: str | None = Field(
        None, description="local folder that caches data from a bucket; default: no cache"
    )
    compile_cache: str | None = Field(
        None, description="folder that keeps programs compiled by XLA; default: none are kept"
    )
    seed: NonNegativeInt = Field(
        0, description="seed of weights, shuffling, augmentation and dropout"
    )
    deterministic: bool = Field(
        False, description="make runs on the same machine bitwise identical; slower"
    )
    verbose: Literal["auto"] | Annotated[int, Field(ge=0, le=2)] = Field(
        "auto", description="0 silent, 1 progress bar, 2 one line per epoch; auto: 1 on a terminal"
    )
    smoke: bool = Field(False, description="run three steps of everything, to check that it works")


class Spread(BaseModel):
    """How the work is distributed over devices."""

    strategy: StrategyName = Field(
        "one_device", description="where computation runs and how gradients are reduced"
    )
    devices: Annotated[int, Field(ge=1)] | list[str] | None = Field(
        None, description="number of devices, or names (GPU:0,GPU:1); default: the strategy's"
    )
    auto: bool = Field(
        False,
        description="choose strategy, accumulation, remat and offload for the devices of this "
        "host, as tfdist plan auto does",
    )
    mesh: str | None = Field(
        None,
        description="axes and sizes of a device mesh, like data=2,pipeline=2: data is the number "
        "of processes; each process has one of pipeline, tensor, shard; implies --strategy",
    )
    memory: Literal["grow"] | PositiveInt = Field(
        "grow",
        description="GPU memory: grow allocates as needed, N allows at most N MB; without GPUs, N "
        "limits all devices of a process together",
    )
    workers: list[str] | None = Field(
        None, description="host:port of each worker, by rank, if no launcher sets them"
    )
    rank: NonNegativeInt | None = Field(None, description="rank of this worker in --workers")
    watchdog_seconds: NonNegativeFloat = Field(
        300.0,
        description="seconds without progress after which a worker counts as lost; 0: wait forever",
    )
    check_data: Literal["full", "sampled", "off"] = Field(
        "full",
        description="how workers check that they read the same global batches: compare every "
        "element (full), labels and a sample of the inputs (sampled), or nothing (off)",
    )
    check_ranks: Literal["every-call", "auto", "off"] = Field(
        "auto",
        description="when workers compare their weights and optimizer state: after each call of "
        "the inner loop (every-call); at epochs, checkpoints and intervals (auto); never (off)",
    )
    uneven_data: Literal["stop", "pad", "refuse"] = Field(
        "pad",
        description="if each worker reads its own dataset and one has fewer batches: end the epoch "
        "(stop), let the others continue (pad), or raise an error (refuse)",
    )
    verify: Literal["off", "first"] | PositiveInt | None = Field(
        None,
        description="compare the first steps with plain Keras on one device: never (off), two "
        "steps (first), or N steps; default: as first, for models with code that is not Keras's",
    )
    replica_random: bool = Field(
        False,
        description="use different random numbers on each replica in dropout, noise and "
        "augmentation, instead of those of single-device training",
    )
    sync_batch_norm: bool = Field(
        False, description="compute BatchNorm statistics over all replicas"
    )


class Optimization(BaseModel):
    """How the model is trained."""

    epochs: PositiveInt = Field(10, description="passes over the training data")
    batch_size: PositiveInt = Field(
        64, description="global batch: examples per optimizer step over all replicas"
    )
    batch_warmup: list[Annotated[str, Field(pattern=_STAGE)]] | None = Field(
        None,
        description="32:3,64:2 uses batches of 32 for 3 epochs, of 64 for 2, then --batch-size; "
        "default: none",
    )
    accumulate: PositiveInt = Field(
        1, description="gradient accumulation: number of micro-batches per global batch"
    )
    remat: str = Field(
        "none",
        validation_alias=AliasChoices("remat", "recompute"),
        description="activation checkpointing: layers whose activations are recomputed in the "
        "backward pass to save memory: none, all, or a regular expression",
    )
    offload_activations: bool = Field(
        False, description="keep activations in host memory until the backward pass"
    )
    learning_rate: PositiveFloat = Field(1e-3, description="the highest learning rate")
    lr_scaling: Literal["none", "linear", "sqrt"] = Field(
        "none", description="how to scale the rate with --batch-size over --lr-reference-batch"
    )
    lr_reference_batch: PositiveInt | None = Field(
        None, description="the batch size that --learning-rate was chosen for; default: unknown"
    )
    lr_rule: Literal["constant", "cosine", "polynomial", "step", "one_cycle"] = Field(
        "constant", description="learning-rate schedule over all epochs"
    )
    lr_decay_epochs: list[PositiveFloat] | None = Field(
        None, description="30,60,80: epochs at which the step rule decays the rate; default: none"
    )
    lr_decay_factor: float = Field(
        0.1, gt=0, lt=1, description="step rule: factor from one rate to the next"
    )
    lr_power: PositiveFloat = Field(2.0, description="polynomial rule: exponent; 1 is linear")
    warmup_epochs: NonNegativeFloat = Field(
        0.0, description="epochs of linear warm-up before the schedule"
    )
    warmup_start: NonNegativeFloat = Field(0.0, description="learning rate at the start of warm-up")
    optimizer: Literal["adam", "adamw", "lamb", "lars", "sgd"] = Field(
        "adam", description="the optimizer; adam with --weight-decay is adamw"
    )
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd and lars")
    weight_decay: NonNegativeFloat | None = Field(
        None,
        description="decay of all weights except biases and those of normalization layers; "
        "default: 0, or Keras's 0.004 with adamw",
    )
    nesterov: bool = Field(False, description="use Nesterov momentum; sgd only")
    clip_norm: PositiveFloat | None = Field(
        None,
        validation_alias=AliasChoices("clip_norm", "clipnorm"),
        description="limit of the norm of each weight's gradient; Keras's clipnorm",
    )
    global_clip_norm: PositiveFloat | None = Field(
        None,
        validation_alias=AliasChoices("global_clip_norm", "global_clipnorm"),
        description="limit of the norm of all gradients together; Keras's global_clipnorm",
    )
    clip_value: PositiveFloat | None = Field(
        None,
        validation_alias=AliasChoices("clip_value", "clipvalue"),
        description="limit of the absolute value of a gradient's elements; Keras's clipvalue",
    )
    beta_1: float = Field(0.9, ge=0, lt=1, description="adam, adamw, lamb: decay of the mean")
    beta_2: float = Field(0.999, ge=0, lt=1, description="adam, adamw, lamb: decay of the variance")
    epsilon: PositiveFloat | None = Field(
        None, description="adam, adamw, lamb: added to the divisor; default: Keras's"
    )
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="fraction of each label that is distributed over all classes"
    )
    ema: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description="momentum of the moving averages of the weights to evaluate and save, such as "
        "0.999; default: the weights themselves",
    )
    early_stopping: Annotated[str, Field(pattern=_PATIENCE)] | None = Field(
        None,
        description="val_loss:5 stops after 5 epochs without improvement; default: never",
    )
    steps_per_call: Literal["auto"] | PositiveInt = Field(
        "auto", description="optimizer steps per call of the training function"
    )
    jit_compile: Literal["auto"] | bool = Field(
        "auto",
        description="compile the step with XLA; auto: on one GPU, for models without convolutions",
    )
    run_eagerly: bool = Field(False, description="run without graphs, for debugging; slow")


class Precision(BaseModel):
    """Number formats."""

    precision: Literal["float32", "mixed_float16", "mixed_bfloat16", "float16", "bfloat16"] = Field(
        "float32", description="dtype of computation and, unless mixed, of the weights"
    )
    loss_scale: Literal["auto", "none", "dynamic"] | PositiveFloat = Field(
        "auto", description="loss scaling; auto: dynamic with float16, none otherwise"
    )
    loss_scale_initial: PositiveFloat = Field(32768.0, description="initial dynamic loss scale")
    loss_scale_growth_interval: PositiveInt = Field(
        2000, description="finite steps before a dynamic loss scale grows"
    )
    loss_scale_growth_factor: float = Field(
        2.0, gt=1, description="factor by which a dynamic loss scale grows"
    )
    loss_scale_backoff_factor: float = Field(
        0.5, gt=0, lt=1, description="factor applied to a dynamic loss scale after an overflow"
    )


class Saving(BaseModel):
    """How a run is saved and resumed."""

    checkpoint_every: (
        Literal["epoch", "never"] | PositiveInt | Annotated[str, AfterValidator(checked_time)]
    ) = Field(
        "epoch",
        description="epoch, a number of steps, or a time (10m); also saves when the run is stopped",
    )
    keep: PositiveInt = Field(3, description="number of newest checkpoints to keep")
    keep_best: str | None = Field(
        None, description="val_loss also keeps the checkpoint of the best epoch; default: none"
    )
    validate_every: PositiveInt | None = Field(
        None, description="also validate after each N-th training step; default: at epochs only"
    )
    resume: str = Field(
        "never",
        description="auto: resume from the newest checkpoint of --run-dir; or the path of a "
        "checkpoint",
    )
    checkpoint_errors: Literal["go_on", "stop"] = Field(
        "go_on", description="if a checkpoint cannot be written: continue (go_on), or stop"
    )
    checkpoint_frozen: bool = Field(
        True,
        description="save frozen weights too; false: a run that resumes loads them as at its start",
    )
    on_nan: Literal["warn", "stop", "checkpoint"] = Field(
        "stop",
        description="if the loss becomes NaN or infinite: continue with a warning, stop, or save "
        "the state to checkpoints/non-finite and stop (checkpoint)",
    )
    on_spike: Literal["off", "warn", "stop", "rollback"] = Field(
        "warn",
        description="if the loss leaves the band of its recent values by 7 standard deviations: "
        "nothing (off), a warning, stop, or return to the last checkpoint and leave these batches "
        "out (rollback)",
    )


class Extent(BaseModel):
    """Limits of a run."""

    limit_steps: PositiveInt | None = Field(
        None, description="maximum number of steps per epoch and per validation; default: all"
    )
    overfit_batches: PositiveInt | None = Field(
        None, description="train and validate on the same N batches; default: all data"
    )
    max_time: Annotated[PositiveFloat, BeforeValidator(seconds_of)] | None = Field(
        None, description="90s, 30m, 2h, 1h30m: stop and save after this time; default: no limit"
    )


class Outcome(BaseModel):
    """Additional results of a run."""

    evaluate: str | None = Field(
        None,
        description="evaluate a saved .keras model, or the newest checkpoint of a folder, instead "
        "of training",
    )
    show_weights: bool = Field(
        False, description="print each weight at the start, with dtype, shape, devices and bytes"
    )
    profile: bool = Field(False, description="profile some steps and print where time is spent")
    log_every: Literal["auto", "epoch"] | PositiveInt = Field(
        "auto",
        description="number of steps between two rows of metrics.jsonl and of the loggers; auto: "
        "by time, at most one a second; epoch: epochs only, and no gradient norm",
    )
    logger: list[Literal["tensorboard", "csv", "mlflow", "wandb"]] = Field(
        ["tensorboard"],
        description="loggers for the metrics in addition to metrics.jsonl, separated by commas",
    )
    export: list[Literal["saved_model", "onnx", "tflite", "preset", "safetensors", "adapter"]] = (
        Field(
            [],
            description="export formats in addition to model.keras, separated by commas; of "
            "KerasHub: preset, safetensors (for transformers), adapter (the weights of LoRA alone)",
        )
    )


def options_of_strategies(groups: Sequence[type[BaseModel]]) -> type[BaseModel]:
    """Returns a class with a field for each option that a strategy declares, None by default.

    Args:
        groups: The other groups of fields, whose names cannot be used.

    Raises:
        ValueError: Two strategies declare different options with the same name.
    """
    grouped = {name for group in groups for name in group.model_fields}
    fields: dict[str, Any] = {}
    for name, declared in options_by_name().items():
        option, *others = declared.values()
        if name in grouped or any(other != option for other in others):
            raise ValueError(
                f"{' and '.join(declared)}: another strategy or TrainConfig defines the option "
                f"{name!r} differently. Rename it."
            )
        text = f"{' and '.join(declared)}: {option.help}; default: {option.default}"
        fields[name] = (option.type | None, Field(None, description=text))
    return create_model("StrategyOptions", __doc__="Options of strategies.", **fields)


if TYPE_CHECKING:

    class StrategyOptions(BaseModel):
        """For type checkers; the fields are those that `options_of_strategies` creates."""

else:
    StrategyOptions = options_of_strategies(
        (Run, Spread, Optimization, Precision, Saving, Extent, Outcome)
    )


class TrainConfig(Outcome, Extent, Saving, Precision, Optimization, StrategyOptions, Spread, Run):
    """The complete, resolved configuration of a training run.

    Example:
        >>> from tfdist.config import TrainConfig
        >>> config = TrainConfig(strategy="mirrored", devices=2, epochs=5)
        >>> config.batch_size, config.epochs
        (64, 5)

    Raises:
        ValueError: A value is invalid, or values contradict each other.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True
    )

    @model_validator(mode="before")
    @classmethod
    def _strategy_of_mesh(cls, values: Any) -> Any:
        """Sets the strategy that a mesh implies, unless another one is given."""
        given = isinstance(values, dict) and values.get("mesh")
        if not given or values.get("strategy", "one_device") != "one_device":
            return values
        try:
            mesh = parse_mesh(given)
        except ConfigurationError as error:
            raise ValueError(str(error)) from None
        processes = getattr(cluster.started_together(), "size", 1)
        strategy = mesh.strategy(values.get("process_group") or "auto", processes)
        return values | {"strategy": strategy}

    @field_validator("strategy", mode="before")
    @classmethod
    def _current_name(cls, value: object) -> object:
        """Accepts former names of strategies."""
        return current_name(value) if isinstance(value, str) else value

    @field_validator("data", "run_dir", "data_dir", "cache_dir", "compile_cache", "evaluate")
    @classmethod
    def _in_home(cls, value: str | None) -> str | None:
        """Replaces `~`, which shells leave in `--run-dir=~/a`, and which files may contain."""
        return value and os.path.expanduser(value)  # noqa: PTH111 - Path changes URLs

    @field_validator("data_dir", "cache_dir", "compile_cache")
    @classmethod
    def _is_local(cls, value: str | None) -> str | None:
        """Refuses URLs for caches, which are there to be faster than a bucket."""
        if value and "://" in value:
            raise ValueError(f"expected a local folder, got {value!r}")
        return value

    @field_validator("lr_decay_epochs", "batch_warmup", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        """Splits `30,60` from a command line into a list."""
        return value.split(",") if isinstance(value, str) else value

    @field_validator("devices", "workers", "logger", "export", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        """Splits `GPU:0,GPU:1` from a command line into names; `2` stays a number."""
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
    def _requires_dynamic_scale(cls, value: float, info: ValidationInfo) -> float:
        default = cls.model_fields[str(info.field_name)].default
        if value != default and not scales_dynamically(
            info.data.get("precision"), info.data.get("loss_scale")
        ):
            raise ValueError(
                "has no effect without dynamic loss scaling: add --loss-scale dynamic, or remove "
                "this flag."
            )
        return value

    @field_validator("global_clip_norm", "clip_value")
    @classmethod
    def _one_clipping(cls, value: float | None, info: ValidationInfo) -> float | None:
        for other in ("clip_norm", "global_clip_norm"):
            if value is not None and info.data.get(other):
                flag = f"--{other.replace('_', '-')}"
                raise ValueError(f"Keras clips in one way only. Remove this flag or {flag}.")
        return value

    @field_validator("limit_steps", "overfit_batches")
    @classmethod
    def _conflicts_with_other_limits(cls, value: int | None, info: ValidationInfo) -> int | None:
        for other in ("smoke", "limit_steps"):
            if value is not None and info.data.get(other):
                flag = f"--{other.replace('_', '-')}"
                raise ValueError(f"{flag} already limits the steps. Remove one of the two flags.")
        return value

    def strategy_options(self) -> dict[str, Any]:
        """Returns the strategy options that are set, for `tfdist.strategies.create`."""
        values = {name: getattr(self, name) for name in StrategyOptions.model_fields}
        return {name: value for name, value in values.items() if value is not None}

    def to_yaml(self) -> str:
        """Returns this configuration as text that `--config` reads from a file."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


#: The groups of fields, in the order of `--help`.
GROUPS: tuple[type[BaseModel], ...] = (
    Run,
    Spread,
    StrategyOptions,
    Optimization,
    Precision,
    Saving,
    Extent,
    Outcome,
)
