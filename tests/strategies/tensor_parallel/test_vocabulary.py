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
    found = engines.by_trainer(case, trainer)
    assert "by vocabulary" in trainer.describe()["split"]
    assert not results.compare(found, engines.one_device(case), case)


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
