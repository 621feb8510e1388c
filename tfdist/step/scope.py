"""Where assignments are kept aside."""

from __future__ import annotations

from typing import Any

import keras


class Scope(keras.StatelessScope):
    """A `keras.StatelessScope` that knows which variables were assigned to, a model's or not.

    Attributes:
        updated: They by their ids, in the order in which they first were.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.updated: dict[int, keras.Variable] = {}

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        """Keeps a variable's new value aside."""
        self.updated[id(update[0])] = update[0]
        super().add_update(update)
