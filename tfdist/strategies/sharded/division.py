"""How the elements of a variable are divided among the devices of one process."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf


def sizes(size: int, num_owners: int) -> list[int]:
    """Returns how many of so many elements each owner has: what is over goes to the first."""
    small, over = divmod(size, num_owners)
    return [small + (owner < over) for owner in range(num_owners)]


class OverDevices:
    """A part a device, all of them in this process; see `VariableOfParts`.

    Args:
        num_devices: At most as many as the variables have elements.
    """

    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices

    def cut(self, flat: tf.Tensor) -> list[tf.Tensor]:
        """Returns all parts of a vector."""
        return tf.split(flat, sizes(flat.shape[0], self._num_devices))

    def join(self, parts: Sequence[tf.Variable]) -> tf.Tensor:
        """Returns the vector, on the device that asks."""
        return tf.concat([part.read_value() for part in parts], 0)

    def add_up(self, numbers: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the numbers: no other process has a part."""
        return numbers
