"""JPEGs of realistic detail, made from the two photographs that scikit-learn ships."""

from __future__ import annotations

import functools
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
#: Shorter side of the packed form, and its quality: what is usual where crops of 224 are trained.
PACKED_SIZE, PACKED_QUALITY = 256, 90
_SIDES = ((375, 500), (500, 375))  # most photographs of ImageNet have these
_LEAST_BYTES, _MOST_BYTES = 30_000, 100_000
_ENLARGED = 4  # a side of a large one: a phone's photograph, reduced once
FEATURES = (
    pipelines.Feature(name="image", dtype="uint8", shape=(None, None, 3), encoding="jpeg"),
    pipelines.Feature(name="label", dtype="int64", encoding="list"),
)


class Photographs(NamedTuple):
    """The same images four times.

    Attributes:
        files: a folder with a folder for each class.
        shards: a folder of shards with an index, of the files' bytes.
        packed: the same, of images packed with a shorter side of `PACKED_SIZE`.
        num_images: in each.
    """

    files: Path
    shards: Path
    packed: Path
    num_images: int


def make(directory: Path, num_images: int, large: bool = False) -> Photographs:
    """Makes the images, unless the folder holds them already.

    Args:
        directory: For a folder of them.
        num_images: How many.
        large: 2000x1500 pixels each, not 500x375.
    """
    folder = directory / f"{'large-' * large}photographs-{num_images}"
    made = Photographs(folder / "files", folder / "shards", folder / "packed", num_images)
    if not made.shards.exists():
        shutil.rmtree(made.files, ignore_errors=True)  # of a run that was interrupted
        for label in range(NUM_CLASSES):
            (made.files / f"{label:02d}").mkdir(parents=True)
        pipelines.write_shards(
            _written(made.files, num_images, large),
            made.shards,
            FEATURES,
            num_shards=NUM_SHARDS,
            source=f"photographs of scikit-learn, varied, seed {SEED}",
        )
    size, quality = str(PACKED_SIZE), PACKED_QUALITY
    pipelines.packed(
        str(made.files), made.packed, num_shards=NUM_SHARDS, image_size=size, quality=quality
    )
    return made


def encoded(photographs: Photographs) -> list[bytes]:
    """The files' contents."""
    return [path.read_bytes() for path in sorted(photographs.files.glob("*/*.jpg"))]


def _written(files: Path, num_images: int, large: bool) -> Iterator[dict[str, object]]:
    """Writes the image folder on the way, and yields each image with its label."""
    # Forking would copy TensorFlow's locks in whatever state they are.
    with multiprocessing.get_context("spawn").Pool() as pool:
        jpeg = functools.partial(_jpeg, enlarged=_ENLARGED if large else 1)
        for number, data in enumerate(pool.imap(jpeg, range(num_images), chunksize=16)):
            label = number % NUM_CLASSES
            (files / f"{label:02d}" / f"{number:05d}.jpg").write_bytes(data)
            yield {"image": data, "label": label}


def _jpeg(number: int, enlarged: int) -> bytes:
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
        (width * enlarged, height * enlarged),
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
        size = file.tell() // enlarged**2
        if size > _MOST_BYTES or (size < _LEAST_BYTES and quality < 100):
            quality += -3 if size > _MOST_BYTES else 3
            continue
        return file.getvalue()
