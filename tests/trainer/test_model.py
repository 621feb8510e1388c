"""`trainer.model` is a plain Keras model, and its overridden methods are honored."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.backend import nn
from keras.src.backend.tensorflow import core
from keras.src.losses import loss as keras_loss

from tests.support import model_edits
from tests.support.case import compiled
from tests.support.training import FIT, STRATEGIES, X, Y, assert_close, build, replica_weights
from tfdist.errors import ConfigurationError
from tfdist.trainer import Trainer
from tfdist.upstream.features import HAS_REMAT

WORDS = ["a", "bb", "ccc", "dddd", "eeeee", "ff", "g"]
LENGTHS = np.asarray([[len(word)] for word in WORDS], "float32")


@pytest.mark.parametrize(("strategy", "devices"), STRATEGIES)
def test_model_behaves_like_keras_in_callbacks(strategy: str, devices: int, tmp_path: Path) -> None:
    trainer = Trainer(model_edits.build, strategy, devices=devices)
    model_edits.assert_matches_keras(trainer, tmp_path)
    for replica in replica_weights(trainer.model)[1:]:
        assert_close(replica, trainer.model.get_weights())


def test_submodels_have_no_distributed_variables() -> None:
    submodels: list[keras.Model] = []

    def build() -> keras.Model:
        model = model_edits.build()
        submodels.append(keras.Model(model.inputs, model.layers[0].output))
        return model

    trainer = Trainer(build, "mirrored", devices=2)
    trainer.fit(X, Y, verbose=0)
    features = submodels[0].predict(X[:3], verbose=0)  # shares layers with the model
    assert_close(features, trainer.model.layers[0](X[:3]).numpy())
    assert not any(
        isinstance(v.value, tf.distribute.DistributedValues) for v in submodels[0].variables
    )


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_arguments_have_the_order_of_keras(method: str) -> None:
    ours, theirs = (inspect.signature(getattr(m, method)) for m in (Trainer, keras.Model))
    kept = [p for p in theirs.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    assert [(p.name, p.kind, p.default) for p in ours.parameters.values()] == [
        (p.name, p.kind, p.default) for p in kept
    ]


class AcceptsStrings(keras.Model):
    """Accepts strings, as KerasHub's tasks do: its overridden methods convert them to numbers."""

    preprocesses_once = True  # the data of validation, in `fit`

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.epochs_seen = keras.layers.Dense(1), 0

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def _numbers(self, x: Any, y: Any = None, batch_size: int | None = None) -> tf.data.Dataset:
        if isinstance(x, tf.data.Dataset):
            data = x.unbatch()
        else:
            data = tf.data.Dataset.from_tensor_slices(x if y is None else (x, y))
        length = lambda word, *y: (tf.cast(tf.strings.length(word), tf.float32)[:, None], *y)  # noqa: E731
        return data.batch(batch_size or 32).map(length)

    def fit(self, x: Any, y: Any = None, batch_size: int | None = None, **options: Any) -> Any:
        def count(epoch: int, logs: Any) -> None:
            self.epochs_seen += 1

        counting = keras.callbacks.LambdaCallback(on_epoch_end=count)
        words, lengths = options.pop("validation_data")
        validation = tf.data.Dataset.from_tensor_slices((words, lengths)).batch(3)
        if self.preprocesses_once:
            validation = self._numbers(words, lengths, 3)
        return super().fit(
            self._numbers(x, y, batch_size),
            validation_data=validation, callbacks=[counting], **options,
        )  # fmt: skip

    def evaluate(self, x: Any, y: Any = None, batch_size: int | None = None, **options: Any) -> Any:
        if options.pop("_use_cached_eval_dataset", False) and self.preprocesses_once:
            return super().evaluate(x, y, batch_size, _use_cached_eval_dataset=True, **options)
        return super().evaluate(self._numbers(x, y, batch_size), **options)

    def predict(self, x: Any, batch_size: int | None = None, **options: Any) -> Any:
        return super().predict(self._numbers(x, batch_size=batch_size), **options)


def accepts_strings() -> keras.Model:
    keras.utils.set_random_seed(1)
    return compiled(AcceptsStrings(), keras.optimizers.SGD(0.01))


@pytest.mark.parametrize("preprocesses_once", [True, False])
def test_overridden_methods_are_honored(
    preprocesses_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AcceptsStrings, "preprocesses_once", preprocesses_once)
    trainer, plain = Trainer(accepts_strings, "mirrored", devices=2), accepts_strings()

    def numbers(runner: Any, model: keras.Model) -> list[Any]:
        options: dict[str, Any] = {"batch_size": 3, "verbose": 0}
        checked = {"validation_data": (WORDS[:4], LENGTHS[:4]), "epochs": 2}
        history = runner.fit(WORDS, LENGTHS, **options, **checked).history
        loss = runner.evaluate(WORDS, LENGTHS, **options)
        return [dict(history), loss, runner.predict(WORDS, **options), *model.get_weights()]

    result = numbers(trainer, trainer.model)
    assert_close(result, numbers(plain, plain))
    assert trainer.model.epochs_seen == 2
    assert trainer.strategy.num_replicas == len(replica_weights(trainer.model))
    assert_close(trainer.model.predict(WORDS, verbose=0), result[2])


# ---- patches ----


def patchable() -> list[Any]:
    """Returns functions and attributes that a trainer replaces during training."""
    return [
        getattr(core, "remat", None),
        tf.GradientTape.gradient,
        tf.GradientTape.__enter__,
        keras_loss.scale_loss_for_distribution,
        keras.optimizers.Optimizer.apply,
        keras.Model.fit,
        keras.Layer.add_loss,
        keras.random.SeedGenerator.next,
        keras.callbacks.SwapEMAWeights._tf_swap_variables,
        nn.conv,
    ]


@pytest.mark.parametrize(
    "strategy", ["one_device", "mirrored", "sharded", "tensor_parallel", "pipeline"]
)
def test_nothing_stays_patched(strategy: str) -> None:
    before = patchable()
    remat = "all" if HAS_REMAT else "none"
    trainer = Trainer(build, strategy, devices=None if strategy == "one_device" else 2, remat=remat)
    assert patchable() == before
    trainer.fit(**FIT)
    assert patchable() == before


def test_remat_is_exact_within_calls() -> None:
    results: list[Any] = []

    class Recorder(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            results.append(core.remat)

    before = core.remat
    Trainer(build, "one_device").fit(**FIT, callbacks=[Recorder()])
    assert before not in results
    assert core.remat is before


def test_nothing_stays_patched_after_an_error() -> None:
    before = patchable()
    with pytest.raises(ConfigurationError, match="matches none of the layers"):
        Trainer(build, "one_device", remat="nothing").fit(**FIT)
    assert patchable() == before


def test_recompute_is_an_alias_of_remat() -> None:
    assert Trainer(build, "one_device", recompute="all").remat == "all"
    with pytest.raises(ConfigurationError, match="not both"):
        Trainer(build, "one_device", recompute="all", remat="dense")
