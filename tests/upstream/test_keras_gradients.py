"""Functions with gradients in closed form: values and derivatives are those of Keras."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tfdist.upstream.keras_gradients import gradients_in_closed_form

WIDTH = 6
Inputs = list[tf.Tensor]


def weights(*shape: int) -> Inputs:
    """Returns two weights near one."""
    return [tf.constant(1 + np.random.default_rng(i).random(shape)) for i in range(2)]


def layer_norm(axis: Any, *shape: int, **options: Any) -> Any:
    """Returns a function that normalizes axes, and its weights."""
    return (
        lambda x, *scales: ops.layer_normalization(x, *scales, axis=axis, epsilon=1e-3, **options),
        weights(*shape),
    )


FUNCTIONS = {
    "GELU": (lambda x: ops.gelu(x, approximate=False), []),
    "approximate GELU": (lambda x: ops.gelu(x, approximate=True), []),
    "layer": layer_norm(-1, WIDTH),
    "layer of a positive axis": layer_norm([2], WIDTH),
    "layer of two axes": layer_norm([-1, -2], 4, WIDTH),
    "layer without weights": (layer_norm(-1)[0], []),
    "layer without a scale": (
        lambda x, beta: ops.layer_normalization(x, None, beta, axis=-1),
        weights(WIDTH)[:1],
    ),
    "layer without an offset": (layer_norm(-1)[0], weights(WIDTH)[:1]),
    "layer of an axis in the middle": layer_norm(1, 4),
    "root mean square": (
        lambda x, scale: ops.rms_normalization(x, scale, axis=-1, epsilon=1e-3),
        weights(WIDTH)[:1],
    ),
    "root mean square without a scale": (lambda x: ops.rms_normalization(x, axis=-1), []),
    "root mean square, one scale for each position": (
        lambda x, scale: ops.rms_normalization(x, scale, axis=-1),
        weights(4, WIDTH)[:1],
    ),
}


def derivatives(
    function: Callable[..., tf.Tensor], arguments: Inputs, context: AbstractContextManager[None]
) -> list[np.ndarray]:
    """Returns a function's value, its gradients, and those of the gradients' sum of squares."""

    @tf.function(autograph=False)
    def compute() -> Any:
        with context, tf.GradientTape(watch_accessed_variables=False) as outer:
            outer.watch(arguments)
            with tf.GradientTape(watch_accessed_variables=False) as inner:
                inner.watch(arguments)
                value = function(*arguments)
                loss = tf.reduce_sum(value * tf.sin(value))
            gradients = inner.gradient(loss, arguments)
            penalty = sum(tf.reduce_sum(tf.square(g)) for g in gradients)
        return [value, *gradients, *outer.gradient(penalty, arguments)]

    return [tensor.numpy() for tensor in compute()]


@pytest.mark.parametrize(("function", "scales"), FUNCTIONS.values(), ids=FUNCTIONS)
def test_derivatives_of_first_and_second_order_are_those_of_keras(
    function: Callable[..., tf.Tensor], scales: Inputs
) -> None:
    x = tf.constant(3 * np.random.default_rng(5).normal(size=(3, 4, WIDTH)))
    ours = derivatives(function, [x, *scales], gradients_in_closed_form())
    for value, expected in zip(
        ours, derivatives(function, [x, *scales], nullcontext()), strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["GELU", "approximate GELU", "layer", "root mean square"])
def test_half_precision_is_as_exact_as_in_keras(name: str, dtype: str) -> None:
    function, scales = FUNCTIONS[name]
    x = tf.cast(np.random.default_rng(6).normal(size=(40, WIDTH)) * 3, dtype)
    scales = [tf.cast(scale, "float32") for scale in scales]

    def slopes(x: tf.Tensor, context: AbstractContextManager[None]) -> np.ndarray:
        with context, tf.GradientTape() as tape:
            tape.watch(x)
            value = function(x, *(tf.cast(scale, x.dtype) for scale in scales))
        upstream = tf.broadcast_to(tf.cast(tf.range(WIDTH), x.dtype) / 5, x.shape)
        gradient = tape.gradient(value, x, output_gradients=upstream)
        return tf.cast(gradient, "float64").numpy()

    exact = slopes(tf.cast(x, "float64"), nullcontext())
    error = np.abs(slopes(x, gradients_in_closed_form()) - exact).max()
    assert error <= 1.5 * np.abs(slopes(x, nullcontext()) - exact).max()


@pytest.mark.parametrize("name", ["GELU", "approximate GELU", "layer", "root mean square"])
def test_the_backward_pass_keeps_one_tensor_of_the_size_of_the_input(name: str) -> None:
    function, scales = FUNCTIONS[name]
    size = tf.TensorSpec((3, 4, WIDTH), tf.float64)

    @tf.function(autograph=False, input_signature=[size, size])
    def compute(x: tf.Tensor, upstream: tf.Tensor) -> Any:
        with gradients_in_closed_form(), tf.GradientTape() as tape:
            tape.watch([x, *scales])
            value = function(x, *scales)
        return tape.gradient(value, [x, *scales], output_gradients=upstream)

    graph = compute.get_concrete_function().graph
    backward, kept = {graph.inputs[1].ref()}, set()
    for operation in graph.get_operations():
        if backward.isdisjoint(t.ref() for t in operation.inputs):
            continue
        backward |= {t.ref() for t in operation.outputs}
        kept |= {t.ref() for t in operation.inputs if t.shape == size.shape} - backward
    assert len(kept) == 1


def test_integers_are_refused_as_in_keras() -> None:
    with gradients_in_closed_form(), pytest.raises(ValueError, match="floating point"):
        ops.gelu(tf.constant([1]))


def test_keras_is_as_before_afterwards() -> None:
    before = keras.src.ops.nn._layer_normalization
    with gradients_in_closed_form():
        assert keras.src.ops.nn._layer_normalization is not before
    assert keras.src.ops.nn._layer_normalization is before


@pytest.mark.parametrize("kind", [keras.layers.LayerNormalization, keras.layers.RMSNormalization])
def test_eager_layer_has_the_gradients_of_its_variables(kind: type) -> None:
    layer, x = kind(), tf.constant([[1.0, 2.0, 4.0], [3.0, -1.0, 0.5]])
    layer.build(x.shape)
    results = []
    for context in (nullcontext(), gradients_in_closed_form()):
        with context, tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x) * x)
        results.append(tape.gradient(loss, [v.value for v in layer.trainable_variables]))
    for ours, keras_gradient in zip(*reversed(results), strict=True):
        np.testing.assert_allclose(ours, keras_gradient, rtol=1e-5)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_arrays_are_accepted(name: str) -> None:
    function, scales = FUNCTIONS[name]
    x = np.random.default_rng(7).normal(size=(3, 4, WIDTH))
    with gradients_in_closed_form():
        result = function(x, *scales)
    np.testing.assert_allclose(result, function(x, *scales), rtol=1e-11, atol=1e-11)
