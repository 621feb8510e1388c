"""Amounts of memory and rates of links as people write them: `24GB`, `80GiB`, `25Gb`."""

from __future__ import annotations

import re

from tfdist.errors import ConfigurationError

_DECIMAL = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i|[kKMGT]?)(B|b|bit)?(?:/s|ps)?")


def num_bytes(text: str) -> int:
    """Returns the bytes of a size such as `24GB` (10^9), `80GiB` (2^30) or `512MB`.

    Raises:
        ConfigurationError: It is of another form, or in bits.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None or found[3] not in ("B", None) or (found[2] and found[3] is None):
        raise ConfigurationError(f"{text!r}: expected a size like 24GB, 80GiB or 512MB.")
    return round(float(found[1]) * (_DECIMAL | _BINARY)[found[2]])


def bytes_per_second(text: str) -> float:
    """Returns the bytes a second of a link, `25Gb` in bits a second as links are sold, or `3GB`.

    Raises:
        ConfigurationError: It is of another form, or does not say whether bits or bytes.
    """
    found = _FORM.fullmatch(text.strip())
    if found is None or found[3] is None or float(found[1]) == 0:
        raise ConfigurationError(
            f"{text!r}: expected the rate of a link like 25Gb (bits a second) or 3GB (bytes)."
        )
    each = 1 if found[3] == "B" else 1 / 8
    return float(found[1]) * (_DECIMAL | _BINARY)[found[2]] * each


def in_words(number: float) -> str:
    """Returns bytes as people write them: `16 MB`, `1.44 GB`."""
    for unit, factor in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if number >= factor:
            return f"{number / factor:.3g} {unit}"
    return f"{number:.0f} B"
