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


def conversation(
    roles: tf.Tensor,
    texts: tf.Tensor,
    tokenize: Callable[[tf.Tensor], tf.Tensor],
    *,
    begin: str = "<start_of_turn>{role}\n",
    end: str = "<end_of_turn>\n",
    learned: str = "assistant",
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the tokens of a conversation, and weights that mask the prompts out of the loss.

    Example:
        >>> from pipelines.maps import text
        >>> tokens, weights = text.conversation(
        ...     ["user", "assistant"], ["Hi", "Ho"], text.byte_tokens, begin="", end="."
        ... )
        >>> bytes(tokens.numpy().tolist()), weights.numpy().tolist()
        (b'Hi.Ho.', [0.0, 0.0, 0.0, 1.0, 1.0, 1.0])

    Args:
        roles: Who says each text, strings `(n,)`.
        texts: The messages, strings `(n,)`.
        tokenize: As `tokenizer` returns it, without tokens for the beginning and the end.
        begin: Text before each message, in which `{role}` is the role.
        end: Text after each message; the model learns to write it.
        learned: The role whose messages are learned.

    Returns:
        Tokens, int32 `(m,)`, and the weight of each as a label, float32 `(m,)`.
    """

    def message(pair: tuple[tf.Tensor, tf.Tensor]) -> tf.RaggedTensor:
        role, content = pair
        prompt = tokenize(tf.strings.regex_replace(tf.constant(begin), r"\{role\}", role))
        said = tokenize(tf.strings.join([content, end]))
        learns = tf.fill(tf.shape(said), tf.cast(role == learned, tf.int32))
        parts = tf.concat([prompt, said], 0), tf.concat([tf.zeros_like(prompt), learns], 0)
        return tf.RaggedTensor.from_tensor(tf.stack(parts, 1))

    pieces = tf.map_fn(
        message,
        (tf.convert_to_tensor(roles), tf.convert_to_tensor(texts)),
        fn_output_signature=tf.RaggedTensorSpec([None, None], tf.int32, 1),
    )
    tokens, learns = tf.unstack(tf.reshape(pieces.flat_values, [-1, 2]), axis=1)
    return tokens, tf.cast(learns, tf.float32)


def pack_examples(examples: tf.data.Dataset, length: int) -> tf.data.Dataset:
    """Packs whole examples into rows for a model that predicts the next token.

    Unlike `pack`, it cuts no example in two, and tells them apart: with `attention_mask` of the
    segment ids and the positions, the model computes for each what it computes for it alone.

    Example:
        >>> from pipelines.maps import text
        >>> tokens = tf.ragged.constant([[1, 2, 3], [4, 5], [6, 7, 8]])
        >>> examples = tf.data.Dataset.from_tensor_slices(tokens)
        >>> rows = text.pack_examples(examples.map(lambda t: (t, tf.ones_like(t, tf.float32))), 5)
        >>> x, y, weights = next(iter(rows))
        >>> x["token_ids"].numpy().tolist(), x["segment_ids"].numpy().tolist()
        ([1, 2, 3, 4, 5], [1, 1, 1, 2, 2])
        >>> x["positions"].numpy().tolist(), y.numpy().tolist(), weights.numpy().tolist()
        ([0, 1, 2, 0, 1], [2, 3, 0, 5, 0], [1.0, 1.0, 0.0, 1.0, 0.0])

    Args:
        examples: The tokens of each example and their weights as labels, int32 and float32 `(n,)`.
            Longer examples are cut to `length`.
        length: Tokens per row.

    Returns:
        Rows `(x, y, weights)` of `(length,)`: a dictionary of `token_ids`, `segment_ids` (from 1;
        0 is padding) and `positions`, int32; the next token of each, int32; and its weight,
        float32, 0 for the last one of an example and for padding.
    """
    row = tf.zeros([0], tf.int32), tf.zeros([0], tf.float32), tf.zeros([0], tf.int32)

    def cut(tokens: tf.Tensor, weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, bool]:
        return tf.cast(tokens, tf.int32)[:length], weights[:length], False

    def add(row: Any, example: Any) -> Any:
        tokens, weights, is_end = example
        example = tokens, weights, tf.shape(tokens)[:1]
        fits = (tf.size(row[0]) + tf.size(tokens) <= length) & ~is_end
        joined = [tf.concat(parts, 0) for parts in zip(row, example, strict=True)]
        after = tf.cond(fits, lambda: tuple(joined), lambda: example)
        return after, (*row, ~fits)

    def labelled(tokens: tf.Tensor, weights: tf.Tensor, sizes: tf.Tensor, _: tf.Tensor) -> Any:
        segments = tf.repeat(tf.range(1, tf.size(sizes) + 1), sizes)
        positions = tf.range(tf.size(tokens)) - tf.repeat(tf.cumsum(sizes, exclusive=True), sizes)
        follows = tf.concat(
            [positions[1:] > 0, tf.zeros([tf.minimum(tf.size(tokens), 1)], bool)], 0
        )
        y = tf.where(follows, tf.roll(tokens, -1, 0), 0)
        weights = tf.where(follows, tf.roll(weights, -1, 0), 0.0)
        columns = [
            tf.pad(v, [[0, length - tf.size(tokens)]])
            for v in (tokens, segments, positions, y, weights)
        ]
        ids, segments, positions, y, weights = (tf.ensure_shape(v, [length]) for v in columns)
        return {"token_ids": ids, "segment_ids": segments, "positions": positions}, y, weights

    end = tf.data.Dataset.from_tensors((row[0], row[1], True))
    rows = examples.map(cut, tf.data.AUTOTUNE).concatenate(end).scan(row, add)
    return rows.filter(lambda tokens, weights, sizes, is_full: is_full & (tf.size(tokens) > 0)).map(
        labelled, tf.data.AUTOTUNE
    )


def attention_mask(segment_ids: tf.Tensor) -> tf.Tensor:
    """Returns which positions of a packed row may attend to which, for `pack_examples`.

    Example:
        >>> from pipelines.maps import text
        >>> text.attention_mask(tf.constant([[1, 1, 2]])).numpy().astype(int).tolist()
        [[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]

    Args:
        segment_ids: int32 `(batch, length)`.

    Returns:
        bool `(batch, length, length)`: the same segment, and not later.
    """
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return tf.linalg.band_part(same, -1, 0)
