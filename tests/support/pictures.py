"""Small image files, each of one color that identifies it."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image


def pixels(number: int, height: int = 20, width: int = 24) -> np.ndarray:
    """Returns an image whose color encodes `number`, uint8 `(height, width, 3)`."""
    return np.full((height, width, 3), (number, 255 - number, 128), np.uint8)


def encoded(number: int, kind: str = "png", height: int = 20, width: int = 24) -> bytes:
    """Returns the image as encoded bytes of a file."""
    out = io.BytesIO()
    Image.fromarray(pixels(number, height, width)).save(out, kind)
    return out.getvalue()


def write_classes(folder: Path, num_images: int, kind: str = "png") -> Path:
    """Writes images 0, 1, ... alternately to the class folders `cat` and `dog`."""
    for number in range(num_images):
        path = folder / ("cat", "dog")[number % 2] / f"{number:03d}.{kind}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encoded(number, kind, width=24 + number % 3))
    return folder
