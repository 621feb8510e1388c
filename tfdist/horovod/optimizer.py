"""Horovod's `DistributedOptimizer` for Keras 3: its all-reduce, and models loaded with it."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfdist.errors import ConfigurationError
from tfdist.horovod.ranks import Average, Compression, Sum, forwarded, size, strategy
from tfdist.upstream.keras_model import refuse_xla
from tfdist.upstream.keras_optimizers import clip_after, unwrapped
from tfdist.upstream.patching import replace


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: keras.optimizers.Optimizer,
    *,
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    **others: Any,
) -> keras.optimizers.Optimizer:
    """Makes an optimizer all-reduce its gradients over the ranks before it clips them.

    The class of the optimizer does not change, so that it is saved and loaded as Keras's, without
    tfdist. Wrap a loaded optimizer again. It works in `model.fit` and in custom loops, with
    `apply_gradients` or `apply`, in graphs and eagerly. `model.compile` does not enable XLA, and
    warns if `jit_compile=True` requested it. With a `LossScaleOptimizer`, inside or outside, either
    all ranks skip a step because of an overflow or none does.

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1 * hvd.size()))
        >>> model = build_model()
        >>> model.compile(optimizer, model.loss)
        >>> history = model.fit(x, y, verbose=0)

    Args:
        optimizer: Any optimizer except a `MultiOptimizer`. It is modified and returned.
        compression: `Compression.fp16` halves the bytes of the all-reduce, and rounds gradients.
        sparse_as_dense: Whether to reduce sparse gradients of embeddings as dense tensors, which is
            faster if most rows of the table have a gradient.
        op: `Average` or `Sum` over the ranks.
        backward_passes_per_step: Number of calls after which gradients are reduced and applied;
            sets Keras's `gradient_accumulation_steps`.
        average_aggregated_gradients: Whether to average the gradients of these calls. If False,
            they are summed, as in Horovod.
        **others: Horovod's further arguments, which only accept their defaults.

    Returns:
        The optimizer.

    Raises:
        ConfigurationError: An argument is not supported, or the optimizer already is distributed.
        TypeError: Horovod has no such argument.
    """
    _check_unsupported(others)
    if op not in (Average, Sum):
        raise ConfigurationError(f"op={op!r}: expected Average or Sum.")
    if hasattr(optimizer, "optimizers"):
        raise ConfigurationError(
            "A MultiOptimizer cannot be distributed as a whole. Wrap each of its optimizers in "
            "DistributedOptimizer, and create the MultiOptimizer from the results."
        )
    if exchanges_of(optimizer):
        raise ConfigurationError(
            "This optimizer is already distributed. Pass it to DistributedOptimizer only once."
        )
    inner = unwrapped(optimizer)
    passes = backward_passes_per_step
    if not isinstance(passes, int) or passes < 1:
        raise ConfigurationError(
            f"backward_passes_per_step={passes!r}: expected an integer of at least 1."
        )
    if passes not in (1, inner.gradient_accumulation_steps):
        if inner.built or inner.gradient_accumulation_steps:
            raise ConfigurationError(
                f"backward_passes_per_step={passes}, but the optimizer "
                + ("was built" if inner.built else "was created")
                + f" with gradient_accumulation_steps={inner.gradient_accumulation_steps}. "
                "Set the number when you create the optimizer."
            )
        inner.gradient_accumulation_steps = passes
    if average_aggregated_gradients:
        passes = 1
    exchange = Exchange(compression, op, sparse_as_dense, times=passes)
    replace(inner, "_tfdist_exchange", exchange)
    clip_after(inner, exchange)
    patch_keras()
    replace(optimizer, "register_local_var", _no_local_variables)
    return optimizer


def load_model(
    filepath: str | Path,
    custom_optimizers: Sequence[type[keras.optimizers.Optimizer]] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: Any = Compression.none,
) -> keras.Model:
    """Loads a model that `model.save` wrote, and makes its optimizer a `DistributedOptimizer`.

    Example:
        >>> import tfdist.horovod as hvd
        >>> hvd.init()
        >>> build_model().save("model.keras")
        >>> model = hvd.load_model("model.keras")

    Args:
        filepath: Path of the file.
        custom_optimizers: Optimizer classes that are not part of Keras.
        custom_objects: As in `keras.models.load_model`.
        compression: As in `DistributedOptimizer`.

    Returns:
        The model, with its optimizer as in the file.
    """
    optimizers = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    objects = {**optimizers, **(custom_objects or {})}
    model = keras.models.load_model(filepath, custom_objects=objects)
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model


# ---- the exchange of gradients ----


_is_finite = keras.optimizers.LossScaleOptimizer.check_finite


class Exchange:
    """Averages or sums gradients over the ranks, in one grouped all-reduce."""

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
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape), context
        return self._compression.compress(gradient)

    def _decompress(self, gradient: Any, context: Any) -> Any:
        if isinstance(gradient, tf.IndexedSlices):
            values = self._compression.decompress(gradient.values, context)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return self._compression.decompress(gradient, context)

    def _scale_of(self, gradient: Any) -> Any:
        """Returns the scale of a gradient in the all-reduce, which keeps float16 from underflow."""
        narrows = self._compression is not Compression.none and gradient.dtype.size > 2
        return 1.0 if self.loss_scale is None or not narrows else self.loss_scale


def _divided(gradient: Any, divisor: Any) -> Any:
    if isinstance(divisor, float) and divisor == 1.0:
        return gradient
    return keras.ops.divide(gradient, tf.cast(divisor, gradient.dtype))


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


# ---- what is refused ----


_PACKED = "all gradients are all-reduced in one group"
_PLACED = "gradients are all-reduced on the device that computes them"
_LOCAL = (
    "all ranks share all weights, which is checked. Train the weights of one rank with another, "
    "undistributed optimizer, in a custom loop or in a keras MultiOptimizer, and exclude them with "
    "BroadcastGlobalVariablesCallback(local_variables=...)"
)
#: Horovod's arguments by name: the accepted values (the defaults), and why others are not.
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "name": ((None,), "the optimizer has a name: keras.optimizers.SGD(name=...)"),
    "device_dense": (("",), _PLACED),
    "device_sparse": (("",), _PLACED),
    "gradient_predivide_factor": (
        (1.0,),
        "gradients are divided by the number of ranks before the all-reduce",
    ),
    "num_groups": ((0,), _PACKED),
    "groups": ((None, 0), _PACKED),
    "process_set": (
        (None,),
        "gradients are summed over all ranks. To sum over fewer, call hvd.allreduce(..., "
        "process_set=...) in a custom loop, or start those ranks as a separate job",
    ),
    "scale_local_gradients": ((True,), _LOCAL),
}


def _check_unsupported(others: Mapping[str, Any]) -> None:
    """Checks Horovod's further arguments of `DistributedOptimizer`."""
    for name, value in others.items():
        if name not in _UNSUPPORTED:
            raise TypeError(f"DistributedOptimizer() got an unexpected argument {name!r}.")
        plain, why = _UNSUPPORTED[name]
        if name == "process_set":
            plain = (*plain, forwarded("global_process_set"))
        if not any(value is default or value == default for default in plain):
            raise ConfigurationError(
                f"{name}={value!r} is not supported: {why}. Remove the argument."
            )


def PartialDistributedOptimizer(*args: Any, **options: Any) -> None:  # noqa: N802 - Horovod's name
    """Raises an error: Horovod's optimizer for layers whose weights are local to each rank.

    Raises:
        ConfigurationError: Always.
    """
    raise ConfigurationError(
        f"PartialDistributedOptimizer is not supported: {_LOCAL}. Use DistributedOptimizer."
    )


def _no_local_variables(variable: Any) -> None:
    raise ConfigurationError(f"register_local_var is not supported: {_LOCAL}. Remove the call.")
