"""The global random states of Python, NumPy, and TensorFlow, which code of the user may draw from.

Code that runs additionally, for an analysis or on another replica, must leave no trace in them, nor
in numbers that are attributes of the user's objects, such as a counter of calls.
"""

from __future__ import annotations

import random
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
from tensorflow.python.eager import context

#: The user's objects whose numbers belong to the state, by ID: some classes are not hashable.
_watched = weakref.WeakValueDictionary[int, Any]()


def watch(objects: Iterable[Any]) -> None:
    """Makes numbers that are attributes of objects a part of the state."""
    allowed = [one for one in objects if hasattr(one, "__dict__") and type(one).__weakrefoffset__]
    _watched.update({id(one): one for one in allowed})


def _numbers() -> list[tuple[Any, str, Any]]:
    numbers = []
    for one in list(_watched.values()):
        defaults = {name: v for kind in type(one).__mro__[::-1] for name, v in vars(kind).items()}
        for name, value in (defaults | vars(one)).items():
            if type(value) in (int, float) and not name.startswith("_"):
                numbers.append((one, name, value))
    return numbers


class RandomStates(NamedTuple):
    """The states at one time, the operation seeds of `tf.random`, and the user's numbers."""

    python: Any
    numpy: Any
    tensorflow: Any
    numbers: list[tuple[Any, str, Any]]

    @classmethod
    def current(cls) -> RandomStates:
        """Returns the states as they are; TensorFlow's are in `Context._rng`, if a seed is set."""
        generator = _operation_seeds()
        operations = None if generator is None else generator.getstate()
        return cls(random.getstate(), np.random.get_state(), operations, _numbers())

    def restore(self, python: bool = True) -> None:
        """Sets the states to what they were.

        Args:
            python: Whether to set that of `random`, from which Keras draws seeds of new weights,
                and the numbers, which code that creates weights may set.
        """
        if python:
            random.setstate(self.python)
        np.random.set_state(self.numpy)
        if self.tensorflow is not None:
            _operation_seeds().setstate(self.tensorflow)
        for one, name, value in self.numbers if python else ():
            if type(vars(one).get(name)) is type(value):
                vars(one)[name] = value


@contextmanager
def draws_at_trace_warned() -> Iterator[None]:
    """Warns if the block, in which a step is traced, draws from NumPy, or counts in Python."""
    before, numbers = repr(np.random.get_state()), _numbers()
    yield
    changed = [(one, name) for one, name, value in numbers if vars(one).get(name, value) != value]
    what = [f"changes {type(one).__name__}.{name}" for one, name in changed[:1]]
    if repr(np.random.get_state()) != before:
        what.append("draws from np.random")
    if what:
        warnings.warn(
            f"A step {' and '.join(what)} while it is traced. The numbers are constants, and not "
            "Keras's if that traces it more often. Use keras.random, and self.add_weight for a "
            "counter.",
            stacklevel=2,
        )


@contextmanager
def python_state_kept(model: keras.Model | None = None) -> Iterator[None]:
    """Restores the states after the block.

    Lists, files, and whatever else the code changes stay changed. If the block creates weights,
    what may change with them stays, too: see `RandomStates.restore`.

    Args:
        model: The model whose code runs; None: the block creates weights.
    """
    states, generator, num_weights = RandomStates.current(), _operation_seeds(), -1
    if model is not None:
        num_weights = len(model.variables)
        if generator is not None:
            generator.seed(-1)  # TensorFlow keeps the state of an eager operation, by its seed
    try:
        yield
    finally:
        states.restore(python=model is not None and len(model.variables) == num_weights)


def _operation_seeds() -> Any:
    return getattr(context.context(), "_rng", None)
