"""Models that are known to treat each row of a batch by itself, because of their layers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import keras

from tfdist.upstream.keras_layers import attention_axes
from tfdist.upstream.keras_model import flatten_layers

#: Modules whose layers treat each row by itself. Some preprocessing layers do not (MelSpectrogram,
#: MixUp): they are analyzed, except for those whose operations the analysis cannot follow.
_ROW_BY_ROW = ("keras.src.layers.", "keras.src.models.", "keras.src.applications.")
_UNKNOWN = ("keras.src.layers.preprocessing.", "keras.src.layers.core.lambda_layer")
_PREPROCESSING = (
    "CategoryEncoding", "ContrastLimitedAdaptiveHistogramEqualization", "HashedCrossing", "Hashing",
    "IntegerLookup", "StringLookup", "TextVectorization",
)  # fmt: skip
#: Output modes in which they encode each number, in contrast to all numbers of a row together.
_BY_NUMBER = ("int", "one_hot")


def has_only_row_by_row_layers(model: keras.Model) -> bool:
    """Returns whether all layers of a model are Keras's own, used in a way that mixes no rows.

    BatchNormalization is one of them, because it is documented to use each replica's moments.
    """
    # An axis counted from the end may be that of the rows if there are few axes.
    has_axes = all(len(tensor.shape) > 1 for tensor in getattr(model, "inputs", None) or ())
    return has_axes and all(is_row_by_row(layer) for layer in flatten_layers(model))


def is_called_row_by_row(layer: keras.layers.Layer, inputs: Sequence[Any]) -> bool:
    """Returns whether a layer and its parts are Keras's own, called so that they mix no rows."""
    if _is_preprocessing(layer, inputs):
        return True
    has_axes = all(tensor.shape.rank is not None and tensor.shape.rank != 1 for tensor in inputs)
    return has_axes and all(is_row_by_row(part) for part in flatten_layers(layer))


def is_row_by_row(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer is Keras's own, used in a way that mixes no rows."""
    if _is_preprocessing(layer):
        return True
    if not _is_of_keras(type(layer)) or getattr(layer, "stateful", False):
        return False
    # A functional model may hold bare operations.
    nodes = getattr(layer, "operations", [])
    if not all(isinstance(node, keras.layers.Layer) for node in nodes):
        return False
    axes = [getattr(layer, name, None) for name in ("axis", "axes")]
    flat = [*keras.tree.flatten(axes), *attention_axes(layer)]
    # Other axes than the last that are counted from the end may be that of the rows.
    if any(axis is not None and (axis == 0 or axis < -1) for axis in flat):
        return False
    values = vars(layer).values()  # among them activations and other functions
    functions: list[Any] = [
        v for v in values if inspect.isroutine(v) or isinstance(v, functools.partial)
    ]
    regularizer = getattr(layer, "activity_regularizer", None)
    if regularizer is not None and not inspect.isroutine(regularizer):
        functions.append(type(regularizer))
    return all(
        _is_patch(function) or _is_of_keras(function, "keras.src.") for function in functions
    )


def _is_preprocessing(layer: keras.layers.Layer, inputs: Sequence[Any] = ()) -> bool:
    cls = type(layer)
    if cls.__name__ not in _PREPROCESSING or not cls.__module__.startswith(_UNKNOWN):
        return False
    config = layer.get_config()
    mode = config.get("output_mode", "int")
    if isinstance(layer, keras.layers.TextVectorization):
        # Without a fixed length, the longest text of the batch decides the width.
        return mode != "int" or config["output_sequence_length"] is not None
    # A batch of single numbers is one sample to the other modes.
    has_numbers = bool(inputs) and all((tensor.shape.rank or 0) > 1 for tensor in inputs)
    return mode in _BY_NUMBER or has_numbers


def _is_of_keras(source: Any, *modules: str) -> bool:
    module = getattr(source, "__module__", None) or ""
    return module.startswith(modules or _ROW_BY_ROW) and not module.startswith(_UNKNOWN)


def _is_patch(function: Any) -> bool:
    """Returns whether tfdist put a function in the place of a method of Keras.

    All ranks have to decide alike, and only ranks other than 0 have patches, which are partial.
    """
    plain = function.func if isinstance(function, functools.partial) else function
    return (getattr(plain, "__module__", None) or "").startswith("tfdist.")
