"""What to tell a user when model and data do not go together: Keras's cause, in two lines."""

from __future__ import annotations

import re
from typing import Any

import keras
import tensorflow as tf


def describe(model: keras.Model, element_spec: Any, error: Exception) -> str:
    """Says in two lines how data and model do not fit together."""
    if isinstance(error, tf.errors.OpError):  # a label out of range, a corrupt file, ...
        return f"A batch cannot be computed: {cause(error)}{_of_user(error)}"
    x, y, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    outputs = getattr(model, "output_shape", "of unknown shape")
    return (
        f"The data do not fit the model: x {shapes(x)}, y {shapes(y)}, outputs {outputs}; "
        f"{cause(error)}\n"
        "Check the shapes of the inputs against the model, and of the labels against the loss."
    )


def out_of_memory(error: Exception) -> str:
    """Says in two lines that a training finds no room, and what needs less."""
    return (
        f"out of memory: {cause(error)}\n"
        "Take a smaller --batch-size, --accumulate 2 (the same numbers in two rounds), more "
        "devices, --precision mixed_bfloat16, or, where weights fill it, --strategy sharded."
    )


def shapes(structure: Any) -> Any:
    """Returns the shapes in a structure of tensors or `tf.TensorSpec`s, as tuples."""

    def shape(spec: Any) -> Any:
        if spec is None:
            return None
        return "of unknown rank" if spec.shape.rank is None else tuple(spec.shape)

    return tf.nest.map_structure(shape, structure)


def _of_user(error: Exception) -> str:
    """The traceback of a Python function in a data pipeline, where one failed, in its own lines."""
    _, found, text = str(error).partition("Traceback (most recent call last):")
    frames = re.findall(r'^  File ".*\n(?:    .*\n)+', text.partition("[[{{node")[0], re.MULTILINE)
    of_others = (*tf.__path__, *keras.__path__)
    own = [frame for frame in frames if not any(f'"{path}/' in frame for path in of_others)]
    return "\n" + "".join(own).rstrip() if found and own else ""


def cause(error: Exception) -> str:
    """Returns the line of an error, of Keras or TensorFlow, that says what went wrong."""
    text = re.sub(r"\x1b\[\d+m|Exception encountered when calling .*", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # An error while a graph runs names its cause right before the node.
    node = next((i for i, line in enumerate(lines) if line.startswith("[[{{node")), 1)
    line = lines[max(node, 1) - 1] if lines else type(error).__name__
    if asserted := re.search(r"assertion failed: \[(.*?)\]", line):
        line = asserted[1]  # the data pipeline's own words
    return re.sub(r"^\(\d+\) [A-Z_]+:\s*", "", line)[:300]
