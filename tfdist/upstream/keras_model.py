"""Private names of Keras's models, layers, losses, metrics and optimizers."""

from __future__ import annotations
