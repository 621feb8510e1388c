"""Private names of TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.distribute import values
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.eager.context import (
    FunctionCallOptions,
    context,
    coordination_config_pb2,
    global_seed,
)
from tensorflow.python.eager.polymorphic_function import attributes
from tensorflow.python.framework import config as framework_config
from tensorflow.python.framework import func_graph, op_def_registry, random_seed
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.ops import collective_ops, resource_variable_ops

from tfdist.upstream.patching import replaced

#: `tf.data.experimental.ExternalStatePolicy.FAIL`, as operations take it.
_FAIL_IF_STATEFUL = 2

#: Operations that call functions, and have the state that those have.
_CALLS = {"PartitionedCall", "StatefulPartitionedCall", "While", "If", "Case"}


def has_global_seed() -> bool:
    """Tells whether a seed was set: `context.global_seed`; `tf.random.set_seed` has no getter."""
    return global_seed() is not None


def is_reshuffled(dataset: tf.data.Dataset) -> bool:
    """Tells whether each iteration has an order of its own, so that a look would change the next.

    `DatasetV2._inputs`, and `_reshuffle_each_iteration` of those that `shuffle` makes.
    """
    again = getattr(dataset, "_reshuffle_each_iteration", False)
    return again is not False or any(map(is_reshuffled, dataset._inputs()))


def seed_of_process() -> int | None:
    """Returns the seed that was set, if one was: `context.global_seed`."""
    return global_seed()


def computes_in_one_order() -> bool:
    """Tells whether operations have to be deterministic: `config.is_op_determinism_enabled`.

    `tf.config.experimental.enable_op_determinism` has no getter.
    """
    return bool(framework_config.is_op_determinism_enabled())


def iterator_state(iterator: Any) -> tf.Tensor | None:
    """Returns the state of an iterator of `tf.data`, buffers included, or None where it has none.

    Its `_iterator_resource`: `tf.train.Checkpoint` would write a file at once, and leaves out of
    its state what draws numbers or calls Python without a word.

    Returns:
        For `set_iterator_state`; of dtype variant.
    """
    if (resource := getattr(iterator, "_iterator_resource", None)) is None:
        return None  # of several devices
    try:
        return tf.raw_ops.SerializeIterator(
            resource_handle=resource, external_state_policy=_FAIL_IF_STATEFUL
        )
    except tf.errors.OpError:
        return None


def set_iterator_state(iterator: Any, state: tf.Tensor) -> None:
    """Gives an iterator the state of another one over the same data set.

    Raises:
        tf.errors.OpError: They do not go together.
    """
    tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=state)


def has_iterator_state(dataset: tf.data.Dataset) -> bool:
    """Tells whether iterators over a data set have a state that can be saved."""
    try:
        tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=_FAIL_IF_STATEFUL,
        )
    except tf.errors.OpError:
        return False
    return True


def has_started() -> bool:
    """Tells whether this process can no longer join others: `context()._initialized`.

    There is no public way to ask that does not start TensorFlow.
    """
    return bool(context()._initialized)


def all_reduce_by_key(
    tensor: tf.Tensor,
    group_size: int,
    keys: tuple[tf.Tensor, tf.Tensor],
    communication: str,
    token: tf.Variable,
) -> tf.Tensor:
    """Sums a tensor over replicas, by keys of one's own: `collective_ops.all_reduce_v2`.

    `tf.distribute` numbers an operation when it is traced, and so has one size for it.

    Args:
        tensor: Of the same size and dtype wherever the keys are the same.
        group_size: How many replicas bring a tensor.
        keys: Of the group and of the operation within it, int32 scalars.
        communication: `"ring"` or `"nccl"`.
        token: Operations on one of these run in the order in which they were traced.
    """
    group_key, instance_key = keys
    return collective_ops.all_reduce_v2(
        tensor,
        group_size=group_size,
        group_key=group_key,
        instance_key=instance_key,
        communication_hint=communication,
        ordering_token=token.handle,
    )


def bound_waiting(
    tasks: Mapping[str, Sequence[str]], leader: str, join_seconds: int, silence_seconds: int
) -> None:
    """Sets how long workers wait: `context().configure_coordination_service`, of a private class.

    By itself TensorFlow waits an hour for one to come, and its public strategies take no number.

    Args:
        tasks: Addresses by the name of the job.
        leader: The job of the task that keeps the list of those who have come.
        join_seconds: For all to come.
        silence_seconds: Without a sign of life, after which one is given up; and for all to end.
    """
    jobs = [
        coordination_config_pb2.CoordinatedJob(name=name, num_tasks=len(addresses))
        for name, addresses in tasks.items()
    ]
    context().configure_coordination_service(
        service_type="standalone",
        service_leader=f"/job:{leader}/replica:0/task:0",
        cluster_register_timeout_in_ms=join_seconds * 1000,
        heartbeat_timeout_in_ms=silence_seconds * 1000,
        shutdown_barrier_timeout_in_ms=silence_seconds * 1000,
        coordinated_jobs=jobs,
    )


@contextmanager
def workers_on(devices: Sequence[str]) -> Iterator[None]:
    """Lets a `MultiWorkerMirroredStrategy` that is made within take the devices given.

    `CollectiveAllReduceExtended._initialize_local_devices`, which takes all GPUs, or one CPU.

    Args:
        devices: Names such as `"GPU:1"`, of one kind.
    """

    def ours(_: Any, resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        del resolver
        kind = devices[0].partition(":")[0]
        return tuple(f"{worker_device}/device:{name}" for name in devices), kind

    with replaced(CollectiveAllReduceExtended, "_initialize_local_devices", ours):
        yield


@contextmanager
def op_seeds_by(function: Callable[[int], int]) -> Iterator[None]:
    """Lets operations of `tf.random` that are made within have the seed `function(seed)`.

    `random_seed.get_seed`, which gives an operation the same on each worker.
    """
    plain = random_seed.get_seed

    def get_seed(op_seed: int | None) -> tuple[Any, Any]:
        first, second = plain(op_seed)
        return (first, second) if first is None else (function(first), second)

    with replaced(random_seed, "get_seed", get_seed):
        yield


@contextmanager
def variables_assigned_by(function: Callable[..., Any]) -> Iterator[None]:
    """Calls a function where a `tf.Variable` would be assigned to: there is no public hook.

    Of `resource_variable_ops.ResourceVariable`, and `values.DistributedVariable` over several
    devices.
    """
    with ExitStack() as stack:
        for owner in (resource_variable_ops.ResourceVariable, values.DistributedVariable):
            for name in ("assign", "assign_add", "assign_sub"):
                stack.enter_context(replaced(owner, name, function))
        yield


def current_device() -> str:
    """Returns the name of the device of the scopes around the call: `context().device_name`.

    The public `tf.device` sets it alone.
    """
    return context().device_name or ""


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


def optimized(graph: tf.Graph) -> tf.compat.v1.GraphDef:
    """Returns the graph of a function as TensorFlow's graph optimizer leaves it.

    By `tf_optimizer.OptimizeGraph`, as functions are optimized that are called eagerly. It keeps
    inputs, outputs and what else the function has to run (`FuncGraph.control_outputs`).
    """
    config = config_pb2.ConfigProto()
    config.ParseFromString(context().function_call_options.config_proto_serialized)
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
