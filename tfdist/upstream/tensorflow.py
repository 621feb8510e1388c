"""Private names of TensorFlow."""

from __future__ import annotations
