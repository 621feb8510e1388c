"""Private names of Keras's models, layers, losses, metrics and optimizers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as keras_loss
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.trainers import trainer

from tfdist.upstream.patching import replace, replaced


def flatten_layers(model: keras.layers.Layer) -> list[keras.layers.Layer]:
    """Returns a model and its layers, nested ones too: `Layer._flatten_layers`."""
    return list(model._flatten_layers())


def seeds_of(model: keras.Model) -> list[keras.Variable]:
    """Returns the seeds of the random layers of a model: `Layer._seed_generators`."""
    generators = (getattr(layer, "_seed_generators", []) for layer in flatten_layers(model))
    return [generator.state for own in generators for generator in own]


def takes_training(model: keras.Model) -> bool:
    """Tells whether a model's `call` has that argument: `Layer._call_has_training_arg`."""
    return model._call_has_training_arg


def compile_config(model: keras.Model) -> Any:
    """Returns what `compile` was given, another object after each: `Trainer._compile_config`.

    Its `config` has the arguments themselves; the public `get_compile_config` serializes them.
    """
    return model._compile_config


def mask_of(tensor: Any) -> Any:
    """Returns the mask that a layer left on its output, or None: `backend.get_keras_mask`."""
    return backend.get_keras_mask(tensor)


def set_mask(tensor: Any, mask: Any) -> None:
    """Leaves a mask on a tensor: `backend.set_keras_mask`."""
    backend.set_keras_mask(tensor, mask)


# Losses


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
    """Returns what logs the loss of each output: `CompileLoss._metrics`."""
    return compile_loss._metrics


def compile_loss_of(
    compile_loss: Any,
    losses: Sequence[Callable[..., Any]],
    trackers: Sequence[Any] | None = None,
) -> Any:
    """Returns a view of a built `CompileLoss` that calls other functions.

    Args:
        compile_loss: Keras's; stays as it is.
        losses: Take the place of its losses, one each.
        trackers: Take the place of its per-output trackers; None: its own.
    """
    view = object.__new__(type(compile_loss))  # copy.copy() would save and load it
    view.__dict__.update(compile_loss.__dict__)
    entries = zip(compile_loss._flat_losses, losses, strict=True)
    view._flat_losses = [entry._replace(loss=loss) for entry, loss in entries]
    if trackers is not None:
        view._metrics = list(trackers)
    return view


def total_loss(
    model: keras.Model, added: Sequence[tf.Tensor], batch: tuple[Any, ...], training: bool
) -> tf.Tensor:
    """Returns Keras's own total loss: `Trainer._compute_loss`, `Trainer._losses_override`.

    Args:
        model: Compiled.
        added: Stand in for `model.losses`.
        batch: Inputs, labels, outputs and weights.
        training: As in `Model.compute_loss`.
    """
    model._losses_override.extend(added)
    try:
        return model._compute_loss(*batch, training=training)
    finally:
        model._losses_override.clear()


def masked_weights(weights: Any, mask: Any, dtype: Any) -> Any:
    """Returns weights with a mask's zeros: `apply_mask` of `keras.src.losses.loss`.

    For a "sum" it leaves the mask at 0 and 1; for means it would scale it by total / valid.
    """
    return keras_loss.apply_mask(weights, mask, dtype=dtype, reduction="sum")


def of_same_rank(values: Any, weights: Any) -> tuple[Any, Any]:
    """Squeezes or expands as Keras: `squeeze_or_expand_to_same_rank` of its losses."""
    return keras_loss.squeeze_or_expand_to_same_rank(values, weights)


@contextmanager
def losses_of_one_device() -> Iterator[None]:
    """Keeps Keras from dividing losses by the number of replicas: `keras.src.losses.loss`."""
    with ExitStack() as stack:
        for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
            stack.enter_context(replaced(keras_loss, name, lambda value: value))
        yield


# Metrics


def compiled_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Returns the metrics that `compile` was given: `Trainer._compile_metrics`."""
    return [] if model._compile_metrics is None else model._compile_metrics.metrics


def function_of(metric: keras.metrics.Metric) -> Any:
    """Returns what a `MeanMetricWrapper` wraps, or the metric's class: `MeanMetricWrapper._fn`."""
    return getattr(metric, "_fn", type(metric))


# BatchNormalization


def moments(
    layer: keras.layers.BatchNormalization, inputs: tf.Tensor, mask: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns mean and variance as the layer's class takes them: `BatchNormalization._moments`."""
    return type(layer)._moments(layer, inputs, mask)


def moments_taken_by(layer: keras.layers.BatchNormalization, function: Callable[..., Any]) -> Any:
    """Returns a context in which `function(inputs, mask)` takes the layer's moments."""
    return replaced(layer, "_moments", function)


def reduction_axes(layer: keras.layers.BatchNormalization) -> list[int]:
    """Returns the axes over which moments are taken: `BatchNormalization._reduction_axes`."""
    return layer._reduction_axes


# Optimizers


def num_batches_seen(optimizer: keras.optimizers.Optimizer) -> tf.Tensor:
    """Returns the batches that an accumulating optimizer has had: `Optimizer._iterations`.

    `iterations` counts updates instead.
    """
    return tf.convert_to_tensor(optimizer._iterations)


@contextmanager
def optimizers_of_one_device() -> Iterator[None]:
    """Lets a Keras optimizer change one copy of the variables, by gradients already summed.

    Inside `Strategy.update` every assignment is local. So what `TFOptimizer` does for
    `tf.distribute` (all-reduce, merge calls) gives way to the plain methods of `BaseOptimizer`;
    clipping, weight decay, EMA, constraints and counters are Keras's own.
    """

    def update_each(self: Any, gradients: list, variables: list, learning_rate: Any) -> None:
        for gradient, variable in zip(gradients, variables, strict=True):
            # Where it is: a server sends none of the moments that an update needs.
            with tf.device(variable.value.device):
                self.update_step(gradient, variable.value, learning_rate)

    plain = {"_backend_update_step": update_each} | {
        name: getattr(BaseOptimizer, name)
        for name in (
            "_apply_weight_decay",
            "_overwrite_model_variables_with_average_value",
            "_backend_increment_gradient_accumulators",
        )
    }
    with ExitStack() as stack:
        # On the class: optimizers such as Nadam override these and call their parent's.
        for name, function in plain.items():
            stack.enter_context(replaced(TFOptimizer, name, function))
        yield


# Embeddings on servers


def rows_taken_by(function: Callable[..., Any]) -> Any:
    """Returns a context in which `function(take, x, indices, axis)` stands for `keras.ops.take`.

    `take` is the `keras.src.backend.numpy.take` that it replaces, which `keras.layers.Embedding`
    calls past any method that one could override.
    """
    return replaced(backend.numpy, "take", functools.partial(function, backend.numpy.take))


def rows_of(variable: keras.Variable, rows: tf.Tensor) -> tf.Tensor:
    """Returns rows of a variable, in the dtype of autocasting, without reading the others.

    From `Variable._value` by `Variable._maybe_autocast`, as the public `value` reads all of it.
    """
    return variable._maybe_autocast(tf.gather(variable._value, rows))


def value_in_scope(variable: keras.Variable) -> tf.Tensor | None:
    """Returns the value that a `keras.StatelessScope` around the call has; None: it has none.

    By `backend.in_stateless_scope` and `get_stateless_scope`; the public class knows not which is
    entered.
    """
    if not backend.in_stateless_scope():
        return None
    return backend.get_stateless_scope().get_current_value(variable)


# Horovod in plain Keras: changes that last


def take_moments_by(layer: keras.layers.BatchNormalization, function: Callable[..., Any]) -> None:
    """Lets `function(inputs, mask)` take a layer's moments from now on: its `_moments`."""
    replace(layer, "_moments", function)


def clip_after(optimizer: keras.optimizers.Optimizer, function: Callable[[list], list]) -> None:
    """Lets an optimizer clip `function(gradients)` from now on: its `_clip_gradients`.

    Keras calls it once a step, after accumulation, whether there is anything to clip or not.
    """

    def clip(gradients: list) -> list:
        return type(optimizer)._clip_gradients(optimizer, function(gradients))

    replace(optimizer, "_clip_gradients", clip)


def refuse_xla(is_refused: Callable[[keras.Model], bool]) -> None:
    """Keeps models from XLA, for good: `trainers.trainer.model_supports_jit`.

    `compile` asks it whether `jit_compile="auto"` may turn XLA on, and no model can answer.
    """
    supports = trainer.model_supports_jit
    replace(trainer, "model_supports_jit", lambda model: supports(model) and not is_refused(model))


def velocities(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the sums of past steps that SGD and RMSprop keep, each times its learning rate.

    RMSprop's are `_momentums`; those of SGD are public.
    """
    if not optimizer.built:
        found = []
    elif isinstance(optimizer, keras.optimizers.SGD):
        found = optimizer.momentums
    elif isinstance(optimizer, keras.optimizers.RMSprop):
        found = optimizer._momentums
    else:
        found = []
    return [v for v in found if v is not None]


# Building, rebuilding and agreeing


def build_by_shapes(model: keras.Model, x: Any) -> None:
    """Calls a model on `keras.KerasTensor`s, which makes its weights and computes nothing.

    `keras.src.backend.compute_output_spec`, as Keras does before training; a call of the model
    itself would leave a node of a graph in it.
    """
    backend.compute_output_spec(model, x, training=False)


def build_for_training(model: keras.Model, batch: Any) -> None:
    """Makes the variables of metrics, loss and optimizer from the `tf.TensorSpec`s of a batch.

    `model._symbolic_build`, which `keras.Model.fit` calls with its first batch.
    """
    model._symbolic_build(data_batch=batch)


def is_functional(model: keras.Model) -> bool:
    """Tells whether Keras knows the graph of a model's layers, and so can clone it.

    By the attribute `_operations`: `keras.Model` stands for functional and subclassed models.
    """
    return isinstance(model, keras.Sequential) or hasattr(model, "_operations")


def weights_known_to(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the weights that a built optimizer was built for: `_trainable_variables`."""
    return list(optimizer._trainable_variables)


def learning_rate_variable(optimizer: keras.optimizers.Optimizer) -> keras.Variable | None:
    """Returns the variable of a learning rate that can be set; None: a schedule decides it.

    `_learning_rate` of the optimizer, or of the one inside a `LossScaleOptimizer`, whose own is
    always 0. The public `learning_rate` is a number where a schedule decides.
    """
    rate = getattr(optimizer, "inner_optimizer", optimizer)._learning_rate
    return rate if isinstance(rate, keras.Variable) else None
