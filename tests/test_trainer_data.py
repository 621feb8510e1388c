"""Data in every form that Keras takes, and a few of our own; conformance has the numbers of fit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.support.training import (
    FIT,
    STRATEGIES,
    X,
    Y,
    assert_close,
    assert_same_weights,
    build,
    building,
    dataset,
    mirrored,
    reference,
    steps,
)
from tfdist.trainer import Trainer

ROWS = len(X)


class Batches(keras.utils.PyDataset):
    """The rows in batches, counting the epochs that have ended."""

    def __init__(self, *arrays: Any, size: int = 4, **options: Any) -> None:
        super().__init__(**options)
        self.arrays, self.size, self.ended = arrays, size, 0

    def __len__(self) -> int:
        return -(-ROWS // self.size)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        rows = slice(index * self.size, (index + 1) * self.size)
        return tuple(keras.tree.map_structure(lambda a: a[rows], a) for a in self.arrays)

    def on_epoch_end(self) -> None:
        self.ended += 1


def generated(*arrays: Any, size: int = 4) -> Iterator[tuple[Any, ...]]:
    batches = Batches(*arrays, size=size)
    return (batches[i] for i in range(len(batches)))


def sliced(*arrays: Any, size: int = 4) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays).batch(size)


def from_context(*arrays: Any, size: int = 4) -> Callable[[Any], tf.data.Dataset]:
    def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
        assert isinstance(context, tf.distribute.InputContext)
        assert context.num_input_pipelines == 1
        return sliced(*arrays, size=size)

    return dataset_fn


FORMS: dict[str, Callable[..., Any]] = {
    "dataset": sliced,
    "unknown length": lambda *arrays: sliced(*arrays).filter(lambda *_: True),
    "generator": generated,
    "PyDataset": Batches,
    "PyDataset with workers": functools.partial(Batches, workers=2),
    "dataset_fn": from_context,
}


def with_outputs() -> keras.Model:
    """Two inputs as a dictionary, and three outputs as a nested structure."""
    keras.utils.set_random_seed(1)
    inputs = {"wide": keras.Input((4,), name="wide"), "one": keras.Input((1,), name="one")}
    joined = layers.Concatenate()([inputs["wide"], inputs["one"]])
    vector, number = layers.Dense(3)(joined), layers.Dense(1)(joined)
    image = layers.Reshape((2, 2, 1))(inputs["wide"])
    return keras.Model(inputs, {"vector": vector, "others": [number, image]})


INPUTS = {"wide": X, "one": np.arange(ROWS, dtype="float32")[:, None]}


@pytest.fixture(scope="module")
def predictor() -> Trainer:
    """A trainer of an uncompiled model over three replicas."""
    return Trainer(with_outputs, "mirrored", devices=3)


@pytest.fixture(scope="module")
def predicted() -> Any:
    """What plain Keras predicts."""
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
    found = predictor.predict(inputs, batch_size=batch_size, verbose=0)
    assert_close(found, keras.tree.map_structure(first, predicted))
    assert all(isinstance(leaf, np.ndarray) for leaf in keras.tree.flatten(found))


def test_predict_some_steps_of_endless_data(predictor: Trainer, predicted: Any) -> None:
    found = predictor.predict(sliced(INPUTS, size=7).repeat(), steps=3, verbose=0)
    assert_close(found, predicted)


def test_predict_leaves_labels_aside() -> None:
    trainer = mirrored(functools.partial(build, metrics=["mae"]))  # compiled, and never trained
    assert_close(trainer.predict(dataset(), verbose=0), build().predict(X, verbose=0))


@pytest.mark.parametrize("form", FORMS)
def test_validation_data_in_every_form(form: str) -> None:
    trainer, plain = mirrored(), build()
    history = trainer.fit(**FIT, epochs=1, validation_data=FORMS[form](X, 1 - Y))
    wanted = plain.fit(**FIT, epochs=1, validation_data=(X, 1 - Y), validation_batch_size=4)
    assert_close(history.history, wanted.history)


def test_validation_steps() -> None:
    options = FIT | {"epochs": 3, "validation_steps": 2}
    trainer, plain = mirrored(), build()
    endless = sliced(X, 1 - Y).repeat()
    history = trainer.fit(**options, validation_data=endless)
    assert_close(history.history, plain.fit(**options, validation_data=endless).history)


@pytest.mark.parametrize("metrics", [None, ["mae", "mse"]])
@pytest.mark.parametrize("return_dict", [False, True])
def test_evaluate_returns_what_keras_does(metrics: Any, return_dict: bool) -> None:
    trainer, plain = mirrored(functools.partial(build, metrics=metrics)), build(metrics=metrics)
    options = {"batch_size": 4, "verbose": 0, "return_dict": return_dict}
    found, wanted = trainer.evaluate(X, Y, **options), plain.evaluate(X, Y, **options)
    assert type(found) is type(wanted)
    assert_close(found, wanted)


@pytest.mark.parametrize(("strategy", "num_replicas"), [("mirrored", 3), ("towers", 3)])
def test_fewer_rows_than_replicas(strategy: str, num_replicas: int) -> None:
    trainer, plain = Trainer(build, strategy, devices=num_replicas), build()
    assert_close(trainer.evaluate(X[:1], Y[:1], verbose=0), plain.evaluate(X[:1], Y[:1], verbose=0))
    fit = {"x": X[:2], "y": Y[:2], "epochs": 2, "verbose": 0}
    assert_close(trainer.fit(**fit).history, plain.fit(**fit).history)
    assert_same_weights(trainer.model, plain)


def test_dataset_fn_trains() -> None:
    trainer = mirrored()
    trainer.fit(from_context(X, Y, size=7), epochs=2, verbose=0)
    assert_same_weights(trainer.model, reference())


def test_shuffled_arrays_give_each_row_once() -> None:
    trainer, plain = mirrored(functools.partial(build, keras.optimizers.SGD(0.0))), build()
    history = trainer.fit(X, Y, batch_size=7, epochs=2, sample_weight=np.arange(15.0), verbose=0)
    # Means of batches of 7, 7 and 1 rows, weighted by rows, are the mean of all.
    wanted = plain.evaluate(X, Y, sample_weight=np.arange(15.0), verbose=0)
    assert_close(history.history["loss"], [wanted, wanted])


def test_pydataset_is_told_of_epochs_as_by_keras() -> None:
    ours, theirs = Batches(X, Y), Batches(X, Y)
    trainer, plain = mirrored(), build()
    trainer.fit(ours, epochs=3, shuffle=False, verbose=0)
    plain.fit(theirs, epochs=3, shuffle=False, verbose=0)
    assert ours.ended >= 3
    assert_same_weights(trainer.model, plain)


@pytest.mark.parametrize("known", [True, False])
def test_data_that_end_early_warn_and_begin_again(known: bool) -> None:
    data = dataset(5)
    trainer, plain = mirrored(), build()
    with pytest.warns(UserWarning, match=r"ended after \d of \d steps .* use \.repeat\(\)"):
        trainer.fit(
            data if known else data.filter(lambda *_: True),
            steps_per_epoch=2,
            epochs=3,
            verbose=0,
        )
    with pytest.warns(UserWarning, match="ran out of data"):
        plain.fit(data, steps_per_epoch=2, epochs=3, verbose=0)
    assert_close(trainer.model.history.history, plain.history.history)
    assert steps(trainer.model) == steps(plain)


def test_each_fit_may_bring_other_columns() -> None:
    build_model = functools.partial(build, weighted_metrics=["mae"])
    trainer, plain = mirrored(build_model), build_model()
    for weights in (None, np.arange(15.0), None):
        found = trainer.fit(**FIT, sample_weight=weights)
        assert_close(found.history, plain.fit(**FIT, sample_weight=weights).history)
    assert_same_weights(trainer.model, plain)


@pytest.mark.parametrize(("strategy", "num_replicas"), STRATEGIES)
def test_sparse_tensors(strategy: str, num_replicas: int) -> None:
    build_model = building(
        lambda: [keras.Input((4,), sparse=True), layers.Dense(2), layers.Dense(1)]
    )
    sparse = tf.sparse.from_dense(np.where(X > 0, X, 0))
    trainer, plain = Trainer(build_model, strategy, devices=num_replicas), build_model()
    history = trainer.fit(sliced(sparse, Y), epochs=2, verbose=0)
    assert_close(history.history, plain.fit(sliced(sparse, Y), epochs=2, verbose=0).history)
    assert_close(trainer.predict(sparse, verbose=0), plain.predict(sparse, verbose=0))


class SumOfRows(layers.Layer):
    """Sums an embedding over rows of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(8, 3)

    def build(self, _: Any) -> None:
        self.table.build(None)
        self.built = True

    def call(self, inputs: tf.RaggedTensor) -> tf.Tensor:
        return tf.reduce_sum(tf.ragged.map_flat_values(self.table, inputs), 1)

    def compute_output_shape(self, shape: Any) -> Any:
        return (shape[0], 3)


@pytest.mark.parametrize(("strategy", "num_replicas"), STRATEGIES)
def test_ragged_tensors(strategy: str, num_replicas: int) -> None:
    build_model = building(
        lambda: [keras.Input((None,), dtype="int64", ragged=True), SumOfRows(), layers.Dense(1)]
    )
    ragged = tf.ragged.range(np.arange(ROWS) % 4, np.arange(ROWS) % 8)
    ragged = tf.cast(ragged, "int64")
    trainer, plain = Trainer(build_model, strategy, devices=num_replicas), build_model()
    history = trainer.fit(sliced(ragged, Y), epochs=2, verbose=0)
    assert_close(history.history, plain.fit(sliced(ragged, Y), epochs=2, verbose=0).history)
    assert_close(trainer.predict(ragged, verbose=0), plain.predict(ragged, verbose=0))


class Doubled(layers.Layer):
    """Ragged in, ragged out."""

    def call(self, inputs: tf.RaggedTensor) -> tf.RaggedTensor:
        return inputs * 2

    def compute_output_shape(self, shape: Any) -> Any:
        return shape


def test_predict_returns_ragged_tensors_as_keras_does() -> None:
    def build_model() -> keras.Model:
        return keras.Sequential([keras.Input((None,), dtype="int64", ragged=True), Doubled()])

    ragged = tf.constant([[1, 2], [3, 0], [0, 0], [4, 5], [6, 0]], tf.int64)
    ragged = tf.RaggedTensor.from_tensor(ragged, padding=0)
    found = mirrored(build_model).predict(ragged, batch_size=3, verbose=0)
    assert isinstance(found, tf.RaggedTensor)
    assert found.to_list() == [[2, 4], [6], [], [8, 10], [12]]


class MeanOfInput(layers.Layer):
    """Adds a loss, so that the trainer looks at a first batch ahead of training."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        self.add_loss(keras.ops.mean(inputs**2))
        return inputs


@pytest.mark.parametrize("form", FORMS)
def test_looking_at_the_first_batch_takes_none_away(form: str) -> None:
    build_model = building(lambda: [keras.Input((4,)), MeanOfInput(), layers.Dense(1)])
    trainer, plain = mirrored(build_model), build_model()
    found = trainer.fit(FORMS[form](X, Y), shuffle=False, verbose=0)
    assert_close(found.history, plain.fit(sliced(X, Y), verbose=0).history)
    assert_same_weights(trainer.model, plain)
