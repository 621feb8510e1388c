"""Loads a saved model with a distributed optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from tfdist.horovod.optimizer import DistributedOptimizer
from tfdist.horovod.ranks import Compression


def load_model(
    filepath: str | Path,
    custom_optimizers: Sequence[type[keras.optimizers.Optimizer]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
) -> keras.Model:
    """Loads a model that `model.save` wrote, and makes its optimizer a `DistributedOptimizer`.

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> build_model().save("model.keras")
        >>> model = hvd.load_model("model.keras")

    Args:
        filepath: Path of the file.
        custom_optimizers: Optimizer classes that are not part of Keras.
        custom_objects: As in `keras.models.load_model`.
        compression: As in `DistributedOptimizer`.

    Returns:
        The model, with its optimizer as in the file.
    """
    optimizers = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    objects = {**optimizers, **(custom_objects or {})}
    model = keras.models.load_model(filepath, custom_objects=objects)
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
