"""Eager calls: faster repeated calls of functions, and which variables a call may change."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf
from keras.src import backend
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.eager.polymorphic_function.autograph_util import py_func_from_autograph
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

from tfdist.upstream.patching import all_replaced, replaced

#: Operations that take a variable's handle and only read the variable.
_READERS = frozenset(
    {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VarIsInitializedOp", "VariableShape"}
)
#: TensorFlow's Python code runs every eager operation and function through these.
_ENTRIES = ("TFE_Py_FastPathExecute", "TFE_Py_Execute", "TFE_Py_ExecuteCancelable")


class RepeatedCalls:
    """Calls a `tf.function` of an iterator and a number; a repeated call skips the search for it.

    At each call, a `tf.function` derives the types of all arguments to look up the concrete
    function, which takes as long as a step of a small network. The same iterator always leads to
    the same concrete function, so `ConcreteFunction._call_flat` can call it directly.

    Args:
        function: Its arguments are an iterator and an int32 scalar.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        # For each iterator, the concrete function and the iterator's tensors; None after the first
        # call, which traces if necessary.
        self._known: MutableMapping[Any, tuple[Any, list[tf.Tensor]] | None]
        self._known = weakref.WeakKeyDictionary()
        self.get_concrete_function = function.get_concrete_function

    def __call__(self, iterator: Any, number: tf.Tensor) -> Any:
        is_batch = isinstance(iterator, tuple)  # `batches.Given`
        if is_batch or tf.config.functions_run_eagerly() or not tf.executing_eagerly():
            return self._function(iterator, number)
        if iterator not in self._known:
            result = self._function(iterator, number)
            self._known[iterator] = None
            return result
        call = self._known[iterator]
        if call is None:
            concrete = self._function.get_concrete_function(iterator, number)
            bound = concrete.function_type.bind(iterator, number)
            *tensors, _ = concrete.function_type.unpack_inputs(bound)
            self._known[iterator] = call = concrete, tensors
        concrete, tensors = call
        return concrete._call_flat([*tensors, number], concrete.captured_inputs)


class ChangesOfVariables:
    """Finds the variables that eager code may have changed.

    An operation or function can change only variables that it receives, as such or as handles.
    Every operation that receives one counts as a change, unless it only reads. To see the
    operations, `watching` replaces the entry points of TensorFlow's runtime in `pywrap_tfe`.

    Args:
        variables: The variables. They are kept alive, because others could reuse their ids.
    """

    def __init__(self, variables: Sequence[tf.Variable]) -> None:
        self._alive = [(variable, variable.handle) for variable in variables]
        self._numbers = {id(one): n for n, pair in enumerate(self._alive) for one in pair}
        self._found: set[int] = set()

    def watching(self) -> AbstractContextManager[None]:
        """Notes changes by any thread while the block runs."""
        entries = {name: self._noting(getattr(pywrap_tfe, name)) for name in _ENTRIES}
        return all_replaced(pywrap_tfe, entries)

    def take(self) -> list[int]:
        """Returns the indices of the variables that may have changed since the last call."""
        changed, self._found = sorted(self._found), set()
        return changed

    def _noting(self, execute: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            # The second argument is the name of the operation, or its device before the name.
            if _READERS.isdisjoint(arguments[1:3]):
                self._note(arguments[3:])
            return execute(*arguments)

        return call

    def _note(self, arguments: Sequence[Any]) -> None:
        for argument in arguments:
            for one in argument if isinstance(argument, (list, tuple)) else (argument,):
                number = self._numbers.get(id(one))
                if number is not None:
                    self._found.add(number)


@contextmanager
def functions_inlined() -> Iterator[None]:
    """Calls the user's `tf.function`s as part of the graph in which a replica is traced.

    Assignments inside of them would stay in their own graphs. Replaces `Function.__call__`, and it
    converts Python's control flow with `py_func_from_autograph`, as the function does.
    """
    plain = Function.__call__

    def call(function: Any, *args: Any, **options: Any) -> Any:
        python = function.python_function
        package = (getattr(python, "__module__", None) or "").partition(".")[0]
        is_of_user = package not in ("keras", "tensorflow", "tfdist")
        if not (backend.in_stateless_scope() and is_of_user):
            return plain(function, *args, **options)
        if function._autograph and not tf.executing_eagerly():
            python = py_func_from_autograph(python)
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED):  # disabled in functions of tfdist
            return python(*args, **options)

    with replaced(Function, "__call__", call):
        yield
