"""Text to tokens, and documents end to end in rows of one length, for language models."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from pipelines.errors import DataError

#: What ends a document where bytes are the tokens: no byte has this number.
END = 256


def byte_tokens(text: tf.Tensor) -> tf.Tensor:
    """The bytes of a text, as tokens 0 to 255; int32 `(n,)`. No vocabulary, nothing unknown."""
    return tf.cast(tf.io.decode_raw(text, tf.uint8), tf.int32)


def tokenizer(name: str, **options: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    """A tokenizer by name.

    Args:
        name: `"bytes"`; `"tensorflow_text.CLASS"`, made with the options; or
            `"keras_hub.PRESET"`, a tokenizer preset of KerasHub.
        **options: of the tokenizer's class.

    Returns:
        A function of a text, string scalar, that returns its tokens, int32 `(n,)`.

    Raises:
        DataError: no such tokenizer, or its package is not installed.
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
        # Some split into words first, and words into pieces: one row of all pieces.
        made = tokenize(text)
        return tf.cast(made.flat_values if isinstance(made, tf.RaggedTensor) else made, tf.int32)

    return tokens


def pack(documents: tf.data.Dataset, length: int, *, end: int = END) -> tf.data.Dataset:
    """Lays documents end to end and cuts them into rows; nothing is padded.

    Args:
        documents: each its tokens, int32 `(n,)`: `pipelines.read(..., batch_size=1)`'s batches of
            one row will do as well.
        length: tokens of a row. A model that predicts the next token takes one more than it sees.
        end: token that is put behind each document.

    Returns:
        Rows, int32 `(length,)`. What is left at the end of the data and fills no row is dropped.
    """

    def ended(tokens: tf.Tensor) -> tf.Tensor:
        tokens = tokens.flat_values if isinstance(tokens, tf.RaggedTensor) else tokens
        return tf.concat([tf.reshape(tokens, [-1]), [end]], 0)

    return documents.map(ended, tf.data.AUTOTUNE).rebatch(length, drop_remainder=True)
