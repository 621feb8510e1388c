"""Data in every form that Keras accepts, and a few of ours. Conformance covers `fit` itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from keras import layers

from tests.support.forms import FORMS, Batches, from_context, sliced
from tests.support.training import (
    FIT,
    STRATEGIES,
    X,
    Y,
    assert_close,
    assert_same_weights,
    assert_trains_as_keras,
    build,
    building,
    dataset,
    fresh_pair,
    mirrored,
    reference,
    steps,
)
from tfdist.trainer import Trainer


@functools.cache
def validated() -> dict[str, list[float]]:
    """Returns the history of plain Keras for one epoch with validation."""
    validation = {"validation_data": (X, 1 - Y), "validation_batch_size": 4}
    return build().fit(**FIT, epochs=1, **validation).history


@pytest.mark.parametrize("form", FORMS)
def test_validation_data_in_every_form(form: str) -> None:
    trainer, _ = fresh_pair()
    history = trainer.fit(**FIT, epochs=1, validation_data=FORMS[form](X, 1 - Y))
    assert_close(history.history, validated())


def test_validation_steps_limit_the_validation() -> None:
    validation = {"validation_data": sliced(X, 1 - Y).repeat(), "validation_steps": 2}
    assert_trains_as_keras(*fresh_pair(), **FIT, epochs=3, **validation)


@pytest.mark.parametrize("metrics", [None, ["mae", "mse"]])
def test_evaluate_returns_what_keras_does(metrics: Any) -> None:
    trainer, plain = mirrored(functools.partial(build, metrics=metrics)), build(metrics=metrics)
    for return_dict in (False, True):
        options = {"batch_size": 4, "verbose": 0, "return_dict": return_dict}
        found, wanted = trainer.evaluate(X, Y, **options), plain.evaluate(X, Y, **options)
        assert type(found) is type(wanted)
        assert_close(found, wanted)


@pytest.mark.parametrize(("strategy", "num_replicas"), [("mirrored", 3), ("towers", 3)])
def test_fewer_rows_than_replicas(strategy: str, num_replicas: int) -> None:
    trainer, plain = Trainer(build, strategy, devices=num_replicas), build()
    assert_close(trainer.evaluate(X[:1], Y[:1], verbose=0), plain.evaluate(X[:1], Y[:1], verbose=0))
    assert_trains_as_keras(trainer, plain, x=X[:2], y=Y[:2], epochs=2, verbose=0)


def test_dataset_fn_trains() -> None:
    trainer, _ = fresh_pair()
    trainer.fit(from_context(X, Y, size=7), epochs=2, verbose=0)
    assert_same_weights(trainer.model, reference())


def test_shuffled_arrays_yield_each_row_once() -> None:
    trainer, plain = mirrored(functools.partial(build, keras.optimizers.SGD(0.0))), build()
    history = trainer.fit(X, Y, batch_size=7, epochs=2, sample_weight=np.arange(15.0), verbose=0)
    # The means of batches of 7, 7 and 1 rows, weighted by rows, give the mean over all rows.
    wanted = plain.evaluate(X, Y, sample_weight=np.arange(15.0), verbose=0)
    assert_close(history.history["loss"], [wanted, wanted])


def test_pydataset_gets_on_epoch_end() -> None:
    ours, theirs = Batches(X, Y), Batches(X, Y)
    trainer, plain = fresh_pair()
    for data, runner in ((ours, trainer), (theirs, plain)):
        options = {"validation_data": data, "validation_freq": 2, "shuffle": False, "verbose": 0}
        runner.fit(data, epochs=3, **options)
        runner.evaluate(data, verbose=0)
        runner.predict(data, verbose=0)
    assert ours.ended == theirs.ended >= 8
    assert_same_weights(trainer.model, plain)


class Endless(Batches):
    """The rows repeated without end; the number of batches is unknown."""

    num_batches = None

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return super().__getitem__(index % len(self))


def test_endless_pydataset_continues_across_epochs() -> None:
    fit = {"epochs": 3, "steps_per_epoch": 2, "verbose": 0}
    assert_trains_as_keras(*fresh_pair(), x=Endless(X, Y, workers=2), **fit)


@pytest.mark.parametrize("known", [True, False])
def test_data_that_end_early_warn_and_restart(known: bool) -> None:
    data, fit = dataset(5), {"steps_per_epoch": 2, "epochs": 3, "verbose": 0}
    trainer, plain = fresh_pair()
    with pytest.warns(UserWarning, match=r"ended after \d of \d steps .* Use \.repeat\(\)"):
        trainer.fit(data if known else data.filter(lambda *_: True), **fit)
    with pytest.warns(UserWarning, match="ran out of data"):
        plain.fit(data, **fit)
    assert_close(trainer.model.history.history, plain.history.history)
    assert steps(trainer.model) == steps(plain)


def test_fit_calls_with_and_without_sample_weights() -> None:
    build_model = functools.partial(build, weighted_metrics=["mae"])
    trainer, plain = mirrored(build_model), build_model()
    for weights in (None, np.arange(15.0), None):
        assert_trains_as_keras(trainer, plain, **FIT, sample_weight=weights)


def assert_trains_and_predicts_as_keras(
    build_model: Any, x: Any, strategy: str, num_replicas: int
) -> None:
    trainer, plain = Trainer(build_model, strategy, devices=num_replicas), build_model()
    assert_trains_as_keras(trainer, plain, x=sliced(x, Y), epochs=2, verbose=0)
    assert_close(trainer.predict(x, verbose=0), plain.predict(x, verbose=0))


@pytest.mark.parametrize(("strategy", "num_replicas"), STRATEGIES)
def test_sparse_tensors_train_as_in_keras(strategy: str, num_replicas: int) -> None:
    build_model = building(
        lambda: [keras.Input((4,), sparse=True), layers.Dense(2), layers.Dense(1)], "adam"
    )
    sparse = tf.sparse.from_dense(np.where(X > 0, X, 0))
    assert_trains_and_predicts_as_keras(build_model, sparse, strategy, num_replicas)


def test_generator_of_sparse_matrices() -> None:
    def batches() -> Iterator[tuple[Any, np.ndarray]]:
        for begin in range(0, len(X), 7):
            rows = slice(begin, begin + 7)
            yield scipy.sparse.csr_matrix(np.where(X > 0, X, 0)[rows]), Y[rows]

    build_model = building(lambda: [keras.Input((4,), sparse=True), layers.Dense(1)])
    trainer, plain = mirrored(build_model), build_model()
    assert_close(trainer.fit(batches(), verbose=0).history, plain.fit(batches(), verbose=0).history)
    assert_same_weights(trainer.model, plain)


class SumOfRows(layers.Layer):
    """Sums embeddings over ragged rows."""

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
def test_ragged_tensors_train_as_in_keras(strategy: str, num_replicas: int) -> None:
    build_model = building(
        lambda: [keras.Input((None,), dtype="int64", ragged=True), SumOfRows(), layers.Dense(1)]
    )
    ragged = tf.cast(tf.ragged.range(np.arange(len(X)) % 4, np.arange(len(X)) % 8), "int64")
    assert_trains_and_predicts_as_keras(build_model, ragged, strategy, num_replicas)


class MeanOfInput(layers.Layer):
    """Adds a loss, so that the trainer reads a first batch before training."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        self.add_loss(keras.ops.mean(inputs**2))
        return inputs


build_with_loss = building(lambda: [keras.Input((4,)), MeanOfInput(), layers.Dense(1)])


@functools.cache
def trained_by_keras() -> keras.Model:
    """Trains the same model with plain Keras for one epoch."""
    model = build_with_loss()
    model.fit(sliced(X, Y), verbose=0)
    return model


@pytest.mark.parametrize("form", FORMS)
def test_probing_the_first_batch_does_not_consume_it(form: str) -> None:
    trainer, plain = mirrored(build_with_loss), trained_by_keras()
    result = trainer.fit(FORMS[form](X, Y), shuffle=False, verbose=0)
    assert_close(result.history, plain.history.history)
    assert_same_weights(trainer.model, plain)


class Indexing(keras.Model):
    """Indexes its list of inputs, and has no loss except an added one."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        hidden = self.dense(inputs[0])
        self.add_loss(keras.ops.mean(hidden**2))
        return hidden * inputs[1][:, :1]


@pytest.mark.parametrize("form", [list, tuple])
def test_several_inputs_without_labels(form: Any) -> None:
    x, options = form([X, 2 * X]), {"batch_size": 7, "verbose": 0}
    build_model = building(Indexing, loss=None)

    def numbers(runner: Any, model: keras.Model) -> list[Any]:
        predicted = runner.predict(x, **options)
        history = runner.fit(x, shuffle=False, **options, validation_data=(x,)).history
        return [predicted, history, runner.evaluate(x, **options), *model.get_weights()]

    trainer, plain = mirrored(build_model), build_model()
    assert_close(numbers(trainer, trainer.model), numbers(plain, plain))
