"""Lengths of time as people write them: `90s`, `30m`, `2h`, `1h30m`, `1d`."""

from __future__ import annotations

import re

_FORM = re.compile(r"(?=\d)(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")


def seconds(text: str) -> float | None:
    """Returns the seconds of such a time; None where the text is of another form."""
    if not (found := _FORM.fullmatch(text)):
        return None
    days, hours, minutes, rest = (float(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest
