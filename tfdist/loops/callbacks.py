"""Keras's container of callbacks, made as `keras.Model.fit` makes it, for all workers.

Each worker runs the callbacks that are its own (`callback_roles`). What those of the chief alone
change in the model when a training begins, at the end of an epoch or when it ends, holds on all:
weights, optimizer, and the epoch that a training goes on with. At other times they must leave the
model as it is; to see that costs a checksum of the variables, before and after the end of an epoch,
unless all of them are known to leave it so.

Which callbacks run on every worker, and which on the chief alone.

A script hands the same list on every worker. Callbacks that decide (EarlyStopping, a scheduler of
the learning rate) run on all of them, on the same numbers; those that write files or report to a
tracker would do it once a worker. A callback says which it is by an attribute of its class or its
own, `chief_only = True` or `False`. One that does not say is judged by what it derives from.

One of the chief's that never changes the model may say so too, by `only_reads = True`: the workers
then need not compare their variables at the end of each epoch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from tfdist.groups import agreement
from tfdist.strategies.base import Strategy
from tfdist.upstream import keras_data
from tfdist.upstream.keras_optimizers import optimizers_of

_CURE = (
    "a callback that does not run on every rank changed them within an epoch. Let it do so at the "
    "end of an epoch, or set its chief_only = False."
)


def create_callback_list(
    callbacks: Any, progress: keras.callbacks.Callback | None, strategy: Strategy, **options: Any
) -> keras.callbacks.CallbackList:
    """Returns a container of this worker's callbacks; called on all workers together.

    Where no callback is for the chief alone, what is a container already is returned as it is.

    Args:
        callbacks: None, a callback, or a structure of them; on each worker its own.
        progress: Added last, unless one of the callbacks is a progress bar; None: none is.
        strategy: Knows the chief, and carries what it says.
        **options: What `keras.callbacks.CallbackList` takes.
    """
    made = callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else None
    given = made.callbacks if made else keras.tree.flatten(callbacks) if callbacks else []
    for_chief = [c for c in given if is_chief_only(c)]
    told = strategy.gather([bool(for_chief), any(may_change_model(c) for c in for_chief)])
    several = len(told) > 1
    if made:
        if not (several and told[:, 0].any()):
            return made
        progress, options = None, made.params | {"model": options["model"]}
    own = [c for c in given if strategy.is_chief or c not in for_chief]
    if progress and not any(isinstance(c, keras.callbacks.ProgbarLogger) for c in own):
        own.append(progress)
    if several and told[:, 1].any():
        return _Shared(own, strategy, **options)
    return keras.callbacks.CallbackList(own, add_progbar=False, **options)


class _Shared(keras.callbacks.CallbackList):
    """One worker's callbacks, where the chief alone has some that may change the model."""

    def __init__(
        self, callbacks: Sequence[keras.callbacks.Callback], strategy: Strategy, **options: Any
    ) -> None:
        self._strategy = strategy
        super().__init__(callbacks, add_progbar=False, **options)

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        self._sync_copies()
        epoch = int(self._strategy.gather([keras_data.initial_epoch(self.model, 0)])[0, 0])
        keras_data.set_initial_epoch(self.model, epoch)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        agreement.check_values(self._strategy.group, self._variables(), _CURE)
        super().on_epoch_end(epoch, logs)
        self._sync_copies()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        super().on_train_end(logs)
        self._sync_copies()

    def _sync_copies(self) -> None:
        """Gives the variables of all workers the values that the chief's have."""
        if not agreement.are_same(self._strategy.group, self._variables()):
            self._strategy.prepare(self.model, optimizers_of(self.model))

    def _variables(self) -> list[keras.Variable]:
        states = [v for optimizer in optimizers_of(self.model) for v in optimizer.variables]
        return self.model.variables + states


#: Of Keras: they write files, or send.
_WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.OrbaxCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)

#: Exactly these leave the model as it is; what derives from them may not.
_READERS = frozenset({*_WRITERS} - {keras.callbacks.BackupAndRestore})

#: Packages whose callbacks report to experiment trackers; TensorBoard's own is for hyperparameters.
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
    """Tells whether a callback is to run on the chief alone."""
    said = getattr(callback, "chief_only", None)
    if said is not None:
        return bool(said)
    packages = {base.__module__.partition(".")[0] for base in type(callback).__mro__}
    return isinstance(callback, _WRITERS) or not packages.isdisjoint(_TRACKERS)


def may_change_model(callback: keras.callbacks.Callback) -> bool:
    """Tells whether a callback might change the model."""
    return type(callback) not in _READERS and not getattr(callback, "only_reads", False)
