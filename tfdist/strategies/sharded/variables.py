"""Shards of variables and optimizer state: over the devices of a process, or over processes."""

from __future__ import annotations

import gc
import itertools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from tfdist.cluster.remote import connection
from tfdist.errors import UnsupportedModelError
from tfdist.groups import agreement, buckets
from tfdist.groups.base import ProcessGroup
from tfdist.groups.buckets import GradientExchange
from tfdist.strategies import mirrored_variables
from tfdist.strategies.sharded import plan
from tfdist.strategies.sharded.division import OverDevices, OverProcesses
from tfdist.strategies.sharded.rank0_coordinator import Rank0Coordinator
from tfdist.strategies.variables import VariableLayout
from tfdist.upstream import keras_model, keras_variables
from tfdist.upstream.keras_layers import read_own_kernels_outside_of_xla
from tfdist.upstream.keras_optimizers import (
    knowing_shards,
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
    weights_of_files_on_disk,
)
from tfdist.upstream.weight_files import FileArray, read_in_pieces

_HOME = "_tfdist_home"  # attribute of a whole weight: the device that has its state


class ShardedVariables(VariableLayout):
    """Shards of variables and of optimizer state, one for each owner.

    Attributes:
        copies_weights: Whether each replica also has the full weights.
    """

    are_local = False
    #: Where state is that is not sharded.
    rest_is = "each on one device"
    is_rest_copied = False

    def __init__(
        self,
        devices: Sequence[str],
        group: ProcessGroup,
        owners: Sequence[str],
        shard: str,
        smallest: int,
        offload: str,
    ) -> None:
        super().__init__(devices, group)
        self._is_offloaded = offload == "optimizer"
        host = connection.on_this_host("CPU:0")
        self._shard_devices = [host] * len(devices) if self._is_offloaded else self._devices
        self._shard, self.copies_weights = shard, shard != "parameters"
        self._owners, self._smallest = list(owners), max(smallest, len(owners))
        self._placed: dict[str, str] = {}
        self._new: list[weakref.ref[keras.Variable]] = []  # sharded before there was a plan

    @contextmanager
    def patched_keras(self) -> Iterator[None]:
        with super().patched_keras(), weights_swapped_by_assignment(), weights_of_files_on_disk():
            yield

    @abstractmethod
    def division_of(self, variable: keras.Variable) -> Division:
        """Returns how a variable is divided among the owners."""

    def describe(self) -> dict[str, str]:
        rows = {"sharded": plan.WHAT[self._shard]} | self._placed
        if self._is_offloaded:
            rows["offloaded"] = "shards of weights and optimizer state are on the host"
        return rows

    @contextmanager
    def making_weights(self) -> Iterator[None]:
        """A context that shards each weight before the next one is created or loaded.

        So no device and no process has the whole model at any time. `prepare` unites those that
        cannot be trained in shards.
        """
        if self.copies_weights:
            yield
            return
        # A model that was saved builds its optimizer while it is loaded.
        made = keras_variables.on_creation(self._divide_new)
        with made, knowing_shards(), read_in_pieces(self._pieces_of):
            yield

    @abstractmethod
    def _pieces_of(self, variable: ShardedVariable, array: FileArray) -> list[np.ndarray] | None:
        """Returns the shards of this process of an array in a file, if all processes read it."""

    def unite_new(self) -> None:
        self._unite_new(lambda _: True)

    def _divide_new(self, variable: keras.Variable, whole: tf.Variable) -> None:
        del whole
        dtype = tf.as_dtype(variable.dtype)
        is_number = dtype.is_floating or dtype.is_integer
        if is_number and variable.shape.num_elements() >= self._smallest:
            self._new.append(weakref.ref(variable))
            self._divide(variable, keep_whole=False)

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
        for weight in [*planned.cut, *planned.frozen]:
            if not isinstance(weight, ShardedVariable):
                self._divide(weight, self.copies_weights)
            for slot in slots.get(id(weight), []):
                if not isinstance(slot, ShardedVariable) and slot.shape == weight.shape:
                    self._divide(slot, keep_whole=False)
        for weight, owner in planned.homes:
            self.keep_whole(weight, slots.get(id(weight), []), owner)
        of_cut = [slot for weight in planned.cut for slot in slots.get(id(weight), [])]
        # What `making_weights` has sharded and the plan does not name becomes whole. Variables of
        # other models stay sharded over processes, which discard them at other times.
        kept = set(map(id, [*planned.cut, *planned.frozen, *of_cut]))
        of_model = set(map(id, model.variables))
        self._unite_new(
            lambda one: id(one) not in kept and (one.division.has_all or id(one) in of_model)
        )
        read_own_kernels_outside_of_xla(model)
        for optimizer in plain if planned.cut else ():
            refuse_elsewhere(optimizer, keras_variables.ELSEWHERE)
        if self.copies_weights:
            self.sync_copies(model.variables)
        gc.collect()  # cycles may hold the full values, and Python frees them at any time

    def _unite_new(self, chosen: Callable[[ShardedVariable], bool]) -> None:
        for variable in (one() for one in self._new):
            if isinstance(variable, ShardedVariable) and chosen(variable):
                keras_variables.unite(variable, self._devices[0])
        self._new.clear()

    def _plan(self, model: Any, optimizers: Sequence[Any]) -> plan.Plan:
        return plan.plan(model, optimizers, self._owners, self._smallest, not self.copies_weights)

    def _divide(self, variable: keras.Variable, keep_whole: bool) -> None:
        division = self.division_of(variable)
        keras_variables.divide(variable, division, self._shard_devices, keep_whole)

    def keep_whole(
        self, weight: keras.Variable, slots: Sequence[keras.Variable], owner: str
    ) -> None:
        """Leaves a weight and its optimizer state whole."""
        del owner
        for variable in [weight, *slots]:
            if isinstance(variable, ShardedVariable):  # it could be sharded before
                keras_variables.unite(variable, self._devices[0])

    def check_table(self, table: keras.Variable) -> None:
        if self._shard != "optimizer" and isinstance(table, ShardedVariable):
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


class DeviceShards(ShardedVariables):
    """A shard for each device of a process; each of several processes has all shards."""

    def __init__(
        self,
        devices: Sequence[str],
        group: ProcessGroup,
        shard: str,
        smallest: int,
        offload: str,
        exchange: Callable[[list], list],
    ) -> None:
        owners = [*map(connection.short, devices)]
        super().__init__(devices, group, owners, shard, smallest, offload)
        self._division, self._exchange = OverDevices(len(devices)), exchange

    def scope(self) -> AbstractContextManager[Any]:
        return connection.spread(self._devices, connection.of_this_process(self._devices[0]))

    def division_of(self, variable: keras.Variable) -> OverDevices:
        del variable
        return self._division

    def _pieces_of(self, variable: ShardedVariable, array: FileArray) -> list[np.ndarray]:
        ends = itertools.accumulate((part.shape[0] for part in variable.parts), initial=0)
        return [array.elements(*between) for between in itertools.pairwise(ends)]

    def keep_whole(
        self, weight: keras.Variable, slots: Sequence[keras.Variable], owner: str
    ) -> None:
        super().keep_whole(weight, slots, owner)
        owner = self._devices[self._owners.index(owner)]
        setattr(weight, _HOME, owner)
        for variable in slots if self.copies_weights else [weight, *slots]:
            keras_model.move(variable, owner)

    def sync_copies(self, variables: Sequence[keras.Variable]) -> None:
        if self.copies_weights:
            weights = [v for v in variables if _has_copies(v)]
            mirrored_variables.sync(weights, self._devices[1:])
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
        terms = {}
        for index, gradient in gradients.items() if self._shard != "optimizer" else ():
            variable = variables[index]
            if isinstance(gradient, tf.IndexedSlices):
                continue
            if isinstance(variable, ShardedVariable):
                pieces = zip(variable.cut(gradient), self._devices, strict=True)
                terms[index] = ShardedGradient(_sent(piece, device) for piece, device in pieces)
            elif hasattr(variable, _HOME):
                terms[index] = _sent(gradient, getattr(variable, _HOME))
        sums = self._exchange(tf.nest.flatten(terms)) if terms else []
        return tf.nest.pack_sequence_as(terms, sums)


class ProcessShards(ShardedVariables):
    """A shard for each process, which rank 0 coordinates: see `rank0_coordinator`."""

    rest_is = "on every rank"
    is_rest_copied = True

    def __init__(
        self,
        devices: Sequence[str],
        group: ProcessGroup,
        shard: str,
        smallest: int,
        offload: str,
        exchange: GradientExchange,
        coordinator: Rank0Coordinator,
    ) -> None:
        owners = [f"rank {i}" for i in range(group.size)]
        super().__init__(devices, group, owners, shard, smallest, offload)
        self._exchange, self._coordinator = exchange, coordinator

    def division_of(self, variable: keras.Variable) -> OverProcesses:
        return OverProcesses(
            variable.shape.num_elements(), self._coordinator, self._group.all_reduce
        )

    def _divide(self, variable: keras.Variable, keep_whole: bool) -> None:
        super()._divide(variable, keep_whole)
        variable.division.introduce(variable)

    def _pieces_of(self, variable: ShardedVariable, array: FileArray) -> list[np.ndarray] | None:
        division = cast("OverProcesses", variable.division)
        if not self._coordinator.is_same(division.number, array.identity):
            return None
        return [array.elements(division.begin, division.begin + variable.parts[0].shape[0])]

    @contextmanager
    def making_weights(self) -> Iterator[None]:
        self._made = list[tf.TensorSpec]()
        with super().making_weights():
            yield
        if not self.copies_weights:  # a rank that makes another weight compares one alone
            agreement.check_shapes(self._group, self._made * 2)

    def _divide_new(self, variable: keras.Variable, whole: tf.Variable) -> None:
        if variable.shape.num_elements() >= self._smallest:
            self._made.append(tf.TensorSpec(variable.shape, variable.dtype))
            agreement.check_shapes(self._group, self._made[-1:])
            if not agreement.are_same(self._group, [variable]):
                agreement.broadcast(self._group, [whole])
        super()._divide_new(variable, whole)

    def reduce_sharded(
        self, gradients: Mapping[int, Any], variables: Sequence[keras.Variable]
    ) -> dict[int, Any]:
        """Sums the gradients of sharded variables, of which this process gets its shard."""
        if self._shard == "optimizer":
            return {}
        places = [p for p in gradients if isinstance(variables[p], ShardedVariable)]
        order = buckets.in_order({p: gradients[p] for p in places}, self._exchange.bucket_bytes)
        flat = [[tf.reshape(gradients[index], [-1]) for index in bucket] for bucket in order]
        scatter = self._group.reduce_scatter
        sums = buckets.each(scatter, flat, self._exchange.bucket_bytes, self._group.sums_in_order)
        totals = buckets.by_index(order, sums)
        for index, total in totals.items():
            total.set_shape(variables[index].parts[0].shape)
        return {index: ShardedGradient([total]) for index, total in totals.items()}

    def any_of_parts(self, flag: tf.Tensor) -> tf.Tensor:
        return self._group.all_reduce([tf.cast(flag, tf.int32)])[0] > 0

    def after_update(self, variables: Sequence[keras.Variable]) -> None:
        with self.collective_section():
            super().after_update(variables)

    @contextmanager
    def collective_section(self) -> Iterator[None]:
        with self._coordinator.collective_section():
            yield

    def prepare(self, model: Any, optimizers: Sequence[Any]) -> None:
        states = [v for optimizer in optimizers for v in optimizer.variables]
        agreement.check_shapes(self._group, model.variables + states)
        super().prepare(model, optimizers)


def _has_copies(variable: keras.Variable) -> bool:
    """Returns whether `prepare` has placed a variable as a weight with copies."""
    is_cut = isinstance(variable, ShardedVariable) and variable.is_whole
    return is_cut or hasattr(variable, _HOME)


def _sent(tensor: tf.Tensor, device: str) -> tf.Tensor:
    with tf.device(device):
        return tf.identity(tensor)
