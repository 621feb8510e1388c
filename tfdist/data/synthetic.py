"""Data that need no files: noise, to measure training alone, and small images of a few classes."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from PIL import Image

import pipelines
from tfdist.data.data_set import Small

#: Number of global batches that are kept in memory and repeated, if they are not larger than this.
_NUM_BATCHES, _MAX_BYTES = 4, 2**28
_NUM_EXAMPLES = {"train": 2048, "validation": 512}
_BLUR = 4  # pixels of an image per pixel of the pattern


class Noise(NamedTuple):
    """A tensor of noise.

    Attributes:
        shape: Shape in one example.
        dtype: Integers are uniform from 0 to `high - 1`, floats are normally distributed.
        high: Upper bound of integers, exclusive.
    """

    shape: tuple[int, ...]
    dtype: str
    high: int = 2

    def drawn(self, seed: int, num_rows: int) -> np.ndarray:
        """Returns noise of shape `(num_rows, *shape)` that depends on the seed only."""
        return self.draw(np.random.default_rng(seed), num_rows)

    def draw(self, random: np.random.Generator, num_rows: int) -> np.ndarray:
        """Returns noise of shape `(num_rows, *shape)`."""
        shape = (num_rows, *self.shape)
        if np.issubdtype(self.dtype, np.integer):
            return random.integers(0, self.high, shape, self.dtype)
        return random.standard_normal(shape, np.float32).astype(self.dtype)


def batches(element: Any, batch_size: int, num_examples: int, seed: int) -> tf.data.Dataset:
    """Returns an epoch of full global batches, which repeats a few batches of noise.

    Args:
        element: Structure of one example: `Noise`, or a tuple or dictionary of them.
        batch_size: Global batch size.
        num_examples: Examples per epoch. A partial last batch is dropped.
        seed: Seed of the noise.
    """
    random = np.random.default_rng(seed)
    num_batches = max(1, min(_NUM_BATCHES, _MAX_BYTES // (batch_size * _row_bytes(element))))
    # `from_tensors` passes on the batch that it holds; slices and a cache would be further copies.
    few = [
        tf.data.Dataset.from_tensors(_drawn(element, random, batch_size))
        for _ in range(num_batches)
    ]
    repeated = functools.reduce(lambda a, b: a.concatenate(b), few).repeat()
    return repeated.take(max(num_examples // batch_size, 1)).prefetch(tf.data.AUTOTUNE)


def _row_bytes(element: Any) -> int:
    if isinstance(element, Noise):
        return math.prod(element.shape) * np.dtype(element.dtype).itemsize
    parts = element.values() if isinstance(element, dict) else element
    return sum(map(_row_bytes, parts))


def _drawn(element: Any, random: np.random.Generator, num_rows: int) -> Any:
    if isinstance(element, Noise):
        return element.draw(random, num_rows)
    if isinstance(element, dict):
        return {name: _drawn(part, random, num_rows) for name, part in element.items()}
    return tuple(_drawn(part, random, num_rows) for part in element)


def drawn_images(size: int, num_classes: int, names: tuple[str, ...] = ()) -> Small:
    """Returns a data set of PNG images `image` with a class `label` each.

    A class is a pattern of coarse squares in shades of one color. An image is that pattern, shifted
    by some pixels, with another brightness and noise.

    Args:
        size: Pixels per side.
        num_classes: Number of classes.
        names: Names of the classes; none by default.
    """
    features = (
        pipelines.Feature(name="image", dtype="uint8", shape=(size, size, 3), encoding="png"),
        pipelines.Feature(name="label", dtype="int64", encoding="list", label_names=names),
    )

    def examples(split: str) -> Iterator[dict[str, object]]:
        coarse = -(-size // _BLUR)
        draw = np.random.default_rng(0).integers
        colours = draw(0, 256, (num_classes, 1, 1, 3))  # visible in small regions, too
        pictures = (colours + draw(0, 256, (num_classes, coarse, coarse, 3))) // 2
        random = np.random.default_rng(["train", "validation"].index(split) + 1)
        for number in range(_NUM_EXAMPLES[split]):
            label = number % num_classes
            fine = pictures[label].repeat(_BLUR, 0).repeat(_BLUR, 1)[:size, :size]
            shifted = np.roll(fine, random.integers(-_BLUR, _BLUR + 1, 2), (0, 1))
            light, noise = random.uniform(0.6, 1.0), random.normal(0, 32, fine.shape)
            yield {
                "image": png(np.clip(shifted * light + noise, 0, 255).astype(np.uint8)),
                "label": label,
            }

    what = f"{_NUM_EXAMPLES['train']} drawn images of {num_classes} classes"
    return Small(what, features, examples)


def png(pixels: np.ndarray) -> bytes:
    """Encodes pixels, uint8 `(height, width, 1 or 3)`, as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(file, "png")
    return file.getvalue()
