"""Every loss, metric and layer of Keras RS, once, compared with plain Keras on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from tests.programs.engines import assert_equals_one_device
from tests.programs.program import unregistered
from tests.programs.rows import integers, normal
from tests.support.case import compiled
from tests.support.data import Data

keras_rs = pytest.importorskip("keras_rs", reason="Keras RS is not installed: pip install keras-rs")

ITEMS = 5

LOSSES = (
    "ListMLELoss",
    "PairwiseHingeLoss",
    "PairwiseLogisticLoss",
    "PairwiseMeanSquaredError",
    "PairwiseSoftZeroOneLoss",
)
METRICS = ("DCG", "NDCG", "MeanAveragePrecision", "MeanReciprocalRank", "PrecisionAtK", "RecallAtK")


def _ranked(loss: Any = "mse", metrics: Any = ()) -> keras.Model:
    """Returns a model that scores the items of each row."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(6, activation="tanh")(inputs)
    return compiled(
        keras.Model(inputs, layers.Dense(ITEMS)(hidden)), loss=loss, metrics=list(metrics)
    )


def _with_layer(layer: Callable[[], Any], call: Callable[[Any, Any], Any]) -> keras.Model:
    inputs = keras.Input((4,))
    hidden = layers.Dense(4, activation="tanh")(inputs)
    return compiled(keras.Model(inputs, layers.Dense(ITEMS)(call(layer(), hidden))))


class InBatchNegatives(keras.Model):
    """A two-tower model, whose logits of all pairs of a batch a layer of Keras RS changes."""

    def __init__(self, layer: Any, arguments: Callable[[Any, Any], dict[str, Any]]) -> None:
        super().__init__()
        self.layer, self.arguments = layer, arguments
        self.query, self.candidate = layers.Dense(3), layers.Dense(3)

    def call(self, x: Any) -> Any:
        return self.query(x)

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any) -> Any:
        logits = ops.matmul(y_pred, ops.transpose(self.candidate(y)))
        labels = ops.eye(ops.shape(x)[0], dtype=logits.dtype)
        result = self.layer(logits, **self.arguments(y, labels))
        logits, labels = result if isinstance(result, tuple) else (result, labels)
        return ops.mean(keras.losses.categorical_crossentropy(labels, logits, from_logits=True))

    def build(self, shape: Any) -> None:
        self.query.build(shape)
        self.candidate.build((None, ITEMS))


class TwoFeatures(layers.Layer):
    """Looks up two features of a row in one table of a `DistributedEmbedding`."""

    def __init__(self) -> None:
        super().__init__()
        of = keras_rs.layers
        table = of.TableConfig("table", 6, 3, optimizer="adam", placement="default_device")
        features = {name: of.FeatureConfig(name, table, (None, 2), (None, 3)) for name in "ab"}
        self.embedding = of.DistributedEmbedding(features)

    def call(self, x: Any) -> Any:
        indices = ops.cast(ops.abs(x) * 3, "int32") % 6
        result = self.embedding({"a": indices[:, :2], "b": indices[:, 2:]})
        return ops.concatenate([result["a"], result["b"]], axis=-1)


def _negatives(layer: Any, arguments: Callable[[Any, Any], dict[str, Any]]) -> keras.Model:
    return compiled(InBatchNegatives(layer, arguments))


LAYERS: dict[str, Callable[[], keras.Model]] = {
    "FeatureCross": lambda: _with_layer(keras_rs.layers.FeatureCross, lambda f, x: f(x, x)),
    "DotInteraction": lambda: _with_layer(
        keras_rs.layers.DotInteraction, lambda f, x: f([x, layers.Dense(4)(x), layers.Dense(4)(x)])
    ),
    "EmbedReduce": lambda: compiled(
        keras.Sequential(
            [
                keras.Input((4,)),
                layers.Lambda(lambda x: ops.cast(ops.abs(x) * 3, "int32") % 6),
                keras_rs.layers.EmbedReduce(6, 3),
                layers.Dense(ITEMS),
            ]
        )
    ),
    "DistributedEmbedding": lambda: compiled(
        keras.Sequential([keras.Input((4,)), TwoFeatures(), layers.Dense(ITEMS)])
    ),
    "BruteForceRetrieval": lambda: _with_layer(
        lambda: keras_rs.layers.BruteForceRetrieval(normal(4, seed=6)[:ITEMS], k=3),
        lambda retrieval, x: retrieval(x)[0],
    ),
    "SamplingProbabilityCorrection": lambda: _negatives(
        keras_rs.layers.SamplingProbabilityCorrection(),
        lambda y, labels: {"candidate_sampling_probability": ops.sigmoid(y[:, 0])},
    ),
    "RemoveAccidentalHits": lambda: _negatives(
        keras_rs.layers.RemoveAccidentalHits(),
        lambda y, labels: {"labels": labels, "candidate_ids": ops.cast(y[:, 0], "int32")},
    ),
    "HardNegativeMining": lambda: _negatives(
        keras_rs.layers.HardNegativeMining(2), lambda y, labels: {"labels": labels}
    ),
}

RELEVANCE = integers(3, ITEMS, seed=5).astype("float64")

PROGRAMS: dict[str, tuple[Callable[[], keras.Model], np.ndarray]] = {
    **{n: (lambda n=n: _ranked(getattr(keras_rs.losses, n)()), RELEVANCE) for n in LOSSES},
    **{
        n: (lambda n=n: _ranked(metrics=[getattr(keras_rs.metrics, n)(k=3)]), RELEVANCE)
        for n in METRICS
    },
    **{n: (build, RELEVANCE) for n, build in LAYERS.items()},
}


@pytest.mark.check
@pytest.mark.parametrize("name", PROGRAMS)
def test_equals_one_device(name: str) -> None:
    build, y = PROGRAMS[name]
    assert_equals_one_device(unregistered(build, Data(normal(4), y)))
