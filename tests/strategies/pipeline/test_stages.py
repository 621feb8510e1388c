"""The assignment of layers to stages, and which calls of a layer belong to a micro-batch."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras import layers

from tests.support.case import compiled, mlp
from tfdist.errors import ConfigurationError, UnsupportedModelError
from tfdist.strategies.pipeline.schedule import Order, Pass
from tfdist.strategies.pipeline.stages import into_stages
from tfdist.strategies.pipeline.tracing import Tracing


def chain(*widths: int) -> keras.Model:
    parts = [layers.Dense(width, name=f"part_{i}") for i, width in enumerate(widths)]
    return keras.Sequential([keras.Input((4,)), *parts])


def test_stages_are_balanced_by_parameters() -> None:
    stages = into_stages(chain(8, 8, 8, 8, 1), 2)
    assert stages.ends() == [("part_0", "part_1"), ("part_2", "part_4")]
    assert stages.num_parameters() == [4 * 8 + 8 + 8 * 8 + 8, 2 * (8 * 8 + 8) + 9]


def test_splits_at_layers_inside_nested_models() -> None:
    inputs = keras.Input((4,))
    inner = chain(3, 5)
    outputs = layers.Dense(2, name="last")(inner(inputs) + 1.0)
    stages = into_stages(keras.Model(inputs, outputs), 2, ["part_0"])
    assert stages.ends()[0] == ("part_0", "part_0")
    assert stages.ends()[1] == ("part_1", "last")


def test_unknown_layer_names_raise() -> None:
    with pytest.raises(ConfigurationError, match=r"called 'part_9'\. Did you mean part_0\?"):
        into_stages(chain(2, 2), 2, ["part_9"])
    with pytest.raises(ConfigurationError, match="no layer before the last is called 'part_1'"):
        into_stages(chain(2, 2), 2, ["part_1"])
    with pytest.raises(ConfigurationError, match="in the order in which the model calls them"):
        into_stages(chain(2, 2, 2), 3, ["part_1", "part_0"])


def called_twice(shared: layers.Layer) -> keras.Model:
    """Returns a model that calls a layer, one in between, the same one again, and two more."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(4, name="between")(shared(inputs))
    hidden = layers.Dense(4, name="behind")(shared(hidden))
    return keras.Model(inputs, layers.Dense(1, name="last")(hidden))


@pytest.mark.parametrize("trainable", [True, False])
def test_stages_share_weights_if_there_are_too_few_other_places(trainable: bool) -> None:
    model = called_twice(layers.Dense(4, name="shared", trainable=trainable))
    assert into_stages(model, 2).ends() == [("shared", "shared"), ("behind", "last")]
    stages = into_stages(model, 4)
    assert stages.num_stages == len(stages.ends()) == 4
    assert sum(stages.num_parameters()) == model.count_params()  # the first one stores it
    stages = into_stages(model, 2, ["between"])
    assert stages.ends() == [("shared", "between"), ("shared", "last")]
    assert stages.shared_weights() == {"shared/kernel": [0, 1], "shared/bias": [0, 1]}


def test_calls_that_share_state_stay_in_one_stage() -> None:
    model = called_twice(layers.BatchNormalization(name="shared"))
    assert into_stages(model, 3).ends()[0] == ("shared", "shared")
    with pytest.raises(UnsupportedModelError, match=r"3 stages at most, not 4.*: shared/moving_"):
        into_stages(model, 4)
    with pytest.raises(UnsupportedModelError, match=r"after 'between' would leave shared/moving_"):
        into_stages(model, 2, ["between"])


class Subclassed(keras.Model):
    """A model with a custom `call`."""

    def call(self, inputs: object) -> object:
        return inputs


class Stepping(keras.Model):
    """A model with a custom `train_step`."""

    def train_step(self, data: object) -> dict:
        """Does nothing."""
        return {}


def test_models_that_cannot_be_split_raise() -> None:
    with pytest.raises(UnsupportedModelError, match="Subclassed is called by code of its own"):
        into_stages(compiled(Subclassed()), 2)
    inputs = keras.Input((4,))
    with pytest.raises(UnsupportedModelError, match=r"Stepping\.train_step makes a custom step"):
        into_stages(Stepping(inputs, layers.Dense(1)(inputs)), 2)
    with pytest.raises(UnsupportedModelError, match="into 2 stages at most, not 3: it has 2 calls"):
        into_stages(mlp(), 3)
    with pytest.raises(UnsupportedModelError, match="use strategy 'sharded'"):
        into_stages(chain(1), 2)


def test_probe_is_not_a_micro_batch() -> None:
    """Both share an input tensor, which a stage must not capture from the probe's graph."""
    layer, added = keras.layers.Add(), tf.ones([2])
    devices: list[str] = []

    def computed(tracing: Tracing, x: Any) -> Any:
        total = tracing.call(lambda operation, x: operation(x), layer, [x, added])
        devices.append(total.device)
        return total

    @tf.function(autograph=False)
    def step(x: tf.Tensor) -> tf.Tensor:
        order = Order("gpipe", 2, 2)
        tracing = Tracing({layer: [1]}, ["CPU:0", "CPU:1"], order, lambda: 0)
        first = computed(tracing, x)
        with tf.init_scope():
            probe = tf.function(lambda x: computed(tracing, x), autograph=False)
            assert float(tf.reduce_sum(probe(tf.zeros([2])))) == 2.0
        assert order.before(Pass(1, 1, "forward"))[0] is first
        return computed(tracing, x)

    assert float(tf.reduce_sum(step(tf.zeros([2])))) == 2.0
    assert [place[-5:] for place in devices] == ["CPU:1", "", "CPU:1"]
