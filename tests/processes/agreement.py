"""What two workers do that differ in their clocks, callbacks, data and seeds; run on each of them.

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
from tfdist.strategies.base import Strategy
from tfdist.strategies.batches import CheckData
from tfdist.trainer import Trainer

#: Batches of each rank's own data set: rank 1 has one less, and they differ in size.
OWN_BATCHES = ([4, 3, 2], [2, 3])


def run(strategy_name: str) -> dict[str, Any]:
    """Runs all scenarios, and returns what came of them by their names."""
    strategy = tfdist.strategies.create(strategy_name)
    return {scenario.__name__: scenario(strategy) for scenario in SCENARIOS}


def own_rows(rank: int) -> list[slice]:
    """Which rows each of a rank's batches has."""
    before = 0 if rank == 0 else sum(OWN_BATCHES[0])
    ends = before + np.cumsum(OWN_BATCHES[rank])
    return [slice(e - n, e) for e, n in zip(ends, OWN_BATCHES[rank], strict=True)]


def own_data(context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Each rank's own batches, as a data set of unknown length."""
    rows = own_rows(context.input_pipeline_id)

    def batches() -> Any:
        yield from ((X[own], Y[own]) for own in rows)

    spec = tf.TensorSpec([None, X.shape[1]]), tf.TensorSpec([None, Y.shape[1]])
    return tf.data.Dataset.from_generator(batches, output_signature=spec)


def stops_on_one_rank(strategy: Strategy) -> np.ndarray:
    """Epochs made, where a callback of rank 1 alone stops after the first."""

    def stop(epoch: int, logs: Any) -> None:
        trainer.model.stop_training = strategy.rank == 1

    trainer = Trainer(build, strategy)
    history = trainer.fit(
        X, Y, epochs=3, verbose=0, callbacks=keras.callbacks.LambdaCallback(on_epoch_end=stop)
    )
    return strategy.gather([len(history.epoch)])


def stops_predicting_on_one_rank(strategy: Strategy) -> np.ndarray:
    """Rows predicted, where a callback of rank 1 alone stops after the first batch of 4."""

    def stop(batch: int, logs: Any) -> None:
        trainer.model.stop_predicting = strategy.rank == 1

    trainer = Trainer(build, strategy)
    callback = keras.callbacks.LambdaCallback(on_predict_batch_end=stop)
    return strategy.gather([len(trainer.predict(X, batch_size=4, verbose=0, callbacks=callback))])


def learning_rate_of_rank_0(strategy: Strategy) -> np.ndarray:
    """Learning rates, where each rank's callback sets another."""

    def set_rate(epoch: int, logs: Any) -> None:
        trainer.model.optimizer.learning_rate = 0.25 + strategy.rank

    trainer = Trainer(build, strategy)
    callback = keras.callbacks.LambdaCallback(on_epoch_end=set_rate)
    trainer.fit(X, Y, epochs=2, verbose=0, callbacks=callback)
    return strategy.gather([float(trainer.model.optimizer.learning_rate.numpy())])


def other_data_are_refused(strategy: Strategy) -> dict[str, str]:
    """The errors of a rank whose batches have their middle rows in another order."""
    order = [0, *range(13, 0, -1), 14] if strategy.rank else list(range(15))

    def fit(check_data: CheckData) -> None:
        trainer = Trainer(build, strategy, check_data=check_data)
        trainer.fit(X[order], Y[order], batch_size=len(order), shuffle=False, verbose=0)

    return {how: error_of(functools.partial(fit, how)) for how in get_args(CheckData)}


def error_of(call: Callable[[], Any]) -> str:
    """Returns the message of the error that a call raises."""
    try:
        call()
    except tfdist.errors.TfdistError as error:
        return str(error)
    return "no error"


def unseeded_shuffles_are_alike(strategy: Strategy) -> np.ndarray:
    """Losses of data that Keras shuffles, with no seed set by anybody."""
    history = Trainer(build, strategy).fit(X, Y, batch_size=4, epochs=3, verbose=0)
    return strategy.gather(history.history["loss"])


def weights_of_rank_0(strategy: Strategy) -> np.ndarray:
    """Weights of an untrained model that each rank builds from another seed."""

    def build_model() -> keras.Model:
        model = build()
        model.set_weights([w + strategy.rank for w in model.get_weights()])
        return model

    evaluating, predicting = Trainer(build_model, strategy), Trainer(build_model, strategy)
    evaluating.evaluate(X, Y, verbose=0)
    predicting.predict(X, verbose=0)
    weights = evaluating.model.get_weights() + predicting.model.get_weights()
    return strategy.gather(np.concatenate([w.ravel() for w in weights]))


def own_data_of_uneven_length(strategy: Strategy) -> list[np.ndarray]:
    """Weights, where each rank brings data of its own, of which rank 1 has fewer batches."""

    trainer = Trainer(build, strategy)
    trainer.fit(own_data, epochs=2, verbose=0)
    return trainer.model.get_weights()


def uneven_data_are_stopped_or_refused(strategy: Strategy) -> dict[str, Any]:
    """What comes of own data of which rank 1 has fewer batches, unless they are padded."""

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
        steps = [stopped(own_data), stopped(of_known_length)]
        Trainer(build, strategy).fit(own_data, verbose=0)
        Trainer(build, strategy).fit(lambda context: of_known_length(context).take(2), verbose=0)
    return {
        "steps": strategy.gather([n for own in steps for n in own]),
        "warnings": [str(w.message) for w in caught if "brought" in str(w.message)],
        "errors": [refused(own_data), refused(of_known_length)],
    }


def predicts_every_row(strategy: Strategy) -> float:
    """The largest difference between what a worker predicts and its model's own outputs."""
    trainer = Trainer(build, strategy)
    predicted = trainer.predict(X, batch_size=4, verbose=0)
    differences = np.abs(predicted - np.asarray(trainer.model(X)))
    return float(strategy.gather([differences.max()]).max())


class OfEveryKind(keras.Sequential):
    """Predicts numbers that are no float32, strings, ragged and sparse ones."""

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
    """Ones, where outputs of a kind are what the model itself predicts, bitwise identically."""

    def build_model() -> keras.Model:
        keras.utils.set_random_seed(1)
        return OfEveryKind([keras.Input(X.shape[1:]), keras.layers.Dense(2)])

    trainer = Trainer(build_model, strategy)
    found = trainer.predict(X, batch_size=1, verbose=0)
    wanted = trainer.model.predict(X, batch_size=1, verbose=0)
    ragged, sparse = found.pop("ragged"), found.pop("sparse")
    same = [
        ragged.to_list() == wanted.pop("ragged").to_list(),
        np.array_equal(tf.sparse.to_dense(sparse), tf.sparse.to_dense(wanted.pop("sparse"))),
        *(np.array_equal(found[name], wanted[name]) for name in wanted),
        *(found[name].dtype == wanted[name].dtype for name in wanted),
    ]
    return strategy.gather(same)


def predicts_own_data(strategy: Strategy) -> float:
    """The largest difference likewise, where each rank brings rows of its own."""
    trainer = Trainer(build, strategy)
    predicted = trainer.predict(own_data, verbose=0)
    batches = zip_longest(own_rows(0), own_rows(1), fillvalue=slice(0))
    whole = np.concatenate([X[own] for batch in batches for own in batch])
    differences = np.abs(predicted - np.asarray(trainer.model(whole)))
    return float(strategy.gather([differences.max()]).max())


def plain_in_the_hands_of_all(strategy: Strategy) -> np.ndarray:
    """One where each rank's model is a plain one to its user; an error there otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        model_edits.assert_matches_keras(Trainer(model_edits.build, strategy), Path(folder))
    return strategy.gather([1.0])


def public_names(strategy: Strategy) -> np.ndarray:
    """Rank and size as a script asks for them, before and after a barrier."""
    before = [tfdist.rank(), tfdist.size(), tfdist.is_chief()]
    tfdist.barrier()
    return strategy.gather([*before, tfdist.rank()])


SCENARIOS: list[Callable[[Strategy], Any]] = [
    unseeded_shuffles_are_alike,  # first: the others seed
    stops_on_one_rank,
    stops_predicting_on_one_rank,
    learning_rate_of_rank_0,
    other_data_are_refused,
    weights_of_rank_0,
    own_data_of_uneven_length,
    uneven_data_are_stopped_or_refused,
    predicts_every_row,
    predicts_every_kind,
    predicts_own_data,
    plain_in_the_hands_of_all,
    public_names,
    *chief_callbacks.SCENARIOS,
    *resuming.SCENARIOS,
]
