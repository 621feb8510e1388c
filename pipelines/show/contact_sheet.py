"""Many small images in one PNG, each with a caption."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

_CELL, _CAPTION, _MARGIN = 128, 18, 6  # pixels
_BACKGROUND, _INK = "white", "black"


def save_sheet(images: Sequence[np.ndarray], captions: Sequence[str], path: Path) -> None:
    """Saves images as a grid that is about as wide as high.

    Args:
        images: uint8 or uint16 `(height, width)` or `(height, width, channels)`. All are brightened
            by the same factor, so that pixels that use little of their range can be seen.
        captions: one an image.
        path: of the PNG.
    """
    columns = math.ceil(math.sqrt(len(images)))
    rows = math.ceil(len(images) / columns)
    step_x, step_y = _CELL + _MARGIN, _CELL + _CAPTION + _MARGIN
    sheet = Image.new("RGB", (columns * step_x + _MARGIN, rows * step_y + _MARGIN), _BACKGROUND)
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    brightest = max(1, *(int(image.max(initial=0)) for image in images))
    for i, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x, y = _MARGIN + i % columns * step_x, _MARGIN + i // columns * step_y
        sheet.paste(_cell(image / brightest), (x, y))
        while font.getlength(caption) > _CELL:
            caption = caption.removesuffix("…")[:-1] + "…"
        draw.text((x, y + _CELL + 2), caption, _INK, font)
    sheet.save(path, "png")


def _cell(image: np.ndarray) -> Image.Image:
    """The image, of values up to 1, as large as fits into a cell."""
    pixels = np.round(image * 255).astype(np.uint8)
    if pixels.ndim == 3 and pixels.shape[2] == 1:
        pixels = pixels[..., 0]
    # Few pixels are shown as the squares that they are.
    few = max(pixels.shape[:2]) < _CELL / 2
    resampling = Image.Resampling.NEAREST if few else Image.Resampling.BICUBIC
    image_of_any_mode = Image.fromarray(pixels).convert("RGB")
    return ImageOps.pad(image_of_any_mode, (_CELL, _CELL), resampling, color=_BACKGROUND)
