"""BatchNorm by default: per-replica moments, and moving statistics averaged over all replicas."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

import tfdist
from tfdist.patches import batch_norm
from tfdist.strategies import mirrored_variables
from tfdist.upstream.tensorflow_graphs import graphs_run_by

STRATEGIES = ["mirrored", "central_storage", "towers"]
MOMENTUM = 0.7


def build() -> keras.Model:
    keras.utils.set_random_seed(1)
    norm = layers.BatchNormalization(momentum=MOMENTUM)
    model = keras.Sequential([keras.Input((3,)), norm, layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
    return model


def rows(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(2)
    x = random.normal(2.0, 1.5, size=(num_rows, 3)).astype("float32")
    return x, np.sum(np.sin(x), axis=1, keepdims=True)


def expected_moving_statistics(
    x: np.ndarray, mean: np.ndarray, variance: np.ndarray, num_replicas: int
) -> tuple:
    """Returns the statistics after a batch: the replicas' moments, weighted by their rows."""
    cuts = [len(x) * i // num_replicas for i in range(1, num_replicas)]
    replica_rows = [share for share in np.split(x, cuts) if len(share)]
    new_mean = sum(len(s) * s.mean(axis=0) for s in replica_rows) / len(x)
    new_variance = sum(len(s) * s.var(axis=0) for s in replica_rows) / len(x)
    return (
        MOMENTUM * mean + (1 - MOMENTUM) * new_mean,
        MOMENTUM * variance + (1 - MOMENTUM) * new_variance,
    )


@pytest.mark.parametrize("num_replicas", [2, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_moving_statistics_average_all_replicas(strategy: str, num_replicas: int) -> None:
    """Also after the last batch, which has one row: the other replicas must not contribute NaN."""
    x, y = rows(15)
    trainer = tfdist.Trainer(build, strategy=strategy, devices=num_replicas)
    trainer.fit(x, y, batch_size=7, shuffle=False, verbose=0)
    mean, variance = np.zeros(3), np.ones(3)
    for begin in range(0, 15, 7):
        mean, variance = expected_moving_statistics(
            x[begin : begin + 7], mean, variance, num_replicas
        )
    found = trainer.model.get_weights()[2:4]
    np.testing.assert_allclose(found, [mean, variance], rtol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_validation_evaluation_and_saved_model_agree(strategy: str, tmp_path: Path) -> None:
    x, y = rows(15)
    trainer = tfdist.Trainer(build, strategy=strategy, devices=2)
    history = trainer.fit(x, y, batch_size=7, epochs=3, verbose=0, validation_data=(x, y)).history
    evaluated = trainer.evaluate(x, y, batch_size=4, verbose=0, return_dict=True)
    trainer.model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    in_keras = loaded.evaluate(x, y, batch_size=15, verbose=0, return_dict=True)
    for name, value in in_keras.items():
        assert evaluated[name] == pytest.approx(value, rel=1e-5)
        assert history[f"val_{name}"][-1] == pytest.approx(value, rel=1e-5)
    predicted = loaded.predict(x, verbose=0)
    np.testing.assert_allclose(trainer.predict(x, batch_size=4, verbose=0), predicted, rtol=1e-5)
    for mine, theirs in zip(trainer.model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_replicas_have_equal_statistics() -> None:
    x, y = rows(15)
    trainer = tfdist.Trainer(build, strategy="mirrored", devices=3)
    trainer.fit(x, y, batch_size=7, epochs=2, verbose=0)
    for variable in trainer.model.variables:
        copies = mirrored_variables.copies_of(variable.value).values()
        assert len(copies) == 2
        for copy in copies:
            np.testing.assert_array_equal(variable, copy)


def images_model(**options: object) -> keras.Model:
    """Returns a network with a BatchNormalization that `fused` can replace."""
    keras.utils.set_random_seed(1)
    norm = layers.BatchNormalization(momentum=MOMENTUM, **options)
    model = keras.Sequential(
        [
            keras.Input((5, 4, 3)),
            layers.Conv2D(6, 3, bias_initializer="ones"),
            norm,
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize("precision", ["float32", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("options", [{}, {"scale": False}, {"center": False, "epsilon": 0.1}])
def test_fused_kernel_trains_as_keras(options: dict, precision: str) -> None:
    """Also on a last batch of one row, whose variance is that of its pixels."""
    random = np.random.default_rng(0)
    x = random.normal(1.0, 2.0, (15, 5, 4, 3)).astype("float32")
    y = random.normal(size=(15, 1)).astype("float32")
    fit = {"batch_size": 7, "shuffle": False, "verbose": 0, "epochs": 2}
    trainer = tfdist.Trainer(
        lambda: images_model(**options), strategy="one_device", precision=precision
    )
    graphs = graphs_run_by(lambda: trainer.fit(x, y, **fit))
    kinds = {node.op for graph in graphs for node in graph.post_optimization_graph.node}
    assert {"FusedBatchNormV3", "FusedBatchNormGradV3"} <= kinds

    def in_keras(policy: str) -> list[np.ndarray]:
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            model = images_model(**options)
            model.fit(x, y, **fit)
        finally:
            keras.config.set_dtype_policy(before)
        return model.get_weights()

    exact, theirs = (
        np.concatenate([w.ravel() for w in in_keras(p)]) for p in ("float32", precision)
    )
    mine = np.concatenate([weight.ravel() for weight in trainer.model.get_weights()])
    if precision == "float32":
        np.testing.assert_allclose(mine, exact, rtol=1e-5, atol=1e-5)
    else:  # rounding may move the weights little further than it does in Keras
        assert np.linalg.norm(mine - exact) <= 1.5 * np.linalg.norm(theirs - exact)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fused_kernel_ignores_replicas_without_rows(strategy: str) -> None:
    x, y = np.ones((7, 5, 4, 3), "float32"), np.zeros((7, 1), "float32")
    x += np.random.default_rng(0).normal(size=x.shape)
    trainer = tfdist.Trainer(images_model, strategy=strategy, devices=3)
    trainer.fit(x, y, batch_size=6, shuffle=False, verbose=0)  # then one row for three replicas
    assert all(np.isfinite(weight).all() for weight in trainer.model.get_weights())


def test_own_layers_keep_their_call() -> None:
    class Doubled(layers.BatchNormalization):
        def call(self, inputs: object, training: object = None, mask: object = None) -> object:
            return 2 * super().call(inputs, training=training, mask=mask)

    image, row = layers.BatchNormalization(), layers.BatchNormalization()
    doubled, first = Doubled(), layers.BatchNormalization(axis=1)
    latest = layers.BatchNormalization(momentum=0.0)
    for layer in (image, doubled, first, latest):
        layer.build((None, 4, 4, 3))
    row.build((None, 3))
    fusible = [batch_norm.is_fusible(layer) for layer in (image, doubled, first, latest, row)]
    assert fusible == [True, False, False, False, False]
