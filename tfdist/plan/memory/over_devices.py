"""What each device holds under a strategy that lays one model over several: its own real step.

The step is traced under the strategy itself, on logical CPU devices of which nothing is asked but
their names: so stages are cut where it cuts them, parts are those that it makes, and micro-batches
come in its order. The host is a device of its own, and not planned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import keras

from tfdist import devices, strategies
from tfdist.plan.memory import graph, liveness, schedule, transfers
from tfdist.plan.memory.held import Held
from tfdist.plan.memory.liveness import Kept
from tfdist.plan.memory.trace import Rows, check_alike, once
from tfdist.plan.network import Network
from tfdist.strategies.sharded.held import copies_of, tensors_of
from tfdist.strategies.sharded.plan import num_bytes
from tfdist.upstream.keras_optimizers import optimizers_of

#: The host; the devices come after it.
_HOST = "CPU:0"
#: Rows of each micro-batch or replica in the batches that are traced; more than one, which is
#: broadcast.
_FEW, _MORE = 2, 4


class _Variables(NamedTuple):
    """Bytes of the variables on a device, each.

    Attributes:
        weights: Of the model: whole, parts and copies.
        optimizer: What it keeps.
        gradients: Of the trainable variables that a step here has gradients of.
    """

    weights: list[int]
    optimizer: list[int]
    gradients: list[int]


def make_devices(num_devices: int) -> list[str]:
    """Makes the devices on which steps are traced, beside the host, and returns their names.

    Raises:
        DeviceError: TensorFlow has started with fewer.
    """
    return devices.resolve([f"CPU:{number}" for number in range(1, num_devices + 1)], 1)


class OverDevices:
    """Answers what each device holds under one strategy.

    Args:
        network: What is trained.
        strategy: A name.
        num_devices: Stages, parts or replicas.
        options: Of the strategy.
        cpus: As of `graph.operations`: `together` is asked then.

    Attributes:
        unit: Rows of which a batch is a multiple here: one for each micro-batch or replica.

    Raises:
        DeviceError: TensorFlow has started with fewer logical devices.
        UnsupportedModelError: The strategy cannot compute the network.
    """

    def __init__(
        self,
        network: Network,
        strategy: str,
        num_devices: int,
        options: Mapping[str, Any] = MappingProxyType({}),
        cpus: int = 0,
    ) -> None:
        self._name, self._devices = strategy, make_devices(num_devices)
        self._cpus, self._example = cpus, [array.nbytes for array in network.batch(1)]
        model, few = self._traced(network, _FEW, options)
        _, more = self._traced(network, _MORE, options)
        check_alike(network, few, more)
        self._rows = Rows(few, more, (_FEW * self.unit, _MORE * self.unit))
        self._order = schedule.order(transfers.with_transfers(few))
        self._variables = {device: _variables(model, device) for device in self._devices}
        if strategy == "sharded":  # each has a replica, with gradients of all weights
            whole = [num_bytes(weight) for weight in model.trainable_variables]
            self._variables = {
                device: own._replace(gradients=whole) for device, own in self._variables.items()
            }
        self._content = _content(model)
        self._found: dict[int, list[Held]] = {}

    def on(self, batch: int) -> list[Held]:
        """Returns what each device holds for a global batch, rounded up to whole units."""
        num_rows = self.unit * math.ceil(batch / self.unit)
        if num_rows not in self._found:
            operations = transfers.with_transfers(self._rows.operations(num_rows))
            held = {
                device: list(map(Kept, own.weights + own.optimizer))
                for device, own in self._variables.items()
            }
            moments = schedule.one_by_one(self._order)
            peaks = liveness.peaks(operations, moments, {_HOST: [], **held})
            self._found[num_rows] = [
                self._held(number, device, peaks[device].num_bytes)
                for number, device in enumerate(self._devices, 1)
            ]
        return self._found[num_rows]

    def together(self, batch: int) -> int:
        """Returns what all devices hold at a time where they share one memory, and hand over.

        So do logical CPU devices: what is equal is there once, and nothing is copied.
        """
        num_rows = self.unit * math.ceil(batch / self.unit)
        operations = transfers.on_one(self._rows.operations(num_rows))
        in_order = schedule.order(transfers.on_one(self._rows.few))
        data = [num_rows * size for size in self._example] if self._cpus else []
        moments = schedule.moments(operations, in_order, self._cpus)
        return liveness.peak(operations, moments, map(Kept, data + self._content)).num_bytes

    def _traced(self, network: Network, times: int, options: Mapping[str, Any]) -> Any:
        strategy = strategies.create(self._name, self._devices, **options)
        self.unit = strategy.num_replicas
        model, operations = once(network, times * self.unit, strategy, self._cpus)
        # Where nobody says, TensorFlow takes the first device that it has.
        return model, {
            name: one if one.device else one._replace(device=self._devices[0])
            for name, one in operations.items()
        }

    def _held(self, number: int, device: str, peak: int) -> Held:
        parts = map(sum, self._variables[device])
        weights, optimizer, gradients = parts
        role = f"stage {number}" if self._name == "pipeline" else f"device {number}"
        rest = max(0, peak - weights - optimizer - gradients)
        return Held(role, weights, gradients, optimizer, rest)


def _variables(model: keras.Model, device: str) -> _Variables:
    def on_it(variables: Iterable[keras.Variable]) -> list[int]:
        tensors = (own for variable in variables for own in tensors_of(variable))
        return [num_bytes(own) for own in tensors if graph.short(own.device) == device]

    kept = [variable for one in optimizers_of(model) for variable in one.variables]
    return _Variables(on_it(model.variables), on_it(kept), on_it(model.trainable_variables))


def _content(model: keras.Model) -> list[int]:
    """Bytes of all variables, of equal ones once: the copies of a weight are."""
    kept = [variable for one in optimizers_of(model) for variable in one.variables]
    copied = {id(copy) for v in model.variables for copy in copies_of(v)}
    tensors = [own for variable in [*model.variables, *kept] for own in tensors_of(variable)]
    return [num_bytes(own) for own in tensors if id(own) not in copied]
