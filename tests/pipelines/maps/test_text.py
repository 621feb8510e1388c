"""Bytes are tokens, and packed rows contain all documents in order."""

from __future__ import annotations

import sys

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

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
