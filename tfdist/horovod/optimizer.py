"""An optimizer that steps by the gradients of all ranks."""

from __future__ import annotations

from typing import Any

import keras

from tfdist.errors import ConfigurationError
from tfdist.horovod import keras_changes, refused
from tfdist.horovod.exchange import Exchange, exchanges_of, remember
from tfdist.horovod.ranks import Average, Compression, Sum
from tfdist.upstream.keras_optimizers import clip_after


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
    """Makes an optimizer exchange its gradients with the other ranks right before it clips them.

    The optimizer stays what it is, so it saves and loads as Keras's own, without tfdist; one that
    was loaded has to be given here again. It works in `model.fit` and in custom loops, by
    `apply_gradients` or `apply`, in graphs and eagerly. XLA is kept clear of: `model.compile`
    leaves it off, with a warning where `jit_compile=True` asked for it. A step overflows, where a
    `LossScaleOptimizer` stands around the optimizer or is the one given, on all ranks or on none.

    Args:
        optimizer: Any but a `MultiOptimizer`. It is changed and returned.
        compression: `Compression.fp16` halves what crosses, and rounds it.
        sparse_as_dense: Whether the gradients of embeddings cross as dense tensors, which is
            faster where most rows have one.
        op: `Average` or `Sum` over the ranks.
        backward_passes_per_step: Calls after which gradients are exchanged and applied. Held as
            Keras's own `gradient_accumulation_steps`.
        average_aggregated_gradients: Whether the gradients of these calls are averaged; they are
            added up otherwise, as in Horovod.
        **others: Horovod's further arguments, as they are by themselves: see `refused`.

    Raises:
        ConfigurationError: A combination that cannot be honoured, or the optimizer has been given
            here before.
    """
    refused.check(others)
    if op not in (Average, Sum):
        raise ConfigurationError(f"op={op!r}: expected Average or Sum.")
    if hasattr(optimizer, "optimizers"):
        raise ConfigurationError(
            "A MultiOptimizer makes its steps one optimizer at a time: give each of those to "
            "DistributedOptimizer, and put the MultiOptimizer around them."
        )
    if exchanges_of(optimizer):
        raise ConfigurationError(
            "This optimizer exchanges its gradients already: give it to DistributedOptimizer once."
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    _accumulate(inner, backward_passes_per_step)
    passes = 1 if average_aggregated_gradients else backward_passes_per_step
    exchange = Exchange(compression, op, sparse_as_dense, times=passes)
    remember(inner, exchange)
    clip_after(inner, exchange)
    keras_changes.make()
    refused.without_local_variables(optimizer)
    return optimizer


def _accumulate(optimizer: keras.optimizers.Optimizer, passes: int) -> None:
    """Lets an optimizer accumulate the gradients of several passes."""
    if not isinstance(passes, int) or passes < 1:
        raise ConfigurationError(f"backward_passes_per_step={passes!r}: expected a number from 1.")
    if passes in (1, optimizer.gradient_accumulation_steps):
        return
    if optimizer.built or optimizer.gradient_accumulation_steps:
        raise ConfigurationError(
            f"backward_passes_per_step={passes}, but the optimizer "
            + ("has made its variables" if optimizer.built else "accumulates")
            + f" for gradient_accumulation_steps={optimizer.gradient_accumulation_steps}: "
            "give it the number that you want when you create it."
        )
    optimizer.gradient_accumulation_steps = passes
