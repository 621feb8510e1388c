"""Horovod's `DistributedOptimizer` for Keras 3, and models that are loaded with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from tfdist.errors import ConfigurationError
from tfdist.horovod import refused
from tfdist.horovod.exchange import Exchange, attach, exchanges_of, patch_keras
from tfdist.horovod.ranks import Average, Compression, Sum
from tfdist.upstream.keras_optimizers import clip_after, unwrapped


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
    refused.check(others)
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
    _accumulate(inner, backward_passes_per_step)
    passes = 1 if average_aggregated_gradients else backward_passes_per_step
    exchange = Exchange(compression, op, sparse_as_dense, times=passes)
    attach(inner, exchange)
    clip_after(inner, exchange)
    patch_keras()
    refused.without_local_variables(optimizer)
    return optimizer


def _accumulate(optimizer: keras.optimizers.Optimizer, passes: int) -> None:
    """Lets an optimizer accumulate the gradients of several passes."""
    if not isinstance(passes, int) or passes < 1:
        raise ConfigurationError(
            f"backward_passes_per_step={passes!r}: expected an integer of at least 1."
        )
    if passes in (1, optimizer.gradient_accumulation_steps):
        return
    if optimizer.built or optimizer.gradient_accumulation_steps:
        raise ConfigurationError(
            f"backward_passes_per_step={passes}, but the optimizer "
            + ("was built" if optimizer.built else "was created")
            + f" with gradient_accumulation_steps={optimizer.gradient_accumulation_steps}. "
            "Set the number when you create the optimizer."
        )
    optimizer.gradient_accumulation_steps = passes


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
