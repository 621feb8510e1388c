"""Sharded over processes that Horovod joins: each keeps its part of what training needs.

Gradients are summed by a reduce-scatter, of which each process has the part that it updates, and
weights joined by an all-gather: once a step, before it computes (ZeRO 3), or after the update
(1 and 2). Sums of what is whole are those of `horovod`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist.strategies import batches, inner_loop
from tfdist.strategies.collectives import buckets, same_variables
from tfdist.strategies.collectives.fusion import by_dtype
from tfdist.strategies.horovod import Horovod, started
from tfdist.strategies.sharded import rank0_coordinator
from tfdist.strategies.sharded.division import OverProcesses
from tfdist.strategies.sharded.parts import Parts
from tfdist.upstream.keras_variables import ShardedGradient, ShardedVariable, is_in_parts


class ShardedOverProcesses(Parts, Horovod):
    """Synchronous replicas, one a process, each the owner of a part of the state.

    Args:
        devices: The device of this process, as of `Horovod`.
        shard: As of `Sharded`.
        smallest: As there.
        offload: As there.

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
    ) -> None:
        # Before any exchange: those of `Horovod.__init__`, too, let rank 0 finish first.
        self._coordinator = rank0_coordinator.of_process(started())
        super().__init__(devices)
        self.bucket_bytes = "auto"  # parts are summed while the backward pass goes on
        self.divide_over([f"rank {i}" for i in range(self.num_workers)], shard, smallest, offload)

    def division_of(self, variable: keras.Variable) -> OverProcesses:
        size = variable.shape.num_elements()
        return OverProcesses(size, self.rank, self.num_workers, self._coordinator, self.all_reduce)

    def _divide(self, variable: keras.Variable, keep_whole: bool) -> None:
        super()._divide(variable, keep_whole)
        variable.division.introduce(variable)

    def make_same(self, variables: Sequence[keras.Variable]) -> None:
        # One by one, and in no graph, which would hold on to what is given up when it is cut.
        same_variables.check_shapes(self, variables)
        for variable in variables:
            if is_in_parts(variable) or variable.dtype == "string":
                continue
            own = variable.value.read_value()
            # Horovod does not know all integers.
            sent = own if own.dtype.is_floating else tf.cast(own, tf.int64)
            variable.value.assign(tf.cast(self._coordinator.of_first(sent), own.dtype))
        same_variables.check_values(self, variables, "run python -m tfdist.doctor.")

    def reduce_sharded(
        self, gradients: Mapping[int, Any], variables: Sequence[keras.Variable]
    ) -> dict[int, Any]:
        """Sums the gradients of what is cut, of which this process gets its part."""
        if self.shard == "optimizer":
            return {}
        places = [p for p in gradients if isinstance(variables[p], ShardedVariable)]
        order = buckets.in_order({p: gradients[p] for p in places}, self.bucket_bytes)
        flat = [[tf.reshape(gradients[place], [-1]) for place in bucket] for bucket in order]
        scatter = functools.partial(by_dtype, self._scattered)
        sums = buckets.each(scatter, flat, self.bucket_bytes, self.buckets_wait)
        totals = buckets.by_place(order, sums)
        for place, total in totals.items():
            total.set_shape(variables[place].parts[0].shape)
        return {place: ShardedGradient([total]) for place, total in totals.items()}

    def _scattered(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """Sums vectors of one dtype, of which this process gets its parts."""
        return self._grouped("reduce-scatter", self._hvd.grouped_reducescatter, tensors)

    def any_of_parts(self, flag: tf.Tensor) -> tf.Tensor:
        return self.all_reduce([tf.cast(flag, tf.int32)])[0] > 0

    def after_update(self, variables: Sequence[keras.Variable]) -> None:
        with self.collective_section():
            super().after_update(variables)

    # ---- rank 0 leads: see `rank0_coordinator` ----

    @contextmanager
    def collective_section(self) -> Iterator[None]:
        with self._coordinator.collective_section():
            yield

    def compile(
        self,
        step: inner_loop.Step,
        eager: bool = False,
        may_end: bool = True,
        own_rows: bool = False,
    ) -> inner_loop.LoopFn:
        run = super().compile(step, eager, may_end, own_rows)

        def call(
            iterator: Iterator[Any], num_steps: tf.Tensor
        ) -> tuple[inner_loop.LoopResult, Any]:
            with self.collective_section():
                return run(iterator, num_steps)

        return call

    def outputs(
        self, fn: Callable[[batches.Batch], Any], element: batches.Element, whole: bool = False
    ) -> list[Any]:
        with self.collective_section():
            return super().outputs(fn, element, whole)

    def gather(self, numbers: Sequence[float]) -> np.ndarray:
        self._coordinator.meet()
        return super().gather(numbers)

    def add_up(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        self._coordinator.meet()
        return super().add_up(arrays)

    def translate_errors(self) -> AbstractContextManager[None]:
        return self._noting_failure()

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            with super().translate_errors():
                yield
        except Exception:  # not an interrupt, which all processes have
            self._coordinator.has_failed = True
            raise
        self._coordinator.has_failed = False
