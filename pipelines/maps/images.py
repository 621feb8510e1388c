"""Decodes, crops and scales image files to uint8 pixels, decoding only the required region.

Read the data with `decode_images=False`, so that these functions get the bytes of the files. Random
functions take a seed, int32 `(2,)`, which `augment_fn` receives; the same seed gives the same
result.

If the region of a JPEG is 2, 4 or 8 times as large as the result, it is decoded at 1/2, 1/4 or 1/8
of its size (like Pillow's `Image.draft`). This is several times as fast, and smoother than a
bilinear resize of all pixels. `reduce=False` decodes all pixels.

Images are turned upright if their EXIF data say so. Regions are those of the upright image.
"""

from __future__ import annotations

import functools
import math

import tensorflow as tf

from pipelines import upright

Size = tuple[int, int]

# Numbers that are folded into an example's seed, so that its draws are independent.
_CROP_STREAM, _FLIP_STREAM = 1, 2

# The reductions that libjpeg supports.
_RATIOS = (1, 2, 4, 8)


def random_crop(
    encoded: tf.Tensor,
    seed: tf.Tensor,
    size: Size,
    *,
    area: tuple[float, float] = (0.08, 1.0),
    aspect: tuple[float, float] = (3 / 4, 4 / 3),
    reduce: bool = True,
) -> tf.Tensor:
    """Decodes a random region of an image and scales it to the given size.

    This is the "inception crop" (Szegedy et al. 2014, "Going deeper with convolutions") with the
    usual values. A region that exceeds the image is clipped to it.

    Example:
        >>> png = tf.io.encode_png(tf.zeros((48, 64, 3), tf.uint8))
        >>> images.random_crop(png, seed=(1, 2), size=(32, 32)).shape
        TensorShape([32, 32, 3])

    Args:
        encoded: JPEG or PNG, string scalar.
        seed: int32 `(2,)`.
        size: Height and width of the result.
        area: Range of the region's area, as fractions of the image's area.
        aspect: Range of the region's width divided by its height.
        reduce: Whether to decode a large JPEG at a fraction of its size.

    Returns:
        Pixels, uint8 `(height, width, 3)`.
    """
    shape, number = _upright_shape(encoded)
    u = tf.random.stateless_uniform(
        (4,), tf.random.experimental.stateless_fold_in(seed, _CROP_STREAM)
    )
    side = tf.sqrt(tf.reduce_prod(shape) * _between(area, u[0]))
    log_aspect = _between((math.log(aspect[0]), math.log(aspect[1])), u[1])
    region = tf.minimum(side * tf.exp(log_aspect * tf.constant([-0.5, 0.5])), shape)
    return _scaled(encoded, number, (shape - region) * u[2:], region, size, reduce)


def center_crop(
    encoded: tf.Tensor, size: Size, *, fraction: float = 0.875, reduce: bool = True
) -> tf.Tensor:
    """Decodes the center of an image and scales it to the given size, for evaluation.

    Example:
        >>> png = tf.io.encode_png(tf.zeros((48, 64, 3), tf.uint8))
        >>> images.center_crop(png, (32, 32)).shape
        TensorShape([32, 32, 3])

    Args:
        encoded: JPEG or PNG, string scalar.
        size: Height and width of the result. The region has the same aspect ratio.
        fraction: Side of the region, as a fraction of the largest one that fits the image.
        reduce: Whether to decode a large JPEG at a fraction of its size.

    Returns:
        Pixels, uint8 `(height, width, 3)`.
    """
    shape, number = _upright_shape(encoded)
    target_size = tf.constant(size, tf.float32)
    region = target_size * tf.reduce_min(shape / target_size) * fraction
    return _scaled(encoded, number, (shape - region) / 2, region, size, reduce)


def resize(encoded: tf.Tensor, size: Size, *, reduce: bool = True) -> tf.Tensor:
    """Scales a whole image to the given size, ignoring its aspect; uint8 `(height, width, 3)`.

    Example:
        >>> png = tf.io.encode_png(tf.zeros((48, 64, 3), tf.uint8))
        >>> images.resize(png, (32, 32)).shape
        TensorShape([32, 32, 3])
    """
    shape, number = _upright_shape(encoded)
    return _scaled(encoded, number, tf.zeros_like(shape), shape, size, reduce)


def flip(images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Flips images horizontally with a probability of one half.

    Example:
        >>> images.flip(tf.zeros((32, 32, 3), tf.uint8), seed=(1, 2)).shape
        TensorShape([32, 32, 3])

    Args:
        images: `(..., height, width, channels)`. A mask can be flipped along as extra channels.
        seed: int32 `(2,)`.
    """
    seed = tf.random.experimental.stateless_fold_in(seed, _FLIP_STREAM)
    turned = tf.random.stateless_uniform((), seed, maxval=2, dtype=tf.int32)
    # Reversing no axis copies the image, which costs less than a condition.
    return tf.ensure_shape(tf.reverse(images, tf.repeat([-2], turned)), images.shape)


def _upright_shape(encoded: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns height and width of the upright image, and its orientation, from the first bytes."""
    stored = tf.cond(
        tf.io.is_jpeg(encoded),
        lambda: tf.io.extract_jpeg_shape(encoded)[:2],
        # https://www.w3.org/TR/png/#11IHDR: width and height, big-endian, after 16 bytes.
        lambda: tf.io.decode_raw(tf.strings.substr(encoded, 16, 8), tf.int32, False)[::-1],
    )
    number = upright.orientation(encoded)
    return tf.cast(tf.where(number >= 5, stored[::-1], stored), tf.float32), number


def _scaled(
    encoded: tf.Tensor,
    number: tf.Tensor,
    begin: tf.Tensor,
    region: tf.Tensor,
    size: Size,
    reduce: bool,
) -> tf.Tensor:
    """Decodes a region of an image with this orientation and scales it; uint8 `(*size, 3)`."""
    is_jpeg = tf.io.is_jpeg(encoded)

    def cut_whole() -> tf.Tensor:
        pixels = tf.cond(
            is_jpeg,
            lambda: tf.io.decode_jpeg(encoded, channels=3),
            lambda: tf.io.decode_png(encoded, channels=3),
        )
        window = tf.unstack(_window(begin, region), num=4)
        return tf.image.crop_to_bounding_box(upright.turn(pixels, number), *window)

    pixels = tf.cond(
        is_jpeg & (number == 1),
        lambda: _decode_jpeg_region(encoded, begin, region, size, reduce),
        cut_whole,
    )
    scaled = tf.image.resize(pixels, size)
    return tf.ensure_shape(tf.cast(tf.round(scaled), tf.uint8), (*size, 3))


def _decode_jpeg_region(
    encoded: tf.Tensor, begin: tf.Tensor, region: tf.Tensor, size: Size, reduce: bool
) -> tf.Tensor:
    """Decodes a region of a JPEG with no more pixels than the size requires."""

    def at(ratio: int) -> tf.Tensor:
        # libjpeg rounds the sides of a reduced image up, so a window rounded down fits into it.
        window = _window(begin / ratio, region / ratio)
        return tf.io.decode_and_crop_jpeg(encoded, window, channels=3, ratio=ratio)

    if not reduce:
        return at(1)
    larger = tf.reduce_min(region / tf.constant(size, tf.float32))
    which = sum(tf.cast(larger >= ratio, tf.int32) for ratio in _RATIOS[1:])
    return tf.switch_case(which, [functools.partial(at, ratio) for ratio in _RATIOS])


def _window(begin: tf.Tensor, region: tf.Tensor) -> tf.Tensor:
    """Returns first row and column, height and width in whole pixels, at least one."""
    begin, region = tf.cast(begin, tf.int32), tf.maximum(tf.cast(region, tf.int32), 1)
    return tf.concat([begin, region], 0)


def _between(limits: tuple[float, float], fraction: tf.Tensor) -> tf.Tensor:
    return limits[0] + (limits[1] - limits[0]) * fraction
