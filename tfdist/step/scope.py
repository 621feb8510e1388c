"""Where assignments are kept aside, and what is kept in parts is joined where it is read."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from tfdist.step.joins import Joins
from tfdist.upstream.keras_variables import is_joined_to_read, source_of


class Scope(keras.StatelessScope):
    """A `keras.StatelessScope` that knows which variables were assigned to, a model's or not.

    Attributes:
        updated: They by their ids, in the order in which they first were.
        joins: Of variables that are kept in parts, as far as they were read.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.updated: dict[int, keras.Variable] = {}
        self.joins = Joins()

    def get_current_value(self, variable: keras.Variable) -> Any:
        """Returns what a variable is in here; None: what it is outside."""
        value = self.assigned(variable)
        if value is None and is_joined_to_read(variable):
            return self.joins.read(variable)
        return value

    def assigned(self, variable: keras.Variable) -> Any:
        """Returns what a variable was given in here, or None."""
        return super().get_current_value(variable)

    def whole(self, variable: keras.Variable) -> tf.Tensor | None:
        """Returns what a variable that is kept in parts is together, in its own format, or None."""
        return self.joins.whole(variable) if is_joined_to_read(variable) else None

    def source(self, variable: keras.Variable) -> Any:
        """Returns what gradients of a variable are taken of.

        A layer may have assigned to it: then of the new value. Of what is joined where it is read:
        a list of the tensors that were read.
        """
        new = self.assigned(variable)
        if new is not None:
            return new
        return self.joins.reads(variable) if is_joined_to_read(variable) else source_of(variable)

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Keeps a variable's new value aside."""
        self.updated[id(update[0])] = update[0]
        super().add_update(update)
