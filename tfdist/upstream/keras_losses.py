"""Private names of Keras's losses and metrics, and of how a model holds them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf
from keras.src.losses import loss as keras_loss

from tfdist.upstream.patching import all_replaced


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """Returns the metric that is logged as `loss`: `Trainer._loss_tracker`."""
    return model._loss_tracker


def compile_loss(model: keras.Model) -> Any:
    """Returns the `CompileLoss` of a model, None without a loss: `Trainer._compile_loss`."""
    return model._compile_loss


def compiled_losses(compile_loss: Any) -> list[keras.losses.Loss]:
    """Returns the losses of a `CompileLoss` in its order: `CompileLoss._flat_losses`."""
    return [entry.loss for entry in compile_loss._flat_losses]


def loss_trackers(compile_loss: Any) -> list[keras.metrics.Mean]:
    """Returns the metrics that log the loss of each output: `CompileLoss._metrics`."""
    return compile_loss._metrics


def compile_loss_of(
    compile_loss: Any, losses: Sequence[Callable[..., Any]], trackers: Sequence[Any]
) -> Any:
    """Returns a view of a built `CompileLoss` that calls other functions."""
    view = object.__new__(type(compile_loss))  # copy.copy() would save and load it
    view.__dict__.update(compile_loss.__dict__)
    entries = zip(compile_loss._flat_losses, losses, strict=True)
    view._flat_losses = [entry._replace(loss=loss) for entry, loss in entries]
    view._metrics = list(trackers)
    return view


def total_loss(
    model: keras.Model, added: Sequence[tf.Tensor], batch: tuple[Any, ...], training: bool
) -> tf.Tensor:
    """Returns Keras's own total loss: `Trainer._compute_loss`, `Trainer._losses_override`."""
    model._losses_override.extend(added)
    try:
        return model._compute_loss(*batch, training=training)
    finally:
        model._losses_override.clear()


def masked_weights(weights: Any, mask: Any, dtype: Any) -> Any:
    """Returns weights multiplied by a mask: `apply_mask` of `keras.src.losses.loss`.

    With the reduction "sum", it uses the mask as it is; for means, it would scale the mask by
    total / valid.
    """
    return keras_loss.apply_mask(weights, mask, dtype=dtype, reduction="sum")


def of_same_rank(values: Any, weights: Any) -> tuple[Any, Any]:
    """Squeezes or expands like Keras's losses: `squeeze_or_expand_to_same_rank`."""
    return keras_loss.squeeze_or_expand_to_same_rank(values, weights)


def losses_of_one_device() -> AbstractContextManager[None]:
    """Keeps Keras from dividing losses by the number of replicas: `keras.src.losses.loss`."""
    names = ("scale_loss_for_distribution", "unscale_loss_for_distribution")
    return all_replaced(keras_loss, dict.fromkeys(names, lambda value: value))


def added_losses_in(
    store: Callable[[], list[tuple[keras.Layer, Any]] | None],
) -> AbstractContextManager[None]:
    """Stores the losses that layers add, with the layer, in the list that `store()` returns.

    By default a layer finds its losses in a `StatelessScope` by `Layer._loss_ids`, which all
    threads share, so that a replica that calls a layer would remove the losses of another replica
    (`Layer._clear_losses`, `Layer._get_own_losses`). If `store()` returns None, Keras's own
    methods run.
    """
    layer = keras.Layer
    add, clear, get_losses = layer.add_loss, layer._clear_losses, layer._get_own_losses

    def add_loss(self: keras.Layer, loss: Any) -> None:
        if (stored := store()) is None:
            add(self, loss)
        else:
            stored += [(self, value) for value in keras.tree.flatten(loss)]

    def clear_losses(self: keras.Layer) -> None:
        if (stored := store()) is None:
            clear(self)
        else:
            inside = {id(each) for each in self._flatten_layers()}
            stored[:] = [(owner, loss) for owner, loss in stored if id(owner) not in inside]

    def own_losses(self: keras.Layer) -> list[Any]:
        if (stored := store()) is None:
            return get_losses(self)
        return [loss for owner, loss in stored if owner is self]

    replacements = {
        "add_loss": add_loss, "_clear_losses": clear_losses, "_get_own_losses": own_losses
    }  # fmt: skip
    return all_replaced(layer, replacements)


def compiled_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns the metrics that were passed to `compile`: `Trainer._compile_metrics`."""
    return [] if model._compile_metrics is None else model._compile_metrics.metrics


def seeds_of_compiled(model: keras.Model) -> list[keras.Variable]:
    """Returns the seeds of the losses and metrics that were passed to `compile`.

    `CompileLoss._flat_losses`, and the attributes of each loss and metric.
    """
    compiled = getattr(model, "_compile_loss", None)
    losses = [] if compiled is None else [entry.loss for entry in compiled._flat_losses or ()]
    metrics = [*compiled_metrics(model), *model.metrics]
    values = [value for each in [*losses, *metrics] for value in vars(each).values()]
    seeds = [v.state for v in values if isinstance(v, keras.random.SeedGenerator)]
    return list({id(seed): seed for seed in seeds}.values())


def function_of(metric: keras.metrics.Metric) -> Any:
    """Returns the function of a `MeanMetricWrapper` (its `_fn`), or the metric's class."""
    return metric if inspect.isroutine(metric) else getattr(metric, "_fn", type(metric))
