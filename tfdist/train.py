"""`python -m tfdist.train`: trains a recipe under a strategy and leaves a run folder."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfdist.config import TrainConfig
from tfdist.console import command, tables
from tfdist.errors import ConfigurationError, Preempted
from tfdist.loops import interrupts
from tfdist.run import evaluating, flags, recipe
from tfdist.run.rank_duties import printing_to
from tfdist.strategies.collectives.once import once

if TYPE_CHECKING:
    import keras

_DESCRIPTION = "Trains a recipe under a strategy and leaves a run folder."


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        The exit code: 0; 1 for an error; 130 for an interrupt; `tfdist.errors.REQUEUE` where a
        scheduler wants its machine back.
    """

    def parse_and_run() -> None:
        config = flags.parse("python -m tfdist.train", _DESCRIPTION, arguments)
        if config.evaluate:
            evaluating.evaluate(config)
        else:
            with interrupts.preemption_raises():
                train(config)

    return command.run(parse_and_run)


def train(config: TrainConfig) -> keras.callbacks.History:
    """Trains what the configuration says and writes the run folder.

    Raises:
        TfdistError: Something that the configuration asks for cannot be honoured.
        KeyboardInterrupt: The user stopped the training; the last state is saved. A `Preempted`
            where a scheduler wants its machine back.
    """
    import keras  # not at the top, because `--help` answers without TensorFlow

    from tfdist.callbacks.batch_size import BatchSize
    from tfdist.callbacks.curves import Curves
    from tfdist.callbacks.metrics_log import MetricsLog
    from tfdist.callbacks.profile import Profile
    from tfdist.run import export, from_config, loggers, profile, provenance, reports, room
    from tfdist.run.effect import Watched, check_spread
    from tfdist.run.folder import RunFolder

    began = time.monotonic()
    export.check(config.export)
    loggers.check(config.logger)
    workload = recipe.find(config.recipe)
    keras.utils.set_random_seed(config.seed)
    strategy = from_config.make_strategy(config)
    check_spread(config, workload, strategy)
    watched = Watched(config)
    data, validation = from_config.make_data(watched.as_config(), workload, strategy)
    steps_per_epoch = recipe.num_steps(data)
    trainer = from_config.make_trainer(watched.as_config(), workload, strategy, steps_per_epoch)
    callbacks = from_config.make_callbacks(watched.as_config(), workload)
    facts = reports.what_runs(trainer, config, data, watched.unread(workload))
    sources = provenance.of_run(config, strategy, workload)
    folder = RunFolder(
        once(strategy, lambda: str(RunFolder.create(config, trainer.model, facts, sources).path))
    )
    trainer.checkpoints = from_config.make_checkpoints(config, folder.checkpoints)
    talks = strategy.is_chief and config.verbose != 0
    if talks:
        tables.facts({**facts, "run folder": str(folder.path)}.items())

    history = keras.callbacks.History()
    curves = Curves(folder.curves, f"smoke run: {reports.SMOKE}" if config.smoke else "")
    log = MetricsLog(folder.metrics, trainer.stats)
    batches = BatchSize(trainer.stats, from_config.first_batch_size(config))
    callbacks = [*from_config.averages(config), *callbacks]
    profiled = [Profile(folder.tensorboard, trainer.stats)] if config.profile else []
    left = None if config.max_time is None else began + config.max_time - time.monotonic()
    fitting, stopped, full = time.perf_counter(), "", ""
    raised: KeyboardInterrupt | None = None
    with (
        printing_to(None if strategy.is_chief else folder.log(strategy.rank)),
        loggers.opened(config, folder, strategy.is_chief) as told,
    ):
        try:
            with interrupts.deadline(left):
                trainer.fit(
                    data,
                    validation_data=validation,
                    callbacks=[*callbacks, history, log, curves, *told, batches, *profiled],
                    **from_config.fit_arguments(config),
                )
        except interrupts.TimeIsUp:
            stopped = "by --max-time"
        except KeyboardInterrupt as signalled:
            raised = signalled
            stopped = "by its scheduler" if isinstance(raised, Preempted) else "by an interrupt"
        except Exception as error:
            if not (strategy.is_chief and (full := room.lacking(error))):
                raise  # what another worker cannot write is its log
    seconds = time.perf_counter() - fitting
    for one in profiled:
        one.close()
    if strategy.is_chief:
        if stopped:
            curves.on_train_end()
        saved, problem = room.save(trainer.model, folder.model)
        full = full or str(problem or "")
    if talks:
        summary = strategy.summary()
        reports.summary(history.history, seconds, trainer.stats, folder.path, stopped, summary)
    if full:
        raise ConfigurationError(
            f"{folder.path}: not all could be written: {full}. The model after "
            f"{int(trainer.model.optimizer.iterations)} steps is {saved}."
        )
    if raised:
        if strategy.is_chief and trainer.checkpoints:
            where = shlex.join(["--run-dir", str(folder.path)])
            print(f"To go on: the same command with {where} --resume auto", file=sys.stderr)
        strategy.barrier()  # who starts the workers ends all of them when one has ended
        raise raised
    for one in profiled:
        exchanged = profile.exchange(strategy, trainer.model)  # all workers do
        if talks:
            profile.show(one, exchanged)
    if strategy.is_chief:
        export.write(config.export, folder.model)
    return history


if __name__ == "__main__":
    sys.exit(main())
