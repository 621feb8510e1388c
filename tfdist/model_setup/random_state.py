"""Global random state: a second model in a script starts from the weights of plain Keras."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Restores the global random state of Python and NumPy after the block.

    Keras draws the seed of each initializer and each random layer that has none from Python's
    generator. Layers that tfdist creates in addition would change the seeds of later ones.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
