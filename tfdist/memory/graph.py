"""The operations of a traced function, with calls and branches inlined, for `liveness`."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import tensorflow as tf

from tfdist.errors import UnsupportedModelError
from tfdist.patches.offload import ON_HOST
from tfdist.upstream.tensorflow_graphs import VIEWS, constant_value, function_graph

#: The host, whose memory is not predicted if the model is on other devices.
HOST = "CPU:0"
#: Operations whose result is in the memory of an input.
_ALIASES = {*VIEWS, "TensorListGetItem", "TensorListPopBack"}
#: Element-wise operations, which overwrite an input that no other operation reads.
_IN_PLACE = {
    "Abs", "Add", "AddN", "AddV2", "BiasAdd", "ClipByValue", "Cos", "Div", "DivNoNan", "Elu",
    "EluGrad", "Erf", "Erfc", "Exp", "Expm1", "FusedBatchNormGradV3", "FusedBatchNormV3", "Inv",
    "LeakyRelu", "LeakyReluGrad", "Log", "Log1p", "LogSoftmax", "Maximum", "Minimum",
    "Mul", "MulNoNan", "Neg",
    "Pow", "RealDiv", "Reciprocal", "Relu", "Relu6", "Relu6Grad", "ReluGrad", "Rsqrt", "RsqrtGrad",
    "Select", "SelectV2", "Selu", "SeluGrad", "Sigmoid", "SigmoidGrad", "Sign", "Sin", "Softmax",
    "SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits",
    "Softplus", "SoftplusGrad", "Sqrt", "SqrtGrad", "Square", "SquaredDifference", "Sub", "Tanh",
    "TanhGrad", "Xdivy", "Xlogy",
}  # fmt: skip
#: Operations that read only the shape of their input. Grappler removes the edge if it is static.
_SHAPE_ONLY = {"OnesLike", "Rank", "Shape", "ShapeN", "Size", "ZerosLike"}
#: Operations whose outputs are not counted: variables are counted separately, constants are small.
_UNCOUNTED = {"Const", "Placeholder", "ReadVariableOp", "VarHandleOp"}
#: Operations that CPUs do not start on another thread.
_CHEAP = {*_ALIASES, *_SHAPE_ONLY, *_UNCOUNTED, "NoOp"}
#: The attribute that names the function of a call, and the branch of a conditional that is planned.
_CALLS = {"PartitionedCall": "f", "StatefulPartitionedCall": "f"}
_BRANCHES = {"If", "StatelessIf"}
_LOOPS = {"While", "StatelessWhile"}
#: Operations that put a tensor into a list, which holds one of each iteration, and the input that
#: is this tensor.
_INTO_LISTS = {"TensorListFromTensor": 0, "TensorListPushBack": 1, "TensorListSetItem": 2}

#: An output of an operation: the operation's name and the output's index.
Output = tuple[str, int]
_NO_VARIABLES: Mapping[Output, str] = MappingProxyType({})


class Operation(NamedTuple):
    """An operation of a graph.

    Attributes:
        kind: Its type, such as `Conv2D`.
        inputs: The outputs that it reads.
        after: Names of its control inputs.
        sizes: Bytes of each of its outputs.
        alias: Whether its outputs share memory with its first inputs, as for `Reshape`.
        in_place: Whether it may overwrite an input of the same size.
        uncounted: Whether its outputs are not counted, because variables are counted separately.
        device: The device that it runs on; empty if there is only one device.
        flops: Multiplications and additions of matrix products and convolutions.
    """

    kind: str
    inputs: Sequence[Output]
    after: Sequence[str]
    sizes: Sequence[int]
    alias: bool = False
    in_place: bool = False
    uncounted: bool = False
    device: str = ""
    flops: int = 0


def loop_body(graph: tf.Graph) -> tf.Graph:
    """Returns the body of the first loop of a graph.

    Raises:
        StopIteration: The graph has no loop.
    """
    loop = next(op for op in graph.get_operations() if op.type in _LOOPS)
    return function_graph(loop, "body")


def variable_devices(graph: tf.Graph) -> dict[Output, str]:
    """Returns the device of each variable that the first loop of a function's graph uses.

    Args:
        graph: The function's graph.

    Returns:
        Devices, by the input of the loop's body for the variable.
    """
    loop = next(op for op in graph.get_operations() if op.type in _LOOPS)
    captured = {_output(inside): outside.device for outside, inside in graph.captures}
    pairs = zip(loop_body(graph).inputs, loop.inputs, strict=True)
    return {
        _output(inside): short_name(captured[_output(given)])
        for inside, given in pairs
        if given.dtype == tf.resource and _output(given) in captured
    }


def operations(
    graph: tf.Graph, variables: Mapping[Output, str] = _NO_VARIABLES
) -> dict[str, Operation]:
    """Returns the operations of a graph and of the functions that it calls, by name.

    Args:
        graph: The graph of a function.
        variables: The result of `variable_devices`. Operations that read or assign a variable run
            on its device.
    """
    inliner = _Inliner(variables)
    inliner.inline(graph, "", {}, "")
    return inliner.found


def short_name(device: str) -> str:
    """Returns a device's name as `CPU:0`, or an empty string for an unspecified device."""
    parsed = tf.DeviceSpec.from_string(device)
    return f"{parsed.device_type}:{parsed.device_index or 0}" if parsed.device_type else ""


def execution_order(operations: Mapping[str, Operation], on_cpu: bool = False) -> list[str]:
    """Returns the names in the order in which TensorFlow's executor starts the operations.

    On a GPU, one thread starts them in the order in which their inputs become available. On a CPU,
    it does so for cheap ones. Of the others, a thread continues with one that becomes available,
    and leaves the rest to the pool of threads, which begins with the newest
    (`ExecutorState::ScheduleReady` in `tensorflow/core/common_runtime/executor.cc`, and
    `Schedule` of Eigen's `NonBlockingThreadPool.h`). Hence gradients of weights come late.

    Args:
        operations: The operations by name.
        on_cpu: Whether they run on a CPU, on one thread.
    """
    readers: dict[str, list[str]] = {name: [] for name in operations}
    missing: dict[str, int] = {}
    for name, operation in operations.items():
        # dict.fromkeys, because the order of a set differs between processes.
        producers = [producer for producer, _ in operation.inputs] + list(operation.after)
        needed = [producer for producer in dict.fromkeys(producers) if producer in operations]
        missing[name] = len(needed)
        for producer in needed:
            readers[producer].append(name)
    roots = [name for name, number in missing.items() if number == 0]

    def is_cheap(name: str) -> bool:
        return not on_cpu or operations[name].kind in _CHEAP

    inline = deque(filter(is_cheap, roots))
    pool = deque(name for name in roots if not is_cheap(name))
    started = []
    while inline or pool:
        started.append((inline or pool).popleft())
        expensive: list[str] = []
        # Read last is what was traced first: a gradient of inputs before that of weights.
        for reader in reversed(readers[started[-1]]) if on_cpu else readers[started[-1]]:
            missing[reader] -= 1
            if missing[reader] == 0:
                (inline if is_cheap(reader) else expensive).append(reader)
        if expensive and not inline:
            inline.append(expensive.pop())
        pool.extendleft(expensive)
    return started


def with_transfers(operations: Mapping[str, Operation]) -> dict[str, Operation]:
    """Adds a copy of each tensor on every other device that reads it.

    TensorFlow partitions a graph (`tensorflow/core/graph/graph_partition.cc`) so that a tensor is
    sent once to each device, as soon as it is available, and freed after its last reader.
    """
    moved: dict[str, Operation] = {}
    for name, operation in operations.items():
        inputs = []
        for read in operation.inputs:
            producer = operations.get(read[0])
            if producer is None or producer.device == operation.device:
                inputs.append(read)
                continue
            copy = f"{read[0]}:{read[1]} on {operation.device}"
            if copy not in moved:
                size = producer.sizes[read[1]]
                moved[copy] = Operation("Receive", [read], [], [size], device=operation.device)
            inputs.append((copy, 0))
        moved[name] = operation._replace(inputs=inputs)
    return moved


def batch_on_devices(operations: Mapping[str, Operation]) -> dict[str, list[int]]:
    """Returns the bytes of each tensor of the batch, by the device that reads it.

    Args:
        operations: The result of `with_transfers`.
    """
    is_batch = {name for name, one in operations.items() if one.kind == "IteratorGetNext"}
    read = {
        (operation.device, name, number)
        for operation in operations.values()
        for name, number in operation.inputs
        if name in is_batch
    }
    sizes: dict[str, list[int]] = {}
    for device, name, number in sorted(read):
        sizes.setdefault(device, []).append(operations[name].sizes[number])
    return sizes


def on_one_device(operations: Mapping[str, Operation]) -> dict[str, Operation]:
    """Returns the operations on one device `""`, and offloaded activations on `HOST`."""
    return {
        name: operation._replace(device=HOST if ON_HOST in name else "")
        for name, operation in operations.items()
    }


class _Inliner:
    """Collects the operations of a graph and of the functions that it calls.

    Args:
        variables: The devices of variables.

    Attributes:
        found: The operations by name.
    """

    def __init__(self, variables: Mapping[Output, str]) -> None:
        self._variables = variables
        self._iterations = 1
        self.found: dict[str, Operation] = {}

    def inline(
        self, graph: tf.Graph, prefix: str, outputs: dict[Output, Output], caller_device: str
    ) -> None:
        """Adds the operations of a graph.

        Args:
            graph: The graph of a function.
            prefix: Prefix of the operations' names, since a function may be called twice.
            outputs: Replacements for outputs that are read in this graph: the arguments of the
                function, and the results of inlined calls.
            caller_device: The device of operations that specify none.
        """
        needed = _needed(graph)
        for op in graph.get_operations():
            if op.name not in needed:
                continue
            reads = map(_output, op.inputs)
            inputs = [outputs.get(read, (prefix + read[0], read[1])) for read in reads]
            after = [prefix + other.name for other in op.control_inputs]
            variable_device = (self._variables[read] for read in inputs if read in self._variables)
            device = next(variable_device, "") or short_name(op.device) or caller_device
            if op.type in _CALLS or op.type in _BRANCHES or op.type in _LOOPS:
                inner = f"{prefix}{op.name}/"
                arguments = inputs[1:] if op.type in _BRANCHES else inputs
                before = self._iterations
                if op.type in _LOOPS:
                    self._iterations *= _iterations(op)
                self._inline_call(op, inner, arguments, outputs, device)
                self._iterations = before
                # Operations that depend on the call depend on everything inside it.
                inside = [name for name in self.found if name.startswith(inner)]
                end = Operation("NoOp", [], [*inside, *after], [], device=device)
                self.found[prefix + op.name] = end
            else:
                self.found[prefix + op.name] = self._operation(op, inputs, after, device)

    def _inline_call(
        self,
        op: tf.Operation,
        inner: str,
        arguments: list[Output],
        outputs: dict[Output, Output],
        device: str,
    ) -> None:
        """Adds the operations of the called function, and maps the call's outputs to them."""
        # For a conditional, the branch that updates weights. The other one skips the step.
        # Of a loop, one iteration, whose tensors are freed before the next one.
        attribute = "body" if op.type in _LOOPS else _CALLS.get(op.type, "then_branch")
        called = function_graph(op, attribute)
        inside = {_output(to): given for to, given in zip(called.inputs, arguments, strict=True)}
        self.inline(called, inner, inside, device)
        for number, result in enumerate(called.outputs):
            key = _output(result)
            outputs[op.name, number] = inside.get(key, (inner + key[0], key[1]))

    def _operation(
        self, op: tf.Operation, inputs: list[Output], after: list[str], device: str
    ) -> Operation:
        static = all(t.shape.is_fully_defined() for t in (*op.inputs, *op.outputs))
        if any(t.dtype == tf.string for t in op.inputs) and not all(map(_has_size, op.outputs)):
            raise UnsupportedModelError(
                f"The sizes of {op.name} depend on the text, so the memory cannot be predicted. "
                "Split texts in the data set: dataset.map(lambda x, y: (text_vectorization(x), y))."
            )
        if op.type in _SHAPE_ONLY and static:
            inputs = []
        sizes = list(map(_size, op.outputs))
        if op.type == "TensorListPopBack":
            inputs = inputs[:1] * 2  # the rest of the list, and the tensor that is taken from it
        elif op.type in _INTO_LISTS:
            times = 1 if op.type == "TensorListFromTensor" else self._iterations
            sizes = [times * _size(op.inputs[_INTO_LISTS[op.type]])]
        elif op.type == "Einsum":
            sizes += _transposed(op)  # like outputs that nothing reads
        return Operation(
            op.type, inputs, after, sizes, op.type in _ALIASES, op.type in _IN_PLACE,
            op.type in _UNCOUNTED, device, self._iterations * _flops(op),
        )  # fmt: skip


def _transposed(op: tf.Operation) -> list[int]:
    """Returns the bytes of the copies of inputs and output that the kernel of Einsum transposes.

    It is a batched matrix product: of each input, the axes that both inputs have come first, then
    those that remain, then those that are summed, or the last two kinds in the opposite order
    (`tensorflow/core/kernels/linalg/einsum_op_impl.h`).
    """
    left, output = op.get_attr("equation").decode().split("->")
    inputs = left.split(",")
    every = list(dict.fromkeys(left))
    sizes: list[int] = []
    result: dict[str, int] = {}

    def kind(axis: str) -> int:
        remains, is_shared = axis in output, all(axis in names for names in inputs)
        return (0 if is_shared else 1) if remains else (2 if is_shared else 3)

    for names, tensor in zip(inputs, op.inputs, strict=True):
        ordered = sorted(names, key=lambda axis: (kind(axis), every.index(axis)))
        swapped = [(0, 2, 1, 3)[kind(axis)] for axis in names]
        if ordered != list(names) and swapped != sorted(swapped):
            sizes.append(_size(tensor))
        result |= {axis: kind(axis) for axis in ordered if axis in output}
    if sorted(result, key=result.__getitem__) != list(output):
        sizes.append(_size(op.outputs[0]))
    return sizes


def _flops(op: tf.Operation) -> int:
    """Returns the operations of a matrix product or convolution of static shapes; otherwise 0."""
    if not all(t.shape.is_fully_defined() for t in (*op.inputs, *op.outputs)):
        return 0
    shapes = [tensor.shape.as_list() for tensor in op.inputs]
    of_output = [math.prod(tensor.shape.as_list()) for tensor in op.outputs[:1]]
    if op.type == "MatMul":
        return 2 * of_output[0] * shapes[0][0 if op.get_attr("transpose_a") else 1]
    if op.type.startswith("BatchMatMul"):
        return 2 * of_output[0] * shapes[0][-2 if op.get_attr("adj_x") else -1]
    if op.type == "Einsum":
        names = op.get_attr("equation").decode().partition("->")[0].split(",")
        sizes = dict(
            zip("".join(names), [size for shape in shapes for size in shape], strict=False)
        )
        return 2 * math.prod(sizes.values())
    if op.type in ("Conv2D", "Conv3D"):
        return 2 * of_output[0] * math.prod(shapes[1][:-1])
    if op.type.startswith(("Conv2DBackprop", "Conv3DBackprop")):
        kernel = op.outputs[0].shape.as_list() if "Filter" in op.type else shapes[1]
        return 2 * math.prod(shapes[2]) * math.prod(kernel[:-1])
    if op.type.startswith("DepthwiseConv2dNative"):
        kernel = op.outputs[0].shape.as_list() if "Filter" in op.type else shapes[1]
        result = shapes[2] if "Backprop" in op.type else op.outputs[0].shape.as_list()
        return 2 * math.prod(result) * math.prod(kernel[:2])
    return 0


def _iterations(loop: tf.Operation) -> int:
    """Returns the largest number of iterations, which is an input of loops; 1 if it is unknown."""
    limits = (constant_value(tensor) for tensor in loop.inputs[1:2])  # Keras: a maximum
    return max(1, *(int(limit) for limit in limits if limit is not None and limit.ndim == 0), 1)


def _needed(graph: tf.Graph) -> set[str]:
    """Returns the names of operations that are returned, have effects, or are read by these.

    TensorFlow prunes all others (`PruneFunctionBody`, declared in
    `tensorflow/core/common_runtime/function_def_utils.h`): mostly gradients of the inputs.
    """
    needed: set[str] = set()
    pending = [tensor.op for tensor in graph.outputs]
    pending += [op for op in graph.get_operations() if op.op_def.is_stateful]
    while pending:
        op = pending.pop()
        if op.name not in needed:
            needed.add(op.name)
            pending += [tensor.op for tensor in op.inputs] + list(op.control_inputs)
    return needed


def _has_size(tensor: tf.Tensor) -> bool:
    return tensor.dtype in (tf.resource, tf.variant) or tensor.shape.is_fully_defined()


def _output(tensor: tf.Tensor) -> Output:
    return tensor.op.name, tensor.value_index


def _size(tensor: tf.Tensor) -> int:
    """Returns the bytes of a tensor; 0 for a handle and for a tensor of unknown shape."""
    if tensor.dtype in (tf.resource, tf.variant, tf.string) or not _has_size(tensor):
        return 0
    return math.prod(tensor.shape.as_list()) * tensor.dtype.size
