"""Cases of layers, and of gradients that are sparse, missing or shared."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops

from tests.support.case import case, compiled, mlp, positioned
from tests.support.data import points, tokens


@case(points())
def large_weights() -> keras.Model:
    """Weights above 10 MB, TensorFlow's limit for constant folding."""
    wide = layers.Dense(1700, activation="tanh")
    return compiled(
        keras.Sequential([keras.Input((4,)), layers.Dense(1700), wide, layers.Dense(1)]),
        keras.optimizers.SGD(1e-3, momentum=0.9),
    )


def _embedded(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            layers.Embedding(7, 2),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    return compiled(model, optimizer)


@case(tokens())
def embedding() -> keras.Model:
    """An embedding, whose gradients are sparse."""
    return _embedded(keras.optimizers.SGD(0.1, momentum=0.9))


@case(tokens())
def embedding_clipped() -> keras.Model:
    """An embedding's sparse gradients clipped together with dense ones."""
    return _embedded(keras.optimizers.SGD(0.3, global_clipnorm=0.3))


@case(tokens())
def embedding_adam() -> keras.Model:
    """An embedding trained by Adam."""
    return _embedded(keras.optimizers.Adam(0.05, epsilon=1e-2))


@case(tokens(empty=()))
def positions() -> keras.Model:
    """Embeddings of tokens and of their positions, trained by Adam with clipping."""
    return compiled(positioned(), keras.optimizers.Adam(0.05, epsilon=1e-2, clipnorm=0.05))


@case(tokens(), accumulate=2)
def positions_accumulate() -> keras.Model:
    """The trainer's `accumulate` with embeddings of tokens and of their positions."""
    return compiled(positioned(), keras.optimizers.Adam(0.05, epsilon=1e-2))


class Unused(layers.Layer):
    """A layer with a weight that does not affect the loss."""

    def build(self, shape: Any) -> None:
        self.idle = self.add_weight(shape=(2,), initializer="ones", name="idle")

    def call(self, inputs: Any) -> Any:
        return inputs


@case(points())
def no_gradient() -> keras.Model:
    """A weight without a gradient."""
    model = mlp()
    model.add(Unused())
    return compiled(model)


@case(points())
def frozen_layer() -> keras.Model:
    """A frozen layer."""
    model = mlp()
    model.layers[0].trainable = False
    return compiled(model)


class Tied(keras.Model):
    """Encodes and decodes with one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = self.add_weight(shape=(4, 2), initializer="glorot_uniform", name="kernel")

    def call(self, inputs: Any) -> Any:
        return ops.tanh(inputs @ self.kernel) @ ops.transpose(self.kernel)


@case(points(outputs=4))
def tied_weights() -> keras.Model:
    """Tied weights."""
    return compiled(Tied())


@case(points())
def nested_model() -> keras.Model:
    """A nested model that is called twice."""
    inner = mlp(outputs=4, activation="tanh")
    inputs = keras.Input((4,))
    return compiled(keras.Model(inputs, layers.Dense(1)(inner(inner(inputs)))))


@case(points())
def attention() -> keras.Model:
    """Multi-head attention."""
    inputs = keras.Input((4,))
    sequence = layers.Reshape((4, 1))(inputs)
    hidden = layers.MultiHeadAttention(2, 2)(sequence, sequence)
    return compiled(keras.Model(inputs, layers.Dense(1)(layers.Flatten()(hidden))))
