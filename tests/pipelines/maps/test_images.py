"""The same seed gives the same crop, and crops equal the region of the whole image."""

from __future__ import annotations

import io

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from pipelines.maps import images

quick = settings(deadline=None, max_examples=20)


def gradient(height: int, width: int) -> np.ndarray:
    """An image with the row in the red channel and the column in the green channel."""
    rows, columns = np.mgrid[0:height, 0:width]
    channels = (rows * 255 / max(height - 1, 1), columns * 255 / max(width - 1, 1), 0 * rows)
    return np.stack(channels, -1).astype(np.uint8)


def encoded(pixels: np.ndarray, kind: str) -> tf.Tensor:
    return tf.io.encode_png(pixels) if kind == "png" else tf.io.encode_jpeg(pixels, quality=100)


@quick
@given(
    height=st.integers(1, 80),
    width=st.integers(1, 80),
    kind=st.sampled_from(["jpeg", "png"]),
    seed=st.integers(-(2**31), 2**31 - 1),
)
def test_random_regions_have_the_size_and_repeat(
    height: int, width: int, kind: str, seed: int
) -> None:
    image, seeds = encoded(gradient(height, width), kind), tf.constant([seed, 1])
    first, again = (images.random_crop(image, seeds, (9, 7)) for _ in range(2))
    assert first.shape == (9, 7, 3)
    assert first.dtype == tf.uint8
    np.testing.assert_array_equal(first, again)


def test_seeds_draw_different_regions() -> None:
    image = encoded(gradient(60, 90), "png")
    regions = [images.random_crop(image, tf.constant([1, i]), (8, 8)).numpy() for i in range(30)]
    assert len({region.tobytes() for region in regions}) == 30
    areas = [(np.ptp(r[..., 0] / 255) + 0.1) * (np.ptp(r[..., 1] / 255) + 0.1) for r in regions]
    assert min(areas) < 0.4 < 0.6 < max(areas)


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_central_square_and_whole_image(kind: str) -> None:
    image = encoded(gradient(64, 128), kind)
    middle = images.center_crop(image, (32, 32), fraction=0.5).numpy().astype(int)
    assert middle[16, 16, 0] == pytest.approx(128, abs=6)
    assert np.ptp(middle[..., 0]) == pytest.approx(127, abs=8)  # half of the height
    assert np.ptp(middle[..., 1]) == pytest.approx(64, abs=8)  # a quarter of the width: a square
    whole = images.resize(image, (16, 16)).numpy().astype(int)
    assert np.ptp(whole[..., 0]) > 230
    assert np.ptp(whole[..., 1]) > 230


@pytest.mark.parametrize("sides", [(31, 47), (32, 32), (65, 90), (150, 139), (257, 300)])
def test_large_jpeg_decoded_at_reduced_size_is_nearly_equal(sides: tuple[int, int]) -> None:
    image = encoded(gradient(*sides), "jpeg")
    whole, reduced = (images.resize(image, (16, 16), reduce=r).numpy() for r in (False, True))
    assert abs(whole.astype(int) - reduced).max() <= 12
    assert (whole == reduced).all() == (min(sides) < 32)
    crops = [
        images.random_crop(image, tf.constant([3, 1]), (8, 8), reduce=r).numpy().astype(int)
        for r in (False, True)
    ]
    assert abs(crops[0] - crops[1]).max() <= 12


@pytest.mark.parametrize("kind", ["jpeg", "png"])
def test_same_result_inside_and_outside_a_dataset(kind: str) -> None:
    image, seed = encoded(gradient(40, 50), kind), tf.constant([1, 2])
    maps = (
        lambda e: images.resize(e, (8, 8)),
        lambda e: images.center_crop(e, (8, 8)),
        lambda e: images.random_crop(e, seed, (8, 8)),
    )
    for function in maps:
        (inside,) = tf.data.Dataset.from_tensors(image).map(function)
        np.testing.assert_array_equal(inside, function(image))


def test_flip_mirrors_half_of_the_images_with_their_masks() -> None:
    image = tf.constant(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
    turned = 0
    for i in range(40):
        flipped = images.flip(image, tf.constant([i, 0])).numpy()
        turned += (flipped == image.numpy()[:, ::-1]).all()
        assert (flipped == image.numpy()).all() or (flipped == image.numpy()[:, ::-1]).all()
    assert 8 < turned < 32


@pytest.mark.parametrize("kind", ["jpeg", "png"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_orientation_of_exif_is_applied(kind: str, order: str) -> None:
    image = Image.fromarray(gradient(40, 64))
    for orientation in range(1, 9):
        exif = image.getexif()
        exif.endian = order
        exif[0x010F], exif[0x0112] = "maker", orientation
        buffer = io.BytesIO()
        image.save(buffer, kind, exif=exif, quality=95)
        upright = ImageOps.exif_transpose(Image.open(buffer))
        whole = images.resize(tf.constant(buffer.getvalue()), upright.size[::-1]).numpy()
        assert np.abs(whole.astype(int) - np.asarray(upright)).mean() < 3
        half = images.center_crop(tf.constant(buffer.getvalue()), (20, 20), fraction=0.5)
        width, height = upright.size
        box = (width // 2 - 10, height // 2 - 10, width // 2 + 10, height // 2 + 10)
        assert np.abs(half.numpy().astype(int) - np.asarray(upright.crop(box))).mean() < 3
