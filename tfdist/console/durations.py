"""Lengths of time as people write them: `90s`, `30m`, `2h`, `1h30m`, `1d`."""

from __future__ import annotations

import re

from tfdist.errors import ConfigurationError

_FORM = re.compile(r"(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")

_SHORT = re.compile(r"(\d+(?:\.\d+)?)\s*(s|ms|us|ns)")


def seconds(text: str) -> float | None:
    """Returns the seconds of such a time; None where the text is of another form."""
    if not (found := _FORM.fullmatch(text)):
        return None
    days, hours, minutes, rest = (float(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def short_seconds(text: str) -> float:
    """Returns the seconds of a time as that of a message is written: `20us`, `1.5ms`, `2s`.

    Raises:
        ConfigurationError: It is of another form.
    """
    if not (found := _SHORT.fullmatch(text.strip())):
        raise ConfigurationError(f"{text!r}: expected a time like 20us, 1.5ms or 2s.")
    return float(found[1]) * {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[found[2]]
