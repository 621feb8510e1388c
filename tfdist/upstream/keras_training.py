"""Private names of Keras's training loop and of its callbacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
from keras.src.backend.tensorflow import trainer

from tfdist.upstream.patching import all_replaced, replaced

#: The state of each class besides its arguments; `on_train_begin` resets most of it.
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

#: An argument of `evaluate` by which `fit` asks for its validation, whose data it has prepared.
WITHIN_FIT = "_use_cached_eval_dataset"


def callback_state(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """Returns the state of a callback of Keras by attribute; empty for other classes."""
    if isinstance(callback, keras.callbacks.TensorBoard) and callback.update_freq == "epoch":
        return {}  # It counts calls, and a faster machine makes more of them.
    names = [n for kind, names in _REMEMBERED.items() if isinstance(callback, kind) for n in names]
    return {name: getattr(callback, name) for name in names if hasattr(callback, name)}


def set_callback_state(callback: keras.callbacks.Callback, values: dict[str, Any]) -> None:
    """Restores the state that `callback_state` returned for a callback of the same class."""
    for name in callback_state(callback).keys() & values.keys():
        setattr(callback, name, values[name])
    if isinstance(callback, keras.callbacks.History):
        callback.model.history = callback


def is_better(model: keras.Model, monitor: str, value: float, best: float) -> bool:
    """Returns whether a value of a metric is an improvement: `MonitorCallback._is_improvement`.

    Args:
        model: A compiled model whose metrics are built.
        monitor: A key of the logs, with the prefix `max:` or `min:` to set the direction.
        value: The new value.
        best: The best value so far.

    Raises:
        ValueError: Keras cannot infer the direction.
    """
    mode, _, name = monitor.rpartition(":")
    judge = keras.callbacks.EarlyStopping(name, mode=mode or "auto")
    judge.set_model(model)
    judge._set_monitor_op()
    return bool(judge._is_improvement(value, best))


def weights_swapped_by_assignment() -> AbstractContextManager[None]:
    """Makes `SwapEMAWeights` swap sharded weights within the block.

    Its `_tf_swap_variables` and `_tf_finalize_ema_values` update a `tf.Variable` in place. Those of
    other backends, `_backend_swap_variables` and `_backend_finalize_ema_values`, assign to Keras
    variables.
    """
    kind = keras.callbacks.SwapEMAWeights
    replacements = {
        "_tf_swap_variables": kind._backend_swap_variables,
        "_tf_finalize_ema_values": kind._backend_finalize_ema_values,
    }
    return all_replaced(kind, replacements)


def is_function_of_keras(function: Any) -> bool:
    """Returns whether a model's `train_function` or the like is None or made by Keras.

    User code may set these attributes, and Keras then calls what it has set.
    """
    plain = getattr(function, "python_function", function)
    return function is None or plain.__module__ == trainer.__name__


@contextmanager
def functions_made(function: Any) -> Iterator[list[Any]]:
    """A context in which Keras's `make_train_function` makes a given function for batches.

    `TensorFlowTrainer._make_function`, which also a bound method that user code has kept calls.

    Yields:
        A list that gets the step of each function that Keras would have made.
    """
    steps: list[Any] = []

    def make(model: keras.Model, step: Any) -> Any:
        del model
        steps.append(step)
        return function

    with replaced(keras.Model, "_make_function", make):
        yield steps


def metrics_or_logs(model: keras.Model, logs: dict[str, Any]) -> dict[str, Any]:
    """Returns an epoch's logs, given those of the last step: `_get_metrics_result_or_logs`."""
    return model._get_metrics_result_or_logs(logs)


def concatenated(tensors: Sequence[Any]) -> Any:
    """Concatenates tensors along the rows; different inner shapes give a ragged tensor.

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
    """Returns whether an epoch, counted from 0, ends with a validation: `model._should_eval`."""
    return model._should_eval(epoch, validation_freq)


def in_order_of_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Returns logs as `evaluate` does without `return_dict`: `model._flatten_metrics_in_order`."""
    return model._flatten_metrics_in_order(logs)


def profiles_batches(board: keras.callbacks.TensorBoard) -> bool:
    """Returns whether a TensorBoard callback profiles batches: its `_should_trace`."""
    return bool(board._should_trace)


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Sets the epoch to resume with, as `BackupAndRestore` does; 0: the one passed to `fit`."""
    model._initial_epoch = epoch or None
