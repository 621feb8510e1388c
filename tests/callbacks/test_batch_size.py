"""A warning if batches have another size than `batch_size`."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

from tests.support.training import X, Y, build
from tfdist import Trainer
from tfdist.callbacks.batch_size import BatchSize


def fit(batch_size: int, expected: int) -> None:
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch_size)
    trainer = Trainer(build, "one_device")
    callback: keras.callbacks.Callback = BatchSize(trainer.stats, expected)
    trainer.fit(data, epochs=2, verbose=0, callbacks=[callback])


def test_warns_once_about_another_batch_size() -> None:
    with pytest.warns(UserWarning, match="but batch_size is 4") as caught:
        fit(2, 4)
    assert len(caught) == 1


@pytest.mark.filterwarnings("error::UserWarning")
def test_partial_batch_does_not_warn() -> None:
    fit(7, 7)
