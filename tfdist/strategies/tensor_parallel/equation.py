"""The axes of an EinsumDense that can be split, from its equation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Axis(NamedTuple):
    """A label of an equation, as an axis of the tensors that have it.

    Attributes:
        of_kernel: Of the kernel.
        of_tensor: Of the outputs, or where it is summed over of the inputs; from behind where an
            ellipsis is before it.
        of_bias: Of the bias; None: it has none there.
    """

    of_kernel: int
    of_tensor: int
    of_bias: int | None


def output_axis(equation: str, bias_axes: str | None, shape: Sequence[int]) -> Axis | None:
    """Returns the longest axis of the kernel that the outputs have and the inputs have not.

    Args:
        equation: Of `keras.layers.EinsumDense`, like `"...x,xy->...y"`.
        bias_axes: Of the same.
        shape: Of the kernel.
    """
    inputs, kernel, outputs = _specs(equation)
    found = [label for label in kernel if label in outputs and label not in inputs]
    if not found:
        return None
    label = max(found, key=lambda label: shape[kernel.index(label)])
    first = min((outputs.replace("...", "").index(axis) for axis in bias_axes or ""), default=0)
    of_bias = None
    if label in (bias_axes or ""):
        of_bias = outputs.replace("...", "").index(label) - first
    return Axis(kernel.index(label), _place(outputs, label), of_bias)


def input_axis(equation: str, shape: Sequence[int]) -> Axis | None:
    """Returns the longest axis of the kernel that is summed over."""
    inputs, kernel, outputs = _specs(equation)
    found = [label for label in kernel if label in inputs and label not in outputs]
    if not found:
        return None
    label = max(found, key=lambda label: shape[kernel.index(label)])
    return Axis(kernel.index(label), _place(inputs, label), None)


def _specs(equation: str) -> tuple[str, str, str]:
    before, outputs = equation.replace(" ", "").split("->")
    inputs, kernel = before.split(",")
    return inputs, kernel, outputs


def _place(spec: str, label: str) -> int:
    place = spec.replace("...", "").index(label)
    return place - len(spec.replace("...", "")) if spec.startswith("...") else place
