"""What `keras.config` limits for a try of a script: epochs of `fit`, steps of every loop."""

from __future__ import annotations

import warnings

import keras


def epochs(asked: int) -> int:
    """Returns so many epochs, or `keras.config.max_epochs()` where that is fewer."""
    return _limited("epochs", asked, keras.config.max_epochs()) or asked


def steps_per_epoch(asked: int | None) -> int | None:
    """Returns so many steps, or `keras.config.max_steps_per_epoch()` where that is fewer.

    Args:
        asked: None: as many as the data have.
    """
    return _limited("steps_per_epoch", asked, keras.config.max_steps_per_epoch())


def _limited(what: str, asked: int | None, limit: int | None) -> int | None:
    if not limit or (asked is not None and asked <= limit):
        return asked
    warnings.warn(f"Limiting {what} to {limit}, as keras.config says.", stacklevel=5)
    return limit
