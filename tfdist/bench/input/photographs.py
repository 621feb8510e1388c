"""JPEGs of realistic detail, made from the two photographs that scikit-learn ships."""

from __future__ import annotations

import io
import multiprocessing
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

import pipelines

NUM_CLASSES = 10
NUM_SHARDS = 8
SEED = 0
_SIDES = ((375, 500), (500, 375))  # most photographs of ImageNet have these
_LEAST_BYTES, _MOST_BYTES = 30_000, 100_000
FEATURES = (
    pipelines.Feature(name="image", dtype="uint8", shape=(None, None, 3), encoding="jpeg"),
    pipelines.Feature(name="label", dtype="int64", encoding="list"),
)


class Photographs(NamedTuple):
    """The same images three times.

    Attributes:
        files: a folder with a folder for each class.
        shards: a folder of shards with an index.
        num_images: in each.
    """

    files: Path
    shards: Path
    num_images: int


def make(directory: Path, num_images: int) -> Photographs:
    """Makes the images, unless the folder holds them already."""
    folder = directory / f"photographs-{num_images}"
    made = Photographs(folder / "files", folder / "shards", num_images)
    if not made.shards.exists():
        shutil.rmtree(made.files, ignore_errors=True)  # of a run that was interrupted
        for label in range(NUM_CLASSES):
            (made.files / f"{label:02d}").mkdir(parents=True)
        pipelines.write_shards(
            _written(made.files, num_images),
            made.shards,
            FEATURES,
            num_shards=NUM_SHARDS,
            source=f"photographs of scikit-learn, varied, seed {SEED}",
        )
    return made


def encoded(photographs: Photographs) -> list[bytes]:
    """The files' contents."""
    return [path.read_bytes() for path in sorted(photographs.files.glob("*/*.jpg"))]


def _written(files: Path, num_images: int) -> Iterator[dict[str, object]]:
    """Writes the image folder on the way, and yields each image with its label."""
    # Forking would copy TensorFlow's locks in whatever state they are.
    with multiprocessing.get_context("spawn").Pool() as pool:
        for number, data in enumerate(pool.imap(_jpeg, range(num_images), chunksize=16)):
            label = number % NUM_CLASSES
            (files / f"{label:02d}" / f"{number:05d}.jpg").write_bytes(data)
            yield {"image": data, "label": label}


def _jpeg(number: int) -> bytes:
    """One image: a crop of a photograph, mirrored or not, brighter or darker."""
    from PIL import Image, ImageEnhance
    from sklearn.datasets import load_sample_images

    random = np.random.default_rng((SEED, number))
    photographs = load_sample_images().images
    photograph = Image.fromarray(photographs[random.integers(len(photographs))])
    height, width = _SIDES[random.integers(len(_SIDES))]
    scale = random.uniform(0.6, 1) * min(photograph.width / width, photograph.height / height)
    part_width, part_height = int(width * scale), int(height * scale)
    left = int(random.integers(photograph.width - part_width + 1))
    top = int(random.integers(photograph.height - part_height + 1))
    image = photograph.resize(
        (width, height),
        Image.Resampling.BICUBIC,
        (left, top, left + part_width, top + part_height),
    )
    if random.integers(2):
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    image = ImageEnhance.Brightness(image).enhance(random.uniform(0.8, 1.2))
    quality = int(random.integers(80, 96))
    while True:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        size = file.tell()
        if size > _MOST_BYTES or (size < _LEAST_BYTES and quality < 100):
            quality += -3 if size > _MOST_BYTES else 3
            continue
        return file.getvalue()
