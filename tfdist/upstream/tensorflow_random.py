"""Random numbers: TensorFlow's stateless samplers, and the global states of Python and NumPy.

Code of the user that runs additionally, for an analysis or on another replica, must leave no trace
in the global states, nor in the user's generators, nor in numbers that are attributes of the user's
objects, such as a counter of calls.
"""

from __future__ import annotations

import functools
import random
import re
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.eager import context
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.framework.tensor_util import constant_value_as_shape
from tensorflow.python.ops import gen_random_ops, gen_stateful_random_ops
from tensorflow.python.ops import gen_stateless_random_ops_v2 as samplers

from tfdist.upstream.keras_model import python_random_state
from tfdist.upstream.patching import replaced

#: For each sampler, the numbers that it reserves for one that it returns
#: (`kReservedSamplesPerOutput` of `core/kernels/random_op_cpu.h`, `random_op_gpu.h`): normals that
#: are truncated reject some, and so need a fixed supply for each.
_RESERVED = {
    "stateless_random_uniform_v2": 1,
    "stateless_random_uniform_int_v2": 1,
    "stateless_random_uniform_full_int_v2": 1,
    "stateless_random_normal_v2": 1,
    "stateless_truncated_normal_v2": 256,
}
#: Numbers of 32 bits that one Philox counter gives (`PhiloxRandom::kResultElementCount`).
_PER_COUNTER = 4


class Sampler(NamedTuple):
    """One of TensorFlow's stateless samplers.

    Element `i` of a draw is in group `i // group`, and each group consumes `counters` Philox
    counters, whatever the shape.

    Attributes:
        draw: Called as `draw(shape, key=..., counter=...)`.
        group: Numbers in a group.
        counters: Counters that a group consumes.
        is_uniform: Whether it draws uniform numbers. XLA orders the others otherwise.
    """

    draw: Callable[..., tf.Tensor]
    group: int
    counters: int
    is_uniform: bool


#: Types of the operations that draw.
_DRAWS = re.compile(
    "(Stateless|Stateful)?(Random|Multinomial|Truncated|Parameterized|StandardNormal|Uniform)"
    "|RngReadAndSkip|StatelessShuffle"
)

Call = Callable[[Sampler, Any, tf.Tensor, tf.Tensor], tf.Tensor]


@contextmanager
def samplers_called_by(call: Call) -> Iterator[None]:
    """Routes the stateless samplers through a function while the block runs.

    `tf.random.stateless_uniform`, `stateless_normal`, `stateless_truncated_normal`, dropout, and
    with them `keras.random`, call these operations (`gen_stateless_random_ops_v2`).

    Args:
        call: Called as `call(sampler, shape, key, counter)` in place of `sampler.draw`.
    """
    with ExitStack() as stack:
        for name, reserved in _RESERVED.items():
            routed = functools.partial(
                _routed, getattr(samplers, name), "uniform" in name, reserved, call
            )
            stack.enter_context(replaced(samplers, name, routed))
        yield


def _routed(
    draw: Callable[..., tf.Tensor],
    is_uniform: bool,
    reserved: int,
    call: Call,
    shape: Any,
    key: tf.Tensor,
    counter: tf.Tensor,
    **arguments: Any,
) -> tf.Tensor:
    low = arguments.get("minval")
    dtype = tf.as_dtype(arguments.get("dtype", tf.float32) if low is None else low.dtype)
    group = 2 if dtype.size == 8 else _PER_COUNTER
    counters = max(1, group * reserved // _PER_COUNTER)
    sampler = Sampler(functools.partial(draw, **arguments), group, counters, is_uniform)
    return call(sampler, shape, key, counter)


@contextmanager
def dropout_drawn_when_reached() -> Iterator[None]:
    """Makes the numbers of each `tf.nn.experimental.stateless_dropout` wait for its inputs.

    A draw needs nothing but its seed. Otherwise those of all dropout layers run when a step begins,
    and take memory until their layers run. Enter it before `samplers_called_by`: then only the
    sampler waits, on its device, and no size on the host.
    """
    dropout, sample = tf.nn.experimental.stateless_dropout, samplers.stateless_random_uniform_v2
    inputs: list[list[tf.Tensor]] = [[]]

    def noted(x: Any, *args: Any, **options: Any) -> tf.Tensor:
        inputs.append([x] if isinstance(x, tf.Tensor) else [])  # or an array, or ragged
        try:
            return dropout(x, *args, **options)
        finally:
            inputs.pop()

    def waiting(*args: Any, alg: Any, **options: Any) -> tf.Tensor:
        # Within the block a constant would be made that waits in place of the sampler.
        alg = tf.convert_to_tensor(alg)
        with tf.control_dependencies(inputs[-1]):
            return sample(*args, alg=alg, **options)

    with (
        replaced(tf.nn.experimental, "stateless_dropout", noted),
        replaced(samplers, "stateless_random_uniform_v2", waiting),
    ):
        yield


#: Operations that keep a state, and the functions of `tf.random` that create them.
_STATEFUL = {
    "random_standard_normal": "normal",
    "random_uniform": "uniform",
    "random_uniform_int": "uniform",
    "truncated_normal": "truncated_normal",
    "random_shuffle": "shuffle",
    "multinomial": "categorical",
    "random_gamma": "gamma",
    "random_poisson_v2": "poisson",
}


@contextmanager
def stateful_samplers_noted(note: Callable[[str], None]) -> Iterator[None]:
    """Calls a function for each stateful sampler that is created while the block runs.

    `tf.random` calls these operations (`gen_random_ops`, `gen_stateful_random_ops`).

    Args:
        note: Called with the name of the public function or class, such as `tf.random.normal`.
    """

    def noted(create: Callable[..., Any], name: str) -> Callable[..., Any]:
        def sampler(*args: Any, **options: Any) -> Any:
            note(f"tf.random.{name}")
            return create(*args, **options)

        return sampler

    with ExitStack() as stack:
        for operation, name in _STATEFUL.items():
            create = getattr(gen_random_ops, operation)
            stack.enter_context(replaced(gen_random_ops, operation, noted(create, name)))
        skip = noted(gen_stateful_random_ops.rng_read_and_skip, "Generator")
        stack.enter_context(replaced(gen_stateful_random_ops, "rng_read_and_skip", skip))
        yield


def draws_numbers(kinds: Iterable[str]) -> bool:
    """Returns whether operations of some types draw random numbers."""
    return any(map(_DRAWS.match, kinds))


def static_shape(shape: Any) -> tf.TensorShape:
    """Returns what is known of the values of a shape tensor."""
    return constant_value_as_shape(tf.convert_to_tensor(shape))


def leads_by_rows(shape: tf.Tensor) -> bool | None:
    """Returns whether the first size in a shape tensor is a multiple of a tensor's leading size.

    Follows the operations that made the shape back to the `Shape` of a tensor.

    Returns:
        True or False; None if the operations are not known.
    """
    return _size_in(shape, 0)


def _size_in(vector: tf.Tensor, index: int) -> bool | None:
    """Tells the same of one size in a vector."""
    op = _producer(vector)
    if op is None:
        return None
    if op.type == "Shape":
        return index == 0
    if op.type == "Pack":
        return _size(op.inputs[index])
    if op.type in ("Const", "Cast", "Identity"):
        return False if op.type == "Const" else _size_in(op.inputs[0], index)
    if op.type == "ConcatV2":
        for part in op.inputs[:-1]:
            if part.shape.rank != 1 or part.shape[0] is None:
                return None
            if index < part.shape[0]:
                return _size_in(part, index)
            index -= part.shape[0]
    if op.type in ("StridedSlice", "Slice"):
        begin = tf.get_static_value(op.inputs[1])
        return None if begin is None else _size_in(op.inputs[0], int(begin[0]) + index)
    return None


def _size(scalar: tf.Tensor) -> bool | None:
    """Tells the same of a scalar."""
    op = _producer(scalar)
    if op is None:
        return None
    if op.type == "Const":
        return False
    if op.type == "Size":
        return True
    if op.type in ("Cast", "Identity", "Squeeze", "Reshape"):
        return _size(op.inputs[0])
    if op.type == "StridedSlice":
        begin = tf.get_static_value(op.inputs[1])
        return None if begin is None or begin[0] < 0 else _size_in(op.inputs[0], int(begin[0]))
    if op.type == "Prod":
        return _size_in(op.inputs[0], 0)
    if op.type == "Mul":
        factors = [_size(factor) for factor in op.inputs]
        return True if True in factors else None if None in factors else False
    return None


def _producer(tensor: tf.Tensor) -> Any:
    """Returns the operation that produced a tensor, also if an inner function captured it."""
    while tensor.op.type == "Placeholder":
        graph = tensor.graph
        outer = None
        if isinstance(graph, FuncGraph):
            outer = next((o for o, inner in graph.captures if inner is tensor), None)
        if outer is None or not hasattr(outer, "op"):
            return None
        tensor = outer
    return tensor.op


# ---- global states ----


#: The user's objects whose numbers belong to the state, by ID: some classes are not hashable.
_watched = weakref.WeakValueDictionary[int, Any]()
#: The user's generators of numbers, by ID; most cannot be referenced weakly.
_generators: dict[int, Any] = {}


def watch(objects: Iterable[Any], generators: Iterable[Any]) -> None:
    """Makes numbers that are attributes of objects, and generators, a part of the state."""
    allowed = [one for one in objects if hasattr(one, "__dict__") and type(one).__weakrefoffset__]
    _watched.update({id(one): one for one in allowed})
    _generators.update({id(one): one for one in generators})


def is_generator(value: Any) -> bool:
    """Returns whether a value draws random numbers with NumPy or Python, one after the other."""
    return isinstance(value, (np.random.Generator, np.random.RandomState, random.Random))


def generator_state(generator: Any) -> tuple[Callable[[Any], None], Any]:
    """Returns a function that sets the state of a generator, and its state."""
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return functools.partial(setattr, bits, "state"), bits.state
    if isinstance(generator, random.Random):
        return generator.setstate, generator.getstate()
    return generator.set_state, generator.get_state()


def _generator_states() -> list[tuple[Callable[[Any], None], Any]]:
    of_numpy = (np.random.set_state, np.random.get_state())
    return [of_numpy, *map(generator_state, list(_generators.values()))]


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

    python: Callable[[], None]  # restores it
    generators: list[tuple[Callable[[Any], None], Any]]
    tensorflow: Any
    numbers: list[tuple[Any, str, Any]]

    @classmethod
    def current(cls) -> RandomStates:
        """Returns the states as they are; TensorFlow's are in `Context._rng`, if a seed is set."""
        generator = _operation_seeds()
        operations = None if generator is None else generator.getstate()
        return cls(python_random_state(), _generator_states(), operations, _numbers())

    def restore(self, python: bool = True) -> None:
        """Sets the states to what they were.

        Args:
            python: Whether to set that of `random`, from which Keras draws seeds of new weights,
                and the numbers, which code that creates weights may set.
        """
        if python:
            self.python()
        for set_state, state in self.generators:
            set_state(state)
        if self.tensorflow is not None:
            _operation_seeds().setstate(self.tensorflow)
        for one, name, value in self.numbers if python else ():
            if type(vars(one).get(name)) is type(value):
                vars(one)[name] = value


@contextmanager
def draws_at_trace_warned() -> Iterator[None]:
    """Warns if the block, in which a step is traced, draws from NumPy, or counts in Python."""
    before, numbers = repr(_generator_states()), _numbers()
    yield
    changed = [(one, name) for one, name, value in numbers if vars(one).get(name, value) != value]
    what = [f"changes {type(one).__name__}.{name}" for one, name in changed[:1]]
    if repr(_generator_states()) != before:
        what.append("draws from NumPy or random")
    if what:
        warnings.warn(
            f"A step {' and '.join(what)} while it is traced. The numbers are constants, and not "
            "Keras's if that traces it more often. Use keras.random, and self.add_weight for a "
            "counter.",
            stacklevel=2,
        )


def use_other_seeds() -> None:
    """Gives eager operations seeds of their own: TensorFlow keeps an operation's state by its seed.

    `RandomStates.restore` gives them the former ones again.
    """
    if (generator := _operation_seeds()) is not None:
        generator.seed(-1)


def _operation_seeds() -> Any:
    return getattr(context.context(), "_rng", None)
