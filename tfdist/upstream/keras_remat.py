"""Private names of Keras's rematerialization: which layers ask for it, and what carries it out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.remat import RematMode
from keras.src.backend.tensorflow import core

from tfdist.upstream.patching import replace, replaced


def asks(operation: keras.Operation) -> bool:
    """Whether an operation was made in a `keras.RematScope`, as `Operation._remat_mode` says."""
    mode = getattr(operation, "_remat_mode", None)
    return mode is not None and mode.mode is not None


def asking(layer: keras.layers.Layer, does: bool = True) -> AbstractContextManager[None]:
    """Returns a context in which a layer's call is handed to `keras.remat`, or is not."""
    return replaced(layer, "_remat_mode", RematMode("full", 0, []) if does else None)


def copy(layer: keras.Operation, from_layer: keras.Operation) -> None:
    """Lets a layer ask for what another does: no configuration holds `_remat_mode`."""
    replace(layer, "_remat_mode", getattr(from_layer, "_remat_mode", None))


def carried_out_by(
    function: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> AbstractContextManager[None]:
    """Returns a context in which `function` is `keras.remat`: `remat` of the backend's `core`.

    Keras's own refuses keyword arguments in a graph, draws other random numbers the second time,
    and loses gradients of what a `StatelessScope` holds, and of losses that layers add.
    """
    return replaced(core, "remat", function)


def surroundings() -> Callable[[], AbstractContextManager[None]]:
    """Returns what makes a context in which calls of layers find what they would find here.

    In what format variables are read and whether it is a training: `get_global_attribute` of
    `autocast_scope` and `current_call_ctx`.
    """
    names = ("autocast_scope", "current_call_ctx")
    here = {name: global_state.get_global_attribute(name) for name in names}

    @contextmanager
    def there() -> Iterator[None]:
        before = {name: global_state.get_global_attribute(name) for name in names}
        _set(here)
        try:
            yield
        finally:
            _set(before)

    return there


def _set(values: dict[str, Any]) -> None:
    for name, value in values.items():
        global_state.set_global_attribute(name, value)
