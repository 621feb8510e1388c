"""`python -m tfdist.train`: trains a recipe under a strategy and leaves a run folder."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfdist.config import TrainConfig
from tfdist.console import command
from tfdist.errors import DataError
from tfdist.run import flags, recipe
from tfdist.run.rank_duties import in_turns, once, printing_to

if TYPE_CHECKING:
    import keras

    from tfdist.precision import LossScale
    from tfdist.trainer import Trainer

_DESCRIPTION = "Trains a recipe under a strategy and leaves a run folder."
_SMOKE_STEPS = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code: 0, 1 for an error, 130 for an interrupt."""
    command.quieten_tensorflow()

    def parse_and_train() -> None:
        train(flags.parse("python -m tfdist.train", _DESCRIPTION, arguments))

    return command.run(parse_and_train)


def train(config: TrainConfig) -> keras.callbacks.History:
    """Trains what the configuration says and writes the run folder.

    Raises:
        TfdistError: Something that the configuration asks for cannot be honoured.
        KeyboardInterrupt: The user stopped the training; the last state is saved.
    """
    import keras  # not at the top, because `--help` answers without TensorFlow

    import pipelines
    from tfdist.callbacks.curves import Curves
    from tfdist.callbacks.metrics_log import MetricsLog
    from tfdist.run import reports
    from tfdist.run.folder import RunFolder

    workload = recipe.find(config.recipe)
    keras.utils.set_random_seed(config.seed)
    trainer = make_trainer(config, workload)  # makes devices: before any TensorFlow operation
    strategy = trainer.strategy
    try:
        with in_turns(strategy):
            data, validation = workload.train_data(config), workload.validation_data(config)
    except pipelines.DataError as error:
        raise DataError(str(error)) from error
    folder = RunFolder(once(strategy, lambda: str(RunFolder.create(config).path)))
    if strategy.is_chief:
        reports.start(trainer, config, data, folder.path)

    history, curves = keras.callbacks.History(), Curves(folder.curves)
    log = MetricsLog(folder.metrics, trainer.stats)
    events = keras.callbacks.TensorBoard(str(folder.tensorboard), write_graph=False)
    began, interrupted = time.perf_counter(), False
    with printing_to(None if strategy.is_chief else folder.log(strategy.rank)):
        try:
            trainer.fit(
                data,
                validation_data=validation,
                callbacks=[history, log, curves, events] if strategy.is_chief else [history],
                **_fit_arguments(config),
            )
        except KeyboardInterrupt:
            interrupted = True
    seconds = time.perf_counter() - began
    if strategy.is_chief:
        if interrupted:
            curves.on_train_end()
        folder.save_model(trainer.model)
        summary = strategy.summary()
        reports.summary(history.history, seconds, trainer.stats, folder.path, interrupted, summary)
    if interrupted:
        raise KeyboardInterrupt
    return history


def make_trainer(config: TrainConfig, workload: recipe.Recipe) -> Trainer:
    """Returns a trainer for a recipe's model, spread as the configuration says.

    Raises:
        TfdistError: The strategy, its devices or options, the batch or the precision cannot be had.
    """
    import tfdist
    from tfdist import cluster
    from tfdist.loops.feed import check_batch_size

    if config.workers or config.rank is not None:
        cluster.use(cluster.discover(workers=config.workers or (), rank=config.rank))
    options = config.strategy_options()
    strategy = tfdist.strategies.create(config.strategy, config.devices, **options)
    check_batch_size(config.batch_size, strategy.num_replicas)  # data sets do not tell theirs
    return tfdist.Trainer(
        lambda: workload.build_model(config),
        strategy=strategy,
        accumulate=config.accumulate,
        sync_batch_norm=config.sync_batch_norm,
        steps_per_call=config.steps_per_call,
        precision=config.precision,
        loss_scale=_loss_scale(config),
        watchdog_seconds=config.watchdog_seconds,
    )


def _fit_arguments(config: TrainConfig) -> dict[str, Any]:
    """How long and how loud to train."""
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
    from tfdist.precision import LossScale

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


if __name__ == "__main__":
    sys.exit(main())
