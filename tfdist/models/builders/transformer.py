"""The transformer block of `vit` and `gpt`."""

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
    """Returns the output of a pre-normalization transformer block: attention, then an MLP.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3:
    the layer normalisation of Vaswani et al. 2017, "Attention Is All You Need", moved to the front.

    Args:
        x: Tokens, `(batch, length, width)`.
        num_heads: Number of attention heads; the width is a multiple of it.
        causal: Whether a token attends only to earlier ones.
        dropout: Dropout rate of the attention weights and of both residual branches.
        epsilon: Epsilon of the layer normalizations.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.

    Returns:
        Tokens of the same shape.
    """
    width = x.shape[-1]
    attention = layers.MultiHeadAttention(
        num_heads, width // num_heads, dropout=dropout, dtype=dtype_policy
    )
    y = layers.LayerNormalization(epsilon=epsilon, dtype=dtype_policy)(x)
    y = attention(y, y, use_causal_mask=causal)
    x = layers.Add(dtype=dtype_policy)([x, _dropout(y, dropout, dtype_policy)])
    y = layers.LayerNormalization(epsilon=epsilon, dtype=dtype_policy)(x)
    y = layers.Dense(4 * width, activation="gelu", dtype=dtype_policy)(y)
    y = layers.Dense(width, dtype=dtype_policy)(y)
    return layers.Add(dtype=dtype_policy)([x, _dropout(y, dropout, dtype_policy)])


def _dropout(x: keras.KerasTensor, rate: float, dtype_policy: str | None) -> keras.KerasTensor:
    return layers.Dropout(rate, dtype=dtype_policy)(x) if rate else x
