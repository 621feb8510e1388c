"""Creates what a run needs from a configuration, and finds fields that have no effect."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import keras
import tensorflow as tf

import pipelines
from tfdist import cluster, compile_cache, devices, schedules, strategies
from tfdist import data as data_sets
from tfdist.callbacks.early_stopping import EarlyStopping
from tfdist.checkpoint.settings import Checkpoints
from tfdist.config import TrainConfig, scales_dynamically
from tfdist.errors import ConfigurationError, DataError
from tfdist.loops.data_handler import check_batch_size
from tfdist.precision import LossScale
from tfdist.run import datasets
from tfdist.run.recipe import Recipe, callbacks, num_steps
from tfdist.trainer import Trainer

if TYPE_CHECKING:
    from tfdist.strategies import Strategy

_SMOKE_STEPS = 3


def make_strategy(config: TrainConfig) -> Strategy:
    """Returns the strategy. Call it before the first TensorFlow operation: it creates devices.

    Raises:
        TfdistError: The strategy, its devices, its options or the batch size are invalid.
    """
    if config.workers or config.rank is not None:
        cluster.use(cluster.discover(workers=config.workers or (), rank=config.rank))
    if config.deterministic:
        # From now on, operations without a deterministic implementation raise an error.
        tf.config.experimental.enable_op_determinism()
    if config.compile_cache:
        compile_cache.use(config.compile_cache)
    if config.memory != "grow":
        devices.limit_memory(config.memory)
    options = config.strategy_options()
    strategy = strategies.create(config.strategy, config.devices, mesh=config.mesh, **options)
    if config.deterministic and strategies.STRATEGIES[strategy.name].asynchronous:
        raise ConfigurationError(
            f"--deterministic: workers of {strategy.name} apply their updates in an order that "
            "differs between runs. Use another strategy."
        )
    check_batch_size(config.batch_size, strategy)  # a data set does not know its batch size
    return strategy


def make_data(config: TrainConfig, recipe: Recipe, strategy: Strategy) -> tuple[Any, Any]:
    """Returns the recipe's data sets for training and validation, limited as configured.

    Raises:
        DataError: The data cannot be written or read, or are not global batches.
    """
    watched = Watched(config)
    try:
        with datasets.one_local_rank_at_a_time(strategy):
            data = recipe.train_data(watched.as_config())
            validation = recipe.validation_data(watched.as_config())
    except pipelines.DataError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        file = Path(str(error.filename)).absolute()
        if file.is_relative_to(Path(config.data_dir).absolute()):
            cure = "Choose another folder with --data-dir."
        elif config.data and file.is_relative_to(Path(config.data).absolute()):
            cure = "Make it readable, or remove it from --data."
        else:
            raise  # an error of the recipe, with its traceback
        raise DataError(f"{error.filename}: {error.strerror}. {cure}") from None
    datasets.check_batches(data, "train_data", config.batch_size)
    if not watched.has_read("data") and config.data == data_sets.SYNTHETIC:
        data, validation = datasets.repeated(data), validation and datasets.repeated(validation)
    if validation is not None:
        datasets.check_batches(validation, "validation_data", None)
    if config.deterministic:
        datasets.check_repeatable(data, "train_data")
        if validation is not None:
            datasets.check_repeatable(validation, "validation_data")
    return datasets.limited(config, data, validation)


def make_trainer(
    config: TrainConfig, recipe: Recipe, strategy: Strategy, steps_per_epoch: int | None
) -> Trainer:
    """Returns a trainer for the recipe's model.

    Raises:
        TfdistError: The model or the precision is invalid.
    """
    loss_scale: LossScale | None
    if isinstance(config.loss_scale, float):
        loss_scale = LossScale.fixed(config.loss_scale)
    elif scales_dynamically(config.precision, config.loss_scale):
        loss_scale = LossScale(
            initial=config.loss_scale_initial,
            growth_interval=config.loss_scale_growth_interval,
            growth_factor=config.loss_scale_growth_factor,
            backoff_factor=config.loss_scale_backoff_factor,
        )
    else:
        # Keras puts a dynamic scale around the optimizers of mixed_float16 by itself.
        loss_scale = LossScale.fixed(1.0) if "float16" in config.precision.split("_") else None
    return Trainer(
        lambda: recipe.build_model(config, steps_per_epoch),
        strategy=strategy,
        accumulate=config.accumulate,
        sync_batch_norm=config.sync_batch_norm,
        steps_per_call=config.steps_per_call,
        precision=config.precision,
        loss_scale=loss_scale,
        watchdog_seconds=config.watchdog_seconds,
        remat=config.remat,
        offload_activations=config.offload_activations,
        replica_random=config.replica_random,
        on_nan=config.on_nan,
        check_data=config.check_data,
        check_ranks=config.check_ranks,
        uneven_data=config.uneven_data,
        verify=config.verify,
        log_every=None if config.log_every == "epoch" else config.log_every,
        validate_every=config.validate_every,
    )


def make_checkpoints(
    config: TrainConfig, folder: str | Path, before_upload: Callable[[], None] | None = None
) -> Checkpoints | None:
    """Returns how the run is saved, or None if it is not.

    Raises:
        ConfigurationError: The run should resume, but keeps no checkpoints.
    """
    if config.checkpoint_every == "never":
        if config.resume != "never":
            raise ConfigurationError(
                f"--resume {config.resume} needs checkpoints, but --checkpoint-every never "
                "saves none. Remove one of the two flags."
            )
        if config.on_spike == "rollback":
            raise ConfigurationError(
                "--on-spike rollback needs checkpoints, but --checkpoint-every never saves none. "
                "Remove one of the two flags."
            )
        return None
    return Checkpoints(
        folder,
        every=config.checkpoint_every,
        keep=config.keep,
        keep_best=config.keep_best,
        resume=config.resume,
        frozen=config.checkpoint_frozen,
        on_error=config.checkpoint_errors,
        configuration=config.model_dump(mode="json"),
        before_upload=before_upload,
    )


def make_callbacks(config: TrainConfig, recipe: Recipe) -> list[Any]:
    """Returns the callbacks of the recipe and of the configuration."""
    result = callbacks(recipe, config)
    if config.early_stopping:
        monitor, _, epochs = config.early_stopping.rpartition(":")
        result.append(EarlyStopping(monitor, patience=int(epochs)))
    return result


def averages(config: TrainConfig) -> list[Any]:
    """Returns the callback that evaluates with averaged weights, if there are any.

    Pass the plain configuration, not a `Watched` one: reading `ema` here would count as an effect.
    """
    # Keras restores the weights after each evaluation, and sets them to the averages at the end.
    return [] if config.ema is None else [keras.callbacks.SwapEMAWeights()]


def fit_arguments(config: TrainConfig, data: Any, validation: Any) -> dict[str, Any]:
    """Returns the keyword arguments of `fit`, besides the data."""
    sizes = schedules.batch_sizes(config)  # one size is the data set's own
    return {
        "epochs": 1 if config.smoke else config.epochs,
        "batch_size": sizes if isinstance(sizes, dict) and not config.smoke else None,
        "steps_per_epoch": _smoke_steps(data) if config.smoke else None,
        "validation_steps": _smoke_steps(validation) if config.smoke and validation else None,
        "verbose": config.verbose,
        "shuffle": False,  # a recipe's data set shuffles itself; Keras warns of shuffling twice
    }


def _smoke_steps(data: Any) -> int:
    """Returns the number of steps of a smoke run; Keras warns if small data end before."""
    return min(num_steps(data) or _SMOKE_STEPS, _SMOKE_STEPS)


def first_batch_size(config: TrainConfig) -> int:
    """Returns the rows of a global batch of the first epoch."""
    sizes = schedules.batch_sizes(config)
    return sizes[0] if isinstance(sizes, dict) and not config.smoke else config.batch_size


# ---- fields without an effect ----


#: Fields that have an effect only if `build_model` or `callbacks` reads them.
OF_RECIPES = (
    "learning_rate", "lr_scaling", "lr_rule", "warmup_epochs", "jit_compile", "run_eagerly"
)  # fmt: skip

#: More such fields, reported only if the user sets them. The value names the setting of another
#: field that they depend on, if any.
ONLY_WITH = {
    "lr_reference_batch": "lr_scaling: linear or sqrt",
    "lr_decay_epochs": "lr_rule: step",
    "lr_decay_factor": "lr_rule: step",
    "lr_power": "lr_rule: polynomial",
    "warmup_start": "warmup_epochs",
    "momentum": "optimizer: sgd or lars",
    "nesterov": "optimizer: sgd",
    "beta_1": "optimizer: adam, adamw or lamb",
    "beta_2": "optimizer: adam, adamw or lamb",
    "epsilon": "optimizer: adam, adamw or lamb",
    "clip_norm": "",
    "global_clip_norm": "",
    "clip_value": "",
    "optimizer": "",
    "weight_decay": "",
    "label_smoothing": "",
    "ema": "",
    "model": "",
    "data": "",
    "read_ahead": "",
    "cache_dir": "",
}


class Watched:
    """A configuration that records which fields are read."""

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._read = config, set[str]()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        # A method such as model_dump may read all of them.
        self._read |= {name} if name in TrainConfig.model_fields else {*OF_RECIPES, *ONLY_WITH}
        return getattr(self._config, name)

    def as_config(self) -> TrainConfig:
        """Returns this object for functions that take a configuration."""
        return cast(TrainConfig, self)

    def has_read(self, name: str) -> bool:
        """Returns whether a field has been read."""
        return name in self._read

    def unread(self, recipe: Recipe) -> list[str]:
        """Returns the fields of `OF_RECIPES` that the recipe did not read.

        Raises:
            ConfigurationError: A flag or a file set a field that was not read.
        """
        unread = [name for name in (*OF_RECIPES, *ONLY_WITH) if name not in self._read]
        for name in _asked_for(unread, self._config, recipe):
            other = ONLY_WITH.get(name)
            raise ConfigurationError(
                f"{name}={getattr(self._config, name)} has no effect: recipe "
                f"{self._config.recipe!r} does not read config.{name}"
                f"{f' without {other}' if other else ''}. Remove it, or "
                f"{f'set {other}' if other else 'read it in build_model'}."
            )
        return [name for name in unread if name in OF_RECIPES]


def check_spread(config: TrainConfig, recipe: Recipe, strategy: Strategy) -> None:
    """Checks fields that need several replicas or processes.

    A Trainer in a script accepts them anywhere, but a command line is for one run.

    Raises:
        ConfigurationError: A flag or a file set one, but there is one replica or process.
    """
    idle = {
        "sync_batch_norm": (strategy.num_replicas == 1, "with one replica"),
        "watchdog_seconds": (strategy.group.size == 1, "because no process waits for another"),
    }
    names = [name for name, (is_idle, _) in idle.items() if is_idle]
    for name in _asked_for(names, config, recipe):
        raise ConfigurationError(
            f"{name}={getattr(config, name)} has no effect {idle[name][1]}. Remove it."
        )


def _asked_for(names: Iterable[str], config: TrainConfig, recipe: Recipe) -> list[str]:
    """Returns the fields whose values differ from the recipe's defaults."""
    usual = TrainConfig(**recipe.DEFAULTS)
    return [name for name in names if getattr(config, name) != getattr(usual, name)]
