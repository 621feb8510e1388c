"""Scenarios for two workers with the same callbacks, some of which run only on the chief.

Each worker has a separate folder, as on two hosts, so that rank 1 cannot read rank 0's files.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import callbacks as kc

from tests.support.training import FIT, momentum
from tfdist.errors import ClusterError
from tfdist.strategies.base import Strategy
from tfdist.trainer import Trainer


class RestoresFirstEpoch(kc.ModelCheckpoint):
    """Restores the weights of the first epoch at the end of training."""

    def on_train_end(self, logs: Any = None) -> None:
        self.model.load_weights(self.filepath.format(epoch=1))


class ChangesWeights(kc.Callback):
    """Changes the weights after the first batch of an epoch."""

    chief_only = True

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if batch == 0:
            self.model.set_weights([w + 1 for w in self.model.get_weights()])


class CountsBatches(kc.Callback):
    """Counts the batches that it is called for, on the chief."""

    chief_only = True
    count = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.count += 1


def writes_and_restores(strategy: Strategy) -> dict[str, Any]:
    """Returns the files, epochs and weights of a training run and of one that resumes it."""
    with tempfile.TemporaryDirectory() as folder:
        return _two_trainings(strategy, Path(folder))


def _two_trainings(strategy: Strategy, folder: Path) -> dict[str, Any]:
    def backup() -> kc.Callback:
        return kc.BackupAndRestore(folder / "backup", delete_checkpoint=False)

    trainer = Trainer(momentum, strategy)
    callbacks = [
        kc.EarlyStopping(monitor="loss", patience=5),
        RestoresFirstEpoch(folder / "{epoch}.weights.h5", save_weights_only=True),
        kc.CSVLogger(folder / "log.csv"),
        kc.TensorBoard(folder / "board", histogram_freq=1, update_freq=1),
        backup(),
    ]
    trainer.fit(**FIT, epochs=2, callbacks=callbacks)
    files = sorted(path.name for path in folder.iterdir())
    resumed = Trainer(momentum, strategy)
    epochs = resumed.fit(**FIT, epochs=3, callbacks=[backup()]).epoch
    return {
        "files": files,
        "num_files": strategy.group.gather([len(files)]),
        "rows": len((folder / "log.csv").read_text().splitlines()) - 1 if files else None,
        "first_epoch": strategy.group.gather(_weights(trainer.model)),
        "resumed_epochs": strategy.group.gather([epochs[0], len(epochs)]),
        "resumed": strategy.group.gather(_weights(resumed.model)),
    }


def change_within_an_epoch_raises(strategy: Strategy) -> str:
    """Returns the error of a callback that changes the weights on rank 0 only."""
    try:
        Trainer(momentum, strategy).fit(**FIT, callbacks=[ChangesWeights()])
    except ClusterError as error:
        return str(error)
    return "no error"


def sees_every_batch(strategy: Strategy) -> np.ndarray:
    """Returns the batches by rank that callbacks saw; an earlier `fit` had many steps per call."""
    trainer, counter = Trainer(momentum, strategy), CountsBatches()
    for callbacks in ([], [counter]):
        trainer.fit(**FIT, epochs=3, callbacks=callbacks)
    return strategy.group.gather([counter.count])


def plain(epochs: int) -> np.ndarray:
    """Returns the weights that plain Keras trains on one device."""
    model = momentum()
    model.fit(**FIT, epochs=epochs)
    return _weights(model)


def _weights(model: keras.Model) -> np.ndarray:
    return np.concatenate([weight.ravel() for weight in model.get_weights()])


SCENARIOS = [writes_and_restores, change_within_an_epoch_raises, sees_every_batch]
