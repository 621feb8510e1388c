"""Two devices whose gradients are averaged every second step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfdist.strategies.base import ReplicaFn
from tfdist.strategies.towers import Towers


class EverySecondStep(Towers):
    """Towers that keep a step's gradients, and apply those of two steps together.

    The numbers are those of one device with `SGD(gradient_accumulation_steps=2)`.
    """

    name = "every_second_step"

    def __init__(self, devices: int | str | Sequence[str] | None = None) -> None:
        super().__init__(devices)
        self._replica = threading.local()
        self._kept: dict[tuple[int, int], tf.Variable] = {}
        self._counters: dict[int, tf.Variable] = {}

    def run(self, fn: ReplicaFn) -> list[Any]:
        def on_replica(index: int) -> Any:
            self._replica.index = index
            return fn(index)

        return super().run(on_replica)

    def gradients(self, tape: Any, loss: Any, sources: Sequence[Any], alone: bool = False) -> list:
        result = super().gradients(tape, loss, sources, alone)
        index = self._replica.index
        with tf.init_scope():
            counter = self._counters.setdefault(index, tf.Variable(0, trainable=False))
        is_second = counter.assign_add(1) % 2 == 0
        return [
            None if gradient is None else self._kept_until(is_second, index, k, gradient)
            for k, gradient in enumerate(result)
        ]

    def _kept_until(self, is_second: tf.Tensor, index: int, k: int, gradient: Any) -> tf.Tensor:
        gradient = tf.convert_to_tensor(gradient)
        with tf.init_scope():
            kept = self._kept.setdefault(
                (index, k), tf.Variable(tf.zeros(gradient.shape, gradient.dtype), trainable=False)
            )
        total = kept.read_value() + gradient
        zeros = tf.zeros_like(total)
        kept.assign(tf.where(is_second, zeros, total))
        return tf.where(is_second, total / 2, zeros)
