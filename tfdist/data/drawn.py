"""Generates small images of a few classes, which can be learned and need no network."""

from __future__ import annotations

import io
from collections.abc import Iterator

import numpy as np
from PIL import Image

import pipelines
from tfdist.data.data_set import Small

_NUM_EXAMPLES = {"train": 2048, "validation": 512}
_BLUR = 4  # pixels of an image per pixel of the pattern


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
            yield {"image": png(_variation(fine, random)), "label": label}

    what = f"{_NUM_EXAMPLES['train']} drawn images of {num_classes} classes"
    return Small(what, features, examples)


def _variation(picture: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Returns a pattern shifted, with another brightness and noise."""
    shifted = np.roll(picture, random.integers(-_BLUR, _BLUR + 1, 2), (0, 1))
    light, noise = random.uniform(0.6, 1.0), random.normal(0, 32, picture.shape)
    return np.clip(shifted * light + noise, 0, 255).astype(np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """Encodes pixels, uint8 `(height, width, 1 or 3)`, as a PNG file."""
    file = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if pixels.shape[-1] == 1 else pixels).save(file, "png")
    return file.getvalue()
