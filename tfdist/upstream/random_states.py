"""The global random states of Python, NumPy, and TensorFlow, which code of the user may draw from.

Code that runs additionally, for an analysis or on another replica, must leave no trace in them.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from tensorflow.python.eager import context


class RandomStates(NamedTuple):
    """The states at one time: `random`, `np.random`, and the operation seeds of `tf.random`."""

    python: Any
    numpy: Any
    tensorflow: Any

    @classmethod
    def current(cls) -> RandomStates:
        """Returns the states as they are; TensorFlow's are in `Context._rng`, if a seed is set."""
        generator = _operation_seeds()
        operations = None if generator is None else generator.getstate()
        return cls(random.getstate(), np.random.get_state(), operations)

    def restore(self, python: bool = True) -> None:
        """Sets the states to what they were.

        Args:
            python: Whether to set that of `random`, too, from which Keras draws seeds.
        """
        if python:
            random.setstate(self.python)
        np.random.set_state(self.numpy)
        if self.tensorflow is not None:
            _operation_seeds().setstate(self.tensorflow)


@contextmanager
def draws_at_trace_warned() -> Iterator[None]:
    """Warns if the block, in which a step is traced, draws from NumPy's global generator."""
    before = repr(np.random.get_state())
    yield
    if repr(np.random.get_state()) != before:
        warnings.warn(
            "A step draws from np.random while it is traced. The numbers are constants, and not "
            "Keras's if that traces it more often. Use keras.random instead.",
            stacklevel=2,
        )


@contextmanager
def numpy_state_kept() -> Iterator[None]:
    """Restores all but the state of `random`, from which new layers draw their seeds."""
    states = RandomStates.current()
    try:
        yield
    finally:
        states.restore(python=False)


def draw_other_operation_seeds() -> None:
    """Sets another state of operation seeds, for code whose draws must not recur.

    TensorFlow keeps the state of an eager operation, by its seed.
    """
    if (generator := _operation_seeds()) is not None:
        generator.seed(-1)


def _operation_seeds() -> Any:
    return getattr(context.context(), "_rng", None)
