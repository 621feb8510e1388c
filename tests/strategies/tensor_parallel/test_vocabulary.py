"""Embedding tables sharded by rows match one device with every kind of gradient."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.conformance import engines, results
from tests.conformance.cases import CASES
from tests.strategies.tensor_parallel.test_layout import kinds, planned
from tests.support.case import compiled
from tests.support.training import assert_same_weights
from tfdist.strategies.tensor_parallel.calls import looked_up
from tfdist.strategies.tensor_parallel.strategy import TensorParallel
from tfdist.trainer import Trainer

#: Lookups by ids (masked, or clipped with other gradients), and by position, which is the same in
#: every accumulation round.
SHORT = ("positions-accumulate",)
LONG = (
    "embedding", "embedding-clipped", "embedding-adam", "positions", "masked-steps", "lstm",
    "sgd", "adam", "nadam", "rmsprop", "adagrad", "ftrl", "lion", "adamax",
    "adadelta", "schedulefreeadamw",
)  # fmt: skip
ROWS = {"embeddings$": ("model", None)}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)
@pytest.mark.parametrize("devices", [2, pytest.param(3, marks=pytest.mark.long)])
def test_equals_one_device(name: str, devices: int) -> None:
    case = CASES[name]
    trainer = Trainer(
        case.build,
        TensorParallel(devices, layout=ROWS),
        accumulate=case.accumulate,
        sync_batch_norm=case.sync_batch_norm,
    )
    result = engines.by_trainer(case, trainer)
    assert "by vocabulary" in trainer.describe()["split"]
    assert not results.compare(result, engines.one_device(case), case)


class Renamed(layers.ReversibleEmbedding):
    """A subclass that changes nothing, as KerasHub's."""


@pytest.mark.parametrize("tied", [True, False])
def test_table_that_computes_logits_is_sharded_by_rows(tied: bool) -> None:
    def build() -> keras.Model:
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3,), dtype="int32")
        table = Renamed(7, 4, tie_weights=tied, mask_zero=True, logit_soft_cap=2.0)
        dense = layers.Dense(4, "tanh")
        dense.trainable = not tied  # frozen weights are multiplied, too
        outputs = table(dense(table(inputs)), reverse=True)
        return compiled(keras.Model(inputs, outputs), keras.optimizers.SGD(0.5, momentum=0.9), LOSS)

    words = np.arange(33, dtype="int32").reshape(11, 3) % 7
    fit = {"x": words, "y": words[:, ::-1], "batch_size": 4, "shuffle": False, "verbose": 0}
    plain, trainer = build(), Trainer(build, TensorParallel(3, smallest=1))
    losses = plain.fit(**fit).history["loss"]
    np.testing.assert_allclose(trainer.fit(**fit).history["loss"], losses, rtol=1e-5)
    assert_same_weights(trainer.model, plain)
    split = trainer.describe()["split"]
    assert "and 100.0% of the work" in split
    assert "1 by vocabulary" in split
    assert trainer.model.layers[1].embeddings.parts[2].shape == (2, 4)


def test_narrow_table_is_sharded_by_rows() -> None:
    assert kinds(planned(keras.Input((5,)), layers.Embedding(7, 1))) == ["vocabulary"]
    assert kinds(planned(keras.Input((5,)), layers.Embedding(7, 2))) == ["column"]


def test_negative_ids_count_from_the_end_and_ids_beyond_the_table_raise() -> None:
    layer = layers.Embedding(7, 2)
    layer.build()
    parts = tf.split(layer.embeddings.value, [3, 2, 2])
    ids = tf.constant([[0, -1, 2], [3, -7, 6]])
    np.testing.assert_array_equal(looked_up(layer, parts, ids), layer(ids))
    for wrong in (7, -8):
        with pytest.raises(tf.errors.InvalidArgumentError):
            looked_up(layer, parts, tf.constant([wrong]))
