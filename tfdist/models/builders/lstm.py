"""A bidirectional LSTM that classifies sequences of tokens.

Source: https://keras.io/examples/nlp/bidirectional_lstm_imdb, whose sizes are the defaults.
"""

from __future__ import annotations

import keras
from keras import layers

from tfdist.models.builders import head


def lstm(
    vocabulary_size: int,
    num_classes: int,
    *,
    width: int = 128,
    units: int = 64,
    depth: int = 2,
    dropout: float = 0.0,
    mask_zero: bool = False,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds an embedding, bidirectional LSTMs, and a dense layer.

    Example:
        >>> from tfdist import models
        >>> models.lstm(vocabulary_size=1000, num_classes=2).output_shape
        (None, 2)

    Args:
        vocabulary_size: Number of tokens; ids are 0 to `vocabulary_size - 1`.
        num_classes: Number of logits.
        width: Width of the embedding.
        units: Units of each LSTM, in each direction.
        depth: Number of stacked LSTMs.
        dropout: Dropout rate of each LSTM's inputs.
        mask_zero: Treat token 0 as padding and mask it.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.

    Returns:
        An uncompiled model from tokens, int32 `(batch, length)` of any length, to logits
        `(batch, num_classes)`.
    """
    tokens = keras.Input((None,), dtype="int32")
    x = layers.Embedding(vocabulary_size, width, mask_zero=mask_zero, dtype=dtype_policy)(tokens)
    for level in range(depth):
        cell = layers.LSTM(
            units, return_sequences=level < depth - 1, dropout=dropout, dtype=dtype_policy
        )
        x = layers.Bidirectional(cell, dtype=dtype_policy)(x)
    return keras.Model(tokens, head.logits(x, num_classes, dtype_policy), name="lstm")
