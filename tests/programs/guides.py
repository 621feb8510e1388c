"""Programs after the Keras guides: transfer learning, adaptation and mixed precision."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers

from tests.programs.program import program
from tests.programs.rows import integers, normal, pictures, vectors
from tests.programs.vision import classifier, of_classes
from tests.support.case import compiled
from tests.support.data import Data

History = keras.callbacks.History
Arguments = dict[str, Any]


def model_of(runner: Any) -> keras.Model:
    """Returns the model of a Trainer, or the model itself."""
    return getattr(runner, "model", runner)


def found(history: History, **numbers: Any) -> History:
    """Adds numbers that a program computed to its history."""
    for name, values in numbers.items():
        history.history[name] = np.ravel(values).tolist()
    return history


TICKETS = Data(
    {"title": integers(9, 4), "body": integers(9, 5, seed=3), "tags": normal(3)},
    {"priority": integers(2, 1).astype("float64"), "department": integers(3)},
)


@program(TICKETS, quick=True)
def several_inputs_and_outputs() -> keras.Model:
    """The functional API: three inputs, two outputs, losses by name."""
    title = keras.Input((4,), name="title", dtype="int32")
    body = keras.Input((5,), name="body", dtype="int32")
    tags = keras.Input((3,), name="tags")
    x = [layers.LSTM(2)(layers.Embedding(9, 2)(words)) for words in (title, body)]
    x = layers.concatenate([*x, tags])
    outputs = {"priority": layers.Dense(1)(x), "department": layers.Dense(3)(x)}
    losses = {"priority": keras.losses.BinaryCrossentropy(True), "department": of_classes()}
    model = keras.Model({"title": title, "body": body, "tags": tags}, outputs)
    return compiled(model, "rmsprop", losses, loss_weights={"priority": 1.0, "department": 0.2})


def _thaw(runner: Any, arguments: Arguments) -> History:
    first = runner.fit(**arguments)
    model = model_of(runner)
    model.layers[1].trainable = True
    model.compile(keras.optimizers.Adam(1e-4), of_classes(), metrics=["accuracy"])
    return found(runner.fit(**arguments), before=first.history["loss"])


def _frozen_base() -> keras.Model:
    base = keras.Sequential(
        [keras.Input((8, 8, 1)), layers.Conv2D(3, 3), layers.BatchNormalization()]
    )
    base.trainable = False
    inputs = keras.Input((8, 8, 1))
    return classifier(inputs, layers.GlobalAveragePooling2D()(base(inputs, training=False)))


@program(pictures(), train=_thaw, sync_batch_norm=True, quick=True)
def fine_tuning() -> keras.Model:
    """Fine-tuning: a frozen base that is unfrozen, recompiled and trained."""
    return _frozen_base()


def _fit_of_the_model(runner: Any, arguments: Arguments) -> History:
    first = runner.fit(**arguments)
    return found(model_of(runner).fit(**arguments), before=first.history["loss"])


@program(vectors(), train=_fit_of_the_model)
def fit_of_the_model() -> keras.Model:
    """`trainer.model.fit` after `trainer.fit`."""
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="tanh")])
    model.add(layers.Dense(1))
    return compiled(model, "sgd")


def _enable_lora(runner: Any, arguments: Arguments) -> History:
    model = model_of(runner)
    first = runner.fit(**arguments)
    model.layers[0].enable_lora(2)
    model.compile(keras.optimizers.SGD(1e-2), "mse")
    return found(runner.fit(**arguments), before=first.history["loss"])


@program(vectors(), train=_enable_lora, may_refuse=True, floatx="float32")
def low_rank_adaptation_later() -> keras.Model:
    """LoRA enabled on a trained dense layer."""
    # Keras stores LoRA's matrices in float32 under every dtype policy.
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(1)])
    return compiled(model)


@program(vectors(), floatx="float32")
def low_rank_adaptation() -> keras.Model:
    """A dense layer with LoRA from the start."""
    inputs = keras.Input((4,))
    x = layers.Dense(3, activation="relu")(layers.Dense(4, lora_rank=2)(inputs))
    return compiled(keras.Model(inputs, layers.Dense(1)(x)), keras.optimizers.SGD(0.1))


@program(
    Data(normal(4), normal(1)),
    floatx="float32",
    tolerance=100.0,
    why="each replica's gradient is rounded to the 8 bits of bfloat16, and so is every output",
)
def mixed_precision() -> keras.Model:
    """mixed_bfloat16 layers, and one float32 layer."""
    inputs = keras.Input((4,))
    x = layers.Dense(3, activation="tanh", dtype="mixed_bfloat16")(inputs)
    model = keras.Model(inputs, layers.Dense(1, dtype="float32")(x))
    return compiled(model, keras.optimizers.SGD(0.1))
