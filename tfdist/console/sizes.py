"""Parses and formats memory sizes and network bandwidths: `24GB`, `80GiB`, `25Gb`."""

from __future__ import annotations

import re

from pydantic import ByteSize, TypeAdapter, ValidationError

from tfdist.errors import ConfigurationError

_BYTE_SIZE = TypeAdapter(ByteSize)
#: Unit prefixes. pydantic's ByteSize ignores case, but `Gb` and `GB` differ by a factor of 8.
_PREFIXES = {
    "": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i|[kKMGT]?)(B|b|bit)(?:/s|ps)?")


def num_bytes(text: str) -> int:
    """Returns the bytes of a size such as `24GB` (10^9 bytes each), `80GiB` (2^30) or `512MB`.

    Raises:
        ConfigurationError: The text is not a size in bytes.
    """
    try:
        # pydantic rounds bits and ignores case, so that `24Gb` would be 24 GB.
        if not text.strip().endswith(("b", "bit")):
            return _BYTE_SIZE.validate_python(text.strip())
    except ValidationError:
        pass
    raise ConfigurationError(f"{text!r}: expected a size like 24GB, 80GiB or 512MB.")


def bytes_per_second(text: str) -> float:
    """Returns a bandwidth in bytes per second: `25Gb` is in bits, `3GB` in bytes.

    Raises:
        ConfigurationError: The text is not a bandwidth in bits or bytes.
    """
    match = _RATE.fullmatch(text.strip())
    if match is None or float(match[1]) == 0:
        raise ConfigurationError(
            f"{text!r}: expected a bandwidth like 25Gb (bits per second) or 3GB (bytes)."
        )
    unit = 1 if match[3] == "B" else 1 / 8
    return float(match[1]) * _PREFIXES[match[2]] * unit


def format_bytes(number: float) -> str:
    """Formats a number of bytes with a unit and three digits: `16 MB`, `1.44 GB`."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f} B"
