"""What a device holds, in parts."""

from __future__ import annotations

from typing import NamedTuple


class Held(NamedTuple):
    """What one device holds at its fullest, in bytes.

    Attributes:
        role: Which device this is.
        weights: Variables of the model, or a copy of them.
        gradients: Of all trainable variables, once for each copy that is held.
        optimizer: What it keeps for each of them.
        activations: All else: tensors of the forward and backward pass, room of the allocator's
            that is given away with them, less what gradients they were already freed for.
    """

    role: str
    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations
