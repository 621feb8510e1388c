"""Images from the bytes of a file to uint8 pixels of one size; only what is needed is decoded.

Read with `decode_images=False`, so that the bytes come here. What is random takes a seed, int32
`(2,)`, as `augment_fn` gets it: the same seed draws the same again.
"""

from __future__ import annotations

import math

import tensorflow as tf

Size = tuple[int, int]

# One seed serves several draws of an example; each is folded with another number.
_OF_CROP, _OF_FLIP = 1, 2


def random_crop(
    encoded: tf.Tensor,
    seed: tf.Tensor,
    size: Size,
    *,
    area: tuple[float, float] = (0.08, 1.0),
    aspect: tuple[float, float] = (3 / 4, 4 / 3),
) -> tf.Tensor:
    """A random region of an image, scaled to one size: decoded and cropped in one go.

    The "inception crop" (Szegedy et al. 2014, "Going deeper with convolutions"), with the values
    that became usual; a region that would stand out over the image is cut back to it.

    Args:
        encoded: JPEG or PNG, string scalar.
        seed: int32 `(2,)`.
        size: height and width of the result.
        area: of the region, as fractions of the image's.
        aspect: width over height of the region.

    Returns:
        Pixels, uint8 `(height, width, 3)`.
    """
    shape = tf.cast(_shape(encoded), tf.float32)
    u = tf.random.stateless_uniform((4,), tf.random.experimental.stateless_fold_in(seed, _OF_CROP))
    side = tf.sqrt(tf.reduce_prod(shape) * _between(area, u[0]))
    log_aspect = _between((math.log(aspect[0]), math.log(aspect[1])), u[1])
    region = tf.minimum(side * tf.exp(log_aspect * tf.constant([-0.5, 0.5])), shape)
    return _resized(_decoded(encoded, (shape - region) * u[2:], region), size)


def center_crop(encoded: tf.Tensor, size: Size, *, fraction: float = 0.875) -> tf.Tensor:
    """The middle of an image, scaled to one size: for evaluation.

    Args:
        encoded: JPEG or PNG, string scalar.
        size: height and width of the result; the region that is decoded is as wide for its height.
        fraction: of the largest such region, by side.

    Returns:
        Pixels, uint8 `(height, width, 3)`.
    """
    shape = tf.cast(_shape(encoded), tf.float32)
    wanted = tf.constant(size, tf.float32)
    region = wanted * tf.reduce_min(shape / wanted) * fraction
    return _resized(_decoded(encoded, (shape - region) / 2, region), size)


def resize(encoded: tf.Tensor, size: Size) -> tf.Tensor:
    """The whole image, scaled to one size whatever its aspect; uint8 `(height, width, 3)`."""
    shape = tf.cast(_shape(encoded), tf.float32)
    return _resized(_decoded(encoded, tf.zeros_like(shape), shape), size)


def flip(images: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
    """Left for right with a chance of one half.

    Args:
        images: `(..., height, width, channels)`; a mask in further channels turns with its image.
        seed: int32 `(2,)`.
    """
    seed = tf.random.experimental.stateless_fold_in(seed, _OF_FLIP)
    turned = tf.random.stateless_uniform((), seed, maxval=2, dtype=tf.int32)
    # No axis at all where it stays: a condition would cost more than the copy.
    return tf.ensure_shape(tf.reverse(images, tf.repeat([-2], turned)), images.shape)


def _shape(encoded: tf.Tensor) -> tf.Tensor:
    """Height and width from the first bytes of a file."""
    return tf.cond(
        tf.io.is_jpeg(encoded),
        lambda: tf.io.extract_jpeg_shape(encoded)[:2],
        # https://www.w3.org/TR/png/#11IHDR: width and height, big-endian, behind 16 bytes.
        lambda: tf.io.decode_raw(tf.strings.substr(encoded, 16, 8), tf.int32, False)[::-1],
    )


def _decoded(encoded: tf.Tensor, begin: tf.Tensor, region: tf.Tensor) -> tf.Tensor:
    """A region of an image, of whole pixels, at least one."""
    begin, region = tf.cast(begin, tf.int32), tf.maximum(tf.cast(region, tf.int32), 1)
    window = tf.concat([begin, region], 0)
    return tf.cond(
        tf.io.is_jpeg(encoded),
        lambda: tf.io.decode_and_crop_jpeg(encoded, window, channels=3),
        lambda: tf.image.crop_to_bounding_box(
            tf.io.decode_png(encoded, channels=3), begin[0], begin[1], region[0], region[1]
        ),
    )


def _resized(pixels: tf.Tensor, size: Size) -> tf.Tensor:
    scaled = tf.image.resize(pixels, size)
    return tf.ensure_shape(tf.cast(tf.round(scaled), tf.uint8), (*size, 3))


def _between(limits: tuple[float, float], fraction: tf.Tensor) -> tf.Tensor:
    return limits[0] + (limits[1] - limits[0]) * fraction
