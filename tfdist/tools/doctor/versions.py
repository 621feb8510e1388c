"""Compares the versions of Python and of the libraries with those that tfdist was tested with."""

from __future__ import annotations

import platform
from importlib import metadata

from packaging.requirements import Requirement

from tfdist.tools.doctor.report import Check
from tfdist.tools.install_horovod import versions
from tfdist.version import TESTED, __version__, untested


def checks() -> list[Check]:
    """Returns a check for Python, for tfdist, and for each library that it requires."""
    python = platform.python_version()
    lines = [Check("python", _with_tested("python", python)), Check("tfdist", __version__)]
    return lines + [_library(requirement) for requirement in _requirements()]


def _requirements() -> list[Requirement]:
    """Returns the requirements of tfdist; the main ones if it is not installed as a package.

    TensorFlow belongs to an extra, because several distributions provide it.
    """
    try:
        texts = metadata.requires("tfdist") or []
    except metadata.PackageNotFoundError:
        texts = ["keras", "numpy"]
    parsed = map(Requirement, [f"tensorflow>={TESTED['tensorflow'][0]}", *texts])
    return [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]


def _library(required: Requirement) -> Check:
    name, fix = required.name, f"pip install '{required}'"
    version = versions.tensorflow() if name == "tensorflow" else versions.of(name)
    if version is None:
        return Check(name, "not installed", "wrong", fix)
    if required.specifier.contains(version, prereleases=True):
        return Check(name, _with_tested(name, version))
    return Check(name, f"{version}, but tfdist needs {required.specifier}", "wrong", fix)


def _with_tested(name: str, version: str) -> str:
    tested = untested({name: version}).get(name)
    return version if tested is None else f"{version} (tested: {tested})"
