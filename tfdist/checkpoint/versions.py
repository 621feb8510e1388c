"""With which software a run, or a checkpoint of it, was made."""

from __future__ import annotations

import functools
import platform
from importlib import metadata

_PACKAGES = ("tfdist", "tensorflow", "keras", "numpy")


@functools.cache
def versions() -> dict[str, str]:
    """Returns the versions of what a run and its checkpoints depend on."""
    return {name: _version(name) for name in _PACKAGES} | {"python": platform.python_version()}


def _version(package: str) -> str:
    """The installed version, or, installed under another name or not at all, what it says."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return str(__import__(package).__version__)
