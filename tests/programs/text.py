"""Programs for text."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.programs.program import program
from tests.programs.rows import NUM_ROWS, integers, normal, sentences
from tests.programs.vision import encoder, of_classes
from tests.support.case import compiled
from tests.support.data import Data


def binary(inputs: Any, features: Any, optimizer: Any = "adam") -> keras.Model:
    """Returns a model that predicts one probability from features [rows, n]."""
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(features))
    return compiled(model, optimizer, "binary_crossentropy", metrics=["accuracy"])


class Embedded(layers.Layer):
    """Embeds words and their positions."""

    def __init__(
        self, words: int = 9, length: int = 6, width: int = 4, masked: bool = False
    ) -> None:
        super().__init__()
        self.words = layers.Embedding(words, width, mask_zero=masked)
        self.places = layers.Embedding(length, width)
        self.supports_masking = True

    def call(self, tokens: Any) -> Any:
        """Maps int32 [rows, length] to [rows, length, width]."""
        places = ops.arange(0, ops.shape(tokens)[-1], 1)
        return self.words(tokens) + self.places(places)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """As the embedding of the words."""
        return self.words.compute_mask(inputs, mask)


@program(sentences(), quick=True)
def transformer_classifier() -> keras.Model:
    """A text transformer with token and position embeddings, trained by Adam."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.GlobalAveragePooling1D()(encoder(Embedded()(inputs)))
    return binary(inputs, layers.Dropout(0.0)(x))


@program(sentences())
def convolutions_over_words() -> keras.Model:
    """Text classification: convolutions and global max pooling."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4)(inputs)
    x = layers.Conv1D(4, 3, padding="valid", activation="relu")(x)
    return binary(inputs, layers.GlobalMaxPooling1D()(x))


@program(sentences())
def bidirectional_lstm() -> keras.Model:
    """Text classification: two bidirectional LSTMs on padded words."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 3, mask_zero=True)(inputs)
    x = layers.Bidirectional(layers.LSTM(2, return_sequences=True))(x)
    return binary(inputs, layers.Bidirectional(layers.LSTM(2))(x))


def _masked_words() -> Data:
    words, hidden = integers(9, 6, low=2), normal(6) > 0.3
    return Data(np.where(hidden, 1, words).astype("int32"), words, hidden.astype("float64"))


@program(_masked_words())
def masked_language_model() -> keras.Model:
    """Masked language modeling with a sample weight per token."""
    inputs = keras.Input((6,), dtype="int32")
    x = encoder(Embedded()(inputs))
    model = keras.Model(inputs, layers.Dense(9, activation="softmax")(x))
    loss = "sparse_categorical_crossentropy"
    return compiled(model, "adam", loss, weighted_metrics=["sparse_categorical_accuracy"])


def _translation(steps: int = 5) -> Data:
    words = integers(7, steps, seed=12)
    return Data([integers(9, steps), words], np.roll(words, -1, axis=1))


@program(_translation())
def sequence_to_sequence() -> keras.Model:
    """Translation by an LSTM encoder and decoder."""
    source, target = keras.Input((5,), dtype="int32"), keras.Input((5,), dtype="int32")
    _, *states = layers.LSTM(3, return_state=True)(layers.Embedding(9, 3)(source))
    x = layers.Embedding(7, 3)(target)
    x, *_ = layers.LSTM(3, return_sequences=True, return_state=True)(x, initial_state=states)
    return compiled(keras.Model([source, target], layers.Dense(7)(x)), "rmsprop", of_classes())


@program(_translation())
def translation_transformer() -> keras.Model:
    """Translation by an encoder and a causal decoder, with the masks of their embeddings."""
    source, target = keras.Input((5,), dtype="int32"), keras.Input((5,), dtype="int32")
    encoded = encoder(Embedded(9, 5, masked=True)(source))
    x = Embedded(7, 5, masked=True)(target)
    x = layers.LayerNormalization()(layers.MultiHeadAttention(2, 2)(x, x, use_causal_mask=True) + x)
    x = layers.LayerNormalization()(layers.MultiHeadAttention(2, 2)(x, encoded) + x)
    model = keras.Model([source, target], layers.Dense(7)(x))
    return compiled(model, "rmsprop", of_classes(), metrics=["accuracy"])


@program(Data(integers(9, 6), integers(4, 6)))
def named_entities() -> keras.Model:
    """Named entity recognition with a custom loss that ignores padding."""

    def unpadded(y: Any, logits: Any) -> Any:
        each = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
        there = ops.cast(y > 0, each.dtype)
        return ops.sum(each * there) / ops.sum(there)

    inputs = keras.Input((6,), dtype="int32")
    x = encoder(Embedded()(inputs))
    return compiled(keras.Model(inputs, layers.Dense(4)(x)), "adam", unpadded)


class Fourier(layers.Layer):
    """Mixes words by a Fourier transform."""

    def call(self, x: Any) -> Any:
        """Maps [rows, length, width] to the real part of its transform."""
        real, _ = ops.fft2((x, ops.zeros_like(x)))
        return real


@program(sentences(), floatx="float32")
def fourier_mixing() -> keras.Model:
    """FNet: a Fourier transform in place of attention."""
    inputs = keras.Input((6,), dtype="int32")
    x = Embedded()(inputs)
    x = layers.LayerNormalization()(Fourier()(x) + x)
    return binary(inputs, layers.GlobalAveragePooling1D()(x), keras.optimizers.Adam(epsilon=1e-2))


@program(sentences(), may_refuse=True)
def mixture_of_experts() -> keras.Model:
    """A mixture of experts with a load-balancing loss."""

    class Router(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.route = layers.Dense(2, activation="softmax")
            self.experts = [layers.Dense(4, activation="relu") for _ in range(2)]

        def call(self, x: Any) -> Any:
            chances = self.route(x)
            first = ops.one_hot(ops.argmax(chances, -1), 2, dtype=x.dtype)
            shares = ops.mean(first, (0, 1)) * ops.mean(chances, (0, 1))
            self.add_loss(0.1 * ops.sum(shares))
            outputs = ops.stack([expert(x) for expert in self.experts], -1)
            return ops.sum(outputs * (first * chances)[:, :, None], -1)

    inputs = keras.Input((6,), dtype="int32")
    x = Router()(Embedded()(inputs))
    return binary(inputs, layers.GlobalAveragePooling1D()(x))


def _phrases() -> Data:
    words = ["a small cat", "the dog barks", "a dog", "cats and dogs bark", "the cat"]
    return Data(np.array([words[i % 5] for i in range(NUM_ROWS)], object), integers(2, seed=4))


@program(_phrases(), feed="dataset", quick=True)
def raw_strings() -> keras.Model:
    """Text classification from strings, with a `TextVectorization` layer in the model."""
    inputs = keras.Input((), dtype="string")
    vectorize = layers.TextVectorization(12, output_sequence_length=4)
    vectorize.adapt(["a small cat the dog barks cats and dogs bark"])
    x = layers.Embedding(12, 3, mask_zero=True)(vectorize(inputs))
    return binary(inputs, layers.GlobalAveragePooling1D()(x))


@program(Data([integers(9, 6), integers(9, 6, seed=5)], normal(1)))
def sentence_similarity() -> keras.Model:
    """Sentence similarity: one encoder for both sentences, and their cosine."""
    one, other = keras.Input((6,), dtype="int32"), keras.Input((6,), dtype="int32")
    encode = keras.Sequential([layers.Embedding(9, 4), layers.GRU(3)])
    cosine = layers.Dot(1, normalize=True)([encode(one), encode(other)])
    return compiled(keras.Model([one, other], cosine), "adam", "mse")


@program(Data(integers(5, 4, seed=3), integers(5, 3, seed=4)))
def sums_by_characters() -> keras.Model:
    """Addition as sequence-to-sequence learning with an LSTM."""
    inputs = keras.Input((4,), dtype="int32")
    x = layers.LSTM(4)(layers.CategoryEncoding(5, "one_hot")(layers.Reshape((4, 1))(inputs)))
    x = layers.LSTM(4, return_sequences=True)(layers.RepeatVector(3)(x))
    model = keras.Model(inputs, layers.TimeDistributed(layers.Dense(5, activation="softmax"))(x))
    return compiled(model, "adam", "sparse_categorical_crossentropy", metrics=["accuracy"])


@program(sentences())
def pretrained_embeddings() -> keras.Model:
    """Pretrained, frozen embeddings."""
    table = keras.initializers.Constant(np.random.default_rng(0).normal(size=(9, 4)))
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Embedding(9, 4, embeddings_initializer=table, trainable=False)(inputs)
    return binary(inputs, layers.Dense(3, activation="relu")(layers.Flatten()(x)), "rmsprop")


def _continued() -> Data:
    words = integers(8, 7)
    return Data(words[:, :-1], words[:, 1:])


@program(_continued(), quick=True)
def generative_transformer() -> keras.Model:
    """A small generative transformer with tied input and output embeddings."""
    inputs = keras.Input((6,), dtype="int32")
    words = layers.ReversibleEmbedding(8, 4)
    x = words(inputs) + layers.Embedding(6, 4)(ops.arange(6))
    x = layers.MultiHeadAttention(2, 2)(x, x, use_causal_mask=True) + x
    logits = words(layers.RMSNormalization()(x), reverse=True)
    return compiled(keras.Model(inputs, logits), "adam", of_classes())


@program(sentences())
def relative_positions() -> keras.Model:
    """Attention with relative position biases."""

    class Biased(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table = layers.Embedding(11, 1)
            self.q, self.k = layers.Dense(3), layers.Dense(3)

        def call(self, x: Any) -> Any:
            places = ops.arange(6)
            bias = self.table(places[:, None] - places[None] + 5)[..., 0]
            scores = self.q(x) @ ops.transpose(self.k(x), (0, 2, 1))
            return ops.softmax(scores + bias) @ x

    inputs = keras.Input((6,), dtype="int32")
    x = Biased()(layers.Embedding(9, 4)(inputs))
    return binary(inputs, layers.Flatten()(x), keras.optimizers.Adagrad(0.1))


@program(sentences())
def clipped_positions() -> keras.Model:
    """A position embedding whose gradient is clipped separately."""
    inputs = keras.Input((6,), dtype="int32")
    x = layers.Flatten()(Embedded()(inputs))
    return binary(inputs, x, keras.optimizers.SGD(0.5, clipnorm=0.05))
