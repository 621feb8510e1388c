"""The photographs as a source of examples in Python, decoded by Pillow: for PyTorch and grain.

Worker processes import this module, so it imports no TensorFlow.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from PIL import Image


class Source:
    """Images by number: cropped and flipped at random.

    Args:
        files: A folder with a folder of JPEGs for each class.
        size: Height and width of the results.
    """

    def __init__(self, files: Path, size: tuple[int, int]) -> None:
        self._paths = sorted(files.glob("*/*.jpg"))
        self._size = size

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> tuple[np.ndarray, int]:
        path, random = self._paths[number], np.random.default_rng()
        with Image.open(path) as file:
            area = file.width * file.height * random.uniform(0.08, 1)
            aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            width = min(file.width, int(math.sqrt(area * aspect)))
            height = min(file.height, int(math.sqrt(area / aspect)))
            left = int(random.integers(file.width - width + 1))
            top = int(random.integers(file.height - height + 1))
            # Draft mode decodes at 1/2, 1/4 or 1/8, where the crop has enough pixels.
            most = max(self._size[0] / height, self._size[1] / width)
            before = file.width
            file.draft("RGB", (math.ceil(file.width * most), math.ceil(file.height * most)))
            image, scale = file.convert("RGB"), file.width / before
        box = (left * scale, top * scale, (left + width) * scale, (top + height) * scale)
        crop = image.resize(self._size[::-1], Image.Resampling.BILINEAR, box)
        if random.integers(2):
            crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return np.array(crop), int(path.parent.name)
