"""Scenarios for two workers that differ in clocks, callbacks, data and seeds; run on each one.

Every scenario returns numbers of both workers, one row each.
"""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tests.processes import chief_callbacks, resuming
from tests.support import model_edits
from tests.support.training import X, Y, build
from tfdist.loops.self_check import Verify
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import CheckData
from tfdist.trainer import Trainer

#: Batch sizes of each rank's dataset: rank 1 has one batch less.
RANK_BATCHES = ([4, 3, 2], [2, 3])


def answering(strategy_name: str) -> Callable[[str], Any]:
    """Runs in a worker: returns a function that runs a scenario, given its name."""
    strategy = tfdist.strategies.create(strategy_name)
    scenarios = {scenario.__name__: scenario for scenario in SCENARIOS}
    return lambda name: scenarios[name](strategy)


def rank_rows(rank: int) -> list[slice]:
    """Returns the rows in each of a rank's batches."""
    before = 0 if rank == 0 else sum(RANK_BATCHES[0])
    ends = before + np.cumsum(RANK_BATCHES[rank])
    return [slice(e - n, e) for e, n in zip(ends, RANK_BATCHES[rank], strict=True)]


def rank_data(context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Returns each rank's batches as a dataset of unknown length."""
    rows = rank_rows(context.input_pipeline_id)

    def batches() -> Any:
        yield from ((X[rows_of_batch], Y[rows_of_batch]) for rows_of_batch in rows)

    spec = tf.TensorSpec([None, X.shape[1]]), tf.TensorSpec([None, Y.shape[1]])
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


def stops_on_one_rank(strategy: Strategy) -> np.ndarray:
    """Returns the number of epochs if a callback of rank 1 alone stops after the first."""

    def stop(epoch: int, logs: Any) -> None:
        trainer.model.stop_training = strategy.group.rank == 1

    trainer = Trainer(build, strategy)
    history = trainer.fit(
        X, Y, epochs=3, verbose=0, callbacks=keras.callbacks.LambdaCallback(on_epoch_end=stop)
    )
    return strategy.group.gather([len(history.epoch)])


def stops_predicting_on_one_rank(strategy: Strategy) -> np.ndarray:
    """Returns the number of predicted rows if a callback of rank 1 stops after the first batch."""

    def stop(batch: int, logs: Any) -> None:
        trainer.model.stop_predicting = strategy.group.rank == 1

    trainer = Trainer(build, strategy)
    callback = keras.callbacks.LambdaCallback(on_predict_batch_end=stop)
    return strategy.group.gather(
        [len(trainer.predict(X, batch_size=4, verbose=0, callbacks=callback))]
    )


def learning_rate_of_rank_0(strategy: Strategy) -> np.ndarray:
    """Returns the learning rates if each rank's callback sets a different one."""

    def set_rate(epoch: int, logs: Any) -> None:
        trainer.model.optimizer.learning_rate = 0.25 + strategy.group.rank

    trainer = Trainer(build, strategy)
    callback = keras.callbacks.LambdaCallback(on_epoch_end=set_rate)
    trainer.fit(X, Y, epochs=2, verbose=0, callbacks=callback)
    return strategy.group.gather([float(trainer.model.optimizer.learning_rate.numpy())])


def different_data_raise(strategy: Strategy) -> dict[str, str]:
    """Returns the errors of a rank whose batches have their middle rows in another order."""
    order = [0, *range(13, 0, -1), 14] if strategy.group.rank else list(range(15))

    def fit(check_data: CheckData, verify: Verify = "off") -> None:
        trainer = Trainer(build, strategy, check_data=check_data, verify=verify)
        trainer.fit(X[order], Y[order], batch_size=len(order), shuffle=False, verbose=0)

    errors = {how: error_of(functools.partial(fit, how)) for how in get_args(CheckData)}
    return errors | {"verified": error_of(lambda: fit("full", "first"))}


def error_of(call: Callable[[], Any]) -> str:
    """Returns the message of the error that a call raises."""
    try:
        call()
    except tfdist.errors.TfdistError as error:
        return str(error)
    return "no error"


def unseeded_shuffles_agree(strategy: Strategy) -> np.ndarray:
    """Returns losses for data that Keras shuffles when no seed is set."""
    history = Trainer(build, strategy).fit(X, Y, batch_size=4, epochs=3, verbose=0)
    return strategy.group.gather(history.history["loss"])


def weights_of_rank_0(strategy: Strategy) -> np.ndarray:
    """Returns weights of an untrained model that each rank builds from another seed."""

    def build_model() -> keras.Model:
        model = build()
        model.set_weights([w + strategy.group.rank for w in model.get_weights()])
        return model

    evaluating, predicting = Trainer(build_model, strategy), Trainer(build_model, strategy)
    evaluating.evaluate(X, Y, verbose=0)
    predicting.predict(X, verbose=0)
    weights = evaluating.model.get_weights() + predicting.model.get_weights()
    return strategy.group.gather(np.concatenate([w.ravel() for w in weights]))


def uneven_data(strategy: Strategy) -> list[np.ndarray]:
    """Returns the weights if each rank has different data, and rank 1 fewer batches."""

    trainer = Trainer(build, strategy)
    trainer.fit(rank_data, epochs=2, verbose=0)
    return trainer.model.get_weights()


def uneven_data_options(strategy: Strategy) -> dict[str, Any]:
    """Returns the results of uneven data with `uneven_data` "stop" and "refuse"."""

    def of_known_length(context: tf.distribute.InputContext) -> tf.data.Dataset:
        size = [8, 4][context.input_pipeline_id]
        return tf.data.Dataset.from_tensor_slices((X[:size], Y[:size])).batch(2)

    def stopped(data: Any) -> list[float]:
        trainer = Trainer(build, strategy, uneven_data="stop")
        trainer.fit(data, epochs=2, verbose=0)
        return [float(trainer.model.optimizer.iterations.numpy())]

    def refused(data: Any) -> str:
        return error_of(lambda: Trainer(build, strategy, uneven_data="refuse").fit(data, verbose=0))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        steps = [stopped(rank_data), stopped(of_known_length)]
        Trainer(build, strategy).fit(rank_data, verbose=0)
        Trainer(build, strategy).fit(lambda context: of_known_length(context).take(2), verbose=0)
    return {
        "steps": strategy.group.gather([n for rows_of_batch in steps for n in rows_of_batch]),
        "warnings": [str(w.message) for w in caught if "batches in epoch" in str(w.message)],
        "errors": [refused(rank_data), refused(of_known_length)],
    }


def predicts_every_row(strategy: Strategy) -> float:
    """Returns the largest difference between a worker's predictions and its model's outputs."""
    trainer = Trainer(build, strategy)
    predicted = trainer.predict(X, batch_size=4, verbose=0)
    differences = np.abs(predicted - np.asarray(trainer.model(X)))
    return float(strategy.group.gather([differences.max()]).max())


class EveryKind(keras.Sequential):
    """Predicts float16, boolean, string, ragged and sparse tensors."""

    def predict_step(self, data: Any) -> Any:
        outputs = self(keras.utils.unpack_x_y_sample_weight(data)[0], training=False)
        return {
            "half": tf.cast(outputs, tf.float16),
            "positive": outputs > 0,
            "ragged": tf.ragged.boolean_mask(outputs, outputs > 0),
            "sparse": tf.sparse.from_dense(tf.nn.relu(outputs)),
            "text": tf.strings.as_string(outputs),
        }


def predicts_every_kind(strategy: Strategy) -> np.ndarray:
    """Returns ones where outputs are bitwise identical to those of the model itself."""

    def build_model() -> keras.Model:
        keras.utils.set_random_seed(1)
        return EveryKind([keras.Input(X.shape[1:]), keras.layers.Dense(2)])

    trainer = Trainer(build_model, strategy)
    result = trainer.predict(X, batch_size=1, verbose=0)
    wanted = trainer.model.predict(X, batch_size=1, verbose=0)
    ragged, sparse = result.pop("ragged"), result.pop("sparse")
    same = [
        ragged.to_list() == wanted.pop("ragged").to_list(),
        np.array_equal(tf.sparse.to_dense(sparse), tf.sparse.to_dense(wanted.pop("sparse"))),
        *(np.array_equal(result[name], wanted[name]) for name in wanted),
        *(result[name].dtype == wanted[name].dtype for name in wanted),
    ]
    return strategy.group.gather(same)


def predicts_rank_data(strategy: Strategy) -> float:
    """Returns the same difference if each rank has different rows."""
    trainer = Trainer(build, strategy)
    predicted = trainer.predict(rank_data, verbose=0)
    batches = zip_longest(rank_rows(0), rank_rows(1), fillvalue=slice(0))
    whole = np.concatenate([X[rows_of_batch] for batch in batches for rows_of_batch in batch])
    differences = np.abs(predicted - np.asarray(trainer.model(whole)))
    return float(strategy.group.gather([differences.max()]).max())


def model_edits_on_all_ranks(strategy: Strategy) -> np.ndarray:
    """Returns one if each rank's model behaves like a Keras model; otherwise raises."""
    with tempfile.TemporaryDirectory() as folder:
        model_edits.assert_matches_keras(Trainer(model_edits.build, strategy), Path(folder))
    return strategy.group.gather([1.0])


def public_names(strategy: Strategy) -> np.ndarray:
    """Returns rank and size from the public functions, before and after a barrier."""
    before = [tfdist.rank(), tfdist.size(), tfdist.is_chief()]
    tfdist.barrier()
    return strategy.group.gather([*before, tfdist.rank()])


SCENARIOS: list[Callable[[Strategy], Any]] = [
    unseeded_shuffles_agree, stops_on_one_rank, stops_predicting_on_one_rank,
    learning_rate_of_rank_0, different_data_raise, weights_of_rank_0, uneven_data,
    uneven_data_options, predicts_every_row, predicts_every_kind, predicts_rank_data,
    model_edits_on_all_ranks, public_names, *chief_callbacks.SCENARIOS, *resuming.SCENARIOS,
]  # fmt: skip
