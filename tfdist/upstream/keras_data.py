"""Private names of Keras's data adapters, callbacks and training loop."""

from __future__ import annotations
