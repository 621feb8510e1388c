"""Where assignments are kept aside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from tfdist.upstream.keras_variables import is_in_parts


class Scope(keras.StatelessScope):
    """A `keras.StatelessScope` that knows which variables were assigned to, a model's or not.

    Attributes:
        updated: They by their ids, in the order in which they first were.
        joined: What variables that are kept in parts are together, by the ids of the variables.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.updated: dict[int, keras.Variable] = {}
        self.joined: dict[int, tf.Tensor] = {}

    def join(self, variables: Iterable[keras.Variable]) -> None:
        """Joins those that are kept in parts alone, once for all that read them in here."""
        for variable in variables:
            if is_in_parts(variable) and not variable.division.reads_parts:
                whole = variable.joined()
                self.joined[id(variable)] = self.state_mapping[id(variable)] = whole

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Keeps a variable's new value aside."""
        self.updated[id(update[0])] = update[0]
        super().add_update(update)
