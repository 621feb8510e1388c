"""All-reduces gradients over the ranks in a step of an optimizer, and detects overflows."""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf

from tfdist.horovod.ranks import Compression, Sum, size, strategy
from tfdist.upstream.keras_model import refuse_xla
from tfdist.upstream.patching import replace

_is_finite = keras.optimizers.LossScaleOptimizer.check_finite


class Exchange:
    """Averages or sums gradients over the ranks, in one grouped all-reduce.

    Args:
        compression: A class of `Compression`.
        op: `Average` or `Sum`.
        sparse_as_dense: Whether to convert sparse gradients of embeddings to dense tensors first.
        times: Factor of the result.
    """

    def __init__(self, compression: Any, op: Any, sparse_as_dense: bool, times: int) -> None:
        self._compression, self._sparse_as_dense = compression, sparse_as_dense
        self._divisor = (1 if op == Sum else size()) / times
        #: The scale by which a `LossScaleOptimizer` just divided the gradients, or None.
        self.loss_scale: Any = None

    def __call__(self, gradients: list) -> list:
        """Returns the reduced gradients; called before the optimizer clips them."""
        if self._sparse_as_dense:
            gradients = [tf.convert_to_tensor(g) for g in gradients]
        # Divided before the sum, which could overflow in float16 otherwise.
        parts = [_divided(g, self._divisor / self._scale_of(g)) for g in gradients]
        compressed, contexts = zip(*map(self._compress, parts), strict=True)
        sums = map(self._decompress, strategy().all_reduce(list(compressed)), contexts)
        return [_divided(total, self._scale_of(total)) for total in sums]

    def are_finite(self, gradients: list) -> tf.Tensor:
        """Returns whether the compressed gradients are finite on every rank, as a bool scalar."""
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        finite = [tf.math.is_finite(self._compress(v)[0]) for v in values if v is not None]
        failed = tf.reduce_any([~tf.reduce_all(f) for f in finite])
        return strategy().all_reduce([tf.cast(failed, tf.int32)])[0] == 0

    def _compress(self, gradient: Any) -> tuple[Any, Any]:
        if isinstance(gradient, tf.IndexedSlices):
            values, context = self._compression.compress(gradient.values)
            return _with_values(gradient, values), context
        return self._compression.compress(gradient)

    def _decompress(self, gradient: Any, context: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            values = self._compression.decompress(gradient.values, context)
            return _with_values(gradient, values)
        return self._compression.decompress(gradient, context)

    def _scale_of(self, gradient: Any) -> Any:
        """Returns the scale of a gradient in the all-reduce, which keeps float16 from underflow."""
        narrows = self._compression is not Compression.none and gradient.dtype.size > 2
        return 1.0 if self.loss_scale is None or not narrows else self.loss_scale


def _with_values(slices: tf.IndexedSlices, values: tf.Tensor) -> tf.IndexedSlices:
    return tf.IndexedSlices(values, slices.indices, slices.dense_shape)


def _divided(gradient: Any, divisor: Any) -> Any:
    if isinstance(divisor, float) and divisor == 1.0:
        return gradient
    return keras.ops.divide(gradient, tf.cast(divisor, gradient.dtype))


def attach(optimizer: keras.optimizers.Optimizer, exchange: Exchange) -> None:
    """Stores the exchange in an attribute of the optimizer, which Keras does not save."""
    replace(optimizer, "_tfdist_exchange", exchange)


def exchanges_of(optimizer: keras.optimizers.Optimizer) -> list[Exchange]:
    """Returns the exchanges of an optimizer and of its inner optimizers."""
    inner = getattr(optimizer, "optimizers", None) or [getattr(optimizer, "inner_optimizer", None)]
    exchange = vars(optimizer).get("_tfdist_exchange")
    inner_exchanges = [e for other in inner if other is not None for e in exchanges_of(other)]
    return inner_exchanges if exchange is None else [exchange, *inner_exchanges]


@functools.cache
def patch_keras() -> None:
    """Applies two permanent patches for models with a `DistributedOptimizer`, once per process.

    `model.compile` may wrap the optimizer in a `LossScaleOptimizer`, which decides from the
    gradients of its own rank whether to apply a step: ranks that apply it would wait in the
    all-reduce for one that does not. XLA, which `jit_compile="auto"` enables on GPUs, cannot
    compile Horovod's operations.
    """
    replace(keras.optimizers.LossScaleOptimizer, "check_finite", _is_finite_on_all)
    refuse_xla(_is_exchanging)


def _is_finite_on_all(self: keras.optimizers.LossScaleOptimizer, grads: list) -> tf.Tensor:
    exchanges = exchanges_of(self)
    if not exchanges:
        return _is_finite(self, grads)
    for exchange in exchanges:
        exchange.loss_scale = self.dynamic_scale
    return exchanges[0].are_finite(grads)


def _is_exchanging(model: keras.Model) -> bool:
    optimizer = getattr(model, "optimizer", None)
    return optimizer is not None and bool(exchanges_of(optimizer))
