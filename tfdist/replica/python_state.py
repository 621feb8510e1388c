"""What code of the user changes in Python, undone after it ran for an analysis only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from tfdist.upstream.keras_model import flatten_layers
from tfdist.upstream.random_states import RandomStates, draw_other_operation_seeds


@contextmanager
def python_state_kept(model: keras.Model) -> Iterator[None]:
    """Restores global random states, and numbers among the attributes of layers, after the block.

    Lists, files, and whatever else the code changes stay changed. If the block creates weights,
    the state of Python's `random` stays as it is, because Keras draws the seeds of initializers
    from it, once.

    Args:
        model: The model whose code runs.
    """
    states, numbers, num_weights = RandomStates.current(), _numbers(model), len(model.variables)
    draw_other_operation_seeds()
    try:
        yield
    finally:
        states.restore(python=len(model.variables) == num_weights)
        for layer, name, value in numbers:
            if type(vars(layer).get(name)) is type(value):
                vars(layer)[name] = value


def _numbers(model: keras.Model) -> list[tuple[keras.layers.Layer, str, Any]]:
    """Returns the attributes of the user's layers that are numbers."""
    return [
        (layer, name, value)
        for layer in flatten_layers(model)
        if not type(layer).__module__.startswith("keras.")
        for name, value in vars(layer).items()
        if type(value) in (int, float) and not name.startswith("_")
    ]
