"""The ways of setting the learning rate that are compared; imports no TensorFlow."""

from __future__ import annotations

from typing import Any

#: Fields of `TrainConfig` by the name of the way.
WAYS: dict[str, dict[str, Any]] = {
    "fixed": {"lr_scaling": "none"},
    "sqrt": {"lr_scaling": "sqrt"},
    "linear": {"lr_scaling": "linear"},
    "sqrt-warmup": {"lr_scaling": "sqrt", "warmup_epochs": 5},
    "linear-warmup": {"lr_scaling": "linear", "warmup_epochs": 5},
}
