"""Private names of Keras's training loop and of its callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.backend.tensorflow import trainer

from tfdist.upstream.patching import replaced

#: What each class keeps besides its arguments; `on_train_begin` resets most of it.
_REMEMBERED: dict[type, tuple[str, ...]] = {
    keras.callbacks.History: ("epoch", "history"),
    keras.callbacks.EarlyStopping: (
        "wait", "stopped_epoch", "best", "best_weights", "best_epoch",
    ),
    keras.callbacks.ReduceLROnPlateau: ("wait", "best", "cooldown_counter"),
    keras.callbacks.ModelCheckpoint: (
        "best", "_batches_seen_since_last_saving", "_last_batch_seen", "_current_epoch",
    ),
    keras.callbacks.CSVLogger: ("keys",),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
}  # fmt: skip


def remembered(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Returns what a callback of Keras remembers, by attribute; nothing of other classes."""
    if isinstance(callback, keras.callbacks.TensorBoard) and callback.update_freq == "epoch":
        return {}  # it counts calls, of which there are more on a fast machine
    names = [n for kind, names in _REMEMBERED.items() if isinstance(callback, kind) for n in names]
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}


def remember(callback: keras.callbacks.Callback, values: dict[str, Any]) -> None:
    """Gives a callback what another one of its class remembered."""
    for name in remembered(callback).keys() & values.keys():
        setattr(callback, name, values[name])
    if isinstance(callback, keras.callbacks.History):
        callback.model.history = callback


def is_better(model: keras.Model, monitor: str, value: float, best: float) -> bool:
    """Tells which of two values of a metric is better: `MonitorCallback._is_improvement`.

    Args:
        model: Compiled, with the metrics built.
        monitor: A key of the logs; `max:` or `min:` before it says what is better.
        value: The later one.
        best: The best before it.

    Raises:
        ValueError: Nobody knows which direction is better.
    """
    mode, _, name = monitor.rpartition(":")
    judge = keras.callbacks.EarlyStopping(name, mode=mode or "auto")
    judge.set_model(model)
    judge._set_monitor_op()
    return bool(judge._is_improvement(value, best))


@contextmanager
def weights_swapped_by_assignment() -> Iterator[None]:
    """A context in which `SwapEMAWeights` swaps weights that are not one `tf.Variable` each.

    Its `_tf_swap_variables` and `_tf_finalize_ema_values` add to `tf.Variable`s in place. What it
    has for other backends, `_backend_swap_variables` and `_backend_finalize_ema_values`, assigns to
    Keras variables.
    """
    kind = keras.callbacks.SwapEMAWeights
    with (
        replaced(kind, "_tf_swap_variables", kind._backend_swap_variables),
        replaced(kind, "_tf_finalize_ema_values", kind._backend_finalize_ema_values),
    ):
        yield


def concatenated(tensors: Sequence[Any]) -> Any:
    """Returns tensors end to end along the rows; of different inner shapes as a ragged one.

    `potentially_ragged_concat`, as in `keras.Model.predict`.
    """
    return trainer.potentially_ragged_concat(tensors)


def as_arrays(structure: Any) -> Any:
    """Returns tensors as NumPy arrays, and ragged and sparse ones as they are.

    `convert_to_np_if_not_ragged`, as in `keras.Model.predict`.
    """
    return keras.tree.map_structure(trainer.convert_to_np_if_not_ragged, structure)


def initial_epoch(model: keras.Model, given: int) -> int:
    """Returns the first epoch, after the callbacks' `on_train_begin`.

    `BackupAndRestore` sets `model._initial_epoch` to the epoch to resume with.
    """
    return model._initial_epoch or given


def is_validated(model: keras.Model, epoch: int, validation_freq: int | Sequence[int]) -> bool:
    """Tells whether an epoch, from 0, ends with a validation: `model._should_eval`."""
    return model._should_eval(epoch, validation_freq)


def in_order_of_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Returns logs as `evaluate` does without `return_dict`: `model._flatten_metrics_in_order`."""
    return model._flatten_metrics_in_order(logs)


def profiles_batches(board: keras.callbacks.TensorBoard) -> bool:
    """Tells whether a TensorBoard is to profile batches, which it keeps as `_should_trace`."""
    return bool(board._should_trace)


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Sets the epoch to resume with, as `BackupAndRestore` does; 0: the one passed to `fit`."""
    model._initial_epoch = epoch or None
