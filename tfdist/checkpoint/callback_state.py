"""The state of callbacks, which a resumed run restores.

A custom callback is saved and restored if it defines two methods:

- `get_state()` returns its state: nested dicts and lists of numbers, strings and arrays. It is
  called at the end of a step, in the process whose state is saved: the chief.
- `set_state(state)` receives that state on every worker that has such a callback, after
  `on_train_begin` or, if the run resumes within an epoch, after `on_epoch_begin`.

Keras's own callbacks are supported without these methods. A file that a callback appends to
(CSVLogger's) is truncated to its length at the time of the checkpoint.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from tfdist.upstream import keras_training

_BYTES = "bytes written"  # the key of a file's length


def states(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, Any]:
    """Returns the states of callbacks, by class name and number."""
    by_name = {name: _state(callback) for name, callback in _named(callbacks)}
    return {name: state for name, state in by_name.items() if state}


def before_training(callbacks: Sequence[keras.callbacks.Callback], saved: dict[str, Any]) -> None:
    """Truncates the files of callbacks that open them when training begins, and appends to them."""
    for name, callback in _named(callbacks):
        if isinstance(callback, keras.callbacks.CSVLogger) and name in saved:
            truncate(Path(callback.filename), saved[name].get(_BYTES))
            callback.append = True


def restore(callbacks: Sequence[keras.callbacks.Callback], saved: dict[str, Any]) -> None:
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


def _state(callback: keras.callbacks.Callback) -> Any:
    if hasattr(callback, "get_state"):
        return callback.get_state()
    state = keras_training.callback_state(callback)
    if isinstance(callback, keras.callbacks.CSVLogger):
        path = Path(callback.filename)
        state[_BYTES] = path.stat().st_size if path.exists() else 0
    return state


def _named(
    callbacks: Sequence[keras.callbacks.Callback],
) -> Iterator[tuple[str, keras.callbacks.Callback]]:
    """Yields each callback with its class name, numbered within the class."""
    seen = Counter[str]()
    for callback in callbacks:
        kind = type(callback).__qualname__
        seen[kind] += 1
        yield f"{kind} {seen[kind]}", callback
