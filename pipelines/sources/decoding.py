"""Whether TensorFlow decodes an image file, mostly without importing it.

Importing TensorFlow takes longer than packing thousands of images. Therefore it decodes only files
with something that Pillow, which has decoded them before, treats in another way.
"""

from __future__ import annotations

import zlib

from pipelines.errors import DataError, cause_of
from pipelines.format.feature import Feature, image_format


class DamagedError(DataError):
    """An image cannot be decoded. `--skip-damaged` leaves it out."""


#: Segments of a JPEG without content: RST0 to RST7, SOI and TEM.
_WITHOUT_LENGTH = frozenset({0x01, *range(0xD0, 0xD9)})
_START_OF_SCAN = 0xDA
#: Baseline, extended and progressive JPEG with Huffman coding.
_HUFFMAN_FRAMES = frozenset({0xC0, 0xC1, 0xC2})
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_CRITICAL_CHUNKS = frozenset({b"IHDR", b"PLTE", b"IDAT", b"IEND"})
#: TensorFlow refuses larger PNGs.
_MOST_PIXELS = 1 << 26


def is_plain(data: bytes) -> bool:
    """Returns whether every decoder reads a JPEG or PNG that Pillow has decoded."""
    return _is_plain_jpeg(data) if image_format(data) == "jpeg" else _is_plain_png(data)


def check(data: bytes, feature: Feature, name: str) -> None:
    """Decodes an image with TensorFlow.

    Raises:
        DamagedError: TensorFlow cannot decode it.
    """
    import tensorflow as tf

    try:
        if feature.encoding == "jpeg":
            tf.io.decode_jpeg(data, channels=feature.shape[2])
        else:
            tf.io.decode_png(data, channels=feature.shape[2], dtype=feature.dtype)
    except (tf.errors.OpError, UnicodeDecodeError) as error:  # messages may quote bytes
        raise DamagedError(
            f"{name}: TensorFlow cannot decode this {feature.encoding}, although other programs "
            f"may: {cause_of(error)}; save it again or remove it"
        ) from None


def _is_plain_png(data: bytes) -> bool:
    """Returns whether all checksums are right, and only known chunks are needed up to the end."""
    # https://www.w3.org/TR/png/#5Chunk-layout: length, name, contents and checksum.
    width, height = (int.from_bytes(data[at : at + 4]) for at in (16, 20))
    at, view = 8, memoryview(data)
    while at + 12 <= len(data) and width * height <= _MOST_PIXELS:
        end = at + 8 + int.from_bytes(view[at : at + 4])
        name = data[at + 4 : at + 8]
        if zlib.crc32(view[at + 4 : end]) != int.from_bytes(view[end : end + 4]):
            return False
        if name[:1].isupper() and name not in _CRITICAL_CHUNKS:
            return False
        if name == b"IEND":
            return True
        at = end + 4
    return False


def _is_plain_jpeg(data: bytes) -> bool:
    """Returns whether it has 8 bits, one or three channels and Huffman coding."""
    # ITU-T T.81, B.1.1.4: a marker, then the length of the segment with itself.
    at = 0
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker in _WITHOUT_LENGTH:
            at += 2
        elif marker in _FRAMES:
            frame = data[at + 4 : at + 10]
            return marker in _HUFFMAN_FRAMES and frame[0] == 8 and frame[5] in (1, 3)
        elif marker == _START_OF_SCAN:
            return False
        else:
            at += 2 + int.from_bytes(data[at + 2 : at + 4])
    return False
