"""Versions of Python and of the libraries, against what tfdist was tested with."""

from __future__ import annotations

import platform
from importlib import metadata

from packaging.requirements import Requirement

from tfdist.doctor.check import Check
from tfdist.install_horovod import versions
from tfdist.version import __version__


def checks() -> list[Check]:
    """Returns a line for Python, one for tfdist, and one for each library that it needs."""
    lines = [
        Check("python", platform.python_version()),
        Check("tfdist", __version__),
    ]
    return lines + [_library(requirement) for requirement in _requirements()]


def _requirements() -> list[Requirement]:
    """What tfdist needs; where it is used without having been installed, the two that count."""
    try:
        all_of_them = metadata.requires("tfdist") or []
    except metadata.PackageNotFoundError:
        all_of_them = ["tensorflow", "keras", "numpy"]
    parsed = map(Requirement, all_of_them)
    return [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]


def _library(needed: Requirement) -> Check:
    cure = f"pip install '{needed}'"
    # TensorFlow comes under several names.
    found = versions.tensorflow() if needed.name == "tensorflow" else _version(needed.name)
    if found is None:
        return Check(needed.name, "not installed", "wrong", cure)
    if needed.specifier.contains(found, prereleases=True):
        return Check(needed.name, found)
    return Check(needed.name, f"{found}, tested with {needed.specifier}", "wrong", cure)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
