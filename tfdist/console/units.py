"""Parses and formats sizes (`24GB`, `80GiB`), bandwidths (`25Gb`) and durations (`1h30m`)."""

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


_DURATION = re.compile(r"(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")

_SHORT_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|ns)")


def seconds(text: str) -> float | None:
    """Returns a duration in seconds, or None if the text is not a duration."""
    if not (match := _DURATION.fullmatch(text)):
        return None
    days, hours, minutes, remainder = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + remainder


def short_seconds(text: str) -> float:
    """Returns a latency such as `20us`, `1.5ms` or `2s` in seconds.

    Raises:
        ConfigurationError: The text is not a latency.
    """
    if not (match := _SHORT_DURATION.fullmatch(text.strip())):
        raise ConfigurationError(f"{text!r}: expected a time like 20us, 1.5ms or 2s.")
    return float(match[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[match[2]]
