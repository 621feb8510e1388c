"""Private names of Keras's functional models: which operations they call, and when."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
from keras.src.models.functional import Functional

from tfdist.upstream.patching import replaced


def operations_called_by(model: keras.Model) -> list[keras.Operation] | None:
    """Returns what a model calls, in order; a layer that is called twice is there twice.

    Of `Functional._nodes_by_depth`, in whose order a model calls its operations; a `Sequential` has
    one in `_functional`. There is no public way to ask for calls, only for layers.

    Returns:
        None where it is not Keras that calls them, or nothing is known yet.
    """
    graph = model
    if isinstance(model, keras.Sequential):
        if type(model).call is not keras.Sequential.call:
            return None
        graph = model._functional
    if not isinstance(graph, Functional) or type(graph).call is not Functional.call:
        return None
    by_depth = graph._nodes_by_depth
    nodes = [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth]]
    return [node.operation for node in nodes if node.operation is not None and not node.is_input]


@contextmanager
def operations_called_through(function: Callable[..., Any]) -> Iterator[None]:
    """Calls `function(call, operation, *args, **kwargs)` for each call of an operation or layer.

    Args:
        function: Has to call `call(operation, *args, **kwargs)`, Keras's own method, sooner or
            later; for a layer it is called twice, by `keras.Operation` and by `keras.Layer`.
    """
    with ExitStack() as stack:
        for owner in (keras.Operation, keras.layers.Layer):
            through = functools.partialmethod(_through, function, owner.__call__)
            stack.enter_context(replaced(owner, "__call__", through))
        yield


def _through(
    operation: Any, function: Callable[..., Any], call: Any, *args: Any, **kwargs: Any
) -> Any:
    return function(call, operation, *args, **kwargs)
