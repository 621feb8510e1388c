"""What a call of a layer finds and makes: values of variables, outputs, losses, assignments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist.upstream.keras_model import logits_of, mask_of, set_logits, set_mask


class Found(dict):
    """The values of variables by their ids, as a `keras.StatelessScope` has them.

    Attributes:
        first: They before anything was assigned.
        read: Those that have been asked for, as they were at first.
    """

    def __init__(self, values: Any) -> None:
        super().__init__(values)
        self.first = dict(values)
        self.read: dict[int, Any] = {}

    def add(self, key: int, value: Any) -> None:
        """Notes a value that was there at first, and has been asked for."""
        self.first[key] = self.read[key] = self[key] = value

    def get(self, key: int, default: Any = None) -> Any:
        """Returns a value, and notes it."""
        value = super().get(key, default)
        if value is not None and value is self.first.get(key):
            self.read[key] = value
        return value


class Made(NamedTuple):
    """What a call made.

    Attributes:
        outputs: As it returned them.
        losses: That layers added.
        updates: New values of variables.
    """

    outputs: Any
    losses: list[tf.Tensor]
    updates: list[tuple[keras.Variable, Any]]

    def differentiable(self) -> list[tf.Tensor]:
        """Returns all that a gradient may come from: logits behind probabilities, too."""
        outputs = [leaf for leaf in keras.tree.flatten(self.outputs) if is_float(leaf)]
        logits = [logits_of(leaf) for leaf in outputs if logits_of(leaf) is not None]
        return [*outputs, *logits, *self.losses]

    def with_tensors(self, tensors: Sequence[tf.Tensor]) -> Made:
        """Returns the same with others for what `differentiable` returns."""
        left = iter(tensors)
        leaves = keras.tree.flatten(self.outputs)
        new = [next(left) if is_float(leaf) else leaf for leaf in leaves]
        for leaf, other in zip(leaves, new, strict=True):
            if is_float(leaf) and logits_of(leaf) is not None:
                set_logits(other, next(left))
            if other is not leaf and mask_of(leaf) is not None:
                set_mask(other, mask_of(leaf))
        return Made(keras.tree.pack_sequence_as(self.outputs, new), list(left), self.updates)


class Aside(keras.StatelessScope):
    """Keeps aside what one call assigns; finds what is joined for the first time in it outside.

    Args:
        found: What it finds.
        outer: The scope around it.
    """

    def __init__(self, found: Found, outer: keras.StatelessScope) -> None:
        super().__init__(collect_losses=outer.collect_losses, initialize_variables=False)
        self.state_mapping, self._outer = found, outer
        self.updates: dict[int, tuple[keras.Variable, Any]] = {}

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        super().add_update(update)
        self.updates[id(update[0])] = (update[0], dict.get(self.state_mapping, id(update[0])))

    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        return self.whole(variable) if value is None else value

    def whole(self, variable: keras.Variable) -> Any:
        """Returns what a variable that is kept in parts is together, as of `Scope`."""
        whole = getattr(self._outer, "whole", lambda _: None)(variable)
        if whole is not None:
            self.state_mapping.add(id(variable), whole)
        return whole


def called(function: Callable[..., Any], args: Any, options: Any, found: Found, outer: Any) -> Made:
    """Calls a function in a scope of its own.

    Args:
        function: Of a layer.
        args: By position.
        options: By name.
        found: What it finds of variables.
        outer: The scope around it, which gets none of its assignments and losses.
    """
    with Aside(found, outer) as scope:
        outputs = function(*args, **options)
    return Made(outputs, list(scope.losses), list(scope.updates.values()))


def is_float(leaf: Any) -> bool:
    """Whether it is a tensor that may have a gradient."""
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating
