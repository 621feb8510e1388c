"""Callbacks over several workers: which of them run where, in Keras's container.

A script passes the same list of callbacks on every worker. Callbacks that make decisions
(EarlyStopping, a learning rate scheduler) run on all workers, with the same numbers. Those that
write files or report to an experiment tracker run on the chief alone. A callback can choose with
the attribute `chief_only = True` or `False`, of its class or its own; otherwise its base classes
decide.

What callbacks of the chief change in the model, at the beginning and the end of training and at the
end of an epoch, is sent to all workers: weights, optimizer, and the initial epoch. At other times
they must not change it. To check this, the workers compare checksums of the variables before and
after the end of an epoch, unless all of the chief's callbacks set `only_reads = True`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfdist.groups import agreement
from tfdist.strategies.base import Strategy
from tfdist.upstream import keras_training
from tfdist.upstream.keras_optimizers import optimizers_of

_CURE = (
    "a callback that runs on the chief alone changed them within an epoch. Change them at the end "
    "of an epoch, or set chief_only = False on the callback."
)


def create_callback_list(
    callbacks: Any, progress: keras.callbacks.Callback | None, strategy: Strategy, **options: Any
) -> keras.callbacks.CallbackList:
    """Returns a container of this worker's callbacks; called on all workers together.

    A container is returned unchanged if no callback runs on the chief alone.

    Args:
        callbacks: None, a callback, or a structure of callbacks of this worker.
        progress: Progress bar to add, unless one of the callbacks is one; None for none.
        strategy: Knows the chief, and connects the workers.
        **options: As in `keras.callbacks.CallbackList`.
    """
    container = callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else None
    given = container.callbacks if container else keras.tree.flatten(callbacks) if callbacks else []
    for_chief = [c for c in given if is_chief_only(c)]
    found = strategy.gather([bool(for_chief), any(may_change_model(c) for c in for_chief)])
    several = len(found) > 1
    if container:
        if not (several and found[:, 0].any()):
            return container
        progress, options = None, container.params | {"model": options["model"]}
    own = [c for c in given if strategy.is_chief or c not in for_chief]
    if progress and not any(isinstance(c, keras.callbacks.ProgbarLogger) for c in own):
        own.append(progress)
    if several and found[:, 1].any():
        return _Shared(own, strategy, **options)
    return keras.callbacks.CallbackList(own, add_progbar=False, **options)


class _Shared(keras.callbacks.CallbackList):
    """Callbacks of a worker, if callbacks that run only on the chief may change the model."""

    def __init__(
        self, callbacks: Sequence[keras.callbacks.Callback], strategy: Strategy, **options: Any
    ) -> None:
        self._strategy = strategy
        super().__init__(callbacks, add_progbar=False, **options)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._sync_copies()
        epoch = int(self._strategy.gather([keras_training.initial_epoch(self.model, 0)])[0, 0])
        keras_training.set_initial_epoch(self.model, epoch)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        agreement.check_values(self._strategy.group, self._variables(), _CURE)
        super().on_epoch_end(epoch, logs)
        self._sync_copies()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        super().on_train_end(logs)
        self._sync_copies()

    def _sync_copies(self) -> None:
        """Sends the chief's variables to all workers if they differ."""
        if not agreement.are_same(self._strategy.group, self._variables()):
            self._strategy.prepare(self.model, optimizers_of(self.model))

    def _variables(self) -> list[keras.Variable]:
        states = [v for optimizer in optimizers_of(self.model) for v in optimizer.variables]
        return self.model.variables + states


#: Keras's callbacks that write files or send data.
_WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.OrbaxCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)

#: Exactly these classes do not change the model; their subclasses may.
_READERS = frozenset({*_WRITERS} - {keras.callbacks.BackupAndRestore})

#: Packages whose callbacks report to experiment trackers; TensorBoard's is for hyperparameters.
_TRACKERS = frozenset(
    {
        "aim",
        "clearml",
        "comet_ml",
        "dvclive",
        "mlflow",
        "neptune",
        "neptune_tensorflow_keras",
        "swanlab",
        "tensorboard",
        "traceml",
        "wandb",
    }
)


def is_chief_only(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback runs on the chief alone."""
    choice = getattr(callback, "chief_only", None)
    if choice is not None:
        return bool(choice)
    packages = {base.__module__.partition(".")[0] for base in type(callback).__mro__}
    return isinstance(callback, _WRITERS) or not packages.isdisjoint(_TRACKERS)


def may_change_model(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback may change the model."""
    return type(callback) not in _READERS and not getattr(callback, "only_reads", False)
