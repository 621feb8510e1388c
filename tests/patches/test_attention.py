"""Attention in chunks of queries gives the results of Keras, with memory for one chunk."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfdist
from tests.support.training import building
from tfdist.patches import attention
from tfdist.upstream.patching import replaced
from tfdist.upstream.tensorflow_graphs import LOOPS

_LENGTH, _WIDTH = 19, 8
_MASK = np.random.default_rng(0).random((3, _LENGTH, _LENGTH)) < 0.7
_MASK[:, 5] = False  # a query that may attend to no key
_QUERIES = {
    "plain": {},
    "causal": {"use_causal_mask": True},
    "mask": {"attention_mask": _MASK},
    "mask of keys": {"attention_mask": _MASK[:, :1]},
    "causal mask": {"attention_mask": _MASK, "use_causal_mask": True},
}
_LAYERS = {
    "heads": lambda **options: layers.MultiHeadAttention(2, 4, **options),
    "grouped": lambda **options: layers.GroupQueryAttention(4, 4, 2, **options),
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_CHUNK", 8)
    monkeypatch.setattr(attention, "_LEAST_SCORES", 64)


def results(layer: keras.layers.Layer, in_chunks: bool, **call: Any) -> tuple[list, bool]:
    """Returns output and gradients of a layer, and whether it has a loop."""
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(3, _LENGTH, _WIDTH))
    if not layer.built:
        layer.build(x.shape, x.shape)
        for weight in layer.trainable_variables:
            weight.assign(0.3 * numbers.normal(size=weight.shape))
    spec = tf.TensorSpec([None, _LENGTH, _WIDTH], layer.compute_dtype)

    @tf.function(input_signature=[spec])
    def compute(x: tf.Tensor) -> list:
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = tf.nest.flatten(layer(x, x, **call))[0]
            loss = tf.reduce_sum(tf.sin(tf.cast(output, tf.float32)))
        return [output, *tape.gradient(loss, [x, *(v.value for v in layer.trainable_variables)])]

    with attention.attention_in_chunks() if in_chunks else nullcontext():
        graph = compute.get_concrete_function().graph
        kinds = {operation.type for operation in graph.get_operations()}
        return compute(x.astype(layer.compute_dtype)), not kinds.isdisjoint(LOOPS)


@pytest.mark.parametrize("query", _QUERIES)
@pytest.mark.parametrize("kind", _LAYERS)
def test_chunks_are_rows_of_the_scores(kind: str, query: str) -> None:
    layer, options = _LAYERS[kind](), _QUERIES[query]
    plain, _ = results(layer, False, training=True, **options)
    chunked, has_loop = results(layer, True, training=True, **options)
    assert has_loop
    for one, other in zip(plain, chunked, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("options", "call", "has_loop"),
    [
        ({"dtype": "mixed_float16"}, {"training": True}, True),
        ({"dropout": 0.5}, {"training": False}, True),
        ({"dropout": 0.5}, {"training": True}, False),
        ({}, {"return_attention_scores": True}, False),
    ],
)
@pytest.mark.parametrize("kind", _LAYERS)
def test_what_needs_all_scores_is_left_to_keras(
    kind: str, options: dict[str, Any], call: dict[str, Any], has_loop: bool
) -> None:
    assert results(_LAYERS[kind](**options), True, **call)[1] is has_loop


def test_replicas_train_and_predict_with_chunks() -> None:
    def build_model() -> keras.Model:
        x = keras.Input((_LENGTH, _WIDTH))
        masked = layers.Masking()(x)
        h = layers.MultiHeadAttention(2, 4)(masked, masked, use_causal_mask=True)
        return keras.Model(x, layers.Dense(1)(layers.GlobalAveragePooling1D()(h)))

    build = building(build_model, optimizer="sgd")
    numbers = np.random.default_rng(0)
    x, y = numbers.normal(size=(7, _LENGTH, _WIDTH)), numbers.normal(size=(7, 1))
    x[:, -3:] = 0
    plain, trainer = build(), tfdist.Trainer(build, strategy="mirrored", devices=2)
    fit = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
    losses = plain.fit(x, y, **fit).history["loss"]
    np.testing.assert_allclose(trainer.fit(x, y, **fit).history["loss"], losses, 1e-5)
    for one, other in zip(plain.get_weights(), trainer.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    with replaced(attention, "_joined", mock.Mock(side_effect=attention._joined)):
        predictions = trainer.predict(x, batch_size=4, verbose=0)
        assert attention._joined.called
    np.testing.assert_allclose(predictions, plain.predict(x, verbose=0), rtol=1e-4, atol=1e-5)
