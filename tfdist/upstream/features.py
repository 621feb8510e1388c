"""What the installed versions of Keras and TensorFlow have, by feature and not by number."""

from __future__ import annotations

import functools
import inspect
import platform
import warnings
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.version import untested

#: `keras.remat` and `keras.RematScope`, since Keras 3.9.
HAS_REMAT = hasattr(keras, "RematScope")

#: Whether `train_on_batch` and `test_on_batch` return the metrics of their batch alone. In older
#: versions of Keras, these are the means since the last reset.
RESETS_METRICS = "reset_metrics" in inspect.unwrap(keras.Model.train_on_batch).__code__.co_names


def existing(namespace: Any, *names: str) -> tuple[Any, ...]:
    """Returns those attributes of a module that the installed version has.

    Example:
        >>> from tfdist.upstream.features import existing
        >>> [layer.__name__ for layer in existing(keras.layers, "Dense", "LayerOfTheFuture")]
        ['Dense']
    """
    return tuple(getattr(namespace, name) for name in names if hasattr(namespace, name))


@functools.cache
def tested() -> str:
    """Returns whether tfdist was tested with the installed versions; warns once if not."""
    versions = {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
    }
    outside = untested(versions)
    if not outside:
        return "tested"
    parts = (f"{name} {versions[name]} (tested: {tests})" for name, tests in outside.items())
    text = f"not tested: {', '.join(parts)}"
    warnings.warn(f"These versions are {text}. Compare with `tfdist verify`.", stacklevel=3)
    return text
