"""Operations that a step has for each weight: on a GPU, each is a kernel that the host queues."""

from __future__ import annotations

import collections
import functools
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from tests.gpu_paths.step_graph import step_graphs
from tests.support.training import building
from tfdist.strategies.one_device import OneDevice

_sgd = functools.partial(keras.optimizers.SGD, 0.1, momentum=0.9)
#: Operations by which overflows are looked for and gradients are unscaled.
_OF_SCALING = ("IsFinite", "All", "RealDiv", "SelectV2", "ConcatV2")
#: The weights of a layer of `operations`: a kernel, a bias, gamma and beta.
_WEIGHTS_PER_LAYER = 4


def operations(num_layers: int) -> collections.Counter[str]:
    """Returns the number of operations of each type in a step with loss scaling."""

    def build_layers() -> list[Any]:
        kinds = (lambda: layers.Conv2D(8, 1), layers.BatchNormalization) * num_layers
        as_image = [keras.Input((4,)), layers.Reshape((2, 2, 1))]
        return [*as_image, *(make() for make in kinds), layers.Flatten(), layers.Dense(1)]

    build = building(build_layers, optimizer=_sgd)
    graphs = step_graphs(OneDevice(), build, precision="mixed_float16")
    return collections.Counter(node.op for node in graphs.nodes())


def test_weights_are_updated_by_one_operation_and_checked_together() -> None:
    few, many = operations(1), operations(3)
    assert {kind: many[kind] - few[kind] for kind in _OF_SCALING} == dict.fromkeys(_OF_SCALING, 0)
    kind = "ResourceApplyKerasMomentum"
    assert many[kind] - few[kind] == 2 * _WEIGHTS_PER_LAYER
    assert many["AssignAddVariableOp"] == few["AssignAddVariableOp"]


def test_schedule_is_evaluated_once_and_before_the_backward_pass() -> None:
    class Schedule(keras.optimizers.schedules.ExponentialDecay):
        def __call__(self, step: Any) -> Any:
            return tf.identity(super().__call__(step), name="scheduled")

    optimizer = functools.partial(
        keras.optimizers.AdamW, Schedule(0.1, 2, 0.5), weight_decay=0.1, global_clipnorm=1.0
    )
    build = building(lambda: [keras.Input((4,)), layers.Dense(3), layers.Dense(1)], optimizer)
    traced = list(step_graphs(OneDevice(), build).traced_nodes())
    (rate,) = (node for node in traced if node.name.endswith("scheduled"))
    by_name = {node.name: node for node in traced}
    waiting, before = [rate], set()
    while waiting:
        for name in waiting.pop().input:
            source = name.lstrip("^").split(":")[0]
            if source in by_name and source not in before:
                before.add(source)
                waiting.append(by_name[source])
    assert any("ReadVariableOp" in name for name in before)
    assert not any("MatMul" in name for name in before)
