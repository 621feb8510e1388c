"""Predictions for exactly the given rows, from data in every form."""

from __future__ import annotations

import functools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.forms import FORMS, sliced
from tests.support.training import X, assert_close, build, building, dataset, mirrored
from tfdist import strategies
from tfdist.groups.base import LocalGroup
from tfdist.loops.outputs import LocalOutputs, outputs_of_all_workers
from tfdist.strategies.one_device import OneDevice
from tfdist.trainer import Trainer

ROWS = len(X)
#: Rows per rank in each of two steps; rank 1 has no rows in the second.
OUTPUT_ROWS = ([2, 1], [1, 0])

KINDS = {
    "numbers": tf.constant([[-0.0], [float("nan")], [1.5], [2.5]], tf.float16),
    "flags": tf.constant([True, False, True, False]),
    "words": tf.constant([["a", ""], ["", "bb"], ["c\0", "c"], ["d", "d"]]),
    "bfloat16": tf.constant([[1.0], [2.0], [3.0], [4.0]], tf.bfloat16),
    "ragged": tf.ragged.constant([[1], [], [2, 3], [4]], tf.int64),
    "sparse": tf.sparse.from_dense([[1, 0], [0, 0], [0, 2], [3, 4]]),
}


def with_outputs() -> keras.Model:
    """Returns a model with two inputs in a dictionary and three outputs in a nested structure."""
    keras.utils.set_random_seed(1)
    inputs = {"wide": keras.Input((4,), name="wide"), "one": keras.Input((1,), name="one")}
    joined = layers.Concatenate()([inputs["wide"], inputs["one"]])
    vector, number = layers.Dense(3)(joined), layers.Dense(1)(joined)
    image = layers.Reshape((2, 2, 1))(inputs["wide"])
    return keras.Model(inputs, {"vector": vector, "others": [number, image]})


INPUTS = {"wide": X, "one": np.arange(ROWS, dtype="float32")[:, None]}


@pytest.fixture(scope="module")
def predictor() -> Trainer:
    """A trainer for an uncompiled model with three replicas."""
    return Trainer(with_outputs, "mirrored", devices=3)


@pytest.fixture(scope="module")
def predicted() -> Any:
    """The predictions of plain Keras."""
    return with_outputs().predict(INPUTS, verbose=0)


@pytest.mark.parametrize("form", FORMS)
def test_predict_takes_data_in_every_form(form: str, predictor: Trainer, predicted: Any) -> None:
    assert_close(predictor.predict(FORMS[form](INPUTS), verbose=0), predicted)


@pytest.mark.parametrize(("rows", "batch_size"), [(15, None), (15, 4), (15, 1), (2, 4), (1, None)])
def test_predict_returns_exactly_the_rows_given(
    rows: int, batch_size: int | None, predictor: Trainer, predicted: Any
) -> None:
    def first(array: np.ndarray) -> np.ndarray:
        return array[:rows]

    inputs = keras.tree.map_structure(first, INPUTS)
    result = predictor.predict(inputs, batch_size=batch_size, verbose=0)
    assert_close(result, keras.tree.map_structure(first, predicted))
    assert all(isinstance(leaf, np.ndarray) for leaf in keras.tree.flatten(result))


def test_predict_takes_some_steps_of_endless_data(predictor: Trainer, predicted: Any) -> None:
    result = predictor.predict(sliced(INPUTS, size=7).repeat(), steps=3, verbose=0)
    assert_close(result, predicted)


class Calls(keras.callbacks.Callback):
    """Counts rows per call, like progress bars, which do not need every batch."""

    every_batch = False

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rows.append(len(logs["vector"]))


def test_predict_uses_many_batches_per_call(predicted: Any) -> None:
    trainer, calls = Trainer(with_outputs, "mirrored", devices=3, steps_per_call=5), Calls()
    result = trainer.predict(INPUTS, batch_size=2, verbose=0, callbacks=[calls])
    assert_close(result, predicted)
    assert calls.rows == [10, ROWS - 10]


class Loops(layers.Layer):
    """Adds 1 as often as the first number of the batch says: later batches may end earlier."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(
            lambda i, _: i < inputs[0, 0], lambda i, x: (i + 1, x + 1), (0.0, inputs)
        )[1]


def test_batches_that_are_computed_together_keep_their_order() -> None:
    trainer = Trainer(building(lambda: [keras.Input((1,)), Loops()]), steps_per_call=8)
    x = np.repeat(np.float32([2000, 0, 1000, 1, 500, 2, 3, 0]), 2)[:, None]
    np.testing.assert_array_equal(trainer.predict(x, batch_size=2, verbose=0), 2 * x)


def test_predict_with_active_dropout_draws_the_numbers_of_keras() -> None:
    """Each batch reads the seed that the previous one has written."""

    def build_model() -> keras.Model:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        return keras.Model(inputs, layers.Dropout(0.5)(inputs, training=True))

    result = Trainer(build_model, steps_per_call=8).predict(X, batch_size=2, verbose=0)
    assert_close(result, build_model().predict(X, batch_size=2, verbose=0))


def test_predict_ignores_labels() -> None:
    trainer = mirrored(functools.partial(build, metrics=["mae"]))  # compiled but never trained
    assert_close(trainer.predict(dataset(), verbose=0), build().predict(X, verbose=0))


class Doubled(layers.Layer):
    """Maps ragged tensors to ragged tensors."""

    def call(self, inputs: tf.RaggedTensor) -> tf.RaggedTensor:
        return inputs * 2

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


def test_predict_returns_ragged_tensors_as_keras_does() -> None:
    def build_model() -> keras.Model:
        return keras.Sequential([keras.Input((None,), dtype="int64", ragged=True), Doubled()])

    ragged = tf.constant([[1, 2], [3, 0], [0, 0], [4, 5], [6, 0]], tf.int64)
    ragged = tf.RaggedTensor.from_tensor(ragged, padding=0)
    result = mirrored(build_model).predict(ragged, batch_size=3, verbose=0)
    assert isinstance(result, tf.RaggedTensor)
    assert result.to_list() == [[2, 4], [6], [], [8, 10], [12]]


@pytest.mark.parametrize("name", ["towers", "central_storage", "sharded"])
def test_grouped_convolution_predicts_before_and_after_training(name: str) -> None:
    """Keras compiles it with XLA, which cannot read kernels from another device."""

    grouped = building(lambda: [keras.Input((4, 4, 4)), layers.Conv2D(128, 3, groups=4)])
    x, y = np.linspace(0, 1, 256, dtype="float32").reshape(4, 4, 4, 4), np.ones((4, 2, 2, 128))
    trainer, plain = Trainer(grouped, strategies.create(name, 2)), grouped()
    for _ in range(2):
        result = trainer.predict(x, batch_size=4, verbose=0)
        np.testing.assert_allclose(result, plain.predict(x, verbose=0), atol=1e-6)
        np.testing.assert_allclose(trainer.model(x), plain(x), atol=1e-6)
        for one in (trainer, plain):
            one.fit(x, y, batch_size=4, verbose=0)


class Sampling(layers.Layer):
    """Draws noise in predictions, too."""

    def __init__(self) -> None:
        super().__init__()
        self.seed_generator = keras.random.SeedGenerator(3)

    def call(self, mean: Any) -> Any:
        shape = keras.ops.shape(mean)
        return mean + keras.random.normal(shape, seed=self.seed_generator)


class PredictStep(keras.Model):
    """Centers the rows of a batch, counts, and draws with a fixed seed."""

    def build(self, input_shape: Any) -> None:
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
        super().build(input_shape)

    def predict_step(self, data: Any) -> Any:
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        self.count.assign_add(1.0)
        y = super().predict_step(data) + keras.random.uniform(keras.ops.shape(x), seed=5)
        return y - keras.ops.mean(y, 0) + self.count


@pytest.mark.filterwarnings("ignore:Full-batch mode")
@pytest.mark.parametrize(
    ("kind", "name"),
    [("vae", "mirrored"), ("vae", "sharded"), ("dropout", "towers"), ("predict_step", "mirrored")],
)
def test_predictions_draw_and_count_as_on_one_device(kind: str, name: str) -> None:
    def build_model() -> keras.Model:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((4,))
        if kind == "predict_step":
            model = PredictStep(inputs, layers.Dense(4)(inputs))
        else:
            layer = Sampling() if kind == "vae" else layers.Dropout(0.5, seed=2)
            options = {} if kind == "vae" else {"training": True}
            model = keras.Model(inputs, layer(layers.Dense(4)(inputs), **options))
        if kind == "predict_step":
            model.compile("sgd", "mse")
        return model

    plain, trainer = build_model(), Trainer(build_model, name, devices=2)
    for _ in range(2):  # the seeds advance
        expected = plain.predict(X, batch_size=6, verbose=0)
        assert_close(trainer.predict(X, batch_size=6, verbose=0), expected)


class Shared(LocalGroup):
    """A group of two ranks that gathers what both have sent."""

    def __init__(self, sent: list[Any]) -> None:
        super().__init__()
        self.sent = sent

    def gather_objects(self, value: Any) -> list[Any]:
        self.sent.append(value)
        return self.sent


def _rows(value: Any, begin: int, size: int) -> Any:
    if isinstance(value, tf.SparseTensor):
        return tf.sparse.slice(value, [begin, 0], [size, 2])
    return value[begin : begin + size]


def _plain(value: Any) -> Any:
    value = tf.sparse.to_dense(value) if isinstance(value, tf.SparseTensor) else value
    return value.to_list() if isinstance(value, tf.RaggedTensor) else value.numpy().tolist()


@pytest.mark.parametrize("kinds", [["numbers", "flags", "words", "bfloat16"], [*KINDS]])
def test_combines_rows_unchanged_and_in_order(kinds: list[str]) -> None:
    begins = ([0, 3], [2, 4])
    sent: list[np.ndarray] = []
    for begin, size in zip(begins, OUTPUT_ROWS, strict=True):
        pieces = [
            {kind: _rows(KINDS[kind], b, n) for kind in kinds}
            for b, n in zip(begin, size, strict=True)
        ]
        result = outputs_of_all_workers(OneDevice("CPU:0", Shared(sent)), LocalOutputs(pieces, 2))
    assert len(result) == (1 if "ragged" not in kinds else 4)
    for kind in kinds:
        rows = [row for piece in result for row in _plain(piece[kind])]
        assert str(rows) == str(_plain(KINDS[kind]))
        assert all(piece[kind].dtype == KINDS[kind].dtype for piece in result)


def test_splits_arrays_of_several_steps() -> None:
    sent: list[np.ndarray] = []
    for values, counts in (([0, 1, 3], OUTPUT_ROWS[0]), ([2], OUTPUT_ROWS[1])):
        (found,) = outputs_of_all_workers(
            OneDevice("CPU:0", Shared(sent)),
            LocalOutputs([(tf.constant(values),)], 2, np.array(counts)[:, None]),
        )
    keras.tree.map_structure(lambda t: np.testing.assert_array_equal(t, range(4)), found)


def test_pieces_of_different_widths_are_not_concatenated() -> None:
    pieces = [tf.ones([1, 2]), tf.ones([1, 3])]
    result = outputs_of_all_workers(OneDevice("CPU:0", Shared([])), LocalOutputs(pieces, 2))
    assert [piece.shape for piece in result] == [(1, 2), (1, 3)]
