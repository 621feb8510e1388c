"""Returns the installed versions of TensorFlow, Horovod and others, without importing them."""

from __future__ import annotations

import importlib.util
import json
from importlib import metadata
from pathlib import Path

#: The last release. `include` has the headers that it lacks for current TensorFlow versions.
HOROVOD = "0.28.1"

#: Distributions that provide the package `tensorflow`.
_TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-rocm", "tf-nightly")


def of(distribution: str) -> str | None:
    """Returns the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def tensorflow() -> str | None:
    """Returns the version of the installed TensorFlow, or None."""
    return next(filter(None, map(of, _TENSORFLOWS)), None)


def horovod() -> str | None:
    """Returns the version of the installed Horovod, or None."""
    return of("horovod")


def horovod_was_built_for() -> str | None:
    """Returns the TensorFlow that the installed Horovod was built against, or None."""
    spec = importlib.util.find_spec("horovod")
    if spec is None or spec.origin is None:
        return None
    record = Path(spec.origin).with_name("metadata.json")
    return json.loads(record.read_text()).get("tensorflow") if record.exists() else None


def horovod_fits() -> bool:
    """Returns whether the installed Horovod was built against the installed TensorFlow.

    They must match, because TensorFlow's C++ interface is not stable between versions.
    """
    return horovod() == HOROVOD and horovod_was_built_for() == tensorflow()
