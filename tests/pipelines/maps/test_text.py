"""Bytes are tokens, and packed rows contain all documents in order."""

from __future__ import annotations

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers

from pipelines import DataError
from pipelines.maps import text


@settings(deadline=None, max_examples=15)
@given(st.lists(st.binary(max_size=30), min_size=1, max_size=8), st.integers(1, 20))
def test_rows_contain_the_documents_in_order(documents: list[bytes], length: int) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(documents).map(text.byte_tokens)
    rows = text.pack(dataset, length)
    assert rows.element_spec == tf.TensorSpec((length,), tf.int32)
    laid = [token for document in documents for token in [*document, text.END]]
    assert [token for row in rows for token in row.numpy()] == laid[: len(laid) // length * length]


def test_bytes_by_name() -> None:
    assert text.tokenizer("bytes")(tf.constant("né")).numpy().tolist() == [110, 195, 169]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("words", "expected 'bytes'"),
        ("tensorflow_text.", "expected 'bytes'"),
        ("tensorflow_text.WhitespaceTokenizer", "tensorflow_text cannot be imported"),
    ],
)
def test_missing_tokenizer_is_reported(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow_text", None)
    with pytest.raises(DataError, match=message):
        text.tokenizer(name)


def test_packed_examples_do_not_see_each_other() -> None:
    """Loss and gradients are those of unpacked rows."""
    length, vocabulary = 12, 20
    table, places = layers.Embedding(vocabulary, 8), layers.Embedding(length, 8)
    attention, head = layers.MultiHeadAttention(2, 4), layers.Dense(vocabulary)

    def loss(x: dict[str, tf.Tensor], y: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        h = table(x["token_ids"]) + places(x["positions"])
        h = h + attention(h, h, attention_mask=text.attention_mask(x["segment_ids"]))
        entropy = keras.losses.sparse_categorical_crossentropy(y, head(h), from_logits=True)
        return tf.reduce_sum(entropy * weights)

    keras.utils.set_random_seed(3)
    sizes = [5, 4, 3, 7, 2, 14, 1]
    ids = [np.random.randint(1, vocabulary, size) for size in sizes]
    weights = [np.random.randint(0, 2, size).astype("float32") for size in sizes]

    def examples(numbers: list[int]) -> tf.data.Dataset:
        spec = tf.TensorSpec([None], tf.int32), tf.TensorSpec([None], tf.float32)
        return tf.data.Dataset.from_generator(
            lambda: ((ids[n], weights[n]) for n in numbers), output_signature=spec
        )

    packed = text.pack_examples(examples([*range(7)]), length).batch(10).get_single_element()
    assert packed[0]["segment_ids"].numpy().max(1).tolist() == [3, 2, 1, 1]
    with tf.GradientTape(persistent=True) as tape:
        together = loss(*packed)
        alone = tf.add_n(
            [
                loss(*row)
                for n in range(7)
                for row in text.pack_examples(examples([n]), length).batch(1)
            ]
        )
    variables = [v for part in (table, places, attention, head) for v in part.trainable_variables]
    values = [v.value for v in variables]
    np.testing.assert_allclose(together, alone, rtol=1e-6)
    for one, other in zip(
        tape.gradient(together, values), tape.gradient(alone, values), strict=True
    ):
        np.testing.assert_allclose(
            tf.convert_to_tensor(one), tf.convert_to_tensor(other), atol=1e-5
        )
