"""What is begun: models from the smallest to deep ones, and one batch each. No TensorFlow yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import keras

#: Rows of the one batch, over all replicas.
BATCH_SIZE = 16
_CLASSES = 10
_LENGTH = 32


def _mlp() -> tuple[keras.Model, Any, Any]:
    from tfdist import models

    return models.mlp((64,), _CLASSES), *_rows((64,))


def _resnet50() -> tuple[keras.Model, Any, Any]:
    from tfdist import models

    return models.resnet50((32, 32, 3), _CLASSES), *_rows((32, 32, 3))


def _transformer() -> tuple[keras.Model, Any, Any]:
    """Twelve blocks, as the smallest GPT-2 has, of a width that computes in a moment."""
    from tfdist.models.builders import gpt

    gpt.SIZES["benchmark"] = (12, 64, 4)
    tokens = np.random.default_rng(0).integers(0, 256, (BATCH_SIZE, _LENGTH + 1))
    model = gpt.gpt(256, _LENGTH, size="benchmark")  # type: ignore[arg-type]
    return model, tokens[:, :-1], tokens[:, 1:]


def _rows(shape: tuple[int, ...]) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.random((BATCH_SIZE, *shape), np.float32), rng.integers(0, _CLASSES, BATCH_SIZE)


#: Functions that return an uncompiled model, inputs and labels.
MODELS: dict[str, Callable[[], tuple[keras.Model, Any, Any]]] = {
    "mlp": _mlp,
    "resnet50": _resnet50,
    "transformer": _transformer,
}
