"""Functions that TensorFlow traces: what is in them, and how they are optimized."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager.context import FunctionCallOptions, context
from tensorflow.python.eager.polymorphic_function import attributes
from tensorflow.python.framework import auto_control_deps, func_graph, op_def_registry
from tensorflow.python.grappler import tf_optimizer

from tfdist.upstream.patching import replaced

#: Operations that call functions, and have the state that those have.
_CALLS = {"PartitionedCall", "StatefulPartitionedCall", "While", "If", "Case"}


def function_called(graph: tf.Graph, name: str) -> tf.Graph:
    """Returns the graph of a function that an operation calls: `tf.Graph._get_function`.

    Args:
        graph: The operation's.
        name: Of the function.
    """
    return graph._get_function(name).graph


def kinds_of(graph: tf.Graph) -> set[str]:
    """Returns the types of all operations in a graph and in functions it calls."""
    kinds = {operation.type for operation in graph.get_operations()}
    if kinds & _CALLS:
        functions = graph.as_graph_def().library.function
        kinds |= {node.op for function in functions for node in function.node_def}
    return kinds


def with_state(kinds: set[str]) -> set[str]:
    """Returns which of some types of operations have state, but for calls of functions.

    By `op_def_registry.get`.
    """
    known = {kind: op_def_registry.get(kind) for kind in kinds - _CALLS}
    return {kind for kind, definition in known.items() if not definition or definition.is_stateful}


@contextmanager
def functions_kept_whole() -> Iterator[None]:
    """Within it `_nospecialize` is taken as an attribute of a `tf.function`, made and traced there.

    Without it the graph optimizer makes a function of its own of each call, and of all that the
    function calls. `attributes.parse_func_attrs` knows the attributes that it allows from lists.
    """
    with ExitStack() as stack:
        for kind in ("POLYMORPHIC_FUNCTION", "TRACING_COMPILATION", "MONOMORPHIC_FUNCTION"):
            name = f"{kind}_ALLOWLIST"
            wider = getattr(attributes, name) | {"_nospecialize"}
            stack.enter_context(replaced(attributes, name, wider))
        yield


@contextmanager
def outputs_where_computed() -> Iterator[None]:
    """Within it, functions that are traced return each tensor from the device that computes it.

    `AutomaticControlDependencies.mark_as_return` adds an identity to each output that has no device
    of its own. It is placed on the default one, the first GPU, even for tensors of other GPUs.
    """
    plain = auto_control_deps.AutomaticControlDependencies.mark_as_return

    def there(self: Any, output: Any) -> Any:
        tensor = output.values if isinstance(output, tf.IndexedSlices) else output
        with tf.device(tensor.device if isinstance(tensor, tf.Tensor) else None):
            return plain(self, output)

    with replaced(auto_control_deps.AutomaticControlDependencies, "mark_as_return", there):
        yield


def optimized(graph: tf.Graph) -> tf.compat.v1.GraphDef:
    """Returns the graph of a function as TensorFlow's graph optimizer leaves it.

    By `tf_optimizer.OptimizeGraph`, as functions are optimized that are called eagerly. It keeps
    inputs, outputs and what else the function has to run (`FuncGraph.control_outputs`).
    """
    config = config_pb2.ConfigProto()
    config.ParseFromString(context().function_call_options.config_proto_serialized)
    # A second pass takes as long as the first, and takes a fiftieth of what that has left.
    options = config.graph_options.rewrite_options
    options.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    whole = tf.compat.v1.train.export_meta_graph(graph_def=graph.as_graph_def(), graph=graph)
    whole.collection_def.clear()
    kept = [tensor.name for tensor in graph.inputs + graph.outputs]
    kept += [operation.name for operation in graph.control_outputs]
    whole.collection_def["train_op"].node_list.value.extend(kept)
    return tf_optimizer.OptimizeGraph(config, whole, verbose=False)


@contextmanager
def calls_as_traced() -> Iterator[None]:
    """Within it this thread adds calls of functions to graphs that are not optimized once more.

    By `context.function_call_options`, which tell a call how to optimize the function it makes.
    """
    config = config_pb2.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    before = context().function_call_options
    context().function_call_options = FunctionCallOptions(before.executor_type, config)
    try:
        yield
    finally:
        context().function_call_options = before


def graphs_run_by(fn: Callable[[], object]) -> list[Any]:
    """Calls a function, and returns the graphs that TensorFlow ran in it, as it optimised them.

    `context().enable_run_metadata` and its kin: run metadata were public in TensorFlow 1 alone.

    Returns:
        `RunMetadata.FunctionGraphs` messages; their `partition_graphs` are those of the devices.
    """
    context().enable_run_metadata()
    fn()
    graphs = list(context().export_run_metadata().function_graphs)
    context().disable_run_metadata()
    return graphs


@contextmanager
def seconds_of_tracing() -> Iterator[list[float]]:
    """Adds up, in a list of one, the processor's seconds in which functions are traced within.

    By `func_graph.func_graph_from_py_func`, counted where no other one is around it.
    """
    total, around, plain = [0.0], [0], func_graph.func_graph_from_py_func

    def timed(*args: Any, **options: Any) -> Any:
        began = time.process_time()
        around[0] += 1
        try:
            return plain(*args, **options)
        finally:
            around[0] -= 1
            if not around[0]:
                total[0] += time.process_time() - began

    with replaced(func_graph, "func_graph_from_py_func", timed):
        yield total
