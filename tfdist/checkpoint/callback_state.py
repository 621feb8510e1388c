"""What callbacks remember, so that a training which goes on has the same ones.

The protocol for a callback of one's own is two methods:

- `get_state()` returns what it remembers: nested dicts and lists of numbers, texts and arrays. It
  is asked at the end of a step, in the process whose state is saved: that of the chief.
- `set_state(state)` is given that back on every worker that has such a callback, after it has heard
  `on_train_begin`, and, within an epoch, `on_epoch_begin`.

Keras's own callbacks need no such methods: what they remember is known here. A file that grows
(CSVLogger's) is cut back to what it was when the checkpoint was made, and goes on from there.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from tfdist.upstream import keras_callbacks

_BYTES = "bytes written"  # key of a length of a file


def states(callbacks: Sequence[keras.callbacks.Callback]) -> dict[str, Any]:
    """Returns what callbacks remember, by class and number."""
    found = {name: _state(callback) for name, callback in _named(callbacks)}
    return {name: state for name, state in found.items() if state}


def before_training(callbacks: Sequence[keras.callbacks.Callback], saved: dict[str, Any]) -> None:
    """Has callbacks that open files when a training begins go on with them."""
    for name, callback in _named(callbacks):
        if isinstance(callback, keras.callbacks.CSVLogger) and name in saved:
            cut(Path(callback.filename), saved[name].get(_BYTES))
            callback.append = True


def restore(callbacks: Sequence[keras.callbacks.Callback], saved: dict[str, Any]) -> None:
    """Gives callbacks what those of the same class and number remembered."""
    for name, callback in _named(callbacks):
        if name not in saved:
            continue
        if hasattr(callback, "set_state"):
            callback.set_state(saved[name])
        else:
            keras_callbacks.remember(callback, saved[name])


def cut(path: Path, num_bytes: int | None) -> None:
    """Cuts a file back to what it was; one that is not there, or is shorter, stays as it is."""
    if num_bytes is not None and path.exists() and path.stat().st_size > num_bytes:
        os.truncate(path, num_bytes)


def _state(callback: keras.callbacks.Callback) -> Any:
    if hasattr(callback, "get_state"):
        return callback.get_state()
    state = keras_callbacks.remembered(callback)
    if isinstance(callback, keras.callbacks.CSVLogger):
        path = Path(callback.filename)
        state[_BYTES] = path.stat().st_size if path.exists() else 0
    return state


def _named(
    callbacks: Sequence[keras.callbacks.Callback],
) -> Iterator[tuple[str, keras.callbacks.Callback]]:
    """Yields each callback with a name that does not depend on the others of other classes."""
    seen = Counter[str]()
    for callback in callbacks:
        kind = type(callback).__qualname__
        seen[kind] += 1
        yield f"{kind} {seen[kind]}", callback
