"""What a configuration describes, made: strategy, data, trainer, and the arguments of `fit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import tensorflow as tf

import pipelines
from tfdist import cluster, strategies
from tfdist.config import TrainConfig
from tfdist.errors import DataError
from tfdist.loops.feed import check_batch_size
from tfdist.precision import LossScale
from tfdist.run.rank_duties import in_turns
from tfdist.run.recipe import Recipe
from tfdist.trainer import Trainer

if TYPE_CHECKING:
    from tfdist.strategies import Strategy

_SMOKE_STEPS = 3


def make_strategy(config: TrainConfig) -> Strategy:
    """Returns the strategy; it makes the devices, so no TensorFlow operation may run before.

    Raises:
        TfdistError: The strategy, its devices or options, or the batch cannot be had.
    """
    if config.workers or config.rank is not None:
        cluster.use(cluster.discover(workers=config.workers or (), rank=config.rank))
    options = config.strategy_options()
    strategy = strategies.create(config.strategy, config.devices, **options)
    check_batch_size(config.batch_size, strategy.num_replicas)  # data sets do not tell theirs
    return strategy


def make_data(config: TrainConfig, recipe: Recipe, strategy: Strategy) -> tuple[Any, Any]:
    """Returns the recipe's data sets, of training and of validation.

    Raises:
        DataError: They cannot be written or read, or are no global batches.
    """
    try:
        with in_turns(strategy):
            data, validation = recipe.train_data(config), recipe.validation_data(config)
    except pipelines.DataError as error:
        raise DataError(str(error)) from error
    except OSError as error:
        if not Path(str(error.filename)).is_relative_to(config.data_dir):
            raise  # the recipe's own: the traceback leads to it
        raise DataError(
            f"{error.filename}: {error.strerror}: name another folder with --data-dir."
        ) from None
    check_batches(data, "train_data", config.batch_size)
    if validation is not None:
        check_batches(validation, "validation_data", None)
    return data, validation


def check_batches(data: Any, function: str, batch_size: int | None) -> None:
    """Checks what a recipe's function returned.

    Args:
        data: That is.
        function: The name of it.
        batch_size: Rows of a batch; None: any number.

    Raises:
        DataError: It is no `tf.data.Dataset`, or one that is not batched, or in other batches.
    """
    if not isinstance(data, tf.data.Dataset):
        raise DataError(
            f"{function}: expected a tf.data.Dataset of batches, got {type(data).__name__}: return "
            "one, say tf.data.Dataset.from_tensor_slices((x, y)).batch(config.batch_size)."
        )
    shapes = [spec.shape for spec in tf.nest.flatten(data.element_spec) if hasattr(spec, "shape")]
    rows = {shape[0] if shape.rank else 0 for shape in shapes if shape.rank is not None} - {None}
    if 0 in rows or len(rows) > 1 or (batch_size and rows - {batch_size}):
        raise DataError(
            f"{function}: expected batches of {batch_size or 'any number of'} rows, got elements "
            f"of the shapes {', '.join(map(str, shapes))}: end it with .batch(config.batch_size)."
        )


def make_trainer(
    config: TrainConfig, recipe: Recipe, strategy: Strategy, steps_per_epoch: int | None
) -> Trainer:
    """Returns a trainer for the recipe's model.

    Raises:
        TfdistError: The model, or the precision, cannot be had.
    """
    return Trainer(
        lambda: recipe.build_model(config, steps_per_epoch),
        strategy=strategy,
        accumulate=config.accumulate,
        sync_batch_norm=config.sync_batch_norm,
        steps_per_call=config.steps_per_call,
        precision=config.precision,
        loss_scale=_loss_scale(config),
        watchdog_seconds=config.watchdog_seconds,
    )


def fit_arguments(config: TrainConfig) -> dict[str, Any]:
    """Returns how long and how loud to train."""
    steps = _SMOKE_STEPS if config.smoke else None
    return {
        "epochs": 1 if config.smoke else config.epochs,
        "steps_per_epoch": steps,
        "validation_steps": steps,
        "verbose": config.verbose,
        "shuffle": False,  # a recipe's data set shuffles itself; Keras warns of shuffling twice
    }


def _loss_scale(config: TrainConfig) -> LossScale | None:
    """The loss scale asked for; float16 underflows without one, the other formats need none."""
    if isinstance(config.loss_scale, float):
        return LossScale.fixed(config.loss_scale)
    in_float16 = config.precision in ("float16", "mixed_float16")
    if config.loss_scale == "none" and in_float16:
        return LossScale.fixed(1.0)  # Keras puts a dynamic scale there by itself
    if config.loss_scale == "none" or (config.loss_scale == "auto" and not in_float16):
        return None
    return LossScale(
        initial=config.loss_scale_initial,
        growth_interval=config.loss_scale_growth_interval,
        growth_factor=config.loss_scale_growth_factor,
        backoff_factor=config.loss_scale_backoff_factor,
    )
