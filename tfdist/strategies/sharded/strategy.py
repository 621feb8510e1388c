"""Sharded data parallelism: each device or process keeps a shard of the training state.

In the manner of ZeRO (Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion
Parameter Models"). Weights that their optimizer updates element by element are split into one shard
per owner. Others (tables of embeddings, matrices of Muon) stay whole.
"""

from __future__ import annotations

import gc
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from tfdist import cluster
from tfdist.cluster.remote import connection
from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.groups import agreement, buckets
from tfdist.groups.base import ProcessGroup
from tfdist.groups.collective import CollectiveGroup
from tfdist.groups.fusion import by_device, local_sum
from tfdist.groups.horovod import HorovodGroup
from tfdist.strategies import STRATEGIES, mirrored_variables
from tfdist.strategies.base import ReplicaFn, Strategy
from tfdist.strategies.horovod import device_of_rank
from tfdist.strategies.one_device import OneDevice
from tfdist.strategies.processes import join_processes
from tfdist.strategies.sharded import plan
from tfdist.strategies.sharded.division import OverDevices, OverProcesses
from tfdist.strategies.sharded.rank0_coordinator import coordinator_of
from tfdist.strategies.towers import Towers
from tfdist.upstream import keras_model, keras_variables
from tfdist.upstream.keras_layers import read_own_kernels_outside_of_xla
from tfdist.upstream.keras_optimizers import (
    on_slot_creation,
    refuse_elsewhere,
    slots_of,
    unwrapped,
)
from tfdist.upstream.keras_training import weights_swapped_by_assignment
from tfdist.upstream.keras_variables import (
    Division,
    ShardedGradient,
    ShardedVariable,
)

_HOME = "_tfdist_home"  # attribute of a whole weight: the device that has its state


def Sharded(  # noqa: N802 - the class depends on how the program was started
    devices: int | str | Sequence[str] | None = None,
    shard: str = "parameters",
    smallest: int = 1024,
    offload: str = "none",
    process_group: str = "auto",
) -> Strategy:
    """Returns a strategy of synchronous replicas that each own a shard of the state.

    This is a function, because the class depends on where the shards are. In one process, each
    device has a shard (`ShardedOverDevices`). In several processes with one device each, each
    process has a shard (`ShardedOverProcesses`). In several processes with several devices each,
    every process has all shards, over its devices, and gradients are summed over the processes, as
    in PyTorch's hybrid sharding.

    Example:
        >>> from tfdist.strategies.sharded.strategy import Sharded
        >>> trainer = tfdist.Trainer(build_model, strategy=Sharded(2, shard="gradients"))
        >>> trainer.strategy.shard
        'gradients'

    Args:
        devices: As for `tfdist.devices.resolve`; one replica on each. None with several processes:
            one device.
        shard: What is sharded: `"optimizer"`: the optimizer state (ZeRO 1); `"gradients"`: also the
            sums of gradients (ZeRO 2); `"parameters"`: also the weights (ZeRO 3), which are
            gathered where they are read.
        smallest: The smallest number of elements of a weight that is sharded.
        offload: `"optimizer"`: the shards of weights and optimizer state are in the host's memory
            and updated by its processor, in the manner of ZeRO-Offload (Ren et al. 2021,
            "ZeRO-Offload: Democratizing Billion-Scale Model Training").
        process_group: What exchanges sums between processes: `"horovod"`, `"tensorflow"`, or
            `"auto"`, which is Horovod.

    Raises:
        ConfigurationError: An unknown option, or one that the process group does not support.
        DeviceError: A device that does not exist.
        MissingError: Several processes, and Horovod is not installed.
    """
    STRATEGIES["sharded"].check(shard=shard, offload=offload, process_group=process_group)
    has_several = (
        devices > 1
        if isinstance(devices, int)
        else not isinstance(devices, str) and (devices is not None and len(devices) > 1)
    )
    if cluster.started_together() is None or has_several:
        return ShardedOverDevices(devices, shard, smallest, offload, process_group)
    return ShardedOverProcesses(devices, shard, smallest, offload, process_group)


class ShardedState(Strategy):
    """A mixin for strategies whose owners keep shards; listed before the one that computes.

    A subclass calls `shard_over` in its `__init__`.

    Attributes:
        shard: What is sharded.
        copies_weights: Whether each replica also has the full weights.
    """

    name = "sharded"
    has_local_variables = False
    #: Where state is that is not sharded.
    rest_is = "each on one device"
    is_rest_copied = False

    def shard_over(self, owners: Sequence[str], shard: str, smallest: int, offload: str) -> None:
        """Sets who owns the shards.

        Args:
            owners: Their names, one for each shard.
            shard: As for `Sharded`.
            smallest: As for `Sharded`.
            offload: As for `Sharded`.
        """
        self._is_offloaded = offload == "optimizer"
        host = connection.on_this_host("CPU:0")
        self._places = [host] * len(self.devices) if self._is_offloaded else self.devices
        self.shard, self.copies_weights = shard, shard != "parameters"
        self._owners, self._smallest = list(owners), max(smallest, len(owners))
        self._placed: dict[str, str] = {}

    @contextmanager
    def patched_keras(self) -> Iterator[None]:
        with super().patched_keras(), weights_swapped_by_assignment():
            yield

    @abstractmethod
    def division_of(self, variable: keras.Variable) -> Division:
        """Returns how a variable is divided among the owners."""

    def describe(self) -> dict[str, str]:
        rows = super().describe() | {"sharded": plan.WHAT[self.shard]} | self._placed
        if self._is_offloaded:
            rows["offloaded"] = "shards of weights and optimizer state are on the host"
        return rows

    def place(self, model: keras.Model) -> None:
        if not (model.built and model.compiled) or model.optimizer is None:
            return
        optimizer = unwrapped(model.optimizer)
        planned = self._plan(model, [optimizer])
        self._placed = {"split": planned.describe(len(self._owners), self.rest_is)}
        if (state := plan.state_of(optimizer)) is not None:
            held = planned.bytes_by_owner(
                self._owners, state, self.copies_weights, self.is_rest_copied
            )
            each = ", ".join(f"{owner} {num / 1e6:,.1f} MB" for owner, num in held.items())
            self._placed["weights and optimizer state"] = each

    @contextmanager
    def making_state(self, model: keras.Model) -> Iterator[None]:
        """A context that shards optimizer state as soon as it is created, so it is never whole.

        On every rank it begins with the same numbers, which do not depend on the weights.
        """
        optimizer = unwrapped(model.optimizer)
        cut = {id(weight) for weight in self._plan(model, [optimizer]).cut}

        def divide(slot: keras.Variable, weight: keras.Variable) -> None:
            if id(weight) in cut and slot.shape == weight.shape:
                self._divide(slot, keep_whole=False)

        with on_slot_creation(divide):
            yield

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        super().prepare(model, optimizers)
        plain = [unwrapped(optimizer) for optimizer in optimizers]
        planned = self._plan(model, plain)
        slots: dict[int, list[keras.Variable]] = {}
        for slot, weight in (pair for optimizer in plain for pair in slots_of(optimizer)):
            slots.setdefault(id(weight), []).append(slot)
        for weight in planned.cut:
            self._cut(weight, slots.get(id(weight), []))
        for weight, owner in planned.homes:
            self.keep_whole(weight, slots.get(id(weight), []), owner)
        read_own_kernels_outside_of_xla(model)
        for optimizer in plain if planned.cut else ():
            refuse_elsewhere(optimizer, keras_variables.ELSEWHERE)
        if self.copies_weights:
            self.sync_copies(model.variables)
        gc.collect()  # cycles may hold the full values, and Python frees them at any time

    def _plan(self, model: Any, optimizers: Sequence[Any]) -> plan.Plan:
        return plan.plan(model, optimizers, self._owners, self._smallest)

    def _cut(self, weight: keras.Variable, slots: list[keras.Variable]) -> None:
        """Gives each owner its shard of a weight and of the weight's optimizer state."""
        if not isinstance(weight, ShardedVariable):
            self._divide(weight, self.copies_weights)
        for slot in slots:
            if not isinstance(slot, ShardedVariable) and slot.shape == weight.shape:
                self._divide(slot, keep_whole=False)

    def _divide(self, variable: keras.Variable, keep_whole: bool) -> None:
        division = self.division_of(variable)
        keras_variables.divide(variable, division, self._places, keep_whole)

    def keep_whole(
        self, weight: keras.Variable, slots: Sequence[keras.Variable], owner: str
    ) -> None:
        """Leaves a weight and its optimizer state whole.

        Args:
            weight: A weight that is not sharded.
            slots: Its optimizer state.
            owner: The owner that has least so far.
        """
        del owner
        for variable in [weight, *slots]:
            if isinstance(variable, ShardedVariable):  # it could be sharded before
                keras_variables.unite(variable, self.devices[0])

    def check_table(self, table: keras.Variable) -> None:
        if self.shard != "optimizer" and isinstance(table, ShardedVariable):
            raise UnsupportedModelError(
                f"{table.path!r} is a table that no Embedding holds, and its sparse gradients "
                "cannot be sharded: use keras.layers.Embedding, shard='optimizer', or "
                f"Sharded(smallest=N) with more than its {table.shape.num_elements()} elements."
            )

    def sync_copies(self, variables: Sequence[keras.Variable]) -> None:
        for weight in variables if self.copies_weights else ():
            if isinstance(weight, ShardedVariable) and weight.is_whole:
                weight.assign_parts(weight.value)

    def after_update(self, variables: Sequence[keras.Variable]) -> None:
        for weight in variables if self.copies_weights else ():
            if isinstance(weight, ShardedVariable) and weight.is_whole:
                weight.value.assign(weight.joined())


class ShardedOverDevices(ShardedState, Towers):
    """Synchronous replicas, where each device of a process owns a shard of the state.

    Each of several processes has all shards. Sums over its devices are summed over the processes,
    each on the device that needs it.

    Args:
        devices: As for `tfdist.devices.resolve`; one replica, and one shard, on each.
        shard: As for `Sharded`.
        smallest: As for `Sharded`.
        offload: As for `Sharded`.
        process_group: As for `Sharded`.
    """

    def __init__(
        self,
        devices: int | str | Sequence[str] | None,
        shard: str,
        smallest: int,
        offload: str,
        process_group: str,
    ) -> None:
        names, group = join_processes(process_group, devices, self.default_cpus)
        super().__init__(names, group=group)
        self.parameter_device = self.devices[0]
        self.shard_over([*map(connection.short, self.devices)], shard, smallest, offload)
        self._division = OverDevices(len(self.devices))

    def describe(self) -> dict[str, str]:
        rows = super().describe()
        del rows["parameters on"]
        return rows

    @contextmanager
    def scope(self) -> Iterator[None]:
        with connection.spread(self.devices, connection.of_this_process(self.devices[0])):
            yield

    def division_of(self, variable: keras.Variable) -> OverDevices:
        del variable
        return self._division

    def keep_whole(
        self, weight: keras.Variable, slots: Sequence[keras.Variable], owner: str
    ) -> None:
        super().keep_whole(weight, slots, owner)
        owner = self.devices[self._owners.index(owner)]
        setattr(weight, _HOME, owner)
        for variable in slots if self.copies_weights else [weight, *slots]:
            keras_model.move(variable, owner)

    def run(self, fn: ReplicaFn) -> list[Any]:
        if not self.copies_weights:
            return super().run(fn)

        def on_tower(index: int) -> Any:
            with mirrored_variables.on_device(self.devices[index] if index else ""):
                return fn(index)

        with mirrored_variables.read_local():
            return super().run(on_tower)

    def sync_copies(self, variables: Sequence[keras.Variable]) -> None:
        if self.copies_weights:
            weights = [v for v in variables if _has_copies(v)]
            mirrored_variables.sync(weights, self.devices[1:])
        super().sync_copies(variables)

    def after_update(self, variables: Sequence[keras.Variable]) -> None:
        super().after_update(variables)
        for weight in variables if self.copies_weights else ():
            if _has_copies(weight):
                for device, copy in mirrored_variables.copies_of(weight.value).items():
                    with tf.device(device):
                        copy.assign(weight.value.read_value())

    def reduce_sharded(
        self, gradients: Mapping[int, Any], variables: Sequence[keras.Variable]
    ) -> dict[int, Any]:
        """Sums each gradient where its variable's state is: each shard on its own device."""
        own = {}
        for place, gradient in gradients.items() if self.shard != "optimizer" else ():
            variable = variables[place]
            if isinstance(gradient, tf.IndexedSlices):
                continue
            if isinstance(variable, ShardedVariable):
                pieces = zip(variable.cut(gradient), self.devices, strict=True)
                own[place] = ShardedGradient(_sent(piece, device) for piece, device in pieces)
            elif hasattr(variable, _HOME):
                own[place] = _sent(gradient, getattr(variable, _HOME))
        sums = self._threads.exchange(tf.nest.flatten(own)) if own else []
        return tf.nest.pack_sequence_as(own, sums)

    def _sum(self, terms_by_tower: list[list]) -> list:
        """Sums over towers and processes, each tensor where the first tower has it."""
        sums = []
        for terms in zip(*terms_by_tower, strict=True):
            with tf.device(terms[0].device):
                sums.append(local_sum(terms))
        return by_device(self.group.all_reduce, sums) if self.group.size > 1 else sums


class ShardedOverProcesses(ShardedState, OneDevice):
    """Synchronous replicas, one per process, where each process owns a shard of the state.

    Gradients are summed by a reduce-scatter, which gives each process the shard that it updates.
    Weights are all-gathered once per step: before they are read (ZeRO 3), or after the update (ZeRO
    1 and 2). What is not sharded is all-reduced.

    Args:
        devices: The device of this process.
        shard: As for `Sharded`.
        smallest: As for `Sharded`.
        offload: As for `Sharded`.
        process_group: As for `Sharded`.

    Raises:
        MissingError: Horovod is not installed.
        ConfigurationError: Several devices.
    """

    rest_is = "on every rank"
    is_rest_copied = True

    def __init__(
        self,
        devices: int | str | Sequence[str] | None,
        shard: str,
        smallest: int,
        offload: str,
        process_group: str,
    ) -> None:
        group: ProcessGroup
        if process_group == "tensorflow":
            group = CollectiveGroup(devices)
            devices = group.devices
            if shard == "parameters" and group.gathers_in_order:
                raise ConfigurationError(
                    "shard='parameters' gathers weights during the backward pass, in another order "
                    "than NCCL as TensorFlow calls it allows. Use process_group='horovod', or "
                    "shard='gradients'."
                )
        else:
            group = HorovodGroup()
            devices = device_of_rank(group.local_rank) if devices is None else devices
        # Before any exchange: those of the base class, too, let rank 0 finish first.
        self._coordinator = coordinator_of(group)
        super().__init__(devices, group)
        self.bucket_bytes = "auto"  # shards are summed while the backward pass continues
        self.shard_over([f"rank {i}" for i in range(group.size)], shard, smallest, offload)

    def division_of(self, variable: keras.Variable) -> OverProcesses:
        return OverProcesses(variable.shape.num_elements(), self._coordinator, self.all_reduce)

    def _divide(self, variable: keras.Variable, keep_whole: bool) -> None:
        super()._divide(variable, keep_whole)
        variable.division.introduce(variable)

    def reduce_sharded(
        self, gradients: Mapping[int, Any], variables: Sequence[keras.Variable]
    ) -> dict[int, Any]:
        """Sums the gradients of sharded variables, of which this process gets its shard."""
        if self.shard == "optimizer":
            return {}
        places = [p for p in gradients if isinstance(variables[p], ShardedVariable)]
        order = buckets.in_order({p: gradients[p] for p in places}, self.bucket_bytes)
        flat = [[tf.reshape(gradients[place], [-1]) for place in bucket] for bucket in order]
        scatter = self.group.reduce_scatter
        sums = buckets.each(scatter, flat, self.bucket_bytes, self.group.sums_in_order)
        totals = buckets.by_index(order, sums)
        for place, total in totals.items():
            total.set_shape(variables[place].parts[0].shape)
        return {place: ShardedGradient([total]) for place, total in totals.items()}

    def any_of_parts(self, flag: tf.Tensor) -> tf.Tensor:
        return self.all_reduce([tf.cast(flag, tf.int32)])[0] > 0

    def after_update(self, variables: Sequence[keras.Variable]) -> None:
        with self.collective_section():
            super().after_update(variables)

    # ---- rank 0 coordinates: see `rank0_coordinator` ----

    @contextmanager
    def collective_section(self) -> Iterator[None]:
        with self._coordinator.collective_section():
            yield

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        states = [v for optimizer in optimizers for v in optimizer.variables]
        agreement.check_shapes(self.group, model.variables + states)
        super().prepare(model, optimizers)

    @contextmanager
    def translate_errors(self) -> Iterator[None]:
        try:
            with super().translate_errors():
                yield
        except Exception:  # raised again; interrupts, which all processes get, are not failures
            self._coordinator.has_failed = True
            raise
        self._coordinator.has_failed = False


def _has_copies(variable: keras.Variable) -> bool:
    """Returns whether `prepare` has placed a variable as a weight with copies."""
    is_cut = isinstance(variable, ShardedVariable) and variable.is_whole
    return is_cut or hasattr(variable, _HOME)


def _sent(tensor: tf.Tensor, device: str) -> tf.Tensor:
    with tf.device(device):
        return tf.identity(tensor)
