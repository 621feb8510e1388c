"""Programs for tables and ratings."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.programs.program import program
from tests.programs.rows import NUM_ROWS, integers, named, normal, vectors
from tests.programs.text import binary
from tests.programs.vision import encoder
from tests.support.case import compiled
from tests.support.data import Data

YES = integers(2, 1, seed=4)


def people() -> dict[str, keras.KerasTensor]:
    """Returns the inputs of a table with numbers and categories."""
    return {
        "age": keras.Input((1,), name="age"),
        "hours": keras.Input((1,), name="hours"),
        "job": keras.Input((1,), name="job", dtype="int32"),
        "town": keras.Input((1,), name="town", dtype="int32"),
    }


PEOPLE = named(
    YES, age=normal(1), hours=normal(1, seed=5), job=integers(4, 1), town=integers(3, 1, seed=7)
)


@program(PEOPLE, quick=True)
def wide_and_deep() -> keras.Model:
    """Wide and deep: one-hot categories and embeddings."""
    inputs = people()
    wide = layers.concatenate(
        [
            layers.CategoryEncoding(4, "one_hot")(inputs["job"]),
            layers.CategoryEncoding(3, "one_hot")(inputs["town"]),
        ]
    )
    embedded = [layers.Flatten()(layers.Embedding(4, 2)(inputs[name])) for name in ("job", "town")]
    deep = layers.concatenate([inputs["age"], inputs["hours"], *embedded])
    deep = layers.Dense(4, activation="relu")(layers.LayerNormalization()(deep))
    return binary(inputs, layers.concatenate([wide, deep]))


@program(PEOPLE)
def crossed_features() -> keras.Model:
    """Deep and cross networks."""
    inputs = people()
    x = [layers.Flatten()(layers.Embedding(4, 2)(inputs[name])) for name in ("job", "town")]
    first = crossed = layers.concatenate([inputs["age"], inputs["hours"], *x])
    for _ in range(2):
        crossed = first * layers.Dense(6)(crossed) + crossed
    return binary(inputs, crossed, keras.optimizers.Adadelta(1.0))


@program(PEOPLE)
def hashed_features() -> keras.Model:
    """Hashed and crossed categories, and discretized numbers."""
    inputs = people()
    crossed = layers.HashedCrossing(5, output_mode="one_hot")((inputs["job"], inputs["town"]))
    hashed = layers.Hashing(3, output_mode="one_hot")(inputs["job"])
    bins = layers.Discretization([-1.0, 0.0, 1.0], output_mode="one_hot")(inputs["age"])
    return binary(inputs, layers.concatenate([crossed, hashed, bins, inputs["hours"]]), "sgd")


class Gated(layers.Layer):
    """A gated residual of dense layers."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.hidden, self.linear = layers.Dense(units, activation="elu"), layers.Dense(units)
        self.gate = layers.Dense(units, activation="sigmoid")
        self.norm, self.project = layers.LayerNormalization(), layers.Dense(units)

    def call(self, x: Any) -> Any:
        y = self.hidden(x)
        return self.norm(self.project(x) + self.linear(y) * self.gate(y))


@program(vectors(5))
def selected_variables() -> keras.Model:
    """Gated residual networks with variable selection by a softmax."""
    inputs = keras.Input((5,))
    columns = [Gated(3)(column) for column in ops.split(inputs, 5, axis=1)]
    chosen = layers.Softmax()(Gated(5)(layers.concatenate(columns)))
    x = ops.squeeze(ops.expand_dims(chosen, 1) @ ops.stack(columns, 1), 1)
    return compiled(keras.Model(inputs, layers.Dense(1)(x)), "adam", "mse")


class Recommender(keras.Model):
    """Embeddings and biases of users and films."""

    def __init__(self, tensordot: bool = False) -> None:
        super().__init__()
        self.tensordot = tensordot
        regular = keras.regularizers.L2(1e-3)
        self.users = layers.Embedding(5, 3, embeddings_regularizer=regular)
        self.films = layers.Embedding(7, 3, embeddings_regularizer=regular)
        self.user_bias, self.film_bias = layers.Embedding(5, 1), layers.Embedding(7, 1)

    def call(self, inputs: Any) -> Any:
        """Maps int32 [rows, 2] to a rating [rows, 1]."""
        users, films = self.users(inputs[:, 0]), self.films(inputs[:, 1])
        if self.tensordot:
            product = ops.tensordot(users, films, 2)
        else:
            product = ops.sum(users * films, 1, keepdims=True)
        biases = self.user_bias(inputs[:, 0]) + self.film_bias(inputs[:, 1])
        return ops.sigmoid(product + biases)


RATINGS = Data(np.stack([integers(5), integers(7, seed=3)], 1), np.abs(np.sin(normal(1, seed=2))))


@program(RATINGS, quick=True)
def recommender() -> keras.Model:
    """A recommender of users and films with regularized embeddings."""
    return compiled(Recommender(), keras.optimizers.Adam(1e-2), "binary_crossentropy")


@program(RATINGS, may_refuse=True)
def recommender_with_tensordot() -> keras.Model:
    """A recommender whose `tensordot` sums over the rows of the batch."""
    return compiled(Recommender(tensordot=True), keras.optimizers.Adam(1e-2), "mse")


@program(Data([integers(5, 1), integers(7, 1, seed=3)], normal(1)))
def two_towers() -> keras.Model:
    """A two-tower recommender with a dot product and a rating output."""
    user, film = keras.Input((1,), dtype="int32"), keras.Input((1,), dtype="int32")
    vectors_ = [layers.Flatten()(layers.Embedding(7, 3)(x)) for x in (user, film)]
    x = layers.Dot(1)([layers.UnitNormalization()(v) for v in vectors_])
    return compiled(keras.Model([user, film], x), keras.optimizers.RMSprop(1e-2, momentum=0.9))


@program(PEOPLE)
def table_transformer() -> keras.Model:
    """TabTransformer: categories as tokens, with an embedding for each column."""
    inputs = people()
    tokens = ops.stack([layers.Embedding(4, 4)(inputs[n])[:, 0] for n in ("job", "town")], 1)
    tokens = tokens + layers.Embedding(2, 4)(ops.arange(2))
    numbers = layers.LayerNormalization()(layers.concatenate([inputs["age"], inputs["hours"]]))
    x = layers.Flatten()(encoder(tokens))
    x = layers.Dense(4, activation="selu")(layers.concatenate([x, numbers]))
    return binary(inputs, layers.BatchNormalization(trainable=False)(x))


@program(Data(normal(5), YES), fit={"class_weight": {0: 0.3, 1: 2.0}})
def rare_fraud() -> keras.Model:
    """Imbalanced classes with `class_weight` and confusion metrics."""
    inputs = keras.Input((5,))
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(inputs))
    names = ("FalseNegatives", "FalsePositives", "TrueNegatives", "TruePositives")
    metrics = [getattr(keras.metrics, name)() for name in names]
    metrics += [keras.metrics.Precision(), keras.metrics.Recall()]
    return compiled(model, keras.optimizers.Adam(1e-2), "binary_crossentropy", metrics=metrics)


class Tree(layers.Layer):
    """A decision tree whose branches are taken with a probability."""

    def build(self, shape: Any) -> None:
        """Makes the leaves, and the columns that this tree sees."""
        self.leaves = self.add_weight(shape=(4, 1), initializer="random_normal", name="leaves")
        self.branch = layers.Dense(3, activation="sigmoid")
        self.seen = np.eye(shape[-1])[:, :3]

    def call(self, x: Any) -> Any:
        p = self.branch(x @ ops.convert_to_tensor(self.seen, x.dtype))
        left, right = p[:, :1], 1 - p[:, :1]
        ways = [left * p[:, 1:2], left * (1 - p[:, 1:2]), right * p[:, 2:], right * (1 - p[:, 2:])]
        return ops.concatenate(ways, 1) @ self.leaves


@program(vectors(5))
def decision_forest() -> keras.Model:
    """A neural decision forest."""
    inputs = keras.Input((5,))
    model = keras.Model(inputs, ops.mean(ops.stack([Tree()(inputs) for _ in range(2)]), 0))
    return compiled(model, keras.optimizers.Ftrl(0.1), "mae")


@program(named(films=integers(7, 4), target=integers(7, 1, seed=3), ratings=normal(4, seed=7)))
def behaviour_sequence() -> keras.Model:
    """Behavior sequence transformer: rated films before a target film."""
    films = keras.Input((4,), name="films", dtype="int32")
    target = keras.Input((1,), name="target", dtype="int32")
    ratings = keras.Input((4,), name="ratings")
    table = layers.Embedding(7, 4)
    history = (table(films) + layers.Embedding(4, 4)(ops.arange(4))) * ratings[..., None]
    x = encoder(layers.Concatenate(axis=1)([history, table(target)]))
    x = layers.LeakyReLU()(layers.Dense(4)(layers.Flatten()(x)))
    model = keras.Model({"films": films, "target": target, "ratings": ratings}, layers.Dense(1)(x))
    return compiled(model, keras.optimizers.Adagrad(0.1), "mse", metrics=["mae"])


def _answers() -> Data:
    """Returns questions and whether each was answered correctly; the label is the next answer."""
    asked, right = integers(5, 4), integers(2, 4, seed=6)
    return Data([asked, right], np.roll(right, -1, 1)[..., None].astype("float64"), normal(4) ** 2)


@program(_answers())
def knowledge_tracing() -> keras.Model:
    """Knowledge tracing: an LSTM with a weight per answer."""
    asked, right = keras.Input((4,), dtype="int32"), keras.Input((4,), dtype="int32")
    x = layers.Embedding(10, 3)(asked + 5 * right)
    x = layers.Dense(5, activation="sigmoid")(layers.LSTM(3, return_sequences=True)(x))
    following = ops.one_hot(ops.roll(asked, -1, 1), 5, dtype=x.dtype)
    chance = ops.sum(x * following, -1, keepdims=True)
    return compiled(keras.Model([asked, right], chance), "adam", "binary_crossentropy")


@program(
    Data(np.array([["a", "b", "c"][i % 3] for i in range(NUM_ROWS)], object), YES), feed="dataset"
)
def looked_up_strings() -> keras.Model:
    """A `StringLookup` layer in the model."""
    inputs = keras.Input((), dtype="string")
    x = layers.StringLookup(vocabulary=["a", "b"], output_mode="one_hot")(inputs)
    return binary(inputs, x)


@program(vectors(4), quick=True)
def normalised_columns() -> keras.Model:
    """An adapted `Normalization` layer in the model."""
    inputs = keras.Input((4,))
    normalise = layers.Normalization()
    normalise.adapt(normal(4, seed=11))
    x = layers.Dense(3, activation="mish", kernel_regularizer="l1")(normalise(inputs))
    return compiled(keras.Model(inputs, layers.Dense(1)(x)), "adam", "log_cosh")
