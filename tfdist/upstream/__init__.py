"""All uses of private names of Keras and TensorFlow; README.md lists them.

Importing this package checks that Keras computes with TensorFlow.
"""

from __future__ import annotations

from tfdist.errors import ConfigurationError, MissingError

_CURE = "Set KERAS_BACKEND=tensorflow before Python starts, or the backend in ~/.keras/keras.json."


def check_backend() -> None:
    """Imports Keras and TensorFlow, and checks that Keras's backend is TensorFlow.

    Raises:
        ConfigurationError: Keras uses another backend.
        MissingError: TensorFlow, Keras or its backend is not installed.
    """
    try:
        import tensorflow  # noqa: F401, I001 # named before a missing backend of Keras
        import keras
    except (ModuleNotFoundError, ValueError) as error:  # ValueError: Keras knows no such backend
        missing = getattr(error, "name", None)
        is_installed = missing in (None, "torch", "jax", "openvino")
        cure = _CURE if is_installed else f"Run pip install {missing}."
        raise MissingError(f"tfdist needs TensorFlow and Keras 3: {error}. {cure}") from error
    if keras.config.backend() != "tensorflow":
        raise ConfigurationError(
            f"Keras computes with {keras.config.backend()!r}, and tfdist distributes TensorFlow. "
            + _CURE
        )


check_backend()
