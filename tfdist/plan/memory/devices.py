"""What each device holds under each strategy.

The step of one replica on its share of the batch is the graph of one device; what a strategy adds
to it, or takes from it, is said here, by what holds which variables and where gradients are summed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

from tfdist.plan.memory import liveness, schedule
from tfdist.plan.memory.held import Held
from tfdist.plan.memory.liveness import Kept
from tfdist.plan.memory.over_devices import OverDevices
from tfdist.plan.memory.trace import Traced

_NONE: Mapping[str, OverDevices] = MappingProxyType({})


class Planner:
    """Answers what devices hold, of one traced step.

    Args:
        traced: The step.
        num_devices: Replicas over all workers.
        num_servers: Parameter servers.
        over: What answers for strategies whose step is another one, by their names.
    """

    def __init__(
        self,
        traced: Traced,
        num_devices: int,
        num_servers: int = 1,
        over: Mapping[str, OverDevices] = _NONE,
    ) -> None:
        self._traced, self._num_devices, self._num_servers = traced, num_devices, num_servers
        self._over, self._order = over, traced.rows.order()
        self._weights = sum(one.num_bytes for one in traced.weights)
        self._gradients = sum(traced.trainable)
        self._optimizer = sum(one.num_bytes for one in traced.optimizer)
        self._peaks: dict[tuple[int, bool], int] = {}

    def share(self, batch: int) -> int:
        """Returns the most rows that a replica gets of a global batch."""
        return math.ceil(batch / self._num_devices)

    def on(self, strategy: str, batch: int) -> list[Held]:
        """Returns what each kind of device holds for a global batch; replicas come first."""
        if strategy in self._over:
            return self._over[strategy].on(batch)
        if strategy == "one_device":
            return [self._whole("the device", self._peak(batch, True))]
        share = self.share(batch)
        if strategy in ("mirrored", "multi_worker", "horovod"):
            # Once all gradients are there, their sums come beside them.
            exchange = self._weights + self._optimizer + 2 * self._gradients
            return [self._whole("each device", max(self._peak(share, True), exchange))]
        worker = self._peak(share, False)
        replica = Held(
            "each replica", self._weights, self._gradients, 0,
            max(0, worker - self._weights - self._gradients),
        )  # fmt: skip
        if strategy == "parameter_server":
            return [replica, self._server("each server", self._num_servers, 1)]
        return [replica, self._server("parameter device", 1, self._num_devices)]

    def largest(self, strategy: str, room: int) -> int:
        """Returns the largest global batch whose replicas find room, in bytes, on their devices."""
        each = 1 if strategy == "one_device" else self._num_devices
        if strategy in self._over:
            each = self._over[strategy].unit
        low, high = 0, 1
        while self._fits(strategy, high * each, room):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self._fits(strategy, middle * each, room) else (low, middle)
            )
        return low * each

    def _fits(self, strategy: str, batch: int, room: int) -> bool:
        return batch < 1 << 30 and all(one.total <= room for one in self.on(strategy, batch))

    def _peak(self, num_rows: int, whole: bool) -> int:
        """The peak of a step; of one that changes nothing, without the optimizer's variables."""
        if (num_rows, whole) not in self._peaks:
            traced = self._traced
            held = traced.weights + (traced.optimizer if whole else [])
            if traced.cpus:  # the data are in the same memory
                held = [Kept(num_rows * size) for size in traced.example] + held
            operations = traced.rows.operations(num_rows)
            names = self._order if whole else self._before_update(self._order)
            moments = schedule.moments(operations, names, traced.cpus)
            self._peaks[num_rows, whole] = liveness.peak(operations, moments, held).num_bytes
        return self._peaks[num_rows, whole]

    def _before_update(self, names: list[str]) -> list[str]:
        """The operations up to the last gradient: what comes then, servers do."""
        gradients = [i for i, name in enumerate(names) if name.startswith("gradient_tape/")]
        return names[: gradients[-1] + 1]

    def _whole(self, role: str, peak: int) -> Held:
        held = (self._weights, self._gradients, self._optimizer)
        return Held(role, *held, max(0, peak - sum(held)))

    def _server(self, role: str, num: int, num_gradients: int) -> Held:
        return Held(
            role, self._weights // num, num_gradients * self._gradients // num,
            self._optimizer // num, 0,
        )  # fmt: skip
