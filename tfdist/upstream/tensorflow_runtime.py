"""TensorFlow's runtime: seed, devices, start-up, collectives over workers, and kernels of GPUs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import values
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended
from tensorflow.python.eager.context import context, coordination_config_pb2, global_seed
from tensorflow.python.framework import config as framework_config
from tensorflow.python.framework import kernels, op_def_registry, random_seed
from tensorflow.python.ops import (
    collective_ops,
    gen_nn_ops,
    math_ops,
    resource_variable_ops,
    stateful_random_ops,
    summary_ops_v2,
)

from tfdist.upstream.patching import all_replaced, replaced


def seed_of_process() -> int | None:
    """Returns the seed that was set, if one was: `context.global_seed`.

    `tf.random.set_seed` has no getter.
    """
    return global_seed()


def random_state() -> Callable[[], None]:
    """Returns a function that restores the state of `tf.random` to what it is now.

    That is `context._rng`, of which each eager operation takes a seed, and the global generator.
    """
    current = context()
    random = getattr(current, "_rng", None)  # None before `tf.random.set_seed`
    state = random and random.getstate()
    generator = stateful_random_ops.global_generator
    value = None if generator is None else generator.state.read_value()

    def restore() -> None:
        if random is not None and random.getstate() != state:
            random.setstate(state)
            current.clear_kernel_cache()  # the kernels of these seeds continue their sequences
        if generator is not None:
            generator.state.assign(value)

    return restore


def computes_in_one_order() -> bool:
    """Returns whether operations have to be deterministic: `config.is_op_determinism_enabled`.

    `tf.config.experimental.enable_op_determinism` has no getter.
    """
    return bool(framework_config.is_op_determinism_enabled())


def summaries_of_this_thread() -> Callable[[], AbstractContextManager[None]]:
    """Returns a context for another thread, in which it uses this thread's summary writer.

    `_summary_state` holds the default writer, the step, and whether to record, for each thread.
    """
    state = summary_ops_v2._summary_state
    names = ("writer", "step", "is_recording")
    saved = {name: getattr(state, name) for name in names}

    @contextmanager
    def as_in_that_thread() -> Iterator[None]:
        before = {name: getattr(state, name) for name in names}
        vars(state).update(saved)
        try:
            yield
        finally:
            vars(state).update(before)

    return as_in_that_thread


def has_started() -> bool:
    """Returns whether this process can no longer join others: `context()._initialized`.

    There is no public way to ask that does not start TensorFlow.
    """
    return bool(context()._initialized)


def has_listed_devices() -> bool:
    """Returns whether TensorFlow has listed devices, when it reads its flags for XLA, or started.

    `context()._physical_devices`. Asking in public would list them.
    """
    return context()._physical_devices is not None or has_started()


def before_start(function: Callable[[], object]) -> None:
    """Calls a function before TensorFlow starts, unless `start_without_hook` is called first.

    `context().ensure_initialized`, which all operations call: there is no public hook.
    """

    def ensure_initialized() -> None:
        start_without_hook()
        function()
        context().ensure_initialized()

    if not has_started():
        vars(context())["ensure_initialized"] = ensure_initialized


def start_without_hook() -> None:
    """Removes the function of `before_start`."""
    vars(context()).pop("ensure_initialized", None)


@contextmanager
def draws_undone() -> Iterator[None]:
    """Begins sequences of `tf.random` anew after the block, if it created an operation with a seed.

    Their state is in the operation's kernel, also within a function.
    """
    plain, seeds = random_seed.get_seed, []

    def get_seed(op_seed: int | None) -> tuple[Any, Any]:
        seeds.append(op_seed)
        return plain(op_seed)

    with replaced(random_seed, "get_seed", get_seed):
        yield
    if any(seed is not None for seed in seeds):
        context().clear_kernel_cache()


@contextmanager
def op_seeds_by(function: Callable[[int], int]) -> Iterator[None]:
    """Gives operations of `tf.random` that are created within the block the seed `function(seed)`.

    Replaces `random_seed.get_seed`, which returns the same seed on each worker.
    """
    plain = random_seed.get_seed

    def get_seed(op_seed: int | None) -> tuple[Any, Any]:
        first, second = plain(op_seed)
        return (first, second) if first is None else (function(first), second)

    with replaced(random_seed, "get_seed", get_seed):
        yield


@contextmanager
def variables_assigned_by(function: Callable[..., Any]) -> Iterator[None]:
    """Calls a function in place of every assignment to a `tf.Variable`: there is no public hook.

    Replaces methods of `resource_variable_ops.ResourceVariable`, and of
    `values.DistributedVariable` for several devices.
    """
    methods = dict.fromkeys(("assign", "assign_add", "assign_sub"), function)
    with (
        all_replaced(resource_variable_ops.ResourceVariable, methods),
        all_replaced(values.DistributedVariable, methods),
    ):
        yield


@contextmanager
def assignments_checked_by(check: Callable[[tf.Variable], None]) -> Iterator[None]:
    """Calls a function with each `tf.Variable` before something is assigned to it."""
    owner = resource_variable_ops.ResourceVariable

    def checked(plain: Callable[..., Any]) -> Callable[..., Any]:
        def assign(variable: tf.Variable, *args: Any, **options: Any) -> Any:
            check(variable)
            return plain(variable, *args, **options)

        return assign

    names = ("assign", "assign_add", "assign_sub")
    with all_replaced(owner, {name: checked(getattr(owner, name)) for name in names}):
        yield


def current_device() -> str:
    """Returns the device that the enclosing scopes select: `context().device_name`.

    The public `tf.device` can only set it.
    """
    return context().device_name or ""


def set_timeouts(
    tasks: Mapping[str, Sequence[str]], leader: str, join_seconds: int, silence_seconds: int
) -> None:
    """Sets how long workers wait: `context().configure_coordination_service`, of a private class.

    By default TensorFlow waits an hour for a worker to connect, and its public strategies have no
    option for it.

    Args:
        tasks: Addresses by the name of the job.
        leader: Job of the task that runs the coordination service.
        join_seconds: Time for all workers to connect.
        silence_seconds: Time without a heartbeat after which a worker counts as lost; also the time
            for all workers to shut down.
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
    """Makes a `MultiWorkerMirroredStrategy` that is created within the block use these devices.

    `CollectiveAllReduceExtended._initialize_local_devices`, which takes all GPUs, or one CPU.
    """

    def ours(_: Any, resolver: Any, worker_device: str) -> tuple[tuple[str, ...], str]:
        del resolver
        kind = devices[0].partition(":")[0]
        return tuple(f"{worker_device}/device:{name}" for name in devices), kind

    with replaced(CollectiveAllReduceExtended, "_initialize_local_devices", ours):
        yield


def ordering_tokens(strategy: tf.distribute.Strategy) -> list[tf.Variable]:
    """Returns the variables that order the collectives of each device of this process.

    They are `CollectiveReplicaLauncher._ordering_token`, one per device. Collectives that use the
    same token run in the order in which they were traced. NCCL needs one order for all
    collectives of a device (`collective_communicator.cc`), so other collectives on these devices
    have to use the same tokens as the strategy's own.
    """
    launchers = strategy.extended._cross_device_ops._launchers
    return [launcher._ordering_token for launcher in launchers]


#: Collectives whose keys the caller chooses.
_EXCHANGES = {"sum": collective_ops.all_reduce_v2, "concatenate": collective_ops.all_gather_v2}


def exchanged_by_key(
    operation: str,
    tensor: tf.Tensor,
    group_size: int,
    keys: tuple[tf.Tensor, tf.Tensor],
    communication: str,
    token: tf.Variable,
) -> tf.Tensor:
    """Sums tensors of replicas, or concatenates them: `all_reduce_v2`, `all_gather_v2`.

    `tf.distribute` assigns the keys of a collective when it is traced, which fixes its size.

    Args:
        operation: `"sum"`, or `"concatenate"` along axis 0.
        tensor: The tensor; it has the same size and dtype wherever the keys are the same.
        group_size: Number of replicas in the exchange.
        keys: Keys of the group and of the operation within it, int32 scalars.
        communication: `"ring"` or `"nccl"`.
        token: Operations that use the same token run in the order in which they were traced.
    """
    group_key, instance_key = keys
    return _EXCHANGES[operation](
        tensor,
        group_size=group_size,
        group_key=group_key,
        instance_key=instance_key,
        communication_hint=communication,
        ordering_token=token.handle,
    )


# ---- kernels ----
# The wheel registers its CUDA kernels when it is loaded, with or without a GPU or a driver.


#: Types of devices whose kernels serve a GPU. Kernels for any device are registered as "DEFAULT".
_ON_GPUS = ("GPU", "DEFAULT")

#: Names and dtypes of the attributes of an operation.
Dtypes = tuple[tuple[str, str], ...]


def dtypes_of(node: Any) -> Dtypes:
    """Returns the attributes of a node that are dtypes; those of a list share a name."""
    dtypes = []
    for name, attribute in sorted(node.attr.items()):
        kind = attribute.WhichOneof("value")
        types = {"type": [attribute.type], "list": attribute.list.type}.get(kind, [])
        dtypes += [(name, tf.as_dtype(one).name) for one in types]
    return tuple(dtypes)


@functools.cache
def gpu_kernel(kind: str, dtypes: Dtypes) -> Any:
    """Returns a kernel for GPUs that accepts all dtypes of an operation, or None."""
    accepting = (
        kernel
        for kernel in kernels.get_registered_kernels_for_op(kind).kernel
        if kernel.device_type in _ON_GPUS
        and all(
            tf.as_dtype(dtype).as_datatype_enum in constraint.allowed_values.list.type
            for constraint in kernel.constraint
            for name, dtype in dtypes
            if name == constraint.name
        )
    )
    return next(accepting, None)


def inputs_in_host_memory(operation: tf.Operation) -> list[bool]:
    """Returns which inputs a GPU takes from host memory; all of them if it has no kernel."""
    return _in_host_memory(operation, "input_arg")


def outputs_in_host_memory(operation: tf.Operation) -> list[bool]:
    """Returns which outputs a GPU leaves in host memory; all of them if it has no kernel."""
    return _in_host_memory(operation, "output_arg")


def _in_host_memory(operation: tf.Operation, side: str) -> list[bool]:
    node, names = operation.node_def, []
    for argument in getattr(op_def_registry.get(operation.type), side):
        types = len(node.attr[argument.type_list_attr].list.type) if argument.type_list_attr else 1
        times = node.attr[argument.number_attr].i if argument.number_attr else types
        names += [argument.name] * times
    kernel = gpu_kernel(operation.type, dtypes_of(node))
    return [kernel is None or name in kernel.host_memory_arg for name in names]


@contextmanager
def sizes_of_reductions_on(device: str) -> Iterator[None]:
    """Computes the sizes in the gradients of reductions on a device: `math_ops.reduced_shape`.

    TensorFlow colocates them with the shape of the reduction's input, and some of them run on the
    GPU then. No device scope changes that.
    """
    plain = math_ops.reduced_shape

    def reduced_shape(input_shape: tf.Tensor, axes: tf.Tensor) -> tf.Tensor:
        if tf.executing_eagerly():
            return plain(input_shape, axes)
        graph = tf.compat.v1.get_default_graph()
        with graph.colocate_with(None, ignore_existing=True), tf.device(device):
            return plain(input_shape, axes)

    with replaced(math_ops, "reduced_shape", reduced_shape):
        yield


@contextmanager
def gradients_of_biases_as_products() -> Iterator[None]:
    """Computes the gradients of biases in half precision as products with ones.

    In TensorFlow's kernel for GPUs, `BiasAddGrad`, blocks of threads add to the same half-precision
    numbers by compare-and-swap. In a transformer on an H200, a call took 0.35 ms, and other sums
    over rows 0.03 ms. A product reads the half-precision numbers once and accumulates in float32,
    where a sum in float32 would first write a copy of twice the size.
    """
    plain = gen_nn_ops.bias_add_grad

    def bias_add_grad(
        out_backprop: tf.Tensor, data_format: str | bytes = "NHWC", name: str | None = None
    ) -> tf.Tensor:
        size, dtype = out_backprop.shape[-1:], out_backprop.dtype
        is_last = tf.compat.as_str(data_format) == "NHWC"
        if dtype.size != 2 or not is_last or not size.is_fully_defined():
            return plain(out_backprop, data_format, name)
        rows = tf.reshape(out_backprop, [-1, *size])
        ones = tf.ones([1, tf.shape(rows)[0]], dtype)
        return tf.reshape(tf.linalg.matmul(ones, rows), size, name=name)

    with replaced(gen_nn_ops, "bias_add_grad", bias_add_grad):
        yield
