"""JPEGs with realistic detail, generated from the two photographs in scikit-learn."""

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
#: Shorter side and JPEG quality of the packed images: usual values for training on crops of 224.
PACKED_SIZE, PACKED_QUALITY = 256, 90
_SIDES = ((375, 500), (500, 375))  # height and width of most photographs of ImageNet
_MIN_BYTES, _MAX_BYTES = 30_000, 100_000
_ENLARGED = 4  # scale of large photographs, which are like those of a phone
FEATURES = (
    pipelines.Feature(name="image", dtype="uint8", shape=(None, None, 3), encoding="jpeg"),
    pipelines.Feature(name="label", dtype="int64", encoding="list"),
)


class Photographs(NamedTuple):
    """The same images in three forms.

    Attributes:
        files: A folder with a folder of JPEGs for each class.
        shards: A folder of TFRecord shards with the bytes of these files.
        packed: A folder of shards with images whose shorter side is `PACKED_SIZE`.
        num_images: Number of images.
    """

    files: Path
    shards: Path
    packed: Path
    num_images: int


def create(directory: Path, num_images: int, large: bool = False) -> Photographs:
    """Creates the images, unless the folder contains them already.

    Args:
        directory: Parent folder.
        num_images: Number of images.
        large: Whether they have 2000x1500 pixels instead of 500x375.
    """
    folder = directory / f"{'large-' * large}photographs-{num_images}"
    images = Photographs(folder / "files", folder / "shards", folder / "packed", num_images)
    if not images.shards.exists():
        shutil.rmtree(images.files, ignore_errors=True)  # files of an interrupted run
        for label in range(NUM_CLASSES):
            (images.files / f"{label:02d}").mkdir(parents=True)
        pipelines.write_shards(
            _written(images.files, num_images, large),
            images.shards,
            FEATURES,
            num_shards=NUM_SHARDS,
            source=f"photographs of scikit-learn, varied, seed {SEED}",
        )
    size, quality = str(PACKED_SIZE), PACKED_QUALITY
    pipelines.pack_dataset(
        str(images.files), images.packed, num_shards=NUM_SHARDS, image_size=size, quality=quality
    )
    return images


def encoded(photographs: Photographs) -> list[bytes]:
    """Returns the contents of the files."""
    return [path.read_bytes() for path in sorted(photographs.files.glob("*/*.jpg"))]


def _written(files: Path, num_images: int, large: bool) -> Iterator[dict[str, object]]:
    # A fork would copy TensorFlow's locks in an arbitrary state.
    with multiprocessing.get_context("spawn").Pool() as pool:
        jpeg = functools.partial(_jpeg, enlarged=_ENLARGED if large else 1)
        for number, data in enumerate(pool.imap(jpeg, range(num_images), chunksize=16)):
            label = number % NUM_CLASSES
            (files / f"{label:02d}" / f"{number:05d}.jpg").write_bytes(data)
            yield {"image": data, "label": label}


def _jpeg(number: int, enlarged: int) -> bytes:
    """Returns one image: a crop of a photograph with random flip, brightness and quality."""
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
        if size > _MAX_BYTES or (size < _MIN_BYTES and quality < 100):
            quality += -3 if size > _MAX_BYTES else 3
            continue
        return file.getvalue()
