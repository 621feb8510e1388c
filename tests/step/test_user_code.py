"""Code of users that plain Keras accepts: values without rows, Python in a step, rare inputs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.support.training import assert_close, mirrored
from tfdist.errors import UnsupportedModelError

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(11, 4)).astype("float32"), RNG.normal(size=(11, 3)).astype("float32")
#: Batches of 6 and 5 rows: the code book below has as many rows as the first, or as a replica.
SIZE = 6


def normal(seed: int) -> keras.Initializer:
    return keras.initializers.RandomNormal(seed=seed)


class WithCode(keras.Model):
    """Returns outputs for the rows, and a code book that has other rows."""

    def __init__(self, form: Callable[[Any], Any] = lambda code: code, rows: int = SIZE) -> None:
        super().__init__()
        self.dense, self.form = layers.Dense(3, kernel_initializer=normal(1)), form
        self.code = self.add_weight(shape=(rows, 3), initializer=normal(2))

    def call(self, x: Any) -> Any:
        return {"y": self.dense(x) + self.code[0], "code": self.form(self.code)}


def of_code(y_true: Any, code: Any) -> Any:
    return ops.sum(code**2)


class Linear(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3, kernel_initializer=normal(1))
        self.count = 0

    def call(self, x: Any) -> Any:
        return self.dense(x)


class MixUp(Linear):
    def train_step(self, data: Any) -> Any:
        self.count += 1
        share = np.random.beta(0.4, 0.4) * random.random() / self.count
        share = share * tf.random.uniform([])
        return super().train_step(tf.nest.map_structure(lambda v: share * v, data))


class NumpyNoise(Linear):
    def call(self, x: Any, training: bool = False) -> Any:
        noise = tf.numpy_function(
            lambda v: np.random.normal(size=v.shape).astype("float32"), [x], tf.float32
        )
        return self.dense(x + tf.ensure_shape(noise, x.shape) if training else x)


GENERATOR, CALLS = np.random.RandomState(), list[int]()


class OwnNoise(Linear):
    """Draws from its own generator and a global one, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.generator, self.numbers = np.random.default_rng(3), itertools.count(1)
        GENERATOR.seed(4)
        CALLS.clear()

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            CALLS.append(len(x))
            self.count = len(CALLS)
            noise = self.generator.normal(size=x.shape) + GENERATOR.normal(size=x.shape)
            x = x + ops.cast(noise, "float32") / (self.count + next(self.numbers))
        return self.dense(x)


class WithIterator(Linear):
    """Reads other data in each step, as semi-supervised learning does."""

    def __init__(self, iterator: Any) -> None:
        super().__init__()
        self.others = iterator

    def train_step(self, data: Any) -> Any:
        x, y = data
        return super().train_step((x * ops.mean(next(self.others)), y))


class Containers(keras.Model):
    """Has layers in a dictionary and a list, and notes its calls in others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers_by_name = {"y": layers.Dense(3, kernel_initializer=normal(1))}
        self.blocks = [layers.Dense(4, kernel_initializer=normal(2)) for _ in range(2)]
        self.calls, self.seen = {"number": 0}, {"x"}

    def call(self, x: Any) -> Any:
        self.calls["number"] += 1
        self.seen.add("y")
        for block in self.blocks:
            x = block(x)
        return self.layers_by_name["y"](x)


class Block(Linear):
    """A `tf.function` that changes a seed, with control flow for AutoGraph."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = layers.Dropout(0.5, seed=1)

    @tf.function
    def call(self, x: Any, training: bool = False) -> Any:
        scale = tf.constant(1.0)
        if tf.shape(x)[1] > 2:
            scale = tf.constant(2.0)
        return self.dropout(self.dense(x), training=training) * scale


class Decorated(Linear):
    @tf.function
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class Accumulating(Linear):
    """Gradient accumulation by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.dense.build((None, 4))
        self.sums = [self.add_weight(shape=v.shape, trainable=False, initializer="zeros")
                     for v in self.dense.trainable_variables]  # fmt: skip
        self.steps = self.add_weight(shape=(), dtype="int32", trainable=False, initializer="zeros")

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.compute_loss(data[0], data[1], self(data[0], training=True))
        for total, gradient in zip(
            self.sums, tape.gradient(loss, self.trainable_variables), strict=True
        ):
            total.assign_add(gradient)
        self.steps.assign_add(1)
        tf.cond(self.steps % 2 == 0, self.update, lambda: None)
        return {"loss": loss}

    def update(self) -> None:
        self.optimizer.apply_gradients(zip(self.sums, self.trainable_variables, strict=True))
        for total in self.sums:
            total.assign(tf.zeros_like(total))


class Ragged(Linear):
    def call(self, x: Any) -> Any:
        return self.dense(x.to_tensor(shape=[None, 4]))


class Sparse(Linear):
    def call(self, x: Any) -> Any:
        return self.dense(tf.sparse.to_dense(x))


class InBatch(keras.Model):
    """Retrieval by an in-batch softmax, with strings among the features."""

    def __init__(self) -> None:
        super().__init__()
        names = [f"u{i}" for i in range(5)]
        self.lookup = layers.StringLookup(vocabulary=names)
        self.table = layers.Embedding(6, 3, embeddings_initializer=normal(1))

    def call(self, x: Any) -> Any:
        return self.table(self.lookup(x))

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # noqa: ANN001, ANN201
        scores = ops.matmul(y_pred, ops.transpose(y))
        labels = ops.arange(ops.shape(scores)[0])
        return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, scores, True))


def sliced(x: Any) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((x, Y)).batch(SIZE)


def other_data() -> Any:
    rows = tf.data.Dataset.from_tensor_slices(X).shuffle(9, seed=1)
    return iter(rows.repeat().batch(4))


def rows_of_lengths() -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_lengths(X.ravel()[:26], [1, 4, 2, 3, 1, 4, 2, 3, 1, 4, 1])


def several_values_per_row(y_true: Any, y_pred: Any) -> Any:
    return ops.reshape(ops.square(y_true - y_pred), (-1,))


def numpy_loss(y_true: Any, y_pred: Any) -> Any:
    return ops.mean(ops.square(y_true - y_pred), -1) * np.random.uniform()


TWO = {"y": Y, "code": np.zeros((11, 1), "float32")}
CODE_LOSS = {"y": "mse", "code": of_code}
EAGER = {"run_eagerly": True}
#: The model, arguments of `compile`, and data.
CASES: dict[str, tuple[Callable[[], keras.Model], dict[str, Any], Callable[[], Any]]] = {
    "code book": (WithCode, {"loss": CODE_LOSS}, lambda: (X, TWO)),
    "code book of a replica's rows": (
        lambda: WithCode(ops.square, SIZE // 2), {"loss": CODE_LOSS}, lambda: (X, TWO),
    ),
    "anchors": (
        lambda: WithCode(lambda code: ops.expand_dims(code, 0)), {"loss": CODE_LOSS},
        lambda: (X, TWO),
    ),
    "several values per row": (Linear, {"loss": several_values_per_row}, lambda: (X, Y)),
    "random states, eager": (MixUp, EAGER, lambda: (X, Y)),
    "own generators, eager": (OwnNoise, EAGER, lambda: (X, Y)),
    "numpy in a loss, eager": (Linear, {"loss": numpy_loss} | EAGER, lambda: (X, Y)),
    "numpy_function": (NumpyNoise, {}, lambda: (X, Y)),
    "iterator of tf.data": (lambda: WithIterator(other_data()), {}, lambda: (X, Y)),
    "iterator of Python, eager": (
        lambda: WithIterator(itertools.cycle(X)), EAGER, lambda: (X, Y),
    ),
    "layers in containers": (Containers, {}, lambda: (X, Y)),
    "tf.function on call": (Block, {}, lambda: (X, Y)),
    "tf.function on train_step": (Decorated, {}, lambda: (X, Y)),
    "assignments in tf.cond": (Accumulating, {}, lambda: (X, Y)),
    "ragged": (Ragged, {}, lambda: (sliced(rows_of_lengths()), None)),
    "sparse": (Sparse, {}, lambda: (sliced(tf.sparse.from_dense(X)), None)),
    "strings beside compute_loss": (
        InBatch, {}, lambda: (sliced([f"u{i % 5}" for i in range(11)]), None),
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_keras(case: str) -> None:
    make, options, data = CASES[case]

    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        model = make()
        if case != "strings beside compute_loss":
            model(X[:1] if case not in ("ragged", "sparse") else next(iter(data()[0]))[0])
        model.compile(keras.optimizers.SGD(0.1), **{"loss": "mse"} | options)
        return model

    def run(runner: Any) -> Any:
        keras.utils.set_random_seed(2)
        x, y = data()
        options = {} if y is None else {"batch_size": SIZE, "shuffle": False}
        history = runner.fit(x, y, epochs=2, verbose=0, **options).history
        size = {} if y is None else {"batch_size": SIZE}
        model = getattr(runner, "model", runner)
        after = [np.random.random(), random.random(), getattr(model, "count", 0)]
        return history, runner.predict(x, verbose=0, **size), model.get_weights(), after

    assert_close(run(mirrored(build)), run(build()))


def test_iterator_that_cannot_be_set_back_is_refused() -> None:
    def build() -> keras.Model:
        data = tf.data.Dataset.from_generator(lambda: iter(X), output_signature=tf.TensorSpec((4,)))
        model = WithIterator(iter(data))
        model.compile("sgd", "mse")
        return model

    with pytest.raises(UnsupportedModelError, match=r"reads a .*Iterator that cannot be set back"):
        mirrored(build).fit(X, Y, verbose=0)
