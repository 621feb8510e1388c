"""The orientation in the EXIF data of image files, which every reader of this package applies.

Cameras store the pixels as the sensor lies, and how to turn them. `pack` turns such images when it
stores them; these functions turn the images of other writers when they are decoded.
"""

from __future__ import annotations

import tensorflow as tf

#: Bytes of a JPEG, and of a PNG, that have the first entries of its EXIF data.
_JPEG_BYTES, _PNG_BYTES = 286, 4096
#: The entry 0x0112 of EXIF data: one short, 1 to 8, in either byte order. The data are the first
#: segment of a JPEG, or the second after that of JFIF, or a chunk of a PNG before the pixels. RE2
#: reads its pattern as UTF-8, in which no escape stands for a byte above 127. An image without the
#: entry matches, too, and leaves no byte: asking whether it did would cost as much as the search.
_ENTRY = (
    r"(?s)^(?:(?:\C{6}(?:\C{18})?Exif\x00\x00|\CPNG\C*?eXIf)(?:MM|II)\C*?"
    r"(?:\x01\x12\x00\x03\x00\x00\x00\x01\x00([\x01-\x08])"
    r"|\x12\x01\x03\x00\x01\x00\x00\x00([\x01-\x08])\x00))?\C*$"
)


def orientation(encoded: tf.Tensor) -> tf.Tensor:
    """Returns how a JPEG or PNG has to be turned, 1 (not at all) to 8, int32 scalar."""
    # Without branches, which cost more than the search: few images have EXIF data.
    is_png = tf.strings.substr(encoded, 0, 4) == b"\x89PNG"
    head = tf.strings.substr(encoded, 0, tf.where(is_png, _PNG_BYTES, _JPEG_BYTES))
    entry = tf.strings.regex_replace(head, _ENTRY, r"\1\2")
    return tf.cast(tf.io.decode_raw(entry + b"\x01", tf.uint8)[0], tf.int32)


def turn(pixels: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Turns decoded pixels `(height, width, channels)` by the number that `orientation` returns."""

    # https://www.cipa.jp/std/documents/e/DC-008-2012_E.pdf, table 6, as transposing and mirroring.
    def turned() -> tf.Tensor:
        upright = tf.cond(number >= 5, lambda: tf.transpose(pixels, (1, 0, 2)), lambda: pixels)
        mirrored = [tf.reduce_any(number == numbers) for numbers in ((3, 4, 7, 8), (2, 3, 6, 7))]
        return tf.reverse(upright, tf.boolean_mask(tf.constant([0, 1]), tf.stack(mirrored)))

    return tf.cond(number == 1, lambda: pixels, turned)
