"""`python -m tfdist.train`: trains a recipe under a strategy and writes a run folder."""

from __future__ import annotations

import atexit
import gc
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from tfdist.config import TrainConfig
from tfdist.console import command
from tfdist.loops import interrupts
from tfdist.run import flags, saved_model

if TYPE_CHECKING:
    import keras

_DESCRIPTION = "Trains a recipe under a strategy, and writes the results to a run folder."


@command.main
def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command.

    Returns:
        The exit code: 0; 1 for an error; 130 for an interrupt; `tfdist.errors.REQUEUE` after a
        preemption if there is a checkpoint, otherwise `tfdist.errors.TERMINATED`.
    """
    # At the end, collecting TensorFlow's and Keras's objects takes a second of CPU time.
    atexit.register(gc.freeze)
    with interrupts.preemption_raises():  # also while TensorFlow is imported
        config = flags.parse("python -m tfdist.train", _DESCRIPTION, arguments)
        saved = Path(config.run_dir or "", "checkpoints")
        if config.run_dir and any(saved.glob("epoch-*/manifest.json")):
            interrupts.note_checkpoint()  # a preemption before it is read changes nothing
        if config.evaluate:
            saved_model.evaluate(config)
        else:
            train(config)


def train(config: TrainConfig) -> keras.callbacks.History:
    """Trains a configuration, and writes the run folder.

    Raises:
        TfdistError: The configuration is invalid or not supported, or training failed.
        KeyboardInterrupt: The user stopped the run, after which a checkpoint is saved. `Preempted`
            after a preemption.
    """
    from tfdist.run.training_run import TrainingRun  # imported here to keep `--help` fast

    planned = ""
    if config.auto:
        from tfdist.tools.plan import auto

        config, planned = auto.applied(config)
    with closing(TrainingRun(config, planned)) as run:
        run.finish(run.fit())
        return run.history


if __name__ == "__main__":
    sys.exit(main())
