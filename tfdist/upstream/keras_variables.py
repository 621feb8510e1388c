"""Private names of Keras's variables, and the variable that is sharded over devices."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, Protocol, runtime_checkable

import keras
import tensorflow as tf
from keras.src.saving import saving_lib
from tensorflow.python.framework.composite_tensor import CompositeTensor
from tensorflow.python.framework.composite_tensor_gradient import CompositeTensorGradient
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

from tfdist.errors import UnsupportedModelError
from tfdist.upstream.keras_model import plain_name, value_in_scope
from tfdist.upstream.patching import all_replaced, replaced


class _GradientOfShards(CompositeTensorGradient):
    """Uses the gradients of the shards as the gradient of the full value."""

    def get_gradient_components(self, value: GradientSource) -> list[tf.Tensor]:
        return [shard.handle for shard in value.shards()]

    def replace_gradient_components(
        self, value: GradientSource, component_grads: Sequence[Any]
    ) -> tf.Tensor | None:
        if all(gradient is None for gradient in component_grads):
            return None
        dense = [
            tf.zeros_like(shard) if gradient is None else tf.convert_to_tensor(gradient)
            for shard, gradient in zip(value.shards(), component_grads, strict=True)
        ]
        return value.join(dense)


class GradientSource(CompositeTensor):
    """The `handle` of a sharded variable, by which a tape differentiates.

    Args:
        shards: Returns the shards; raises if this process does not have all of them.
        join: Returns the full tensor from tensors for the shards.
    """

    __composite_gradient__ = _GradientOfShards()
    dtype = tf.resource

    def __init__(
        self,
        shards: Callable[[], Sequence[tf.Variable]],
        join: Callable[[list[tf.Tensor]], tf.Tensor],
    ) -> None:
        self.shards, self.join = shards, join

    @property
    def _type_spec(self) -> NoReturn:
        raise TypeError("A sharded variable has no single resource that an operation could take.")

    def _shape_invariant_to_type_spec(self, shape: Any) -> NoReturn:
        raise TypeError("A sharded variable has no single resource that a loop could carry.")


#: Why plain Keras cannot train a model with sharded variables, and what to do instead.
ELSEWHERE = (
    "The model's state is divided by the strategy of its Trainer: train with trainer.fit, or save "
    "trainer.model to a .keras file and go on with what keras.models.load_model returns."
)
_local = threading.local()


def share_identity(copy: tf.Variable, variable: tf.Variable) -> None:
    """Copies `_unique_id`, an optimizer's key, so that it treats a copy as the variable."""
    copy._unique_id = variable._unique_id


class Division(Protocol):
    """How the elements of variables are divided into shards.

    Attributes:
        reads_parts: Whether forward passes read single shards, so that gradients are computed per
            shard; otherwise they are computed for the full value.
        has_all: Whether this process has all shards; otherwise other processes have some.
    """

    reads_parts: bool
    has_all: bool

    def cut(self, whole: tf.Tensor | tf.IndexedSlices) -> list[Any]:
        """Returns copies of the shards of this process; variables may keep the tensors."""

    def join(self, parts: Sequence[Any], shape: tf.TensorShape, dtype: tf.DType) -> tf.Tensor:
        """Returns the full tensor, gathered from this process's tensors for its shards."""

    def add_up(self, numbers: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the sums of numbers over the processes that have the other shards."""

    def agreed(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the full value to assign, the same in all processes, from user code's value."""


@runtime_checkable
class JoinsTogether(Protocol):
    """A division whose variables are gathered in fewer exchanges together than one by one."""

    def join_together(self, read: Sequence[tuple[ShardedVariable, tf.DType]]) -> list[tf.Tensor]:
        """Returns the full tensors of variables that are divided in this way, in some dtypes."""


class ShardedGradient(tuple):
    """The gradient of a sharded variable: one tensor for each shard of this process.

    It is a tuple, so that TensorFlow finds its tensors, and supports division, which Keras uses.
    """

    def __truediv__(self, by: Any) -> ShardedGradient:
        return ShardedGradient(piece / by for piece in self)


def pieces(gradient: Any) -> Sequence[Any]:
    """Returns the gradients of the shards; for an unsharded variable, its only gradient."""
    return gradient if isinstance(gradient, ShardedGradient) else [gradient]


def each_piece(function: Callable[..., Any], gradient: Any, *others: Sequence[Any]) -> Any:
    """Applies a function to a gradient, or to each shard of a `ShardedGradient`.

    Args:
        function: Takes a gradient, and one element of each of `others`.
        gradient: A tensor or a `ShardedGradient`.
        *others: Sequences with one element per shard.
    """
    results = [function(*each) for each in zip(pieces(gradient), *others, strict=True)]
    return ShardedGradient(results) if isinstance(gradient, ShardedGradient) else results[0]


def shapes_of_pieces(gradient: Any, variable: keras.Variable) -> list[Any]:
    """Returns the shape of each shard of the gradient of a variable."""
    in_parts = isinstance(gradient, ShardedGradient) and isinstance(variable, ShardedVariable)
    return [piece.shape for piece in (variable.parts if in_parts else [variable])]


class ShardedVariable(keras.Variable):
    """A Keras variable that `divide` has sharded; its identity, name and path stay the same.

    It is read, saved and assigned like any other variable; a read gathers the shards. Inside
    `part(i)` it stands for its i-th shard. An unmodified optimizer that computes each element
    separately runs once per shard and computes only with that shard; so does an unmodified layer.

    Attributes:
        parts: The shards of this process, on their devices, in the shapes that the division gives.
        division: Which process and device has which elements.
    """

    parts: list[tf.Variable]
    division: Division

    @property
    def is_whole(self) -> bool:
        """Whether the process also has a full copy, which reads return and the shards follow."""
        return self._value is not None

    @property
    def value(self) -> Any:
        if (number := _part()) is not None:
            new = value_in_scope(self)  # of a layer that has assigned to its weight
            part = self.parts[number] if new is None else self.cut(new)[number]
            return self._maybe_autocast(part)
        if self.is_whole:
            return super().value
        value = value_in_scope(self)
        if value is None:
            value = self.joined(self.dtype)
            # `GradientTape` uses the `handle` of objects with this attribute, and so returns the
            # variable's gradient for its full value.
            value._should_act_as_resource_variable = True
            value.handle = self._gradient_source()
        return self._maybe_autocast(value)

    @property
    def handle(self) -> Any:
        """What a tape differentiates by."""
        return super().handle if self.is_whole else self._gradient_source()

    def _gradient_source(self) -> GradientSource:
        def shards() -> list[tf.Variable]:
            if not self.division.has_all:
                raise UnsupportedModelError(f"{self.path!r} is not whole. {ELSEWHERE}")
            return self.parts

        shape = super().shape
        return GradientSource(
            shards, lambda pieces: self.division.join(pieces, shape, pieces[0].dtype)
        )

    @property
    def shape(self) -> tf.TensorShape:
        number = _part()
        return super().shape if number is None else self.parts[number].shape

    def joined(self, dtype: Any = None) -> tf.Tensor:
        """Returns all elements, in the variable's shape, gathered from the shards.

        Args:
            dtype: The dtype in which they are sent; None: the variable's own.
        """
        to = self.parts[0].dtype if dtype is None else tf.as_dtype(dtype)
        return self.division.join(self.parts, super().shape, to)

    def cut(self, value: Any) -> list[Any]:
        """Returns the shards of a tensor of the variable's shape, or of a sparse gradient."""
        if isinstance(value, tf.IndexedSlices):
            shape = tf.constant(super().shape.as_list())
            return self.division.cut(tf.IndexedSlices(value.values, value.indices, shape))
        return self.division.cut(tf.convert_to_tensor(value))

    def assign_parts(self, value: Any) -> None:
        """Assigns a tensor of the variable's shape to the shards."""
        for part, piece in zip(self.parts, self.cut(value), strict=True):
            part.assign(tf.cast(piece, part.dtype))

    def _direct_assign(self, value: Any) -> None:
        number = _part()
        if number is not None:
            self.parts[number].assign(tf.cast(value, self._dtype))
            return
        if self.is_whole:
            super()._direct_assign(value)
            self.assign_parts(value)
        else:
            self.assign_parts(self.division.agreed(tf.cast(value, self._dtype)))


def joined_together(read: Sequence[tuple[ShardedVariable, tf.DType]]) -> list[tf.Tensor]:
    """Returns all elements of sharded variables, gathered together.

    Args:
        read: Variables, at least one, each with the dtype in which it is sent.
    """
    division = read[0][0].division
    if isinstance(division, JoinsTogether):
        return division.join_together(read)
    return [variable.joined(dtype) for variable, dtype in read]


def source_of(variable: keras.Variable) -> Any:
    """Returns what to differentiate by for the gradient of a variable.

    This is its value, or a `ShardedGradient` of its shards if forward passes read these.
    """
    if isinstance(variable, ShardedVariable) and variable.division.reads_parts:
        return ShardedGradient(variable.parts)
    return variable.value


@contextmanager
def part(number: int) -> Iterator[None]:
    """Makes each sharded variable stand for its shard of that number, in this thread."""
    _local.number = number
    try:
        yield
    finally:
        _local.number = None


def _part() -> int | None:
    return getattr(_local, "number", None)


def divide(
    variable: keras.Variable, division: Division, devices: Sequence[str], keep_whole: bool
) -> None:
    """Shards a variable in place, by changing its class: all references to it stay valid.

    Call it outside of any graph.

    Args:
        variable: A variable of a floating-point dtype.
        division: The division of its elements.
        devices: The devices of the shards of this process.
        keep_whole: Whether to keep the full copy for reading.
    """
    whole = variable._value
    pieces = division.cut(whole.read_value())
    parts = []
    for device, piece in zip(devices, pieces, strict=True):
        with tf.device(device), tf.name_scope(""):  # while layers are built, their names are open
            name = plain_name(whole)
            parts.append(tf.Variable(piece, trainable=whole.trainable, name=name))
        share_identity(parts[-1], whole)
    variable.__class__ = ShardedVariable
    variable.parts, variable.division = parts, division
    variable._value = whole if keep_whole else None


@contextmanager
def on_creation(function: Callable[[keras.Variable, tf.Variable], None]) -> Iterator[None]:
    """Calls a function with each Keras variable that has got its first value, and its storage.

    The call follows immediately, before the next variable is created.
    """

    def then(method: Callable[..., None]) -> Callable[..., None]:
        def made(variable: keras.Variable, *args: Any, **options: Any) -> None:
            method(variable, *args, **options)
            if variable._value is not None and not isinstance(variable, ShardedVariable):
                function(variable, variable._value)

        return made

    names = "__init__", "_deferred_initialize"
    with all_replaced(keras.Variable, {n: then(getattr(keras.Variable, n)) for n in names}):
        yield


def weights_of_files_on_disk() -> AbstractContextManager[None]:
    """Returns a context in which no `.keras` file that is loaded or saved is whole in memory.

    `saving_lib.is_memory_sufficient`: Keras otherwise reads one at once if it fits there.
    """
    return replaced(saving_lib, "is_memory_sufficient", lambda _: False)


def is_in_parts(variable: keras.Variable) -> bool:
    """Returns whether a variable is stored only in shards."""
    return isinstance(variable, ShardedVariable) and not variable.is_whole


def is_joined_to_read(variable: keras.Variable) -> bool:
    """Returns whether a variable is stored only in shards, which a forward pass has to gather."""
    return is_in_parts(variable) and not variable.division.reads_parts


def is_elsewhere(variable: keras.Variable) -> bool:
    """Returns whether a variable is stored only in shards, some of them in other processes."""
    return is_in_parts(variable) and not variable.division.has_all


def is_divided_over_processes(variable: keras.Variable) -> bool:
    """Returns whether other processes have some shards; this one may also have the full value."""
    return isinstance(variable, ShardedVariable) and not variable.division.has_all


def values_of(variable: keras.Variable) -> list[tf.Variable]:
    """Returns what this process stores of a variable: its value, or else its shards."""
    return list(variable.parts) if is_in_parts(variable) else [variable.value]


@contextmanager
def plain_variables(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Makes copies of the full values stand for sharded variables within the block.

    Plain Keras can then compute with them, and what it assigns is lost after the block. All
    processes that have shards must enter it together.
    """
    sharded = {id(v): v for v in variables if isinstance(v, ShardedVariable)}.values()
    values = [(variable, variable._value) for variable in sharded]
    for variable in sharded:
        copy = tf.Variable(variable.joined(), trainable=variable.trainable, name=variable.name)
        share_identity(copy, variable.parts[0])
        variable.__class__, variable._value = keras.Variable, copy
    try:
        yield
    finally:
        for variable, value in values:
            variable.__class__, variable._value = ShardedVariable, value


def unite(variable: ShardedVariable, device: str) -> None:
    """Turns a sharded variable into a plain one again, on a device."""
    if not variable.is_whole:
        with tf.device(device):
            variable._value = tf.Variable(
                variable.joined(), trainable=variable.trainable, name=plain_name(variable.parts[0])
            )
        share_identity(variable._value, variable.parts[0])
    variable.__class__ = keras.Variable
    del variable.parts, variable.division


#: Smaller variables get values: counters, seeds and learning rates, which Python reads.
_SMALL = 4096


def weights_as_shapes() -> AbstractContextManager[None]:
    """In the block, large variables have a shape and a dtype, but neither values nor memory.

    Functions that read them can be traced, and not run.
    """

    def create(next_creator: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        initial = options["initial_value"]
        if not callable(initial):
            return next_creator(**options)
        with tf.Graph().as_default():
            value = tf.convert_to_tensor(initial())
        if (value.shape.num_elements() or 0) * value.dtype.size < _SMALL:
            return next_creator(**options)
        kept = {name: options.get(name) for name in ("name", "trainable", "aggregation")}
        return UninitializedVariable(shape=value.shape, dtype=value.dtype, **kept)

    return tf.variable_creator_scope(create)
