"""Whether a model is made of nothing but layers that are known to treat each row by itself."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import keras

from tfdist.upstream.keras_model import flatten_layers

#: Whose parts do; preprocessing has some that do not (MelSpectrogram, MixUp, TextVectorization).
_ROW_BY_ROW = ("keras.src.layers.", "keras.src.models.", "keras.src.applications.")
_UNKNOWN = ("keras.src.layers.preprocessing.", "keras.src.layers.core.lambda_layer")


def treat_rows_alone(model: keras.Model) -> bool:
    """Tells whether all layers of a model are Keras's own, used in a way that mixes no rows.

    BatchNormalization is one of them: that its moments are those of a share is documented.
    """
    return all(_is_known(layer) for layer in flatten_layers(model))


def _is_known(layer: keras.layers.Layer) -> bool:
    if not _is_of_keras(type(layer)) or getattr(layer, "stateful", False):
        return False
    # A functional model may hold bare operations.
    nodes = getattr(layer, "operations", [])
    if not all(isinstance(node, keras.layers.Layer) for node in nodes):
        return False
    axes = [getattr(layer, name, None) for name in ("axis", "axes")]
    if any(0 in (axis if isinstance(axis, (list, tuple)) else [axis]) for axis in axes):
        return False
    functions = [value for value in vars(layer).values() if _is_function(value)]
    # Ours are those that a trainer has put in the place of Keras's.
    return all(_is_of_keras(function, "keras.src.", "tfdist.") for function in functions)


def _is_of_keras(source: Any, *where: str) -> bool:
    module = getattr(source, "__module__", None) or ""
    return module.startswith(where or _ROW_BY_ROW) and not module.startswith(_UNKNOWN)


def _is_function(value: Any) -> bool:
    """Whether it is an activation, or the like, that a layer was given."""
    return inspect.isroutine(value) or isinstance(value, functools.partial)
