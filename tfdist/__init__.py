"""Distributed Keras 3 on TensorFlow that gives the numbers of one device.

Importing this package does not import TensorFlow. Attributes that need it are loaded on first use,
so that `--help` of commands is fast.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from tfdist.version import __version__ as __version__

if TYPE_CHECKING:
    from tfdist import callbacks as callbacks
    from tfdist import cluster as cluster
    from tfdist import compile_cache as compile_cache
    from tfdist import devices as devices
    from tfdist import errors as errors
    from tfdist import optimizers as optimizers
    from tfdist import precision as precision
    from tfdist import ray as ray
    from tfdist import schedules as schedules
    from tfdist import strategies as strategies
    from tfdist.checkpoint.settings import Checkpoints as Checkpoints
    from tfdist.cluster import barrier as barrier
    from tfdist.cluster import is_chief as is_chief
    from tfdist.cluster import rank as rank
    from tfdist.cluster import size as size
    from tfdist.cluster.launcher.notebook import notebook_launch as notebook_launch
    from tfdist.script import distribute as distribute
    from tfdist.trainer import Trainer as Trainer

_MODULES = (
    "callbacks",
    "cluster",
    "compile_cache",
    "devices",
    "errors",
    "horovod",
    "optimizers",
    "precision",
    "ray",
    "schedules",
    "strategies",
)
#: Names whose modules import `pipelines`.
_USE_PIPELINES = ("Checkpoints", "Trainer", "callbacks", "horovod", "ray")
_ATTRIBUTES = {
    "Checkpoints": "tfdist.checkpoint.settings",
    "Trainer": "tfdist.trainer",
    "barrier": "tfdist.cluster",
    "distribute": "tfdist.script",
    "is_chief": "tfdist.cluster",
    "notebook_launch": "tfdist.cluster.launcher.notebook",
    "rank": "tfdist.cluster",
    "size": "tfdist.cluster",
}

__all__ = [
    "Checkpoints",
    "Trainer",
    "__version__",
    "barrier",
    "callbacks",
    "cluster",
    "compile_cache",
    "devices",
    "distribute",
    "errors",
    "is_chief",
    "notebook_launch",
    "optimizers",
    "precision",
    "rank",
    "ray",
    "schedules",
    "size",
    "strategies",
]


if sys.argv[:1] == ["-m"]:  # the package of a command is imported, which may need `pipelines`
    importlib.import_module("tfdist.console.shadowed_packages").put_first()
if hasattr(sys, "ps1"):
    # A notebook. Not in scripts, where a file of the user may shadow the package `pipelines`
    # (`tfdist.console.shadowed_packages`).
    importlib.import_module("pipelines.console.quiet").quieten_notebook()
importlib.import_module("tfdist.at_import").prepare()


def __getattr__(name: str) -> Any:
    """Loads a public name on its first use (PEP 562)."""
    if name in _USE_PIPELINES:
        importlib.import_module("tfdist.console.shadowed_packages").check()
    if name in _MODULES:
        return importlib.import_module(f"tfdist.{name}")
    if name in _ATTRIBUTES:
        if (
            name == "Trainer"
        ):  # names a backend of Keras that is missing, which import keras does not
            importlib.import_module("tfdist.upstream")
        value = getattr(importlib.import_module(_ATTRIBUTES[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'tfdist' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
