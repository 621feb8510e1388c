"""`python -m tests.studies.random_programs`: random small models, compared with plain Keras.

A seed and a number identify a model: `--seed 3 --first 17 --count 1` repeats model 17 of seed 3.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, ops, optimizers

from tests import start_tensorflow
from tests.conformance.results import compare
from tests.programs import engines
from tests.programs.program import Program
from tests.support.case import compiled
from tests.support.data import Data
from tests.support.training import computing_in
from tfdist.errors import TfdistError, VerificationError

Make = Callable[[], Any]


def _of_columns(weights: Any) -> Any:
    """A regularizer of weights: the largest column, almost."""
    return 0.1 * ops.logsumexp(ops.sum(ops.abs(weights), axis=0))


def _of_mean_output(outputs: Any) -> Any:
    """A regularizer of outputs that is neither a mean nor a sum over the rows."""
    return 0.1 * ops.sum(ops.mean(outputs, axis=0) ** 2)


#: Shapes of a row, by the kind of input.
INPUTS = {"vector": (4,), "series": (4, 3), "picture": (5, 5, 2), "words": (5,)}

#: Layers by the rank of their inputs and outputs, without the axis of the rows.
LAYERS: dict[int, dict[str, Make]] = {
    1: {
        "dense": lambda: layers.Dense(3, activation="tanh"),
        "dense, regularised": lambda: layers.Dense(3, kernel_regularizer="l2"),
        "dense, constrained": lambda: layers.Dense(3, kernel_constraint="max_norm"),
        "dense, activity": lambda: layers.Dense(2, activity_regularizer="l2"),
        "dense, custom regularised": lambda: layers.Dense(3, kernel_regularizer=_of_columns),
        "dense, custom activity": lambda: layers.Dense(2, activity_regularizer=_of_mean_output),
        "normalised": layers.LayerNormalization,
        "batch normalised": layers.BatchNormalization,
        "unit": layers.UnitNormalization,
        "leaky": layers.LeakyReLU,
    },
    2: {
        "convolution": lambda: layers.Conv1D(3, 2, padding="same", activation="relu"),
        "depthwise": lambda: layers.DepthwiseConv1D(2, padding="same"),
        "masked": lambda: layers.Masking(0.0),
        "lstm": lambda: layers.LSTM(2, return_sequences=True),
        "gru": lambda: layers.GRU(2, return_sequences=True),
        "both ways": lambda: layers.Bidirectional(layers.SimpleRNN(2, return_sequences=True)),
        "group normalised": lambda: layers.GroupNormalization(1),
        "batch normalised": layers.BatchNormalization,
        "pooled": lambda: layers.AveragePooling1D(2, padding="same"),
    },
    3: {
        "convolution": lambda: layers.Conv2D(3, 2, padding="same", activation="relu"),
        "separable": lambda: layers.SeparableConv2D(2, 3, padding="same"),
        "transposed": lambda: layers.Conv2DTranspose(2, 2, padding="same"),
        "pooled": lambda: layers.MaxPooling2D(2, padding="same"),
        "batch normalised": layers.BatchNormalization,
        "squashed": lambda: layers.Activation("swish"),
    },
}

#: Layers with loops, which take five times as long to trace as all others, and are drawn rarely.
RECURRENT = ("lstm", "gru", "both ways")

#: Functions that `Extra` computes, in this order.
INNER: dict[str, Make] = {
    "rows": lambda x: x,
    "squares": ops.square,
    "tanh": ops.tanh,
    "softmax": ops.softmax,
    "mask": lambda x: x * ops.cast(x > -0.5, x.dtype),
}
REDUCED: dict[str, Make] = {
    "mean over rows": lambda x: ops.mean(x, axis=0, keepdims=True),
    "sum over rows": lambda x: ops.sum(x, axis=0, keepdims=True),
    "largest of rows": lambda x: ops.max(x, axis=0, keepdims=True),
    "mean over features": lambda x: ops.mean(x, axis=-1, keepdims=True),
    "masked mean": lambda x: ops.sum(x) / (1.0 + ops.sum(ops.cast(x > 0, x.dtype))),
    "all": lambda x: x,
}
OUTER: dict[str, Make] = {
    "as it is": lambda x: x,
    "square": ops.square,
    "exponential": lambda x: ops.exp(-ops.abs(x)),
    "branch": lambda x: ops.where(ops.mean(x) > 2.0, -x, x),
}
TARGETS = ("mean loss", "sum loss", "outputs", "state")


class Extra(layers.Layer):
    """Adds a loss, changes its inputs, or updates a state.

    Args:
        names: Keys of `INNER`, `REDUCED` and `OUTER`, and one of `TARGETS`.
        gated: Whether a weight that starts at zero multiplies all of this.
    """

    def __init__(self, names: tuple[str, ...], gated: bool) -> None:
        super().__init__()
        self.names, self.gated = names, gated

    def build(self, shape: Any) -> None:
        first = "zeros" if self.gated else keras.initializers.Constant(0.1)
        self.gate = self.add_weight(name="gate", shape=(), initializer=first)
        self.state = self.add_weight(name="state", shape=(), initializer="zeros", trainable=False)

    def call(self, inputs: Any) -> Any:
        inner, reduced, outer, target = self.names
        result = self.gate * OUTER[outer](REDUCED[reduced](INNER[inner](inputs)))
        if target == "outputs":
            return inputs + result
        if target == "state":
            self.state.assign(0.9 * self.state + ops.sum(result))
        else:
            self.add_loss(ops.mean(result) if target == "mean loss" else 0.1 * ops.sum(result))
        return inputs


#: Layers that reduce a row to a vector.
ENDS: dict[int, dict[str, Make]] = {
    1: {"as it is": layers.Identity},
    2: {
        "flat": layers.Flatten,
        "mean": layers.GlobalAveragePooling1D,
        "gru": lambda: layers.GRU(2),
    },
    3: {"flat": layers.Flatten, "max": layers.GlobalMaxPooling2D},
}

MERGES: dict[str, Make] = {
    "add": layers.Add,
    "average": layers.Average,
    "concatenate": layers.Concatenate,
    "maximum": layers.Maximum,
    "multiply": layers.Multiply,
}


class Custom(losses.Loss):
    """A custom loss.

    Args:
        function: Maps labels and outputs, [rows, 3] each, to values of the rows or to a number.
        reduction: As in `keras.losses.Loss`.
    """

    def __init__(self, function: Callable[[Any, Any], Any], reduction: str) -> None:
        super().__init__(reduction=reduction)
        self.function = function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.function(y_true, y_pred)


def _focal(y: Any, p: Any) -> Any:
    error = ops.abs(ops.cast(y, p.dtype) - p)
    return ops.mean(error ** (2 + ops.stop_gradient(ops.max(error, axis=-1, keepdims=True))), -1)


def _masked(y: Any, p: Any) -> Any:
    kept = ops.cast(y > -0.5, p.dtype)
    return ops.sum(kept * (y - p) ** 2) / (1.0 + ops.sum(kept))


def _of_pairs(y: Any, p: Any) -> Any:
    return ops.mean((y - p) ** 2, -1) + 0.1 * ops.relu(ops.mean(p) - 1.0)


def _log_cosh_of_batch(y: Any, p: Any) -> Any:
    return ops.mean(ops.log(ops.cosh(y - p)))


#: Losses, each with the activation of the outputs and the kind of labels.
LOSSES: dict[str, tuple[Callable[[str], Any], str | None, str]] = {
    "squares": (lambda r: losses.MeanSquaredError(reduction=r), None, "numbers"),
    "Huber": (lambda r: losses.Huber(reduction=r), None, "numbers"),
    "log cosh": (lambda r: losses.LogCosh(reduction=r), None, "numbers"),
    "cosine": (lambda r: losses.CosineSimilarity(reduction=r), None, "numbers"),
    "cross-entropy": (lambda r: losses.CategoricalCrossentropy(reduction=r), "softmax", "one-hot"),
    "of numbers": (lambda r: losses.SparseCategoricalCrossentropy(reduction=r), "softmax", "class"),
    "binary": (lambda r: losses.BinaryCrossentropy(reduction=r), "sigmoid", "one-hot"),
    "hinge": (lambda r: losses.CategoricalHinge(reduction=r), "tanh", "one-hot"),
    "custom": (lambda r: Custom(_focal, r), "sigmoid", "one-hot"),
    "custom, masked": (lambda r: Custom(_masked, r), None, "numbers"),
    "custom, of pairs": (lambda r: Custom(_of_pairs, r), None, "numbers"),
    "custom, of a batch": (lambda r: Custom(_log_cosh_of_batch, r), None, "numbers"),
}
#: Layers and losses that accumulation refuses, because they need full batches.
FULL_BATCH = (
    *("batch normalised", "dense, custom activity", "custom, masked", "custom, of pairs"),
    "custom, of a batch",
)
REDUCTIONS = ("sum_over_batch_size", "sum", "mean_with_sample_weight")

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda: optimizers.SGD(0.05),
    "momentum": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "clipped": lambda: optimizers.SGD(0.1, global_clipnorm=0.5),
    "each clipped": lambda: optimizers.SGD(0.1, clipnorm=0.2),
    "averaged": lambda: optimizers.SGD(0.05, use_ema=True, ema_momentum=0.8),
    "Adam": lambda: optimizers.Adam(0.01),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.01),
    "AMSGrad": lambda: optimizers.Adam(0.01, amsgrad=True),
    "Nadam": lambda: optimizers.Nadam(0.01),
    "Adamax": lambda: optimizers.Adamax(0.01),
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.5),
    "Adagrad": lambda: optimizers.Adagrad(0.05),
    "Lamb": lambda: optimizers.Lamb(0.01),
    "Ftrl": lambda: optimizers.Ftrl(0.05),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A small model and how it is trained, as names in the tables above.

    Attributes:
        inputs: Kind of input.
        branches: Layers of each branch.
        end: The last layer of each branch.
        merge: Merges the branches.
        loss: Name and reduction.
        optimizer: Name.
        weighted: Whether rows have weights.
        rows: Number of rows.
        batch_size: Rows of a global batch.
        accumulate: Accumulation rounds of a batch.
        strategy: Name and number of replicas.
        only_fit: Whether the program neither evaluates nor predicts, which halves the tracing.
        extra: The names of an `Extra` before the last layer; empty for none.
        gated: Whether the `Extra` is gated.
    """

    inputs: str
    branches: tuple[tuple[str, ...], ...]
    end: str
    merge: str
    loss: tuple[str, str]
    optimizer: str
    weighted: bool
    rows: int
    batch_size: int
    accumulate: int
    strategy: tuple[str, int]
    only_fit: bool
    extra: tuple[str, ...] = ()
    gated: bool = False

    def program(self) -> Program:
        """Returns the program that trains the model."""

        def build() -> keras.Model:
            keras.utils.set_random_seed(1)
            return self._model()

        feature = str(self)
        return Program(
            "random", feature, build, self._data(), batch_size=self.batch_size, epochs=1,
            accumulate=self.accumulate, sync_batch_norm="batch normalised" in feature,
        )  # fmt: skip

    @property
    def rank(self) -> int:
        """The rank of a row, after the embedding of words."""
        return 2 if self.inputs == "words" else len(INPUTS[self.inputs])

    def _model(self) -> keras.Model:
        words = self.inputs == "words"
        inputs = keras.Input(INPUTS[self.inputs], dtype="int32" if words else None)
        begin = layers.Embedding(6, 3)(inputs) if words else inputs
        ends = []
        for branch in self.branches:
            x = begin
            for name in branch:
                x = LAYERS[self.rank][name]()(x)
            x = ENDS[self.rank][self.end]()(x)
            ends.append(x if self.merge == "concatenate" else layers.Dense(3)(x))
        x = MERGES[self.merge]()(ends) if len(ends) > 1 else ends[0]
        if self.extra:
            x = Extra(self.extra, self.gated)(x)
        kind, reduction = self.loss
        loss, activation, _ = LOSSES[kind]
        model = keras.Model(inputs, layers.Dense(3, activation=activation)(x))
        return compiled(model, OPTIMIZERS[self.optimizer](), loss(reduction))

    def _data(self) -> Data:
        numbers = np.random.default_rng(self.rows)
        shape = (self.rows, *INPUTS[self.inputs])
        x = numbers.normal(size=shape)
        if self.inputs == "words":
            x = numbers.integers(6, size=shape).astype("int32")
        kinds = numbers.integers(3, size=self.rows).astype("int32")
        labels = {
            "numbers": numbers.normal(size=(self.rows, 3)),
            "class": kinds,
            "one-hot": np.eye(3)[kinds],
        }
        weights = numbers.uniform(0.2, 3.0, size=self.rows) if self.weighted else None
        return Data(x, labels[LOSSES[self.loss[0]][2]], weights)


def draw_recipe(seed: int, number: int) -> Recipe:
    """Returns a recipe by its seed and number."""
    draw = random.Random(f"{seed} {number}")
    inputs = draw.choice(list(INPUTS))
    rank = 2 if inputs == "words" else len(INPUTS[inputs])
    accumulate = draw.choice([1, 1, 1, 1, 2, 3])
    known = [name for name in LAYERS[rank] if accumulate == 1 or name not in FULL_BATCH]
    known_losses = [name for name in LOSSES if accumulate == 1 or name not in FULL_BATCH]
    branches = [_draw_layers(draw, known, draw.randint(1, 2)) for _ in range(draw.randint(1, 2))]
    recipe = Recipe(
        inputs=inputs,
        branches=tuple(map(tuple, branches)),
        end=_draw_layers(draw, list(ENDS[rank]), 1)[0],
        merge=draw.choice(list(MERGES)),
        loss=(draw.choice(known_losses), draw.choice(REDUCTIONS)),
        optimizer=draw.choice(list(OPTIMIZERS)),
        weighted=draw.random() < 0.3,
        rows=draw.randint(3, 13),
        batch_size=draw.randint(3, 7),
        accumulate=accumulate,
        strategy=draw.choice([("mirrored", 2)] * 3 + [("towers", 2)] * 2 + [("mirrored", 3)]),
        only_fit=draw.random() < 0.8,
    )
    if accumulate > 1 or draw.random() < 0.5:  # accumulation refuses what needs full batches
        return recipe
    extra = tuple(draw.choice(list(names)) for names in (INNER, REDUCED, OUTER, TARGETS))
    return dataclasses.replace(recipe, extra=extra, gated=draw.random() < 0.5)


def _draw_layers(draw: random.Random, names: list[str], number: int) -> list[str]:
    """Draws names, of which few are recurrent layers."""
    weights = [0.2 if name in RECURRENT else 1.0 for name in names]
    return draw.choices(names, weights, k=number)


def differences_of(recipe: Recipe) -> list[str]:
    """Trains a recipe with a Trainer and with plain Keras; returns the differences.

    Raises:
        TfdistError: The Trainer refuses it, but plain Keras trains it.
    """
    program = recipe.program()
    try:
        result = engines.tfdist(program, *recipe.strategy)
    except TfdistError:
        # Optimizers of Keras fail in some models whose loss becomes NaN, also on one device.
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            engines.plain(program)
            raise
        return []
    # Without graphs, Keras needs a third of the time. But it drops the division by the weights if a
    # loss returns one number for a batch of one row, which it does not see in a graph.
    for eagerly in (True, False):
        differences = [str(d) for d in compare(result, engines.plain(program, eagerly), program)]
        if not differences:
            break
    return differences


def false_alarms_of(recipe: Recipe) -> list[str]:
    """Returns what the first step's check finds in a recipe, in float32 as users train it."""
    program, data = recipe.program(), recipe.program().data
    with computing_in("float32"):
        trainer = engines.trainer(program, *recipe.strategy)
        try:
            trainer.verify(data.x, data.y, 1, program.batch_size, data.sample_weight)
        except VerificationError as error:
            return [str(error)]
    return []


def main() -> int:
    """Trains the models, and prints those that differ; returns 1 if there are any."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.studies.random_programs", description=__doc__
    )
    parser.add_argument("--count", type=int, default=1000, help="default: 1000")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument("--first", type=int, default=0, help="number to begin with, default: 0")
    parser.add_argument("--seconds", type=float, help="begin no further model after so long")
    parser.add_argument(
        "--verify", action="store_true", help="look for false alarms of the first step's check"
    )
    arguments = parser.parse_args()
    start_tensorflow()
    reasons_of = false_alarms_of if arguments.verify else differences_of
    num_wrong, num_tried, began = 0, 0, time.monotonic()
    for number in range(arguments.first, arguments.first + arguments.count):
        if arguments.seconds and time.monotonic() - began > arguments.seconds:
            break
        num_tried += 1
        recipe = draw_recipe(arguments.seed, number)
        try:
            reasons = reasons_of(recipe)
        except Exception as error:
            kind = "refused" if isinstance(error, TfdistError) else type(error).__name__
            reasons = [f"{kind}: {error}"]
        num_wrong += bool(reasons)
        if reasons:
            print(f"{number}: {recipe}", *reasons[:3], sep="\n    ", flush=True)
        elif number % 20 == 19:
            print(f"{number + 1 - arguments.first} tried, {num_wrong} differ", flush=True)
    print(f"{num_tried} tried, {num_wrong} differ")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
