"""What crosses from device to device: each that reads a tensor of another's gets a copy, once.

As TensorFlow cuts a graph (`tensorflow/core/graph/graph_partition.cc`): what is sent is sent as
soon as it is there, and the copy lives until its last reader is done. Imports no TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping

from tfdist.plan.memory.operations import Operation, Output


def with_transfers(operations: Mapping[str, Operation]) -> dict[str, Operation]:
    """Returns operations each of which reads what is on its own device."""
    found: dict[str, Operation] = {}
    for name, operation in operations.items():
        inputs = []
        for read in operation.inputs:
            maker = operations.get(read[0])
            if maker is None or maker.device == operation.device:
                inputs.append(read)
            else:
                inputs.append(_received(read, maker.sizes[read[1]], operation.device, found))
        found[name] = operation._replace(inputs=inputs)
    return found


def _received(read: Output, size: int, device: str, found: dict[str, Operation]) -> Output:
    name = f"{read[0]}:{read[1]} on {device}"
    if name not in found:
        found[name] = Operation("Receive", [read], [], [size], device=device)
    return name, 0


def on_one(operations: Mapping[str, Operation]) -> dict[str, Operation]:
    """Returns operations that are all on one device, between whose parts nothing is copied."""
    return {name: operation._replace(device="") for name, operation in operations.items()}
