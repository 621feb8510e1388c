"""Callbacks with several workers: which of them run on which worker; and the state of callbacks.

A script passes the same list of callbacks on every worker. Callbacks that make decisions
(EarlyStopping, a learning rate scheduler) run on all workers, with the same logs. Callbacks that
write files or report to an experiment tracker run only on the chief. A callback can set the
attribute `chief_only` to True or False; otherwise its base classes decide.

Callbacks that run only on the chief may change the model at the start and the end of training and
at the end of an epoch. The changed weights, optimizer and initial epoch are sent to all workers. At
other times they must not change the model. To check this, the workers compare checksums of the
variables before and after the end of an epoch, unless all of these callbacks set `only_reads =
True`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from tfdist.groups import agreement
from tfdist.strategies.base import Strategy
from tfdist.upstream import keras_training
from tfdist.upstream.features import existing
from tfdist.upstream.keras_optimizers import optimizers_of

_FIX = (
    "a callback that runs only on the chief changed them within an epoch. Change them at the end "
    "of an epoch, or set chief_only = False on the callback."
)
_BYTES = "bytes written"  # the key of a file's length


def create_callback_list(
    callbacks: Any, progress: keras.callbacks.Callback | None, strategy: Strategy, **options: Any
) -> keras.callbacks.CallbackList:
    """Returns a container of this worker's callbacks. All workers must call it together.

    A container is returned unchanged if no callback runs only on the chief.
    """
    container = callbacks if isinstance(callbacks, keras.callbacks.CallbackList) else None
    given = container.callbacks if container else keras.tree.flatten(callbacks) if callbacks else []
    for_chief = [c for c in given if is_chief_only(c)]
    by_worker = strategy.group.gather(
        [bool(for_chief), any(may_change_model(c) for c in for_chief)]
    )
    several = len(by_worker) > 1
    if container:
        if not (several and by_worker[:, 0].any()):
            return container
        progress, options = None, container.params | {"model": options["model"]}
    active = [c for c in given if strategy.group.is_chief or c not in for_chief]
    if progress and not any(isinstance(c, keras.callbacks.ProgbarLogger) for c in active):
        active.append(progress)
    if several and by_worker[:, 1].any():
        return _Shared(active, strategy, **options)
    return keras.callbacks.CallbackList(active, add_progbar=False, **options)


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
        epoch = int(
            self._strategy.group.gather([keras_training.initial_epoch(self.model, 0)])[0, 0]
        )
        keras_training.set_initial_epoch(self.model, epoch)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        agreement.check_values(self._strategy.group, self._variables(), _FIX)
        super().on_epoch_end(epoch, logs)
        self._sync_copies()

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        super().on_train_end(logs)
        self._sync_copies()

    def _sync_copies(self) -> None:
        """Sends the chief's variables to all workers if they differ."""
        if not agreement.are_same(self._strategy.group, self._variables()):
            self._strategy.variables.prepare(self.model, optimizers_of(self.model))

    def _variables(self) -> list[keras.Variable]:
        states = [v for optimizer in optimizers_of(self.model) for v in optimizer.variables]
        return self.model.variables + states


#: Keras's callbacks that write files or send data.
_WRITERS = (
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    *existing(keras.callbacks, "OrbaxCheckpoint"),
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)

#: These classes do not change the model. Their subclasses may.
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
    """Returns whether a callback runs only on the chief."""
    choice = getattr(callback, "chief_only", None)
    if choice is not None:
        return bool(choice)
    packages = {base.__module__.partition(".")[0] for base in type(callback).__mro__}
    return isinstance(callback, _WRITERS) or not packages.isdisjoint(_TRACKERS)


def may_change_model(callback: keras.callbacks.Callback) -> bool:
    """Returns whether a callback may change the model."""
    return type(callback) not in _READERS and not getattr(callback, "only_reads", False)


def callback_states(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, Any]:
    """Returns the states of callbacks, by class name and number, which a resumed run restores.

    A custom callback is saved and restored if it defines two methods:

    - `get_state()` returns its state: nested dicts and lists of numbers, strings and arrays. It is
      called at the end of a step, in the process whose state is saved: the chief.
    - `set_state(state)` receives that state on every worker that has such a callback, after
      `on_train_begin` or, if the run resumes within an epoch, after `on_epoch_begin`.

    Keras's own callbacks are supported without these methods. A file that a callback appends to
    (CSVLogger's) is truncated to its length at the time of the checkpoint.
    """
    states = {}
    for name, callback in _named(callbacks):
        if hasattr(callback, "get_state"):
            state = callback.get_state()
        else:
            state = keras_training.callback_state(callback)
            if isinstance(callback, keras.callbacks.CSVLogger):
                path = Path(callback.filename)
                state[_BYTES] = path.stat().st_size if path.exists() else 0
        if state:
            states[name] = state
    return states


def truncate_files(callbacks: Sequence[keras.callbacks.Callback], saved: dict[str, Any]) -> None:
    """Truncates the files of callbacks that open them when training begins, and appends to them."""
    for name, callback in _named(callbacks):
        if isinstance(callback, keras.callbacks.CSVLogger) and name in saved:
            truncate(Path(callback.filename), saved[name].get(_BYTES))
            callback.append = True


def restore_states(callbacks: Sequence[keras.callbacks.Callback], saved: dict[str, Any]) -> None:
    """Restores callbacks from the states of those with the same class and number."""
    for name, callback in _named(callbacks):
        if name not in saved:
            continue
        if hasattr(callback, "set_state"):
            callback.set_state(saved[name])
        else:
            keras_training.set_callback_state(callback, saved[name])


def truncate(path: Path, num_bytes: int | None) -> None:
    """Truncates a file. Does nothing if it is missing or shorter."""
    if num_bytes is not None and path.exists() and path.stat().st_size > num_bytes:
        os.truncate(path, num_bytes)


def _named(
    callbacks: Sequence[keras.callbacks.Callback],
) -> Iterator[tuple[str, keras.callbacks.Callback]]:
    seen = Counter[str]()
    for callback in callbacks:
        kind = type(callback).__qualname__
        seen[kind] += 1
        yield f"{kind} {seen[kind]}", callback
