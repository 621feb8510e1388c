"""Tokenizes text, and packs documents into rows of equal length for language models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from pipelines.errors import DataError

#: The token that ends a document if tokens are bytes.
END = 256


def byte_tokens(text: tf.Tensor) -> tf.Tensor:
    """Returns the bytes of a text as tokens from 0 to 255, int32 `(n,)`.

    Example:
        >>> from pipelines.maps import text
        >>> text.byte_tokens(tf.constant("Hi")).numpy().tolist()
        [72, 105]
    """
    return tf.cast(tf.io.decode_raw(text, tf.uint8), tf.int32)


def tokenizer(name: str, **options: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a tokenizer by name.

    Example:
        >>> from pipelines.maps import text
        >>> text.tokenizer("bytes")(tf.constant("Hi")).numpy().tolist()
        [72, 105]

    Args:
        name: `"bytes"`, `"tensorflow_text.CLASS"`, or `"keras_hub.PRESET"` for a tokenizer preset
            of KerasHub.
        **options: Arguments of the tokenizer's class.

    Returns:
        A function that takes a text (string scalar) and returns its tokens, int32 `(n,)`.

    Raises:
        DataError: The tokenizer does not exist, or its package is not installed.
    """
    if name == "bytes":
        return byte_tokens
    package, _, which = name.partition(".")
    if package not in ("tensorflow_text", "keras_hub") or not which:
        raise DataError(
            f"tokenizer: expected 'bytes', 'tensorflow_text.CLASS' or 'keras_hub.PRESET', got "
            f"{name!r}"
        )
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise DataError(
            f"tokenizer {name!r}: {package} cannot be imported ({error}); pip install "
            f"{package.replace('_', '-')}, or use 'bytes'"
        ) from None
    if package == "keras_hub":
        found = module.models.Tokenizer.from_preset(which, **options)
    elif hasattr(module, which):
        found = getattr(module, which)(**options)
    else:
        raise DataError(f"tokenizer {name!r}: {package} has no such class")
    tokenize = found if package == "keras_hub" else found.tokenize

    def tokens(text: tf.Tensor) -> tf.Tensor:
        # Tokenizers that split into words and then into pieces return a ragged tensor.
        pieces = tokenize(text)
        return tf.cast(
            pieces.flat_values if isinstance(pieces, tf.RaggedTensor) else pieces, tf.int32
        )

    return tokens


def pack(documents: tf.data.Dataset, length: int, *, end: int = END) -> tf.data.Dataset:
    """Concatenates documents and cuts them into rows without padding.

    Example:
        >>> from pipelines.maps import text
        >>> documents = tf.data.Dataset.from_tensor_slices(["Hello", "you"]).map(text.byte_tokens)
        >>> [row.tolist() for row in text.pack(documents, 5).as_numpy_iterator()]
        [[72, 101, 108, 108, 111], [256, 121, 111, 117, 256]]

    Args:
        documents: The tokens of each document, int32 `(n,)`, or batches of one such row, as
            `pipelines.read(..., batch_size=1)` yields them.
        length: Tokens per row. To predict the next token, use one more than the model's context.
        end: Token that is appended to each document.

    Returns:
        Rows, int32 `(length,)`. An incomplete last row is dropped.
    """

    def ended(tokens: tf.Tensor) -> tf.Tensor:
        tokens = tokens.flat_values if isinstance(tokens, tf.RaggedTensor) else tokens
        return tf.concat([tf.reshape(tokens, [-1]), [end]], 0)

    return documents.map(ended, tf.data.AUTOTUNE).rebatch(length, drop_remainder=True)
