"""Training on a Ray cluster: `python -m tfdist.launch --via ray`, and `tfdist.ray.train`.

Each worker is a process that a Ray actor starts on its node, so that TensorFlow and Ray share no
process. Imports neither Ray nor TensorFlow until they are needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfdist.ray.callback import ReportCallback as ReportCallback
    from tfdist.ray.data import dataset as dataset
    from tfdist.ray.function import train as train
    from tfdist.ray.function import trial_resources as trial_resources
    from tfdist.ray.reports import report as report

__all__ = ["ReportCallback", "dataset", "report", "train", "trial_resources"]

_MODULES = {
    "ReportCallback": "tfdist.ray.callback",
    "dataset": "tfdist.ray.data",
    "report": "tfdist.ray.reports",
    "train": "tfdist.ray.function",
    "trial_resources": "tfdist.ray.function",
}


def __getattr__(name: str) -> Any:
    """Loads a public name on its first use (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'tfdist.ray' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
