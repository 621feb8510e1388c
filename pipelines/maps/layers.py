"""Keras augmentation layers with an explicit seed per example, for reproducible epochs.

A Keras layer draws from its own generator, whose state advances with each call. In a parallel map,
the random numbers of an example would therefore depend on timing. These functions pass a seed to
each call instead. `RandAugment`, `RandomFlip`, `RandomColorJitter`, `MixUp`, `CutMix` and all other
random layers of `keras.layers` are supported. A `keras.Sequential` of them is not: call one after
the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf


def seeded(layer: keras.layers.Layer) -> Callable[[Any, tf.Tensor], Any]:
    """Converts a random layer to a function of an input and a seed.

    Example:
        >>> from pipelines.maps import layers
        >>> augment = layers.seeded(keras.layers.RandomFlip())
        >>> augment(tf.zeros((32, 32, 3), tf.uint8), tf.constant([1, 2])).dtype
        tf.uint8

    Args:
        layer: A Keras augmentation layer. Its input is a dictionary if several tensors change
            together: `images` with `segmentation_masks` (class numbers are not blended),
            `bounding_boxes` or, for `MixUp` and `CutMix`, which take a batch, one-hot `labels`.

    Returns:
        A function of an input (one example or a batch) and a seed, int32 `(2,)`. It returns the
        layer's output in the dtypes of the input; uint8 images are rounded and clipped to 0..255.

    Raises:
        ValueError: The layer is `AugMix`, which draws its operations when it is traced.
    """
    if isinstance(layer, getattr(keras.layers, "AugMix", ())):
        raise ValueError(
            "layer: AugMix cannot be seeded per example, because it draws its operations when it "
            "is traced; use RandAugment"
        )

    def apply(inputs: Any, seed: tf.Tensor) -> Any:
        before = tf.nest.map_structure(tf.convert_to_tensor, inputs)
        with _drawing_from(layer, seed):
            # A copy, because layers modify the dictionary that they are given.
            after = layer(dict(before) if isinstance(before, dict) else before, training=True)
        return tf.nest.map_structure(_as_before, after, before)

    return apply


def mixed(layer: keras.layers.Layer) -> Callable[[tuple[Any, Any], tf.Tensor], tuple[Any, Any]]:
    """Converts `MixUp`, `CutMix` or another random layer to a `mix_fn` of `pipelines.read`.

    Whole global batches are mixed before they are split over replicas, so that the result does not
    depend on the number of replicas. Sources: Zhang et al. 2018, "mixup: Beyond Empirical Risk
    Minimization"; Yun et al. 2019, "CutMix".

    Example:
        >>> from pipelines.maps import layers
        >>> mix = layers.mixed(keras.layers.MixUp(0.2))
        >>> batch = tf.zeros((8, 32, 32, 3)), tf.one_hot([0, 1] * 4, 2)
        >>> mixed_images, labels = mix(batch, tf.constant([1, 2]))
        >>> labels.shape
        TensorShape([8, 2])

    Args:
        layer: A Keras layer for images and their labels.

    Returns:
        A function that takes a pair of images `(n, height, width, channels)` and one-hot floating
        labels `(n, classes)` and a seed, int32 `(2,)`, and returns such a pair.
    """
    apply = seeded(layer)

    def mix(batch: tuple[Any, Any], seed: tf.Tensor) -> tuple[Any, Any]:
        after = apply({"images": batch[0], "labels": batch[1]}, seed)
        return after["images"], after["labels"]

    return mix


def _as_before(after: Any, before: tf.Tensor) -> tf.Tensor:
    if before.dtype.is_integer and after.dtype.is_floating:
        after = tf.round(after)
    return tf.saturate_cast(after, before.dtype)


class _Seeds(keras.random.SeedGenerator):
    """Draws from a seed tensor: the i-th draw during tracing folds the seed with i."""

    def __init__(self, seed: tf.Tensor) -> None:
        self._seed, self._drawn = seed, 0

    def next(self, ordered: bool = True) -> tf.Tensor:
        """Returns the next seed, as Keras passes it to stateless operations."""
        self._drawn += 1
        return tf.random.experimental.stateless_fold_in(self._seed, self._drawn)


@contextmanager
def _drawing_from(layer: keras.layers.Layer, seed: tf.Tensor) -> Iterator[None]:
    seeds = _Seeds(seed)
    random = [inner for inner in _with_inner(layer, {}) if hasattr(inner, "generator")]
    before = [vars(inner)["generator"] for inner in random]
    for inner in random:
        vars(inner)["generator"] = seeds  # bypasses Keras's attribute tracking
    try:
        yield
    finally:
        for inner, generator in zip(random, before, strict=True):
            vars(inner)["generator"] = generator


def _with_inner(
    layer: keras.layers.Layer, layers: dict[int, keras.layers.Layer]
) -> Iterable[keras.layers.Layer]:
    """Returns a layer and its inner layers at any depth, which Keras does not list publicly."""
    layers[id(layer)] = layer
    for value in keras.tree.flatten(list(vars(layer).values())):
        if isinstance(value, keras.layers.Layer) and id(value) not in layers:
            _with_inner(value, layers)
    return layers.values()
