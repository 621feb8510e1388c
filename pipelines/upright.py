"""The orientation in the EXIF data of image files, which every reader of this package applies.

Cameras store the pixels as the sensor lies, and how to turn them. `pack` turns such images when it
stores them; these functions turn the images of other writers when they are decoded.
"""

from __future__ import annotations

import tensorflow as tf

#: Bytes of a PNG in which its EXIF data are looked for, which come before the pixels.
_HEAD_BYTES = 4096
#: Bytes of the EXIF data that have its first entries.
_EXIF_BYTES = 256
#: The entry 0x0112: one short, 1 to 8, in either byte order.
_ENTRY = (
    r"(?s)^(?:MM|II)\C*?(?:\x01\x12\x00\x03\x00\x00\x00\x01\x00([\x01-\x08])"
    r"|\x12\x01\x03\x00\x01\x00\x00\x00([\x01-\x08])\x00)\C*$"
)


def orientation(encoded: tf.Tensor) -> tf.Tensor:
    """Returns how a JPEG or PNG has to be turned, 1 (not at all) to 8, int32 scalar."""

    def at(offset: int) -> tf.Tensor:
        return tf.strings.substr(encoded, offset, _EXIF_BYTES)

    def in_png() -> tf.Tensor:
        parts = tf.strings.split(tf.strings.substr(encoded, 0, _HEAD_BYTES), b"eXIf")
        return tf.strings.substr(tf.concat([parts, [b""]], 0)[1], 0, _EXIF_BYTES)

    def number(exif: tf.Tensor) -> tf.Tensor:
        entry = tf.strings.regex_replace(exif, _ENTRY, r"\1\2")
        code = tf.io.decode_raw(tf.strings.substr(entry + b"\x01", 0, 1), tf.uint8)[0]
        return tf.where(tf.strings.length(entry) == 1, tf.cast(code, tf.int32), 1)

    # The EXIF data of a JPEG are its first segment, or the second after that of JFIF.
    kinds = [tf.strings.substr(encoded, begin, 4) == b"Exif" for begin in (6, 24)]
    kinds.append(tf.strings.substr(encoded, 0, 4) == b"\x89PNG")
    which = tf.argmax(tf.stack([*kinds, True]), output_type=tf.int32)
    functions = [lambda: number(at(12)), lambda: number(at(30)), lambda: number(in_png())]
    return tf.switch_case(which, [*functions, lambda: tf.constant(1)])


def turn(pixels: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Turns decoded pixels `(height, width, channels)` by the number that `orientation` returns."""

    # https://www.cipa.jp/std/documents/e/DC-008-2012_E.pdf, table 6, as transposing and mirroring.
    def turned() -> tf.Tensor:
        upright = tf.cond(number >= 5, lambda: tf.transpose(pixels, (1, 0, 2)), lambda: pixels)
        mirrored = [tf.reduce_any(number == numbers) for numbers in ((3, 4, 7, 8), (2, 3, 6, 7))]
        return tf.reverse(upright, tf.boolean_mask(tf.constant([0, 1]), tf.stack(mirrored)))

    return tf.cond(number == 1, lambda: pixels, turned)
