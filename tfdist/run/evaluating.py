"""`--evaluate`: loss and metrics of a saved model on a recipe's validation data. Trains nothing."""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist.config import Run, Spread, StrategyOptions, TrainConfig
from tfdist.console import tables
from tfdist.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    import keras

    from tfdist.run.recipe import Recipe

#: Fields that mean something where nothing is trained; the model's file says the rest.
_READ = (
    {*Run.model_fields, *Spread.model_fields, *StrategyOptions.model_fields}
    | {"batch_size", "steps_per_call", "limit_steps", "evaluate"}
) - {"run_dir", "smoke", "sync_batch_norm", "replica_random"}


def check_fields(given: Collection[str]) -> None:
    """Checks the fields that were set together with `--evaluate`.

    Args:
        given: Fields that stood on the command line. A file of a run may have any.

    Raises:
        ConfigurationError: One of them has no effect.
    """
    if without := [name for name in given if name in set(TrainConfig.model_fields) - _READ]:
        flag = f"--{without[0].replace('_', '-')}"
        raise ConfigurationError(f"{flag}: no effect with --evaluate, which trains nothing.")


def evaluate(config: TrainConfig) -> dict[str, float]:
    """Returns loss and metrics of the model that `config.evaluate` names, and prints a table.

    Raises:
        TfdistError: There is no such model, or no data to evaluate it on.
    """
    from tfdist.checkpoint.store import checkpoints_of
    from tfdist.run import from_config, recipe
    from tfdist.trainer import Trainer

    path = Path(str(config.evaluate))
    if not path.exists():  # before data are made for it
        raise ConfigurationError(f"--evaluate {config.evaluate}: there is no such file.")
    workload = recipe.find(config.recipe)  # knows the model's own classes
    build = functools.partial(load, str(path))
    if path.is_dir():
        (checkpoint, *_) = checkpoints_of(str(path))
        build = functools.partial(of_checkpoint, checkpoint, workload, config)
    strategy = from_config.make_strategy(config)
    _, validation = from_config.make_data(config, workload, strategy)
    if validation is None:
        raise DataError(f"recipe {config.recipe!r} has no validation_data to evaluate on.")
    trainer = Trainer(
        build,
        strategy,
        precision=config.precision if path.is_dir() else None,
        steps_per_call=config.steps_per_call,
        watchdog_seconds=config.watchdog_seconds,
    )
    talks = strategy.is_chief and config.verbose != 0
    verbose = config.verbose if talks else 0
    found: dict[str, float] = trainer.evaluate(validation, verbose=verbose, return_dict=True)
    if talks:
        tables.facts(
            [
                ("model", str(config.evaluate)),
                ("recipe", config.recipe),
                ("strategy", strategy.name),
            ],
            [(name, f"{value:.6g}") for name, value in found.items()],
        )
    return found


def of_checkpoint(checkpoint: str, workload: Recipe, config: TrainConfig) -> keras.Model:
    """Returns the recipe's model with a checkpoint's weights; averages of them are not used.

    Raises:
        ConfigurationError: The checkpoint is damaged, or another model's.
    """
    from tfdist.checkpoint.export import load_weights

    model = workload.build_model(config, None)
    load_weights(model, checkpoint)
    return model


def load(file: str) -> keras.Model:
    """Returns a saved model with what it was compiled with.

    Raises:
        ConfigurationError: It cannot be loaded, or was saved without.
    """
    import keras

    try:
        model = keras.saving.load_model(file)
    except (OSError, ValueError, TypeError) as error:
        said = str(error).strip().partition("\n")[0]
        raise ConfigurationError(
            f"--evaluate {file}: expected a model that Keras saved as .keras: {said}"
        ) from error
    if not model.compiled:
        raise ConfigurationError(
            f"--evaluate {file}: expected a compiled model, got one without loss and metrics: "
            "compile it and save it again."
        )
    return model
