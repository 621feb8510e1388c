"""Loading a model whose optimizer exchanged gradients, so that it does again."""

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
    """Returns a model that `model.save` wrote, with its optimizer in a `DistributedOptimizer`.

    Args:
        filepath: Of the file.
        custom_optimizers: Classes that Keras does not know.
        custom_objects: As in `keras.models.load_model`.
        compression: As in `DistributedOptimizer`.
    """
    known = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**known, **(custom_objects or {})})
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
