"""Keras's container of callbacks, made as `keras.Model.fit` makes it."""

from __future__ import annotations

from typing import Any

import keras


def create(
    callbacks: Any, progress: keras.callbacks.Callback | None, **options: Any
) -> keras.callbacks.CallbackList:
    """Returns a container of callbacks; one that is a container already is returned as it is.

    Args:
        callbacks: None, a callback, or a structure of them.
        progress: Added last, unless one of the callbacks is a progress bar; None: none is.
        **options: What `keras.callbacks.CallbackList` takes.
    """
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    given = keras.tree.flatten(callbacks) if callbacks else []
    if progress and not any(isinstance(c, keras.callbacks.ProgbarLogger) for c in given):
        given.append(progress)
    return keras.callbacks.CallbackList(given, add_progbar=False, **options)
