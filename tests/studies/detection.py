"""`python -m tests.studies.detection`: which silent faults the first step's check detects.

Each program brings code of a kind that a distributed trainer can get wrong without an error. The
table has the first value that differs from plain Keras, or that the program is right.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfdist
from tfdist.errors import TfdistError, VerificationError

_random = np.random.default_rng(0)
X, Y = _random.normal(size=(26, 4)), _random.normal(size=(26, 1))

#: Builds a compiled model, and the data to verify it with.
Program = Callable[[], tuple[keras.Model, Any, Any]]
PROGRAMS: dict[str, Program] = {}


def program(build: Program) -> Program:
    """Registers a program by the name of its function."""
    PROGRAMS[build.__name__.replace("_", " ")] = build
    return build


def _network(
    optimizer: Any = None, kind: type = keras.Model, middle: Any = None, **options: Any
) -> tuple[keras.Model, Any, Any]:
    inputs = keras.Input((4,))
    hidden = layers.Dense(5, "tanh", name="body")(inputs)
    model = kind(inputs, layers.Dense(1, name="head")(middle(hidden) if middle else hidden))
    model.compile(optimizer or keras.optimizers.SGD(0.1), "mse", **options)
    return model, X, Y


@program
def optimizer_that_chooses_weights_by_name() -> Any:
    class SlowHead(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            slow = 0.1 if "head" in variable.name else 1.0
            super().update_step(gradient, variable, learning_rate * slow)

    return _network(SlowHead(0.1))


@program
def optimizer_that_overrides_apply_gradients() -> Any:
    class Clipped(keras.optimizers.SGD):
        def apply_gradients(self, grads_and_vars: Any) -> Any:
            pairs = [(0.01 * gradient, variable) for gradient, variable in grads_and_vars]
            return super().apply_gradients(pairs)

    return _network(Clipped(0.1))


@program
def optimizer_that_sets_its_learning_rate() -> Any:
    class Inverse(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            self.learning_rate.assign(0.1 / (2.0 + ops.cast(self.iterations, "float64")))
            return super().apply(grads, trainable_variables)

    return _network(Inverse(0.1))


@program
def optimizer_with_a_variable_as_beta() -> Any:
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.beta_1 = keras.Variable(0.95, trainable=False, dtype="float64", name="beta_1")
    inputs = keras.Input((4,))
    hidden = layers.Dense(200, "tanh")(layers.Dense(200, "tanh")(inputs))
    model = keras.Model(inputs, layers.Dense(1)(hidden))
    model.compile(optimizer, "mse")
    return model, X, Y


@program
def output_without_rows() -> Any:
    class WithCode(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = layers.Dense(3)
            random = keras.initializers.RandomNormal(seed=2)
            self.code = self.add_weight(shape=(6, 3), initializer=random)

        def call(self, x: Any) -> Any:
            return {"y": ops.matmul(self.dense(x), ops.transpose(self.code)), "code": self.code * 1}

    model = WithCode()
    of_code = lambda y, code: ops.sum(code**2)  # noqa: E731
    model.compile(keras.optimizers.SGD(0.1), loss={"y": "mse", "code": of_code})
    model(X[:1])
    return model, X, {"y": np.tile(Y, 6), "code": np.zeros((26, 1))}


@program
def prediction_of_a_layer_that_draws() -> Any:
    class Sampling(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.seed_generator = keras.random.SeedGenerator(1337)

        def call(self, mean: Any) -> Any:
            noise = keras.random.normal(ops.shape(mean), seed=self.seed_generator, dtype=mean.dtype)
            return mean + noise

    return _network(middle=Sampling())


@program
def numpy_random_in_an_eager_step() -> Any:
    class MixUp(keras.Model):
        def train_step(self, data: Any) -> Any:
            share = np.random.beta(0.4, 0.4)
            mixed = tf.nest.map_structure(lambda v: share * v + (1 - share) * v[::-1], data)
            return super().train_step(mixed)

    return _network(kind=MixUp, run_eagerly=True)


@program
def numpy_random_in_a_numpy_function() -> Any:
    class Noise(layers.Layer):
        def call(self, x: Any, training: bool = False) -> Any:
            draw = lambda shape: np.random.normal(size=shape)  # noqa: E731
            noise = tf.numpy_function(draw, [tf.shape(x)], tf.float64)
            return x + tf.ensure_shape(noise, x.shape) if training else x

    return _network(middle=Noise())


@program
def model_that_overrides_make_train_function() -> Any:
    class Tracked(keras.Model):
        def make_train_function(self, force: bool = False) -> None:
            super().make_train_function(force)
            plain = self.train_function

            def function(iterator: Any) -> Any:
                logs = plain(iterator)
                for weight in self.trainable_variables:
                    weight.assign(0.9 * weight)
                return logs

            self.train_function = function

    return _network(kind=Tracked)


@program
def train_step_assigned_to_the_model() -> Any:
    model, x, y = _network()
    plain = model.train_step
    model.train_step = lambda data: plain((data[0] * 2, data[1]))
    return model, x, y


@program
def model_that_overrides_compute_metrics() -> Any:
    class Measured(keras.Model):
        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            results = super().compute_metrics(x, y, y_pred, sample_weight)
            return {**results, "rmse": ops.sqrt(results["mse"])}

    return _network(kind=Measured, metrics=["mse"])


@program
def values_assigned_in_the_build_of_an_optimizer() -> Any:
    class TowardsStart(keras.optimizers.SGD):
        def build(self, variables: Any) -> None:
            if self.built:
                return
            super().build(variables)
            self.start = [self.add_variable_from_reference(v, name="start") for v in variables]
            for start, weight in zip(self.start, variables, strict=True):
                start.assign(weight)

        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            start = self.start[self._get_variable_index(variable)]
            super().update_step(gradient + 0.5 * (variable - start), variable, learning_rate)

    return _network(TowardsStart(0.1))


@program
def random_layer_in_the_map_of_a_dataset() -> Any:
    noise = layers.GaussianNoise(1.0, seed=3)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)
    model, _, _ = _network()
    return model, data.map(lambda x, y: (noise(x, training=True), y)), None


@program
def list_of_one_output() -> Any:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, [layers.Dense(7)(inputs)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, X, np.tile(Y, 7)


def first_difference(build: Program, strategy: str = "mirrored") -> str | None:
    """Returns what the check says about a program; None if it says that the program is right."""
    keras.config.set_floatx("float64")
    keras.utils.set_random_seed(1)
    made: list[Any] = []

    def model() -> keras.Model:
        made[:] = build()
        return made[0]

    try:
        trainer = tfdist.Trainer(model, strategy, devices=1 if strategy == "one_device" else 2)
        trainer.verify(made[1], made[2], batch_size=13)
    except VerificationError as error:
        return str(error).splitlines()[0]
    except TfdistError as error:
        return f"refused: {error}"
    finally:
        keras.config.set_floatx("float32")
    return None


def main() -> int:
    """Prints the table."""
    warnings.simplefilter("ignore")
    tfdist.devices.configure(2)
    for strategy in sys.argv[1:] or ["mirrored"]:
        results = {name: first_difference(build, strategy) for name, build in PROGRAMS.items()}
        for name, text in results.items():
            print(f"{strategy:12} {name:45} {text or 'matches plain Keras'}", flush=True)
        print(f"{strategy}: {sum(map(bool, results.values()))} of {len(results)} differ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
