"""Where the variables of a model are, and how the replicas' values of them stay equal.

A layout of variables is a subclass of `VariableLayout`, which is the layout of `one_device`. The
others are `MirroredVariables`, `SharedVariables`, and those of strategies that split a model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfdist.cluster.remote import connection
from tfdist.groups import agreement
from tfdist.groups.base import ProcessGroup
from tfdist.upstream.keras_layers import kernels_read_outside_of_xla


class VariableLayout:
    """One set of variables in each process, on its first device.

    Attributes:
        are_local: Whether each replica reads its variables on its own device, which XLA requires.
        writes_alone: Whether nothing else changes the variables between a step's reads and its
            writes.

    Args:
        devices: Names of the devices of this process.
        group: The processes that train together.
    """

    are_local = True
    writes_alone = True

    def __init__(self, devices: Sequence[str], group: ProcessGroup) -> None:
        self._devices, self._group = list(devices), group

    def describe(self) -> dict[str, str]:
        """Returns rows for the start-up table."""
        return {}

    # ---- creation ----

    def scope(self) -> AbstractContextManager[Any]:
        """Returns a context in which model and optimizer are created; it places their variables."""
        return tf.device(self._devices[0])

    def owns(self, variable: tf.Variable) -> bool:
        """Returns whether a variable is placed as the scope would place it."""
        return not isinstance(variable, tf.distribute.DistributedValues)

    def patched_keras(self) -> AbstractContextManager[None]:
        """Returns a context for each call of a trainer's methods.

        In it, parts of Keras that expect all variables on one device work with this layout's.
        """
        return nullcontext() if self.are_local else kernels_read_outside_of_xla()

    def making_weights(self) -> AbstractContextManager[None]:
        """Returns a context in which a model and its weights are created, inside `scope`."""
        return nullcontext()

    def unite_new(self) -> None:
        """Makes weights whole until `prepare`, if `making_weights` has divided them."""

    def place(self, model: Any) -> None:
        """Decides on which device each part of a model is, and moves its weights there.

        Called when the model has been created, and again when it has been built.

        Raises:
            UnsupportedModelError: The strategy cannot compute the model.
        """
        del model

    def making_state(self, model: keras.Model) -> AbstractContextManager[None]:
        """Returns a context in which a model's optimizer creates its state, inside `scope`.

        The weights exist, but do not have the values of rank 0 yet.
        """
        del model
        return nullcontext()

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        """Gives the state of all processes the values of rank 0, before the first step.

        Raises:
            ClusterError: The processes built different models.
        """
        if self._group.size > 1:
            states = [v for optimizer in optimizers for v in optimizer.variables]
            agreement.broadcast_and_check(self._group, model.variables + states)

    def collective_section(self) -> AbstractContextManager[None]:
        """Returns a context in which all processes are known to run the same code."""
        return nullcontext()

    # ---- between steps ----

    def sync_copies(self, variables: Sequence[keras.Variable]) -> None:
        """Copies the values of variables to the mirrored variables of the other replicas, if any.

        Called before a step if user code may have changed the variables.
        """
        del variables

    def frequent_sync(self, variables: Sequence[keras.Variable]) -> ReplicaSync:
        """Returns a faster alternative to `sync_copies` for repeated calls."""
        return FullReplicaSync(functools.partial(self.sync_copies, variables))

    # ---- in a step ----

    def place_of(self, variable: keras.Variable, index: int) -> str:
        """Returns the device on which a replica of this process has a variable's gradient."""
        del variable
        return self._devices[index]

    def check_table(self, table: keras.Variable) -> None:
        """Checks that a variable with sparse gradients can be trained.

        Raises:
            UnsupportedModelError: It cannot.
        """
        del table

    def reduce_sharded(
        self, gradients: Mapping[int, Any], variables: Sequence[keras.Variable]
    ) -> dict[int, Any]:
        """Sums, over all replicas, the gradients that are needed in shards.

        Called on a replica, before `Strategy.all_reduce` sums all others.

        Args:
            gradients: This replica's gradients, by index; the same indices on every replica.
            variables: Their variables, by the same index.

        Returns:
            Sums by index: tensors, or a `ShardedGradient` for a sharded variable.
        """
        del gradients, variables
        return {}

    def any_of_parts(self, flag: tf.Tensor) -> tf.Tensor:
        """Returns whether a flag is true in any process, if each looked at its shards only.

        Called inside `Strategy.update`.
        """
        return flag

    def after_update(self, variables: Sequence[keras.Variable]) -> None:
        """Completes a step's changes to variables; called inside `Strategy.update`.

        Args:
            variables: All that the step may have changed, and possibly others.
        """
        del variables


class SharedVariables(VariableLayout):
    """One set of variables, on a device from which every replica reads them."""

    are_local = False

    def __init__(self, devices: Sequence[str], group: ProcessGroup, parameter_device: str) -> None:
        super().__init__(devices, group)
        self._parameter_device = parameter_device

    def describe(self) -> dict[str, str]:
        return {"parameters on": connection.short(self._parameter_device)}

    def scope(self) -> AbstractContextManager[Any]:
        return tf.device(self._parameter_device)


class ReplicaSync(Protocol):
    """Keeps the replicas' variables equal while user code runs between training steps."""

    def watching(self) -> AbstractContextManager[None]:
        """Returns a context that notes which variables the code inside may change."""

    def sync_changed(self) -> None:
        """Updates the other replicas, at least for the variables that changed in `watching`."""

    def sync_all(self) -> None:
        """Updates all variables of the other replicas."""


class FullReplicaSync:
    """A `ReplicaSync` that updates every variable each time."""

    def __init__(self, sync: Callable[[], None]) -> None:
        self.sync_changed = self.sync_all = sync

    def watching(self) -> AbstractContextManager[None]:
        """Returns a context that notes nothing."""
        return nullcontext()
