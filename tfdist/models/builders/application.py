"""Networks of `keras.applications` as classifiers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras

from tfdist.errors import ConfigurationError, first_line
from tfdist.models.builders import head
from tfdist.models.builders.pixels import pixels
from tfdist.precision import policy

#: Initial weights: random (None or "none"), trained on ImageNet ("imagenet", downloaded once), or
#: the path of a weights file.
Weights = str | None


def classifier(
    name: str,
    make: Callable[..., keras.Model],
    input_shape: Sequence[int],
    num_classes: int,
    *,
    scale: float | None,
    weights: Weights,
    dtype_policy: str | None,
    features: str | None = None,
) -> keras.Model:
    """Builds a network of `keras.applications` with a new output layer.

    Args:
        name: Name of the model.
        make: A function of `keras.applications`.
        input_shape: Shape of one image: height, width, channels.
        num_classes: Number of logits.
        scale: Factor for the pixels, applied on the device.
        weights: Initial weights of the network. The last layer always starts from random weights.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.
        features: Name of the layer whose output the last layer reads; None: the average over the
            image of the network's output without its top.

    Returns:
        An uncompiled model from `(batch, *input_shape)` to logits `(batch, num_classes)`.

    Raises:
        ConfigurationError: The weights cannot be downloaded or read.
    """
    with policy(dtype_policy), loaded(name, weights) as start:  # Keras's functions take no dtype
        top: dict[str, Any] = {"include_top": False, "pooling": "avg"}
        if features:  # layers after `features` are left out
            top = {"include_top": True, "classes": 1000 if start else 1}
        inputs, x = pixels(input_shape, scale, dtype_policy)
        network = make(input_tensor=x, weights=start, **top)
        x = network.get_layer(features).output if features else network.output
        return keras.Model(inputs, head.logits(x, num_classes, dtype_policy), name=name)


@contextmanager
def loaded(name: str, weights: Weights) -> Iterator[Weights]:
    """Returns the `weights` argument for a function of `keras.applications`.

    Raises:
        ConfigurationError: The block failed to download or read the weights.
    """
    if weights in (None, "none"):
        yield None
        return
    if weights != "imagenet" and not Path(weights).is_file():
        raise ConfigurationError(
            f"weights={weights}: the file does not exist. Pass the path of a weights file, "
            "imagenet, or none for random weights (--set weights=none)."
        )
    try:
        yield weights
    except Exception as error:
        raise ConfigurationError(_problem(name, weights, error)) from error


def _problem(name: str, weights: str, error: Exception) -> str:
    """Returns a message that explains why weights could not be loaded, and what to do."""
    reason = first_line(error)
    failed_download = re.match(r"URL fetch failure on (\S+):", reason)
    if failed_download is None:
        return f"weights={weights}: cannot be loaded into {name}: {reason}"
    url = failed_download[1]
    home = os.environ.get("KERAS_HOME", "~/.keras")
    return (
        f"weights={weights}: {url} cannot be downloaded. Copy this file to {home}/models/ by other "
        "means, or start from random weights (--set weights=none)."
    )
