"""Optimizers for large batches that Keras does not have."""

from __future__ import annotations

from tfdist.optimizers.from_config import create
from tfdist.optimizers.lars import LARS
from tfdist.optimizers.momentum_sgd import MomentumSGD
from tfdist.optimizers.weight_decay import NOT_DECAYED, leave_biases_and_norms

__all__ = ["LARS", "NOT_DECAYED", "MomentumSGD", "create", "leave_biases_and_norms"]
