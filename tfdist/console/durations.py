"""Parses durations such as `90s`, `30m`, `2h`, `1h30m` and `1d`."""

from __future__ import annotations

import re

from tfdist.errors import ConfigurationError

_PATTERN = re.compile(r"(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")

_SHORT_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|ns)")


def seconds(text: str) -> float | None:
    """Returns a duration in seconds, or None if the text is not a duration."""
    if not (match := _PATTERN.fullmatch(text)):
        return None
    days, hours, minutes, remainder = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + remainder


def short_seconds(text: str) -> float:
    """Returns a latency such as `20us`, `1.5ms` or `2s` in seconds.

    Raises:
        ConfigurationError: The text is not a latency.
    """
    if not (match := _SHORT_PATTERN.fullmatch(text.strip())):
        raise ConfigurationError(f"{text!r}: expected a time like 20us, 1.5ms or 2s.")
    return float(match[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[match[2]]
