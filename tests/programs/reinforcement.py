"""Programs for reinforcement learning, on the rows of a replay memory."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from tests.programs.program import program
from tests.programs.rows import integers, named, normal
from tests.support.case import compiled
from tests.support.data import Data


class ActorCritic(layers.Layer):
    """Adds the losses of an actor and of its critic."""

    def __init__(self) -> None:
        super().__init__()
        self.common = layers.Dense(4, activation="relu")
        self.actor, self.critic = layers.Dense(2, activation="softmax"), layers.Dense(1)

    def call(self, state: Any, action: Any, reward: Any) -> Any:
        """Returns the probabilities of the actions [rows, 2]."""
        x = self.common(state)
        chances, value = self.actor(x), self.critic(x)
        advantage = reward - value
        chosen = ops.sum(chances * ops.one_hot(action[:, 0], 2, dtype=x.dtype), -1, keepdims=True)
        self.add_loss(-ops.mean(ops.log(chosen) * ops.stop_gradient(advantage)))
        self.add_loss(ops.mean(ops.square(advantage)))
        return chances


@program(
    Data({"state": normal(4), "action": integers(2, 1), "reward": normal(1, seed=6)}), quick=True
)
def actor_critic() -> keras.Model:
    """Actor-critic, with losses added by a layer."""
    inputs = {
        "state": keras.Input((4,), name="state"),
        "action": keras.Input((1,), name="action", dtype="int32"),
        "reward": keras.Input((1,), name="reward"),
    }
    model = keras.Model(inputs, ActorCritic()(**inputs))
    model.compile(keras.optimizers.Adam(1e-2))
    return model


class Taken(keras.losses.Loss):
    """Huber's loss of the value of the action that was taken: y is [action, target]."""

    def call(self, y: Any, values: Any) -> Any:
        taken = ops.one_hot(ops.cast(y[:, 0], "int32"), 3, dtype=values.dtype)
        return keras.losses.huber(y[:, 1:], ops.sum(values * taken, 1, keepdims=True))


@program(Data(normal(6, 6, 2), np.concatenate([integers(3, 1), normal(1, seed=4)], 1)))
def deep_q_network() -> keras.Model:
    """Deep Q-learning from frames."""
    inputs = keras.Input((6, 6, 2))
    x = layers.Flatten()(layers.Conv2D(4, 3, strides=2, activation="relu")(inputs))
    model = keras.Model(inputs, layers.Dense(3)(layers.Dense(4, activation="relu")(x)))
    return compiled(model, keras.optimizers.Adam(2.5e-4, clipnorm=1.0), Taken())


class Clipped(keras.Model):
    """A policy whose ratio to the old one is clipped."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = keras.Sequential([layers.Dense(4, activation="tanh"), layers.Dense(2)])

    def call(self, inputs: Any) -> Any:
        return self.policy(inputs["state"])

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> Any:  # fmt: skip
        """The clipped surrogate, a mean over the rows."""
        taken = ops.one_hot(x["action"][:, 0], 2, dtype=y_pred.dtype)
        log_chance = ops.sum(ops.log_softmax(y_pred) * taken, 1, keepdims=True)
        ratio, gain = ops.exp(log_chance - x["old"]), x["advantage"]
        clipped = ops.clip(ratio, 0.8, 1.2)
        return -ops.mean(ops.minimum(ratio * gain, clipped * gain))


@program(
    named(
        state=normal(3), action=integers(2, 1), old=-np.abs(normal(1)), advantage=normal(1, seed=8)
    )
)
def clipped_policy() -> keras.Model:
    """Proximal policy optimization, in `compute_loss`."""
    return compiled(Clipped(), keras.optimizers.Adam(3e-3), None)


@program(Data(normal(3), normal(1), np.abs(normal(seed=9))))
def weighted_bandit() -> keras.Model:
    """A bandit with inverse propensity weights and a dueling network."""
    inputs = keras.Input((3,))
    x = layers.Dense(4, activation="celu")(inputs)
    value, gain = layers.Dense(1)(x), layers.Dense(3)(x)
    q = value + gain - ops.mean(gain, 1, keepdims=True)
    model = keras.Model(inputs, ops.max(q, 1, keepdims=True))
    return compiled(model, keras.optimizers.RMSprop(1e-2), "huber", weighted_metrics=["mae"])
