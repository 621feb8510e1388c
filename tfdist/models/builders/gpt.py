"""A decoder-only transformer in the sizes of GPT-2, and the block that `vit` has too.

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", table 2.
"""

from __future__ import annotations

import contextlib
from typing import Literal

import keras
from keras import layers, ops

from tfdist.errors import ConfigurationError
from tfdist.models.builders import head

#: Number of blocks, width and number of heads.
SIZES = {"tiny": (2, 64, 2), "mini": (4, 128, 4), "small": (12, 768, 12), "medium": (24, 1024, 16)}


def gpt(
    vocabulary_size: int,
    length: int,
    *,
    size: Literal["tiny", "mini", "small", "medium"] = "small",
    dropout: float = 0.0,
    remat: bool = False,
    dtype_policy: str | None = None,
) -> keras.Model:
    """Builds causal transformer blocks with tied input and output embeddings.

    Example:
        >>> from tfdist import models
        >>> models.gpt(vocabulary_size=257, length=64, size="tiny").output_shape
        (None, None, 257)

    Args:
        vocabulary_size: Number of tokens; ids are 0 to `vocabulary_size - 1`.
        length: Maximum sequence length in tokens.
        size: GPT-2's `small` (124 M weights) or `medium` (355 M); `tiny` and `mini` are for small
            texts.
        dropout: Dropout rate; see `transformer.block`.
        remat: Activation checkpointing (`keras.RematScope`) in a `Trainer`: each block stores only
            its inputs, and the backward pass recomputes it. Saves memory for 1/3 more computation.
        dtype_policy: Name of the Keras dtype policy of all layers; None: the global policy.

    Returns:
        An uncompiled model from tokens, int32 `(batch, up to length)`, to logits of the next token
        at each position, `(batch, length, vocabulary_size)`.

    Raises:
        ConfigurationError: Keras is older than 3.12, which brought `ReversibleEmbedding`.
    """
    if not hasattr(layers, "ReversibleEmbedding"):
        raise ConfigurationError(
            f"The model gpt needs ReversibleEmbedding, which Keras {keras.version()} lacks. "
            "Upgrade to Keras 3.12."
        )
    depth, width, num_heads = SIZES[size]
    normal = keras.initializers.RandomNormal(stddev=0.02)
    tokens = keras.Input((None,), dtype="int32")
    words = layers.ReversibleEmbedding(
        vocabulary_size,
        width,
        embeddings_initializer=normal,
        dtype=dtype_policy,
        name="words",
    )
    places = layers.Embedding(
        length, width, embeddings_initializer=normal, dtype=dtype_policy, name="places"
    )
    positions = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
    x = layers.Add(dtype=dtype_policy)([words(tokens), places(positions)])
    if dropout:
        x = layers.Dropout(dropout, dtype=dtype_policy)(x)
    for _ in range(depth):
        inputs = keras.Input((None, width), dtype=x.dtype)
        outputs = block(
            inputs, num_heads, causal=True, dropout=dropout, epsilon=1e-5, dtype_policy=dtype_policy
        )
        # The block as a whole: checkpointing its layers one by one would store all their inputs.
        with keras.RematScope("full") if remat else contextlib.nullcontext():
            x = keras.Model(inputs, outputs)(x)
    x = layers.LayerNormalization(epsilon=1e-5, dtype=dtype_policy)(x)
    # In the compute dtype of the other layers: a large vocabulary makes this product the largest.
    outputs = layers.Activation("linear", dtype=head.dtype(dtype_policy), name="logits")(
        words(x, reverse=True)
    )
    return keras.Model(tokens, outputs, name="gpt")


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
