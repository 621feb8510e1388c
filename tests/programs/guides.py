"""Programs after the guides: what Keras teaches, and what users then do."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.programs.program import program
from tests.programs.rows import integers, named, normal, pictures, sentences, vectors
from tests.programs.text import binary
from tests.programs.vision import classifier, of_classes
from tests.support.case import compiled
from tests.support.data import Data

History = keras.callbacks.History
Arguments = dict[str, Any]


def model_of(runner: Any) -> keras.Model:
    """The model that a Trainer has, or the one that trains itself."""
    return getattr(runner, "model", runner)


def found(history: History, **numbers: Any) -> History:
    """The history, and what a program computed after it."""
    for name, values in numbers.items():
        history.history[name] = np.ravel(values).tolist()
    return history


def dense(optimizer: Any = "adam", loss: Any = "mse", **options: Any) -> keras.Model:
    """A small network with a regulariser."""
    model = keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(3, activation="tanh", kernel_regularizer="l2"),
            layers.Dense(1),
        ]
    )
    return compiled(model, optimizer, loss, **options)


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


class Regular(layers.Layer):
    """Adds a loss of what passes through, and differs in training."""

    def call(self, x: Any, training: bool = False) -> Any:
        """Returns what came; scaled in training."""
        self.add_loss(1e-2 * ops.mean(ops.square(x)))
        return x * 1.5 if training else x


class Subclassed(keras.Model):
    """A model with a metric of its own, updated in `call`."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.regular, self.out = layers.Dense(3), Regular(), layers.Dense(1)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x: Any, training: bool = False) -> Any:
        """Maps [rows, 4] to [rows, 1]."""
        x = self.regular(ops.relu(self.hidden(x)), training=training)
        self.seen.update_state(ops.mean(x, -1))
        return self.out(x)


@program(vectors())
def subclassed() -> keras.Model:
    """A subclassed model with an added loss and a metric updated in its call."""
    return compiled(Subclassed(), "adam")


@program(vectors(), quick=True)
def loss_and_metric_of_ones_own() -> keras.Model:
    """A loss class and a metric class of one's own."""

    class Asymmetric(keras.losses.Loss):
        def call(self, y: Any, p: Any) -> Any:
            return ops.mean(ops.where(y > p, 2.0 * (y - p), p - y), -1)

    class Above(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__(name="above")
            self.count = self.add_weight(name="count", initializer="zeros")

        def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
            self.count.assign_add(ops.sum(ops.cast(p > y, self.count.dtype)))

        def result(self) -> Any:
            return self.count

    return dense(loss=Asymmetric(), metrics=[Above()])


@program(
    Data(normal(4), integers(3), np.abs(normal(seed=5))),
    fit={"validation_split": 0.3},
    floatx="float32",
)
def weighted_and_split() -> keras.Model:
    """Sample weights, and a validation split."""
    inputs = keras.Input((4,))
    x = layers.Dense(3, activation="relu")(inputs)
    metrics = {"weighted_metrics": [keras.metrics.SparseTopKCategoricalAccuracy(2)]}
    adam = keras.optimizers.Adam(epsilon=1e-2)
    return compiled(keras.Model(inputs, layers.Dense(3)(x)), adam, of_classes(), **metrics)


@program(vectors(), feed="endless", fit={"steps_per_epoch": 2}, evaluate={"steps": 3})
def steps_of_an_endless_stream() -> keras.Model:
    """A data set without an end, in epochs of so many steps."""
    return dense(keras.optimizers.SGD(0.1, use_ema=True))


@program(vectors(), feed="pydataset", fit={"initial_epoch": 1}, epochs=3)
def indexed_data_set() -> keras.Model:
    """A `PyDataset`, from a later epoch on."""
    return dense(metrics=[keras.metrics.R2Score()])


class Minimal(layers.Layer):
    """A recurrent cell of one's own."""

    def __init__(self, units: int = 3) -> None:
        super().__init__()
        self.units = self.state_size = units

    def build(self, shape: Any) -> None:
        """Makes the weights."""
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.recurrent = self.add_weight(shape=(self.units, self.units), name="recurrent")

    def call(self, x: Any, states: Any) -> Any:
        """Maps [rows, n] and a state to the next."""
        state = ops.tanh(x @ self.kernel + states[0] @ self.recurrent)
        return state, [state]


@program(Data(normal(4, 2), normal(1)))
def recurrent_cells() -> keras.Model:
    """A recurrent cell of one's own beside Keras's, one on top of the other."""
    inputs = keras.Input((4, 2))
    cells = layers.StackedRNNCells([layers.LSTMCell(2), layers.GRUCell(2), layers.SimpleRNNCell(2)])
    x = layers.concatenate([layers.RNN(Minimal())(inputs), layers.RNN(cells)(inputs)])
    return compiled(keras.Model(inputs, layers.Dense(1)(x)), "rmsprop")


@program(sentences(), train=lambda runner, given: runner.fit(given["x"], given["y"], 5, 2, 0))
def positional_arguments() -> keras.Model:
    """`fit(x, y, 5, 2, 0)`: arguments by their place."""
    inputs = keras.Input((6,), dtype="int32")
    return binary(inputs, layers.Flatten()(layers.Embedding(9, 2)(inputs)))


def _two_fits(runner: Any, arguments: Arguments) -> History:
    first = runner.fit(**arguments)
    second = runner.fit(**arguments)
    return found(second, before=first.history["loss"])


@program(vectors(), train=_two_fits)
def two_calls_of_fit() -> keras.Model:
    """`fit` twice: the optimizer goes on where it was."""
    return dense(keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)))


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
    """A frozen base that is thawed, compiled anew and trained on."""
    return _frozen_base()


def _by_hand(runner: Any, arguments: Arguments) -> History:
    history, model = runner.fit(**arguments), model_of(runner)
    x, y = arguments["x"], arguments["y"]
    numbers = {
        "predicted": model.predict(x[:3], verbose=0),
        "evaluated": model.evaluate(x[:3], y[:3], verbose=0),
        "called": ops.convert_to_numpy(model(x[:3])),
        "rate": float(model.optimizer.learning_rate),
        "weights": np.concatenate([np.ravel(np.asarray(v)) for v in model.weights]),
    }
    with tf.GradientTape() as tape:
        loss = ops.mean(ops.square(model(x[:3]) - y[:3]))
    numbers["gradient"] = tape.gradient(loss, model.trainable_variables[0].value)
    return found(history, **numbers)


@program(vectors(), train=_by_hand, quick=True)
def model_in_the_users_hands() -> keras.Model:
    """After training the model predicts, evaluates, is called and differentiated by itself."""
    return dense()


def _train_on_batches(runner: Any, arguments: Arguments) -> History:
    history, model = runner.fit(**arguments), model_of(runner)
    x, y = arguments["x"], arguments["y"]
    losses = [model.train_on_batch(x[:3], y[:3]) for _ in range(2)]
    return found(history, by_batch=losses, tested=model.test_on_batch(x[:4], y[:4]))


@program(vectors(), train=_train_on_batches)
def batch_by_hand() -> keras.Model:
    """`train_on_batch` and `test_on_batch` of the model after `fit`."""
    return dense()


def _fit_of_the_model(runner: Any, arguments: Arguments) -> History:
    first = runner.fit(**arguments)
    return found(model_of(runner).fit(**arguments), before=first.history["loss"])


@program(vectors(), train=_fit_of_the_model)
def fit_of_the_model() -> keras.Model:
    """`trainer.model.fit` after `trainer.fit`."""
    return dense("sgd")


def _enable_lora(runner: Any, arguments: Arguments) -> History:
    model = model_of(runner)
    first = runner.fit(**arguments)
    model.layers[0].enable_lora(2)
    model.compile(keras.optimizers.SGD(1e-2), "mse")
    return found(runner.fit(**arguments), before=first.history["loss"])


@program(vectors(), train=_enable_lora, may_refuse=True, floatx="float32")
def low_rank_adaptation_later() -> keras.Model:
    """A trained dense layer that gets matrices of low rank, and trains on."""
    # Keras keeps such matrices in float32, whatever it computes with.
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3), layers.Dense(1)])
    return compiled(model)


@program(vectors(), floatx="float32")
def low_rank_adaptation() -> keras.Model:
    """A dense layer with matrices of low rank, from the beginning."""
    inputs = keras.Input((4,))
    x = layers.Dense(3, activation="relu")(layers.Dense(4, lora_rank=2)(inputs))
    return compiled(keras.Model(inputs, layers.Dense(1)(x)), keras.optimizers.SGD(0.1))


def _evaluated_before(runner: Any, arguments: Arguments) -> History:
    x, y = arguments["x"], arguments["y"]
    before = runner.evaluate(x, y, batch_size=4, verbose=0)
    guessed = runner.predict(x, batch_size=4, verbose=0)
    return found(runner.fit(**arguments), before=before, guessed=guessed)


@program(vectors(), train=_evaluated_before)
def evaluated_before_training() -> keras.Model:
    """`evaluate` and `predict` before `fit`."""
    return dense(metrics=["mae"])


def _rate_by_hand(runner: Any, arguments: Arguments) -> History:
    losses = []
    for epoch in range(2):
        model_of(runner).optimizer.learning_rate = 0.1 / (1 + epoch)
        losses += runner.fit(**{**arguments, "epochs": 1}).history["loss"]
    return found(runner.fit(**arguments), before=losses)


@program(vectors(), train=_rate_by_hand)
def rate_by_hand() -> keras.Model:
    """A learning rate that is set between calls of `fit`."""
    return dense(keras.optimizers.SGD(0.1, momentum=0.9))


class Prepared(keras.Model):
    """A model whose `fit` prepares its data."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(1)

    def call(self, x: Any) -> Any:
        """Maps [rows, 4] to [rows, 1]."""
        return self.out(x)

    def fit(self, x: Any = None, y: Any = None, **options: Any) -> History:
        """Doubles the rows' numbers first."""
        return super().fit(2 * x, y, **options)


@program(vectors(), may_refuse=True)
def overridden_fit() -> keras.Model:
    """A class whose `fit` prepares its data."""
    model = Prepared()
    model.build((None, 4))
    return compiled(model, "adam")


def _trained() -> keras.Model:
    model = dense(keras.optimizers.Adam(0.01))
    model.fit(normal(4), normal(1), batch_size=5, epochs=1, verbose=0, shuffle=False)
    return model


@program(vectors(), built=True, quick=True)
def trained_before() -> keras.Model:
    """A model that was trained before: its optimizer goes on."""
    return _trained()


@program(vectors(), built=True)
def copied_by_its_configuration() -> keras.Model:
    """A model made again from its configuration, with its weights."""
    trained = _trained()
    model = keras.Sequential.from_config(trained.get_config())
    model.set_weights(trained.get_weights())
    return compiled(model, "adam")


class Second(keras.Model):
    """Takes the second of a list of inputs, and little of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        """Maps two [rows, 3] to [rows, 1]."""
        return self.out(inputs[1] + 0.1 * inputs[0])


@program(Data([normal(3), normal(3, seed=2)], normal(1, seed=3)), quick=True)
def inputs_as_a_list() -> keras.Model:
    """A subclassed model that takes its inputs out of a list, by number."""
    return compiled(Second(), "adam")


@program(named(left=normal(2), right=normal(2, seed=2)))
def inputs_by_name() -> keras.Model:
    """A model of nested inputs and a `Lambda`, merged by multiplication."""
    left, right = keras.Input((2,), name="left"), keras.Input((2,), name="right")
    x = layers.multiply([layers.Lambda(lambda t: ops.square(t))(left), right])
    model = keras.Model({"left": left, "right": right}, layers.Dense(1)(x))
    return compiled(model, "adam", metrics=["mape"])


@program(
    Data(normal(4), normal(1)),
    floatx="float32",
    tolerance=100.0,
    why="each share's gradient is rounded to the 8 bits of bfloat16, and so is every output",
)
def mixed_precision() -> keras.Model:
    """Layers in bfloat16 under weights in float32, one of them in float32 throughout."""
    inputs = keras.Input((4,))
    x = layers.Dense(3, activation="tanh", dtype="mixed_bfloat16")(inputs)
    model = keras.Model(inputs, layers.Dense(1, dtype="float32")(x))
    return compiled(model, keras.optimizers.SGD(0.1))


@program(vectors(), sync_batch_norm=True)
def normalised_in_every_way() -> keras.Model:
    """Batch, layer, RMS, spectral and unit normalisation in one network."""
    inputs = keras.Input((4,))
    x = layers.BatchNormalization(momentum=0.8)(layers.Dense(4)(inputs))
    x = layers.RMSNormalization()(layers.LayerNormalization()(x))
    x = layers.SpectralNormalization(layers.Dense(3))(layers.UnitNormalization()(x))
    return compiled(keras.Model(inputs, layers.Dense(1)(x)), "adam")
