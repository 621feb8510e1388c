"""Searches graphs."""

from __future__ import annotations

import tensorflow as tf


def ancestors(operation: tf.Operation) -> set[tf.Operation]:
    """Returns all ops that an op depends on, by data or by control edges."""
    results: set[tf.Operation] = set()
    waiting = [operation]
    while waiting:
        one = waiting.pop()
        new = ({tensor.op for tensor in one.inputs} | set(one.control_inputs)) - results
        waiting += new
        results |= new
    return results
