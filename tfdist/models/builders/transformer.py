"""The block that the transformers share."""

from __future__ import annotations

import keras
from keras import layers


def block(
    x: keras.KerasTensor,
    num_heads: int,
    *,
    causal: bool,
    dropout: float,
    epsilon: float,
    dtype_policy: str | None,
) -> keras.KerasTensor:
    """Attention and two dense layers, each normalised first and added to what came in.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3:
    the layer normalisation of Vaswani et al. 2017, "Attention Is All You Need", moved to the front.

    Args:
        x: Tokens, `(batch, length, width)`.
        num_heads: Of the attention; the width divides by it.
        causal: Whether a token sees only those before it.
        dropout: Share of the attention and of both sums' new parts that training drops.
        epsilon: Of the layer normalisations.
        dtype_policy: Name of the Keras policy of all layers; None: the global one.

    Returns:
        Tokens of the same shape.
    """
    width = x.shape[-1]
    attention = layers.MultiHeadAttention(
        num_heads, width // num_heads, dropout=dropout, dtype=dtype_policy
    )
    y = layers.LayerNormalization(epsilon=epsilon, dtype=dtype_policy)(x)
    y = attention(y, y, use_causal_mask=causal)
    x = layers.Add(dtype=dtype_policy)([x, _dropped(y, dropout, dtype_policy)])
    y = layers.LayerNormalization(epsilon=epsilon, dtype=dtype_policy)(x)
    y = layers.Dense(4 * width, activation="gelu", dtype=dtype_policy)(y)
    y = layers.Dense(width, dtype=dtype_policy)(y)
    return layers.Add(dtype=dtype_policy)([x, _dropped(y, dropout, dtype_policy)])


def _dropped(x: keras.KerasTensor, rate: float, dtype_policy: str | None) -> keras.KerasTensor:
    return layers.Dropout(rate, dtype=dtype_policy)(x) if rate else x
