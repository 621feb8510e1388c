"""Which variables can be kept in parts, since their optimizer computes each element by itself."""

from __future__ import annotations

from collections.abc import Sequence

import keras
import tensorflow as tf

from tfdist.upstream import keras_model

#: Keras's optimizers of which an element's update depends on that element alone. Not among them:
#: Lamb (norms of whole weights), Muon (products of matrices), Adafactor (means of rows, columns).
#: Classes derived from these may compute anything.
ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
    keras.optimizers.ScheduleFreeAdamW,
)


def why_whole(model: keras.Model, optimizers: Sequence[keras.optimizers.Optimizer]) -> str | None:
    """Says why no weight of a model can be cut; None: those that `can_be_cut` says can be.

    Args:
        model: Built.
        optimizers: Its own, without the `LossScaleOptimizer` around one.
    """
    if type(model).train_step is not keras.Model.train_step:
        return f"{type(model).__name__}.train_step may do anything with them"
    for optimizer in optimizers:
        if type(optimizer) not in ELEMENTWISE:
            return f"{type(optimizer).__name__} may not compute each element by itself"
        if optimizer.gradient_accumulation_steps:
            return "the optimizer accumulates whole gradients"
    inputs = getattr(model, "inputs", None) or []
    if any(getattr(tensor, "sparse", False) for tensor in inputs):
        return "sparse inputs give gradients of rows"
    return None


def tables(model: keras.Model) -> set[int]:
    """Returns the ids of weights whose gradients are of rows: those of Embeddings.

    Cut, the gradients would have to be made dense, of which optimizers make other numbers.
    """
    layers = keras_model.flatten_layers(model)
    embeddings = [layer for layer in layers if isinstance(layer, keras.layers.Embedding)]
    return {id(v) for layer in embeddings for v in layer.variables}


def can_be_cut(weight: keras.Variable, smallest: int) -> bool:
    """Whether a weight, no table, has as many elements, and nothing that sees all of them."""
    is_float = tf.as_dtype(weight.dtype).is_floating
    sees_all = weight.constraint is not None or weight.overwrite_with_gradient
    return is_float and not sees_all and weight.shape.num_elements() >= smallest
