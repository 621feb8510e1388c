"""What the steps of a model change besides their results, and how to restore it.

That is variables, the random states of Python, NumPy and TensorFlow, and values that the user's
functions read or set: attributes, global names, closures, containers, arrays and generators. So
code that runs additionally, for a trial or a comparison, leaves no trace.
"""

from __future__ import annotations

import collections
import functools
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.upstream import input_data, keras_model
from tfdist.upstream.keras_optimizers import optimizers_of
from tfdist.upstream.keras_variables import ShardedVariable, values_of
from tfdist.upstream.tensorflow_random import (
    RandomStates,
    generator_state,
    is_generator,
    use_other_seeds,
    watch,
)
from tfdist.upstream.tensorflow_runtime import random_state

#: Packages whose code keeps no values of the user.
_LIBRARIES = sys.stdlib_module_names | {
    *("keras", "keras_hub", "keras_rs", "tensorflow", "numpy", "tfdist", "recipes", "pipelines")
}
_IMMUTABLE = (int, float, complex, str, bytes, type(None), tuple, frozenset, np.generic)
_OWNERS = (keras.Layer, keras.metrics.Metric, keras.optimizers.Optimizer)
_WRITTEN = (
    tf.summary.SummaryWriter, tf.queue.QueueBase, tf.lookup.experimental.MutableHashTable,
    tf.lookup.experimental.DenseHashTable,
)  # fmt: skip
#: Larger containers and arrays are data, which a step does not change. So is what comes after many
#: other objects.
_MAX_ELEMENTS, _MAX_BYTES, _MAX_OBJECTS = 1000, 1 << 20, 20_000


def participants(model: keras.Model) -> list[Any]:
    """Returns the objects whose code runs in a model's steps, and functions that they hold."""
    config = keras_model.compile_config(model)
    compiled = keras.tree.flatten(list(config.config.values())) if config else []
    objects = keras_model.flatten_layers(model) + optimizers_of(model)
    objects += [*keras_model.metrics_of(model), *compiled]
    for owner in list(objects):
        for value in getattr(owner, "__dict__", {}).values():
            several = value.values() if isinstance(value, dict) else value
            parts = several if isinstance(several, (list, tuple)) else [value]
            objects += [part for part in parts if callable(part) and is_users(part)]
    return list({id(one): one for one in objects}.values())


def user_code(model: keras.Model) -> list[str]:
    """Returns the names of classes and functions in a model's steps that no library defines."""
    users = filter(is_users, participants(model))
    return list(dict.fromkeys(getattr(one, "__qualname__", type(one).__name__) for one in users))


def is_users(value: Any) -> bool:
    """Returns whether a value is a function or an instance of a class of the user's code."""
    if isinstance(value, functools.partial):
        return is_users(value.func)
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return _is_of_user(value.__module__)
    return any(_is_of_user(kind.__module__) for kind in type(value).__mro__)


def _is_of_user(module: str | None) -> bool:
    return module is not None and module.partition(".")[0] not in _LIBRARIES


class ProgramState:
    """The state of a program between two steps."""

    def __init__(self, model: keras.Model, variables: Sequence[Any]) -> None:
        self._python = PythonState(model, variables)
        self._python.restore()
        self._values = [(v, v.read_value()) for v in self._python.variables.values()]
        self._restore_tensorflow = random_state()

    def restore(self) -> None:
        """Restores everything, so that the next step computes what it would have computed."""
        for variable, value in self._values:
            variable.assign(value)
        self.restore_python()
        self._restore_tensorflow()

    @property
    def lost(self) -> list[str]:
        """The kinds of objects in it that cannot be set back."""
        return self._python.lost + self._python.written

    def restore_python(self) -> None:
        """Restores what Python code changes, so that it runs in a step as in one that is traced."""
        self._python.restore()


@contextmanager
def python_state_kept(
    model: keras.Model | None = None, creates_weights: bool = False
) -> Iterator[PythonState | None]:
    """Restores the state of Python, and the operation seeds of `tf.random`, after the block.

    If the block creates weights, what may change with them stays: see `RandomStates.restore`.

    Args:
        model: The model whose code runs; None: the block creates weights of layers.
        creates_weights: Whether the block creates states of metrics and optimizers.
    """
    states, state, num_weights = RandomStates.current(), None, -1
    if model is not None:
        state, num_weights = PythonState(model, owners=not creates_weights), len(model.variables)
        state.restore()
    if state is not None and not creates_weights:
        use_other_seeds()
    try:
        yield state
    finally:
        is_trial = model is not None and len(model.variables) == num_weights
        states.restore(python=is_trial and not creates_weights)
        if state is not None:
            state.restore() if is_trial or creates_weights else state.set_iterators_back()


def watch_program(model: keras.Model) -> None:
    """Makes the user's generators and numbers in a model's steps a part of `RandomStates`."""
    watch(filter(is_users, participants(model)), PythonState(model).generators)


class PythonState:
    """The values that the Python code of a model's steps may change.

    Args:
        model: The model.
        variables: Further variables of TensorFlow.
        owners: Whether layers, metrics and optimizers count, and the global random states from
            which they draw seeds of new weights.

    Attributes:
        variables: TensorFlow's variables among them, by ID.
        generators: Generators of random numbers of NumPy and Python.
        lost: The kinds of iterators that cannot be set back.
        written: The kinds of objects that steps may write to outside of the program.
    """

    def __init__(
        self, model: keras.Model, variables: Sequence[Any] = (), owners: bool = True
    ) -> None:
        self.variables: dict[int, Any] = {}
        self.generators: list[Any] = []
        self.lost: list[str] = []
        self.written: list[str] = []
        self._iterators: list[Callable[[], Any]] = []
        self._restore: list[Callable[[], Any]] = []
        self._seen: dict[int, Any] = {}
        for one in participants(model):
            if is_users(one) and (owners or not isinstance(one, _OWNERS)):
                self._note_user(one)
        if not owners:
            return
        if (generator := keras_model.global_generator()) is not None:
            self._note(generator)
        for variable in variables:
            self._note(variable)
        numpy_state = np.random.get_state()
        self._restore += [
            lambda: np.random.set_state(numpy_state),
            keras_model.python_random_state(),
        ]

    def restore(self) -> None:
        """Restores everything but the variables.

        Iterators of Python are replaced by ones that yield the same, to be restored again: call it
        before the code runs, too.
        """
        for restore in self._restore:
            restore()
        self.set_iterators_back()

    def set_iterators_back(self) -> None:
        """Restores the iterators alone."""
        for restore in self._iterators:
            restore()

    def _note_user(self, value: Any) -> None:
        """Notes the values that an object or a function of the user may change."""
        if isinstance(value, functools.partial):
            return self._note_user(value.func)
        if isinstance(value, (types.FunctionType, types.MethodType)):
            return self._note(value)
        names = set[str]()
        for function in _functions_of(type(value)):
            names |= _names_in(function.__code__)
            self._note(function)
        for kind in filter(lambda base: _is_of_user(base.__module__), type(value).__mro__):
            for name in sorted(names & vars(kind).keys()):
                self._note_at(vars(kind)[name], functools.partial(setattr, kind, name))
        attributes = vars(value)
        for name in names & attributes.keys():
            self._note_at(attributes[name], functools.partial(attributes.__setitem__, name))
        absent = names - attributes.keys()

        def forget_new() -> None:
            for name in absent & attributes.keys():
                if isinstance(attributes[name], _IMMUTABLE):
                    del attributes[name]

        self._restore.append(forget_new)
        return None

    def _note_at(self, value: Any, assign: Callable[[Any], Any]) -> None:
        """Notes a value, and how to assign it where it is, as another one may be there later."""
        if not _is_iterator(value):
            if not callable(value):  # patches replace methods, and end in an order of their own
                self._restore.append(functools.partial(assign, value))
            return self._note(value)
        to_come = value

        def fork() -> None:
            nonlocal to_come
            to_come, current = itertools.tee(to_come)
            assign(current)

        self._iterators.append(fork)
        return None

    def _note(self, value: Any) -> None:
        """Notes a value that can change in place, and what it consists of."""
        if id(value) in self._seen or len(self._seen) > _MAX_OBJECTS:
            return
        self._seen[id(value)] = value
        if isinstance(value, keras.random.SeedGenerator):
            self._note(value.state)
        elif isinstance(value, keras.Variable):
            parts = value.parts if isinstance(value, ShardedVariable) else []
            for one in [*values_of(value), *parts]:
                self._note(one)
        elif isinstance(value, tf.random.Generator):
            self._note(value.state)
        elif isinstance(value, tf.Variable):
            if value.dtype != tf.string:
                self.variables[id(value)] = value
        elif isinstance(value, tf.data.Iterator):
            if (state := input_data.iterator_state(value)) is None:
                self.lost.append(type(value).__name__)
            else:
                back = functools.partial(input_data.set_iterator_state, value, state)
                self._iterators.append(back)
        elif isinstance(value, _WRITTEN):
            self.written.append(type(value).__name__)
        elif _is_iterator(value):  # in a container
            self.lost.append(type(value).__name__)
        elif isinstance(value, types.MethodType):
            self._note(value.__func__)
        elif isinstance(value, types.FunctionType):
            self._note_function(value)
        elif is_generator(value):
            self.generators.append(value)
            set_state, state = generator_state(value)
            self._restore.append(functools.partial(set_state, state))
        elif restore := _restores_in_place(value):
            self._restore.append(restore)
        if isinstance(value, (list, tuple, dict, set, collections.deque)):
            if len(value) <= _MAX_ELEMENTS:
                for element in value.values() if isinstance(value, dict) else value:
                    self._note(element)
        elif is_users(value) and not isinstance(value, (type, types.FunctionType, keras.Layer)):
            self._note_instance(value)

    def _note_function(self, function: types.FunctionType) -> None:
        if not _is_of_user(function.__module__):
            return
        names = function.__globals__
        for name in _names_in(function.__code__) & names.keys():
            if not name.startswith("__"):
                self._note_at(names[name], functools.partial(names.__setitem__, name))
        for cell in function.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._note_at(content, functools.partial(setattr, cell, "cell_contents"))
        for default in function.__defaults__ or ():
            self._note(default)

    def _note_instance(self, value: Any) -> None:
        """Notes the attributes of an object that is not Keras's."""
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict) or isinstance(value, types.ModuleType):
            return
        for name in list(attributes):
            self._note_at(attributes[name], functools.partial(attributes.__setitem__, name))


def _is_iterator(value: Any) -> bool:
    """Returns whether a value is a generator or the like, without a state that could be noted."""
    return isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools")


def _functions_of(kind: type) -> Iterator[types.FunctionType]:
    """Yields the functions that the user's classes among a class and its bases define."""
    for base in kind.__mro__:
        for value in vars(base).values() if _is_of_user(base.__module__) else ():
            if isinstance(value, property):
                value = value.fget
            value = getattr(value, "__func__", getattr(value, "python_function", value))
            value = getattr(value, "__wrapped__", value)
            if isinstance(value, types.FunctionType):
                yield value


def _names_in(code: types.CodeType) -> set[str]:
    """Returns the global names and the attributes that code uses, also in inner functions."""
    inner = [_names_in(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*inner)


def _restores_in_place(value: Any) -> Callable[[], Any] | None:
    """Returns a function that gives a mutable value its current content again."""
    if isinstance(value, np.ndarray) and value.nbytes <= _MAX_BYTES and value.flags.writeable:
        return functools.partial(np.copyto, value, value.copy())
    kinds = (kind for kind in (list, dict, set, collections.deque) if isinstance(value, kind))
    if (kind := next(kinds, None)) is None:
        return None
    # Methods of Keras's containers would stop tracking the layers in them, and refuse them later.
    is_plain = kind is list or type(value).__module__.startswith("keras")
    methods: Any = kind if is_plain else type(value)
    content = kind(value)

    def restore() -> None:
        methods.clear(value)
        (methods.extend if hasattr(methods, "extend") else methods.update)(value, content)

    return restore
