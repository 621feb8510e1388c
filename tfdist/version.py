"""The version of tfdist, and the versions of other software that it was tested with.

For modules that may not import the whole package.
"""

from __future__ import annotations

from collections.abc import Mapping

__version__ = "0.1.0"

#: The oldest and the newest minor version that the tests ran with: docs/versions.md has the table.
TESTED = {
    "python": ("3.11", "3.13"),
    "tensorflow": ("2.18", "2.21"),
    "keras": ("3.8", "3.15"),
    "numpy": ("1.26", "2.5"),
}


def untested(versions: Mapping[str, str]) -> dict[str, str]:
    """Returns the tested versions of each package whose version is not one of them.

    Args:
        versions: Versions by the names of packages; other packages are ignored.

    Example:
        >>> from tfdist.version import untested
        >>> untested({"keras": "3.10.0", "tensorflow": "2.99.1"})
        {'tensorflow': '2.18 to 2.21'}
    """
    outside = {}
    for name, (oldest, newest) in TESTED.items():
        minor = _minor(versions.get(name, ""))
        if minor and not _minor(oldest) <= minor <= _minor(newest):
            outside[name] = f"{oldest} to {newest}"
    return outside


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
