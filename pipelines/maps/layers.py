"""Keras's augmentation layers with a seed for each example, so that an epoch can be repeated.

A layer draws from a generator of its own, which moves on with each call: in a parallel map the
examples would get their draws in the order of chance. Here each call draws from the seed it is
given. `RandAugment`, `RandomFlip`, `RandomColorJitter`, `MixUp`, `CutMix` and all other layers of
`keras.layers` that are random in this way will do, and a `keras.Sequential` of them not: call one
after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf


def seeded(layer: keras.layers.Layer) -> Callable[[Any, tf.Tensor], Any]:
    """Makes a function of an input and a seed out of a random layer.

    Args:
        layer: of Keras, for images and what belongs to them. Its inputs are a dictionary where
            several things change together: `images` with `segmentation_masks` (each class keeps
            its number: masks are not blended), `bounding_boxes` or, for `MixUp` and `CutMix`, which
            take a batch, `labels` (one-hot).

    Returns:
        A function of an input, one example's or a batch's, and a seed, int32 `(2,)`. It returns
        what the layer would, in the dtypes that came in; images are rounded and cut to 0..255 where
        these are uint8.

    Raises:
        ValueError: `AugMix`, which chooses its operations once, by Python's own generator.
    """
    if isinstance(layer, keras.layers.AugMix):
        raise ValueError(
            "layer: expected one whose draws follow from a seed, got AugMix, which chooses its "
            "operations when it is traced; use RandAugment"
        )

    def apply(inputs: Any, seed: tf.Tensor) -> Any:
        before = tf.nest.map_structure(tf.convert_to_tensor, inputs)
        with _drawing_from(layer, seed):
            # A copy: layers write into the dictionary that they are given.
            after = layer(dict(before) if isinstance(before, dict) else before, training=True)
        return tf.nest.map_structure(_as_before, after, before)

    return apply


def mixed(layer: keras.layers.Layer) -> Callable[[tuple[Any, Any], tf.Tensor], tuple[Any, Any]]:
    """Makes `pipelines.read`'s `mix_fn` out of `MixUp` or `CutMix`, or of another random layer.

    Whole global batches are mixed, before they are divided: so the result is the same for any
    number of replicas. Sources: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization"; Yun
    et al. 2019, "CutMix".

    Args:
        layer: of Keras, for images and their labels.

    Returns:
        A function of a pair and a seed, int32 `(2,)`: images `(n, height, width, channels)` and
        labels `(n, classes)`, one-hot and floating, come in and go out.
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
    """Numbers drawn from a tensor: the i-th draw while tracing folds the seed with i."""

    def __init__(self, seed: tf.Tensor) -> None:
        self._seed, self._drawn = seed, 0

    def next(self, ordered: bool = True) -> tf.Tensor:
        """The next seed, as Keras hands it to stateless operations."""
        self._drawn += 1
        return tf.random.experimental.stateless_fold_in(self._seed, self._drawn)


@contextmanager
def _drawing_from(layer: keras.layers.Layer, seed: tf.Tensor) -> Iterator[None]:
    """Has a layer, and those inside it, draw from a seed for a while."""
    seeds = _Seeds(seed)
    random = [inner for inner in _with_inner(layer, {}) if hasattr(inner, "generator")]
    before = [vars(inner)["generator"] for inner in random]
    for inner in random:
        vars(inner)["generator"] = seeds  # past Keras's tracking, which would keep it
    try:
        yield
    finally:
        for inner, generator in zip(random, before, strict=True):
            vars(inner)["generator"] = generator


def _with_inner(
    layer: keras.layers.Layer, found: dict[int, keras.layers.Layer]
) -> Iterable[keras.layers.Layer]:
    """A layer and those inside it, however deep: Keras lists them nowhere in public."""
    found[id(layer)] = layer
    for value in keras.tree.flatten(list(vars(layer).values())):
        if isinstance(value, keras.layers.Layer) and id(value) not in found:
            _with_inner(value, found)
    return found.values()
